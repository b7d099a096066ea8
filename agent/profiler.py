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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from agent.gradients import GradientSum
from agent.optimizer import StageOptimizer
from agent.stage import Stage
from planner.profiles import Clock, Part, Timing

T = TypeVar("T")

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_KEY = (0, 0)


@dataclass(frozen=True)
class Effort:
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
    """build: makes the module. x: what enters it. loss: of its output, where it is the last.

    optimizer: of its parameters. terms: micro-batches per iteration, of all pipelines.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    loss: Callable[[Tensor], Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    terms: int = 16


def measure_part(spec: PartSpec, effort: Effort) -> tuple[Part, Tensor]:
    """The part, and its output (its scaled loss, where it is the last)."""
    parts, weight_bytes = kept_bytes(lambda: _set_up(spec))
    stage, optimizer, gradients = parts
    loss = spec.loss
    scaled = None if loss is None else (lambda y: loss(y) / spec.terms)
    watch = Stopwatch(_CLOCKS[effort.clock])
    dy: Tensor | None = None

    def forward() -> Tensor:
        # A copy that nobody else holds, as one that was received.
        y = stage.forward(_KEY, spec.x.clone(), seed=0, loss=scaled)
        return y.clone()

    def input_backward() -> None:
        stage.input_backward(_KEY, None if dy is None else dy.clone())

    y, activation_bytes = kept_bytes(forward)
    if loss is None:
        # Small, as a mean over the batch makes them.
        dy = torch.randn_like(y) / y.numel()
    _, change = kept_bytes(input_backward)
    stage.weight_backward(_KEY)
    activation_bytes -= _bytes(y)
    _, state_bytes = kept_bytes(lambda: [optimizer.step() for _ in range(2)])

    for number in range(effort.warm_up + effort.repeats):
        if number == effort.warm_up:
            watch.seconds.clear()
        with watch("F"):
            stage.forward(_KEY, spec.x, seed=number, loss=scaled)
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
        reduced_bytes=_bytes(gradients.buffer),
    )
    return part, y


def kept_bytes(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the bytes it took and did not give back (negative: gave back more)."""
    gc.collect()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return result, sum(e.nbytes() for e in events if e.name() == "[memory]")


def _set_up(spec: PartSpec) -> tuple[Stage, StageOptimizer, GradientSum]:
    module = spec.build()
    gradients = GradientSum(module.parameters(), terms=spec.terms)
    return Stage(module, gradients), StageOptimizer(module, spec.optimizer(module.parameters()), gradients), gradients


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
