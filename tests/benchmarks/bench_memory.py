"""What memory a worker takes beside activations, in bytes a parameter: AdamW, fp32, one process per row; with the
optimizer's state sharded, the peers of a stage, of whom the one that takes the most is shown.

Each process trains a chain of linear layers on a batch of two rows for some iterations of four micro-batches, as a
worker's stage does (and torch's plain training, with gradients added up in `.grad`); its resident memory at the most,
less what it was before the model was built, and less the same for a model of a tenth of the size.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from openrecycle.agent.config.numerics import Mode
from openrecycle.agent.stages.backward.split import Deferred
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.agent.workers.worker import keep_freed_memory
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

ALONE = Worker(0, 0)
WIDTH, LAYERS, SMALL = 1024, 40, 4
ITERATIONS, MICRO_BATCHES = 4, 4
ROWS: dict[str, tuple[Mode | None, bool, int]] = {
    "torch, plain": (None, False, 1),
    "fast": ("fast", False, 1),
    "fast, gradients clipped": ("fast", True, 1),
    "deterministic": ("deterministic", False, 1),
    "deterministic, gradients clipped": ("deterministic", True, 1),
    "deterministic, sharded over 2": ("deterministic", False, 2),
    "deterministic, sharded over 3": ("deterministic", False, 3),
    "deterministic, clipped, sharded over 3": ("deterministic", True, 3),
    "fast, sharded over 3": ("fast", False, 3),
    "deterministic, sharded over 8": ("deterministic", False, 8),
}
"""The mode, whether gradients are clipped, and over how many peers the optimizer's state is sharded."""


def resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])


def train(
    mode: Mode | None, clips: bool, layers: int, answer: Connection, place: int, peers: int, store: tuple[str, int]
) -> None:
    """Answers with (parameters, bytes)."""
    torch.set_num_threads(1)
    keep_freed_memory()
    _warm_up()
    before = resident()
    most, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], resident())

    watching = threading.Thread(target=watch)
    watching.start()
    me = Worker(place, 0)
    parameters = _plainly(layers) if mode is None else _as_a_worker(mode, clips, layers, me, peers, store)
    done.set()
    watching.join()
    answer.send((parameters, most[0] - before))


def _warm_up() -> None:
    """What torch loads with its first step is no part of it."""
    _as_a_worker("deterministic", False, 1)
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.1)


def _model(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _plainly(layers: int) -> int:
    model = _model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(ITERATIONS):
        for _ in range(MICRO_BATCHES):
            model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return sum(p.numel() for p in model.parameters())


def _as_a_worker(
    mode: Mode, clips: bool, layers: int, me: Worker = ALONE, peers: int = 1, store: tuple[str, int] | None = None
) -> int:
    model = _model(layers)
    sums = SUM_OF[mode](model.parameters(), terms=MICRO_BATCHES)
    stage = Stage(model, sums, split=Deferred(model))
    made, sharded, groups = torch.optim.AdamW(model.parameters(), lr=1e-3), None, None
    optimizer = StageOptimizer(model, made, sums, clips=clips, pipelines=peers if peers > 1 else None)
    if (shards := optimizer.shards) is not None and store is not None:
        living = [Worker(p, 0) for p in range(peers)]
        groups = Communicator().form(1, me, living, store)
        held = dict.fromkeys(living, shards.shards_held)
        sharded = ShardedStage(
            me, groups, optimizer, assign(living, held, dict.fromkeys(living, 0), shards.sizes), print
        )
    for _ in range(ITERATIONS):
        for m in range(MICRO_BATCHES):
            stage.forward((0, m), torch.randn(2, WIDTH), seed=m, loss=lambda y: y.square().mean())
            stage.input_backward((0, m), None)
            stage.weight_backward((0, m))
        if sharded is not None and groups is not None:
            groups.reduce(sums.buffer)
            sharded.measure()
        optimizer.step(None)
        optimizer.settle(CLEAN)
        if sharded is not None:
            sharded.gather()
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    print(describe())
    context = multiprocessing.get_context("spawn")
    for name, (mode, clips, peers) in ROWS.items():
        found = []
        for layers in (SMALL, LAYERS):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pipes = [context.Pipe(duplex=False) for _ in range(peers)]
            processes = [
                context.Process(
                    target=train, args=(mode, clips, layers, theirs, place, peers, ("127.0.0.1", store.port))
                )
                for place, (_, theirs) in enumerate(pipes)
            ]
            for process in processes:
                process.start()
            found.append(max(ours.recv() for ours, _ in pipes))
            for process in processes:
                process.join()
        (few, small), (many, large) = found
        print(f"{name}: {(large - small) / (many - few):.1f} bytes a parameter ({many / 1e6:.0f} M parameters)")
    print(describe())


if __name__ == "__main__":
    main()
