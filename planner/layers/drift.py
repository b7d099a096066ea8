"""Detects workers whose op times are no longer those of the profile. If that lasts, plans need other speeds.

`Ratios` compares one report of a worker's op times with the profile. `observe` takes one round of such
ratios after the other, and returns which workers' speed to plan with. Pure: no clock, no I/O.

A worker is compared with the others. When all of them are slower than the profile says (a shared
machine, another clock), plans are as good as before, and only last longer. That is reported as `scale`,
but no speed changes.

Nothing changes before a whole window of rounds agrees, and after a change the window begins anew:
two changes of a worker are at least `DriftLimits.window` rounds apart. A worker counts as slow (or fast)
beyond the factor `slow`, and as nominal again within `well`; in between it stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from openrecycle.planner.jobs.job import FASTEST, SECONDS, SLOWEST, Job, Worker


@dataclass(frozen=True)
class DriftLimits:
    """slow: a worker counts as slow once its ops take so many times longer than the others'; well: it counts as nominal
    again below this factor; change: a slow worker's factor is replaced once it differs by this factor. scale: as
    `change`, for all workers together against the profile. window: rounds that must agree; a quarter of them may be
    off.
    """

    slow: float = 1.3
    well: float = 1.15
    change: float = 1.2
    scale: float = 1.3
    window: int = 20


class Track(NamedTuple):
    """One worker. assumed: the factor that is planned with (1: nominal). recent: the newest factors, oldest first."""

    assumed: float = 1.0
    recent: tuple[float, ...] = ()


@dataclass(frozen=True)
class DriftState:
    """workers: those that have reported. scale: of all of them together; None before a window is full."""

    workers: Mapping[Worker, Track] = field(default_factory=dict)
    scale: float | None = None
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Drift:
    """The result of one round. changed: workers whose factor has changed, with the old and the new one. scale: of all
    workers together, where it has just changed; 1 means that ops take what the profile says."""

    state: DriftState
    changed: Mapping[Worker, tuple[float, float]]
    scale: float | None = None


def drifted(job: Job, state: DriftState) -> Job:
    """Return `job` with the speeds that were observed, rounded to percents, so that equal ones compare equal."""
    known = dict(job.speeds)
    for worker, track in state.workers.items():
        if track.assumed != 1:
            known[worker] = min(FASTEST, max(SLOWEST, round(known.get(worker, 1.0) / track.assumed, 2)))
    return replace(job, speeds=tuple(known.items()))


def assumed(job: Job, planned: Job) -> DriftState:
    """Return the state with which `drifted` makes `planned` of `job`. The two jobs differ in their speeds alone."""
    own, known = dict(planned.speeds), dict(job.speeds)
    factors = {w: known.get(w, 1.0) / own.get(w, 1.0) for w in {*own, *known}}
    return DriftState({w: Track(factor) for w, factor in factors.items() if factor != 1})


class Ratios:
    """Computes how many times longer a worker's ops take than its job says."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tick = 1000 * SECONDS.get(job.time_unit, 1e-3) / job.ticks_per_unit
        self._speeds = dict(job.speeds)
        self._stages = [{kind: ticks for kind, ticks in own.by_kind.items() if kind != "O"} for own in job.ticks]

    def of(self, worker: Worker, milliseconds: Mapping[Any, float]) -> float | None:
        """Compares mean op times with the job's. Returns 1 if they are what the job says of this worker.

        milliseconds: by op kind (F, I, W, B); the optimizer step is left out, since it waits for others. If the job's
        unit is no unit of time, the ratios can only be compared among workers of one stage. Returns None if there is
        nothing to compare.
        """
        kinds, took, expected = self._stages[worker.stage], 0.0, 0
        for kind, ms in milliseconds.items():
            if kinds.get(kind) and math.isfinite(ms) and ms > 0:
                took += ms
                expected += kinds[kind]
        return self._speeds.get(worker, 1.0) * took / (self._tick * expected) if expected else None


def observe(job: Job, state: DriftState, ratios: Mapping[Worker, float], limits: DriftLimits) -> Drift:
    """Take one round: the ratio (see `Ratios`) of every worker that has reported. Others keep their window."""
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
        # Every second, nearly all of thousands of workers are well. If the newest quarter of the window is, the whole
        # window can't agree on anything else, so it need not be looked at.
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
    # A scale that is close to the profile again is reported as 1.
    moved = 1.0 if 1 / limits.well < moved < limits.well else moved
    return Drift(replace(state, scale=moved, scales=()), changed, moved)


def forget(state: DriftState, workers: Iterable[Worker]) -> DriftState:
    """Forget these workers: another process, perhaps on another machine, has taken their place."""
    gone = set(workers)
    return replace(state, workers={w: track for w, track in state.workers.items() if w not in gone})


def _judged(assumed: float, recent: tuple[float, ...], limits: DriftLimits) -> float:
    """Return the factor to plan with."""
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
    """Return the median once a whole window differs from `known` by more than a factor, all to one side."""
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
    """Return the lower median: of two workers, the faster one is the measure."""
    ranked = sorted(values)
    return ranked[(len(ranked) - 1) // 2]
