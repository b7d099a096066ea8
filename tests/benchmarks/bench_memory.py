"""What memory a worker takes beside activations, in bytes a parameter: AdamW, fp32, one process per row; with the
optimizer's state sharded, the peers of a stage, of whom the one that takes the most is shown.

Each process trains a chain of linear layers on a batch of two rows for some iterations of four micro-batches, as a
worker's stage does (and torch's plain training, with gradients added up in `.grad`); its resident memory at the most,
less what it was before the model was built, and less the same for a model of a sixth of the size. Then what
activations take: a batch of many rows, all micro-batches of an iteration in flight, less the same with two rows. And
what a worker takes at the most while it resumes from a checkpoint, before its first iteration.

Behind each: what is said of it before a job starts (agent.jobs.preflight).

    python -m tests.benchmarks.bench_memory                        # all rows
    python -m tests.benchmarks.bench_memory --only "over 8"        # those with this in their name
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from openrecycle.agent.checkpoints import Identity, load_layers, write_share
from openrecycle.agent.config.devices import Mode
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.jobs.preflight import activation_memory, micro_batch_memory, state_memory
from openrecycle.agent.models.state import Writer
from openrecycle.agent.stages.backward import Deferred
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.workers.reduction import GradientReduction
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.agent.workers.worker import keep_freed_memory
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

ALONE = Worker(0, 0)
WIDTH, LAYERS, SMALL = 1024, 60, 10
"""The small model needs all that does not grow with a model, such as what peers send of their sums at a time."""
SHALLOW = 4
"""Layers of the model whose activations are measured."""
ITERATIONS, MICRO_BATCHES = 4, 4
FEW, MANY = 2, 8192
"""Rows."""
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
    "deterministic, clipped, sharded over 8": ("deterministic", True, 8),
    "fast, sharded over 8": ("fast", False, 8),
}
"""The mode, whether gradients are clipped, and over how many peers the optimizer's state is sharded."""


def resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])


def train(
    mode: Mode | None,
    clips: bool,
    layers: int,
    answer: Connection,
    place: int,
    peers: int,
    store: tuple[str, int],
    rows: int,
) -> None:
    """Answers with (parameters, bytes)."""
    torch.set_num_threads(1)
    keep_freed_memory()
    _warm_up()
    me = Worker(place, 0)
    answer.send(
        _most(lambda: _plainly(layers) if mode is None else _as_a_worker(mode, clips, layers, me, peers, store, rows))
    )


def _most(work: Callable[[], int]) -> tuple[int, int]:
    """What it returns, and the bytes that it has taken at the most."""
    before = resident()
    most, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], resident())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        found = work()
    finally:  # or the process would wait for this thread and never end
        done.set()
        watching.join()
    return found, most[0] - before


def write(layers: int, folder: str) -> None:
    """A checkpoint of one stage."""
    stage = _stage_optimizer(layers)
    for parameter in stage.gradients.parameters:
        stage.gradients.add(parameter, torch.randn(parameter.shape))
    stage.step()
    identity = Identity("bench", 1, 1, 1, MICRO_BATCHES, 0)
    write_share(Path(folder), stage.share(Writer()), 0, 1, identity, 1, 1)


def resume(layers: int, folder: str, answer: Connection) -> None:
    """Answers with (parameters, bytes)."""
    torch.set_num_threads(1)
    keep_freed_memory()
    _warm_up()

    def work() -> int:
        state = load_layers(Path(folder), range(1))
        stage = _stage_optimizer(layers)
        stage.load_state(state, own=True)
        return sum(p.numel() for p in stage.module.parameters())

    answer.send(_most(work))


def _stage_optimizer(layers: int) -> StageOptimizer:
    model = _model(layers)
    sums = SUM_OF["deterministic"](model.parameters(), terms=MICRO_BATCHES)
    return StageOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sums)


def _warm_up() -> None:
    """What torch loads with its first step is no part of it."""
    _as_a_worker("deterministic", False, 1)
    gc.collect()  # what is in circles would be freed at some time later, and be missed in what is measured
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
    mode: Mode,
    clips: bool,
    layers: int,
    me: Worker = ALONE,
    peers: int = 1,
    store: tuple[str, int] | None = None,
    rows: int = FEW,
) -> int:
    model = _model(layers)
    sums = SUM_OF[mode](model.parameters(), terms=MICRO_BATCHES)
    stage = Stage(model, sums, split=Deferred(model))
    made, sharded, groups = torch.optim.AdamW(model.parameters(), lr=1e-3), None, None
    optimizer = StageOptimizer(model, made, sums, clips=clips, pipelines=peers if peers > 1 else None)
    if (shards := optimizer.shards) is not None and store is not None:
        living = [Worker(p, 0) for p in range(peers)]
        _meet(me, living, store)
        groups = Communicator().form(1, me, living, store)
        held = dict.fromkeys(living, shards.shards_held)
        sharded = ShardedStage(
            me, groups, optimizer, assign(living, held, dict.fromkeys(living, 0), shards.sizes), print
        )
    for _ in range(ITERATIONS):
        for m in range(MICRO_BATCHES):
            stage.forward((0, m), torch.randn(rows, WIDTH), seed=m, loss=lambda y: y.square().mean())
            if rows == FEW:
                stage.input_backward((0, m), None)
                stage.weight_backward((0, m))
        for m in range(MICRO_BATCHES) if rows != FEW else ():
            stage.input_backward((0, m), None)
            stage.weight_backward((0, m))
        if sharded is not None and groups is not None:
            GradientReduction(sums, sharded.begin_reduce).finish()
            sharded.measure()
        optimizer.step(None)
        optimizer.settle(CLEAN)
        if sharded is not None:
            sharded.gather()
    return sum(p.numel() for p in model.parameters())


