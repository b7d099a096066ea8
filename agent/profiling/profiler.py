"""Measures what the planner wants to know of a model: op times, step, and bytes kept, part by part.

A part runs through the same `Stage`, sums and optimizer as in training, one micro-batch after the
other, alone in this process. Bytes are counted exactly, from the allocations and releases that
torch's own profiler sees, in a round that is not timed.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from openrecycle.agent.models.stage_io import Gradients, Tensors
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.profiles import Clock, Part, Timing

T = TypeVar("T")

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_KEY = (0, 0)


@dataclass(frozen=True)
class ProfilingEffort:
    """repeats: timed rounds, after `warm_up` others. clock: `cpu` is processor time of this process,
    for a machine that has other things to do."""

    repeats: int = 10
    warm_up: int = 2
    clock: Clock = "wall"


@dataclass
class Stopwatch:
    """Seconds by op, one entry per timed round."""

    clock: Callable[[], float]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def __call__(self, op: str) -> Iterator[None]:
        started = self.clock()
        yield
        self.seconds.setdefault(op, []).append(self.clock() - started)

    def timing(self, op: str) -> Timing:
        return timing_of(self.seconds[op])


def timing_of(seconds: list[float]) -> Timing:
    """Median and deciles in milliseconds, to the microsecond."""
    ms = sorted(1000 * s for s in seconds)
    deciles = statistics.quantiles(ms, n=10, method="inclusive") if len(ms) > 1 else [ms[0]] * 9
    return Timing(
        median=round(statistics.median(ms), 3), p10=round(deciles[0], 3), p90=round(deciles[8], 3), repeats=len(ms)
    )


@dataclass(frozen=True)
class PartSpec:
    """build: makes what trains. x: what enters it. loss: of its output, scaled, where it is the last."""

    name: str
    build: Callable[[], tuple[Stage, StageOptimizer]]
    x: Tensors
    loss: Callable[[Any], Tensor] | None


def measure_part(spec: PartSpec, effort: ProfilingEffort) -> tuple[Part, Tensors]:
    """The part, and its output (its scaled loss, where it is the last)."""
    (stage, optimizer), weight_bytes = kept_bytes(spec.build)
    watch = Stopwatch(CLOCKS[effort.clock])
    dy: Gradients = None

    def forward() -> Tensors:
        # A copy that nobody else holds, as one that was received; and the output, sent and forgotten.
        return _each(Tensor.clone, stage.forward(_KEY, _each(Tensor.clone, spec.x), seed=0, loss=spec.loss))

    def input_backward() -> None:
        stage.input_backward(_KEY, dy if dy is None else _each(Tensor.clone, dy))  # type: ignore[arg-type]

    y, activation_bytes = kept_bytes(forward)
    activation_bytes -= size_of(y)
    if spec.loss is None:
        dy = _each(_gradient, y)
    _, change = kept_bytes(input_backward)
    stage.weight_backward(_KEY)
    _, state_bytes = kept_bytes(lambda: [optimizer.step() for _ in range(2)])

    for number in range(effort.warm_up + effort.repeats):
        if number == effort.warm_up:
            watch.seconds.clear()
        with watch("F"):
            stage.forward(_KEY, spec.x, seed=number, loss=spec.loss)
        with watch("I"):
            stage.input_backward(_KEY, dy)
        with watch("W"):
            stage.weight_backward(_KEY)
        with watch("O"):
            optimizer.step()
    part = Part(
        name=spec.name,
        forward=watch.timing("F"),
        input_backward=watch.timing("I"),
        weight_backward=watch.timing("W"),
        step=watch.timing("O"),
        activation_bytes=max(0, activation_bytes),
        weight_backward_bytes=max(0, activation_bytes + change),
        weight_bytes=max(0, weight_bytes),
        optimizer_bytes=max(0, state_bytes),
        reduced_bytes=size_of(stage.gradients.buffer),
    )
    return part, y


def kept_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the bytes it took and did not give back (negative: gave back more)."""
    gc.collect()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return result, sum(e.nbytes() for e in events if e.name() == "[memory]")


def size_of(tensors: Tensors) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in (tensors if isinstance(tensors, tuple) else (tensors,)))


def _each(change: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    return tuple(map(change, tensors)) if isinstance(tensors, tuple) else change(tensors)


def _gradient(y: Tensor) -> Tensor:
    """Small, as a mean over the batch makes it; of integers it is not looked at."""
    return torch.randn_like(y) / y.numel() if y.is_floating_point() else y


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's profiler announces itself on the error stream, past Python."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
