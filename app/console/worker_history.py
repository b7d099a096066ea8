"""What one worker reported over time: op times, memory, silence, from the history of heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from openrecycle.app.console.service import Console
from openrecycle.app.jobs.recording import grid_place
from openrecycle.app.observing.recorder import clock_offset
from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.db.heartbeats import Level
from openrecycle.db.samples import METRICS, PHASES, joined, rolled_up

# More are not asked for at once: beyond them the next longer step is taken.
MAX_SAMPLES = 3_000

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class MetricSeries:
    """One entry per sample; None where no heartbeat of it brought this metric."""

    low: Values
    mean: Values
    high: Values


@dataclass(frozen=True)
class Series:
    """step: seconds that a sample stands for. at: POSIX seconds, when each sample begins, rising; a step without
    a heartbeat has none. beats: heartbeats in it. iteration, phase: of the last one.

    metrics: by name; F, I, W, B, O in milliseconds, resident_bytes, silence_seconds (from the worker's
    heartbeat before); without those that nobody has reported.
    """

    worker: str
    step: int
    at: tuple[int, ...]
    beats: tuple[int, ...]
    iteration: tuple[int, ...]
    phase: tuple[str, ...]
    metrics: dict[str, MetricSeries]


def worker_history(
    console: Console, job_id: str, worker: str, since: float, until: float, step: Level | None = None
) -> Series:
    """The samples that begin in [since, until), POSIX seconds, of the shortest step that is still kept and
    makes no more than MAX_SAMPLES; or of `step`.

    Raises ConsoleError: 404 for an unknown job or worker; 422 for a time that is none; 503.
    """
    job = console.job(job_id)
    if worker not in job.state.members:
        raise ConsoleError(404, "unknown_worker", f"worker: got {worker!r}, expected one of the job's grid")
    if not since < until:
        raise ConsoleError(422, "invalid", f"until: got {until!r}, expected more than since, {since!r}")
    recorder = console.observing.recorder
    level = step or _level(since, until, time.time(), recorder.keep.seconds, recorder.keep.minutes)
    if (until - since) / level > MAX_SAMPLES:
        got = f"{until - since:,.0f} s of {level} s each"
        raise ConsoleError(422, "invalid", f"since, until: got {got}, expected at most {MAX_SAMPLES:,} samples")
    place = grid_place(worker, job.spec.stages)
    with storing():
        stored = recorder.heartbeats.read(job_id, level, place, since, until)
    samples = rolled_up(joined([stored, job.recording.peek(place, clock_offset())]), level)
    samples = samples.where((samples.at >= since) & (samples.at < until))
    metrics = {}
    for i, name in enumerate(METRICS):
        if samples.counts[:, i].any():
            metrics[name] = MetricSeries(*(_values(getattr(samples, kind)[:, i]) for kind in ("low", "mean", "high")))
    return Series(
        worker=worker,
        step=int(level),
        at=tuple(samples.at.tolist()),
        beats=tuple(samples.beats.tolist()),
        iteration=tuple(samples.iteration.tolist()),
        phase=tuple(PHASES[p] for p in samples.phase.tolist()),
        metrics=metrics,
    )


def _level(since: float, until: float, now: float, seconds: float, minutes: float) -> Level:
    for level, kept in ((Level.SECOND, seconds), (Level.MINUTE, minutes)):
        if since >= now - kept and (until - since) / level <= MAX_SAMPLES:
            return level
    return Level.HOUR


def _values(column: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Values:
    # Seven digits are what a float32 has; more would only look exact.
    return tuple(None if np.isnan(v) else float(f"{v:.7g}") for v in column)
