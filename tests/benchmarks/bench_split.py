"""What splitting the backward costs, in time and memory, for each way of splitting.

A stage of 4 transformer blocks of width 512 on 4 samples of 128 tokens, one thread. Time: (I + W) / B, B
being the fused backward, in turns (medians of processor time, so that other work on the
machine counts less; the sum of gradients, in fast mode, is in both). Memory: bytes that
one micro-batch holds after F, and after I (the gradient that I returns not counted).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from openrecycle.agent.config.devices import Autocast
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.models.compat import LiveBytes
from openrecycle.agent.stages.backward import Deferred, Fused, Strategy, TorchSplit
from openrecycle.agent.stages.gradients import FastSum, GradientSum
from openrecycle.agent.stages.stage import Stage
from tests.benchmarks.machine import describe

LAYERS, WIDTH, BATCH, LENGTH, ROUNDS = 4, 512, 4, 128, 9
KEY = (0, 0)
WAYS: dict[str, type[Strategy]] = {"fused": Fused, "deferred": Deferred, "torch": TorchSplit}


def _stage(way: type[Strategy], autocast: Autocast | None = None) -> Stage:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(WIDTH, 8, 0.1) for _ in range(LAYERS)))
    make: Callable[[nn.Module], Strategy] = way  # type: ignore[assignment]
    return Stage(module, FastSum(module.parameters(), terms=1), split=make(module), autocast=autocast)


def times(autocast: Autocast | None) -> dict[str, tuple[float, float, float]]:
    """Median processor seconds of F, I and W."""
    stages = {name: _stage(way, autocast) for name, way in WAYS.items()}
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, stage in stages.items():
            x, dy = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
            clock = [time.thread_time()]
            y = stage.forward(KEY, x, seed=1)
            assert isinstance(y, torch.Tensor)
            dy = dy.to(y.dtype)
            clock.append(time.thread_time())
            stage.input_backward(KEY, dy)
            clock.append(time.thread_time())
            stage.weight_backward(KEY)
            clock.append(time.thread_time())
            stage.abandon()
            seconds[name].append((clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]))
    # The first round warms up.
    return {
        name: (
            statistics.median(t[0] for t in rounds[1:]),
            statistics.median(t[1] for t in rounds[1:]),
            statistics.median(t[2] for t in rounds[1:]),
        )
        for name, rounds in seconds.items()
    }


def held(way: type[Strategy]) -> tuple[int, int]:
    """Bytes held by a micro-batch after F, and after I."""
    stage = _stage(way)
    x, dy = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    for _ in range(2):  # the first one also fills torch's caches
        live = LiveBytes()
        with live:
            stage.forward(KEY, x, seed=1)
            after_f = live.now
            stage.input_backward(KEY, dy)
            after_i = live.now
        stage.weight_backward(KEY)
        stage.abandon()
    return after_f, after_i


def exact() -> bool:
    """Do all ways give the same bits here?"""
    buffers = []
    x, dy = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    for way in WAYS.values():
        stage = _stage(way)
        stage.gradients = GradientSum(stage.module.parameters(), terms=1)
        stage.forward(KEY, x, seed=1)
        stage.input_backward(KEY, dy)
        stage.weight_backward(KEY)
        buffers.append(stage.gradients.buffer)
    return all(torch.equal(buffers[0], b) for b in buffers[1:])


def main() -> None:
    print(describe())
    torch.set_num_threads(1)
    print(f"same bits in all ways: {'yes' if exact() else 'NO'}")
    for autocast in (None, "bf16"):
        found = times(autocast)  # type: ignore[arg-type]
        whole = sum(found["fused"][1:])
        for name, (f, i, w) in found.items():
            split = "" if name == "fused" else f"   (I+W)/B {(i + w) / whole:.3f}"
            print(
                f"{autocast or 'fp32':5s} {name:9s} F {1000 * f:6.1f}  I {1000 * i:6.1f}  W {1000 * w:6.1f} ms{split}"
            )
    for name, way in WAYS.items():
        after_f, after_i = held(way)
        ratio = after_i / after_f
        print(f"{name:9s} after F {after_f / 2**20:6.1f} MiB, after I {after_i / 2**20:6.1f} MiB: {ratio:.2f} times")
    print(describe())


if __name__ == "__main__":
    main()
