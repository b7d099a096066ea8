"""Do workers still take what the profile says of them? When one does not for long, plans need other speeds.

`Ratios` compares one report of a worker's op times with the profile; `observe` takes one round of such
ratios after the other, and says which workers' speed should be planned with. Pure: no clock, no I/O.

A worker is compared with the others: when all of them are slower than the profile says (a shared
machine, another clock), plans are as good as before, and only last longer. That is `scale`, and is
said, but no speed changes.

Nothing changes before a whole window of rounds agrees, and after a change the window begins anew:
two changes of a worker are at least `DriftLimits.window` rounds apart. A worker counts as slow (or fast)
beyond `slow`, and as nominal again within `well`; in between it stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import FASTEST, SLOWEST, Job, Worker
from openrecycle.planner.layers.migration import SECONDS


@dataclass(frozen=True)
class DriftLimits:
    """slow: how many times longer than the others' a worker's ops take before it counts as slow; well:
    below this it counts as nominal again; change: by how much a slow worker's factor must move to be
    taken anew. scale: the same for all workers together, against the profile. window: rounds that
    must agree; a quarter of them may be off. Raises InputError.
    """

    slow: float = 1.25
    well: float = 1.1
    change: float = 1.2
    scale: float = 1.3
    window: int = 12

    def __post_init__(self) -> None:
        for name in ("slow", "well", "change", "scale"):
            if not 1 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "a factor above 1")
        if self.well >= self.slow:
            raise InputError("well", self.well, f"less than slow, {self.slow:g}")
        if not 4 <= self.window <= 10_000:
            raise InputError("window", self.window, "a number of rounds from 4 to 10,000")


class Track(NamedTuple):
    """assumed: the factor that is planned with (1: nominal). recent: the newest factors, oldest first."""

    assumed: float = 1.0
    recent: tuple[float, ...] = ()


@dataclass(frozen=True)
class DriftState:
    """workers: of those that were ever heard. scale: of all of them together; None before a window is full."""

    workers: Mapping[Worker, Track] = field(default_factory=dict)
    scale: float | None = None
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Drift:
    """What one round led to. changed: workers whose factor is another from now on, with the one before
    and the new one. scale: of all workers together, where that has just changed; it is 1 when ops
    take what the profile says."""

    state: DriftState
    changed: Mapping[Worker, tuple[float, float]]
    scale: float | None = None


def drifted(job: Job, state: DriftState) -> Job:
    """`job` with the speeds that its workers turned out to have, in percents, so that equal ones are equal."""
    known = dict(job.speeds)
    for worker, track in state.workers.items():
        if track.assumed != 1:
            known[worker] = min(FASTEST, max(SLOWEST, round(known.get(worker, 1.0) / track.assumed, 2)))
    return replace(job, speeds=tuple(known.items()))


def assumed(job: Job, planned: Job) -> DriftState:
    """The state in which `drifted` makes `planned` of `job`, which differ in nothing but speeds."""
    own, known = dict(planned.speeds), dict(job.speeds)
    factors = {w: known.get(w, 1.0) / own.get(w, 1.0) for w in {*own, *known}}
    return DriftState({w: Track(factor) for w, factor in factors.items() if factor != 1})


class Ratios:
    """How many times longer than a job says its workers' ops take."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tick = 1000 * SECONDS.get(job.time_unit, 1e-3) / job.ticks_per_unit
        self._speeds = dict(job.speeds)
        self._stages = [{kind: ticks for kind, ticks in own.by_kind.items() if kind != "O"} for own in job.ticks]

    def of(self, worker: Worker, milliseconds: Mapping[Any, float]) -> float | None:
        """By mean op times. 1: they take what the job says of this worker.

        milliseconds: by op kind (F, I, W, B); a step is left out, it waits for others. A job without a
        unit of time gives numbers that only workers of one stage can be compared by. None: nothing
        to compare.
        """
        kinds, took, expected = self._stages[worker.stage], 0.0, 0
        for kind, ms in milliseconds.items():
            if kinds.get(kind) and math.isfinite(ms) and ms > 0:
                took += ms
                expected += kinds[kind]
        return self._speeds.get(worker, 1.0) * took / (self._tick * expected) if expected else None


def observe(job: Job, state: DriftState, ratios: Mapping[Worker, float], limits: DriftLimits) -> Drift:
    """Takes one round: the ratio (see `Ratios`) of every worker that was heard. Others keep their window."""
    timed = job.time_unit in SECONDS
    scale = _low_median(ratios.values()) if timed and ratios else 1.0
    usual = dict.fromkeys(range(job.stages), scale) if timed else _by_stage(ratios)
    workers, changed = dict(state.workers), dict[Worker, tuple[float, float]]()
    unknown, window = Track(), limits.window
    few = (window - 1) // 4 + 1
    for worker, own in ratios.items():
        assumed, before = workers.get(worker, unknown)
        recent = (*before[1 - window :], own / usual[worker.stage])
        factor = assumed
        # Of thousands of workers nearly all are well, each second: when the newest quarter is, no whole window
        # can agree on anything else.
        newest = recent[-few:]
        if assumed != 1 or max(newest) >= limits.slow or min(newest) <= 1 / limits.slow:
            factor = _judged(assumed, recent, limits)
        if factor != assumed:
            changed[worker] = (assumed, factor)
            recent = ()
        workers[worker] = Track(factor, recent)
    state = replace(state, workers=workers)
    if not timed or not ratios:
        return Drift(state, changed)
    scales = (*state.scales, scale)[-limits.window :]
    known = 1.0 if state.scale is None else state.scale
    moved = _agreed(scales, known, limits.scale, limits.window)
    if moved is None:
        return Drift(replace(state, scales=scales), changed)
    # What is close to the profile again is said to be as the profile says.
    moved = 1.0 if 1 / limits.well < moved < limits.well else moved
    return Drift(replace(state, scale=moved, scales=()), changed, moved)


def forget(state: DriftState, workers: Iterable[Worker]) -> DriftState:
    """Without what is known of these: another process, perhaps on another machine, has their place."""
    gone = set(workers)
    return replace(state, workers={w: track for w, track in state.workers.items() if w not in gone})


def _judged(assumed: float, recent: tuple[float, ...], limits: DriftLimits) -> float:
    """The factor to plan with."""
    if len(recent) < limits.window:
        return assumed
    low, _, high = _quartiles(recent)
    if assumed != 1 and 1 / limits.well <= low and high <= limits.well:
        return 1.0
    moved = _agreed(recent, assumed, limits.slow if assumed == 1 else limits.change, limits.window)
    if moved is None or 1 / limits.slow < moved < limits.slow:
        return assumed
    return moved


def _agreed(recent: tuple[float, ...], known: float, change: float, window: int) -> float | None:
    """The median, once a whole window is off from what is known by more than a factor, to one side."""
    if len(recent) < window:
        return None
    low, middle, high = _quartiles(recent)
    return middle if low >= known * change or high <= known / change else None


def _quartiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    ranked, last = sorted(values), len(values) - 1
    return ranked[last // 4], ranked[last // 2], ranked[last - last // 4]


def _by_stage(ratios: Mapping[Worker, float]) -> dict[int, float]:
    stages: dict[int, list[float]] = {}
    for worker, own in ratios.items():
        stages.setdefault(worker.stage, []).append(own)
    return {stage: _low_median(peers) for stage, peers in stages.items()}


def _low_median(values: Iterable[float]) -> float:
    """Of an even number the lower one of the middle: of two workers, the faster one is the measure."""
    ranked = sorted(values)
    return ranked[(len(ranked) - 1) // 2]