class _Chain:
    """The same as a workload."""

    samples_per_micro_batch = 1

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def layer_count(self, stages: int) -> int:
        return SHALLOW

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def inputs(self, *_: int) -> torch.Tensor:
        return torch.zeros(self._rows, WIDTH)

    def targets(self, *_: int) -> torch.Tensor:
        return torch.zeros(1)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.square().mean()


def _meet(me: Worker, living: Sequence[Worker], store: tuple[str, int]) -> None:
    """Waits until all have built their models: eight processes that import torch on two busy cores are further apart
    than a worker waits for its peers."""
    there = dist.TCPStore(*store, is_master=False, timeout=timedelta(minutes=5))
    there.set(f"there/{me}", "")
    there.wait([f"there/{worker}" for worker in living])


def _said(mode: Mode, clips: bool, layers: int, peers: int) -> int:
    with torch.device("meta"):
        named = list(_model(layers).named_parameters())
    optimization = Optimization(mode=mode, clip_norm=1.0 if clips else None, sharding="zero1" if peers > 1 else "none")
    return state_memory(named, 8.0, True, optimization, peers).total


def _said_of_activations(rows: int) -> int:
    chain: Any = _Chain(rows)
    found = micro_batch_memory(chain, (SHALLOW,), 0, None, 1 << 30)
    assert found is not None
    return activation_memory(found[0], [(MICRO_BATCHES, 0), (MICRO_BATCHES - 1, 1)])


def _measured(mode: Mode | None, clips: bool, layers: int, peers: int, rows: int = FEW) -> tuple[int, int]:
    """(parameters, bytes) of the one that takes the most."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(peers)]
    processes = [
        context.Process(target=train, args=(mode, clips, layers, theirs, place, peers, ("127.0.0.1", store.port), rows))
        for place, (_, theirs) in enumerate(pipes)
    ]
    with _running(processes, [theirs for _, theirs in pipes]):
        found: tuple[int, int] = max(ours.recv() for ours, _ in pipes)
        return found


@contextmanager
def _running(processes: Sequence[BaseProcess], theirs: Sequence[Connection]) -> Iterator[None]:
    """Starts processes, and ends those that are left, as where one of several fails and its peers wait for it. theirs:
    their ends of pipes, closed here so that who reads the other end sees it when a process is gone."""
    try:
        for process in processes:
            process.start()
        for end in theirs:
            end.close()
        yield
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _resumed(layers: int) -> tuple[int, int]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        with _running([context.Process(target=write, args=(layers, folder))], []):
            pass
        with _running([context.Process(target=resume, args=(layers, folder, theirs))], [theirs]):
            found: tuple[int, int] = ours.recv()
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="the rows with this in their name")
    only = parser.parse_args().only
    print(describe())
    for name, (mode, clips, peers) in ROWS.items():
        if only not in name:
            continue
        (few, small), (many, large) = (_measured(mode, clips, layers, peers) for layers in (SMALL, LAYERS))
        text = f"{name}: {(large - small) / (many - few):.1f} bytes a parameter ({many / 1e6:.0f} M parameters)"
        if mode is not None:
            said = _said(mode, clips, LAYERS, peers) - _said(mode, clips, SMALL, peers)
            text += f"; said {said / (many - few):.1f}"
        print(text, flush=True)
    if only:
        return
    (_, without), (_, with_them) = (_measured("deterministic", False, SHALLOW, 1, rows) for rows in (FEW, MANY))
    said = _said_of_activations(MANY) - _said_of_activations(FEW)
    print(
        f"activations of {MICRO_BATCHES} micro-batches of {MANY:,} rows: {(with_them - without) / 1e6:.0f} MB; "
        f"said {said / 1e6:.0f} MB"
    )
    (few, small), (many, large) = map(_resumed, (SMALL, LAYERS))
    print(f"deterministic, resuming: {(large - small) / (many - few):.1f} bytes a parameter at the most")
    print(describe())


if __name__ == "__main__":
    main()
