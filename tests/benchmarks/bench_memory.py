"""What memory a worker takes beside activations, in bytes a parameter: AdamW, fp32, one process per row.

Each process trains a chain of linear layers on a batch of two rows for some iterations of four micro-batches, as a
worker's stage does (and torch's plain training, with gradients added up in `.grad`); its resident memory at the most,
less what it was before the model was built, and less the same for a model of a tenth of the size.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from openrecycle.agent.config.options import Mode
from openrecycle.agent.stages.backward.split import Deferred
from openrecycle.agent.stages.gradients import gradient_sum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.workers.worker import keep_freed_memory
from tests.benchmarks.machine import describe

WIDTH, LAYERS, SMALL = 1024, 40, 4
ITERATIONS, MICRO_BATCHES = 4, 4
ROWS: dict[str, tuple[Mode | None, bool]] = {
    "torch, plain": (None, False),
    "fast": ("fast", False),
    "fast, gradients clipped": ("fast", True),
    "deterministic": ("deterministic", False),
    "deterministic, gradients clipped": ("deterministic", True),
}


def resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])


def train(mode: Mode | None, clips: bool, layers: int, answer: Connection) -> None:
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
    parameters = _plainly(layers) if mode is None else _as_a_worker(mode, clips, layers)
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


def _as_a_worker(mode: Mode, clips: bool, layers: int) -> int:
    model = _model(layers)
    sums = gradient_sum(mode, model.parameters(), terms=MICRO_BATCHES)
    stage = Stage(model, sums, split=Deferred(model))
    optimizer = StageOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sums, clips=clips)
    for _ in range(ITERATIONS):
        for m in range(MICRO_BATCHES):
            stage.forward((0, m), torch.randn(2, WIDTH), seed=m, loss=lambda y: y.square().mean())
            stage.input_backward((0, m), None)
            stage.weight_backward((0, m))
        optimizer.step(None)
        optimizer.settle(CLEAN)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    print(describe())
    context = multiprocessing.get_context("spawn")
    for name, (mode, clips) in ROWS.items():
        found = []
        for layers in (SMALL, LAYERS):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=partial(train, mode, clips, layers, theirs))
            process.start()
            found.append(ours.recv())
            process.join()
        (few, small), (many, large) = found
        print(f"{name}: {(large - small) / (many - few):.1f} bytes a parameter ({many / 1e6:.0f} M parameters)")
    print(describe())


if __name__ == "__main__":
    main()
