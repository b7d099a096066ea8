"""The history of heartbeats (`Recorder`): a thread writes it, rolls it up and deletes what has expired, in small steps.
`Recorder.series` reads what one worker reported over time: op times, memory, silence.

Nobody waits for the thread. Its transactions are short, with rests between them, so that the coordinator's steps get
the database in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.measurements import grid_place
from openrecycle.app.runtime.errors import ConsoleError, storing, unavailable, unknown_worker
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.runtime.settings import RetentionLimits
from openrecycle.db.heartbeats import METRICS, PHASES, HeartbeatStore, Level, Samples, joined, rolled_up
from openrecycle.db.job_rows import Retention
from openrecycle.db.session import Database

log = structlog.get_logger()

MINUTE = 60
# Heartbeats of a minute's last moments may take this long to reach the recording.
GRACE = 2.0
PAUSE = 1.0
"""Seconds between two rounds."""
REST = 0.02
"""Seconds between two transactions of one round."""
GROUPS, SPANS, BLOCKS = 8, 4, 200
"""Per transaction: groups of workers written; per round: spans packed, blocks of each level deleted."""
TRIM_SECONDS, OVER_AT_ONCE = 300.0, 100
"""Seconds between two rounds of trimming (see `trim`); and how many jobs that are over are trimmed in each."""
WAITING = 512
"""Parts that the database did not take are tried again; when there are more than these, the oldest are dropped."""


# The most samples in one answer. If there would be more, the next longer step is taken.
MAX_SAMPLES = 3_000

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class MetricSeries:
    """One entry per sample; null where no heartbeat of it brought this metric."""

    low: Values
    mean: Values
    high: Values


@dataclass(frozen=True)
class Series:
    """Samples of `step` seconds each, one entry per sample in every list; a step without a heartbeat has none.

    at: POSIX seconds of their begin, rising. beats: heartbeats in it. iteration, phase: of the last one. metrics: F,
    I, W, B, O in milliseconds, resident_bytes, silence_seconds (from the worker's heartbeat before); those that were
    reported.
    """

    step: int
    at: tuple[int, ...]
    beats: tuple[int, ...]
    iteration: tuple[int, ...]
    phase: tuple[str, ...]
    metrics: dict[str, MetricSeries]


class Recorder:
    """Keeps the history of heartbeats. One per console. jobs: those in memory. job_ids: those of all jobs."""

    def __init__(
        self,
        database: Database,
        jobs: Callable[[], Iterable[LiveJob]],
        keep: RetentionLimits,
        job_ids: Callable[[], Iterable[str]],
    ) -> None:
        self.keep = keep
        self.heartbeats = HeartbeatStore(database)
        self._retention = Retention(database)
        self._jobs, self._job_ids = jobs, job_ids
        self.most_waiting = WAITING
        self._unsaved: deque[tuple[str, Sequence[Samples]]] = deque()
        self._dropped = 0
        self._seldom = Seldom()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console-history", daemon=True)
        self._written = 0.0
        self._trimmed = time.monotonic()
        self._trimmed_over: set[str] = set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and writes all heartbeats so far."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if not self._thread.is_alive():
            self.write(float("inf"))

    def series(self, job: LiveJob, worker: str, since: float, until: float, step: Level | None = None) -> Series:
        """Returns a worker's samples that begin in [since, until), in POSIX seconds. step: by default the shortest one
        that is still kept for this time and gives at most MAX_SAMPLES.

        Raises ConsoleError: 404 for an unknown worker; 422 for a wrong or too long time; 503.
        """
        if worker not in job.state.members:
            raise unknown_worker(worker)
        if not since < until:
            raise ConsoleError(422, "invalid", f"got {until!r}, expected more than since, {since!r}", field="until")
        level = step or _level(since, until, time.time(), self.keep.seconds, self.keep.minutes)
        if (until - since) / level > MAX_SAMPLES:
            got = f"{until - since:,.0f} s of {level} s each"
            raise ConsoleError(
                422, "invalid", f"got {got}, expected at most {MAX_SAMPLES:,} samples", field="since, until"
            )
        place = grid_place(worker, job.spec.stages)
        with storing():
            stored = self.heartbeats.read(job.job_id, level, place, since, until)
        samples = rolled_up(joined([stored, job.measurements.recording.peek(place, clock_offset())]), level)
        samples = samples.where((samples.at >= since) & (samples.at < until))
        metrics = {}
        for i, name in enumerate(METRICS):
            if samples.counts[:, i].any():
                metrics[name] = MetricSeries(
                    *(_values(getattr(samples, kind)[:, i]) for kind in ("low", "mean", "high"))
                )
        return Series(
            step=int(level),
            at=tuple(samples.at.tolist()),
            beats=tuple(samples.beats.tolist()),
            iteration=tuple(samples.iteration.tolist()),
            phase=tuple(PHASES[p] for p in samples.phase.tolist()),
            metrics=metrics,
        )

    def write(self, until: float) -> None:
        """Stores the heartbeats heard before `until` (POSIX seconds)."""
        offset = clock_offset()
        answers = self._add(self._unsaved)
        for job in self._jobs():  # job by job, since all together are more than may wait in `_unsaved`
            drained = job.measurements.recording.drain(until, offset)
            parts: deque[tuple[str, Sequence[Samples]]] = deque()
            parts.extend((job.job_id, drained[i : i + GROUPS]) for i in range(0, len(drained), GROUPS))
            answers = answers and self._add(parts)
            self._unsaved += parts
        if (dropped := len(self._unsaved) - self.most_waiting) > 0:
            for _ in range(dropped):
                self._unsaved.popleft()
            self._dropped += dropped
            text = "the oldest heartbeats that the database did not take are dropped"
            self._seldom.warn(text, reason=f"more than {self.most_waiting} parts waited", dropped_so_far=self._dropped)

    def _add(self, parts: deque[tuple[str, Sequence[Samples]]]) -> bool:
        """Stores parts, and removes those that are stored. Returns False if the database refused one; it stays, with
        the rest."""
        while parts:
            job_id, part = parts[0]
            try:
                self.heartbeats.add(job_id, part)
            except IntegrityError:
                log.info("heartbeats of a job that is gone are dropped", job=job_id)
            except SQLAlchemyError as error:
                self._seldom.warn("heartbeats could not be added to the history", reason=unavailable(error).detail)
                return False
            parts.popleft()
            self._rest()
        return True

    def tidy(self, now: float) -> None:
        """Rolls up and deletes a few blocks of heartbeats. Raises SQLAlchemyError."""
        for span in self.heartbeats.spans_to_pack(now, SPANS):
            self.heartbeats.pack(span)
            self._rest()
        for level, kept in (
            (Level.SECOND, self.keep.seconds),
            (Level.MINUTE, self.keep.minutes),
            (Level.HOUR, self.keep.hours),
        ):
            self.heartbeats.expire(level, now - kept, BLOCKS)

    def trim(self) -> None:
        """Deletes all other rows beyond the retention limits. A job that is over is trimmed only once, since nothing
        more is added to it. Raises SQLAlchemyError."""
        live, job_ids = {job.job_id for job in self._jobs() if not job.state.over}, list(self._job_ids())
        self._trimmed_over.intersection_update(job_ids)
        over = [job_id for job_id in job_ids if job_id not in live and job_id not in self._trimmed_over]
        for job_id in [*live, *over[:OVER_AT_ONCE]]:
            while self._retention.trim_job(
                job_id,
                events=self.keep.events,
                states=self.keep.states,
                generations=self.keep.generations,
                plans=self.keep.plans,
            ):
                if self._rest():
                    return
            if job_id not in live:
                self._trimmed_over.add(job_id)
            if self._rest():
                return
        while self._retention.drop_orphans():
            if self._rest():
                return

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            now = time.time()
            minute = (now - GRACE) // MINUTE * MINUTE
            try:
                # "Not equal", since the system clock may have been put back.
                if minute != self._written or self._unsaved:
                    self._written = minute
                    self.write(minute)
                self.tidy(now)
                if time.monotonic() - self._trimmed >= TRIM_SECONDS:
                    self._trimmed = time.monotonic()
                    self.trim()
            except SQLAlchemyError as error:
                self._seldom.warn("the history waits for the database", reason=unavailable(error).detail)
            except Exception as error:
                self._seldom.failed("the history could not be kept", error)

    def _rest(self) -> bool:
        """Waits between two transactions. Returns True if the thread is to end."""
        return self._stop.wait(REST)


def clock_offset() -> float:
    """Returns POSIX seconds minus monotonic seconds."""
    return time.time() - time.monotonic()


def _level(since: float, until: float, now: float, seconds: float, minutes: float) -> Level:
    for level, kept in ((Level.SECOND, seconds), (Level.MINUTE, minutes)):
        if since >= now - kept and (until - since) / level <= MAX_SAMPLES:
            return level
    return Level.HOUR


def _values(column: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Values:
    # A float32 has seven digits; more would only look exact.
    return tuple(None if np.isnan(v) else float(f"{v:.7g}") for v in column)
