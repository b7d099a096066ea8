"""Writes the history of heartbeats, rolls it up and lets it expire: in a thread of its own, in small steps.

Nobody waits for it. Its transactions are short, and it rests between them, so that the coordinator's
steps get the database in between.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.settings import RetentionLimits
from openrecycle.db.heartbeats import HeartbeatStore, Level
from openrecycle.db.retention import Retention
from openrecycle.db.samples import Samples
from openrecycle.db.session import Database

log = structlog.get_logger()

MINUTE = 60
# What was heard in the last moments of a minute is still on its way to the recording.
GRACE = 2.0
PAUSE = 1.0
"""Seconds between two rounds."""
REST = 0.02
"""Seconds between two transactions of one round."""
GROUPS, SPANS, BLOCKS = 8, 4, 200
"""Per transaction: groups of workers written; per round: spans packed, blocks of each level deleted."""
TRIM_SECONDS = 300.0
_WAITING = 512
"""Parts that the database did not take are tried again; when there are more than these, the oldest are dropped."""


class Recorder:
    """One per console. jobs: those that heartbeats may come of. job_ids: of all that it has."""

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
        self._unsaved: deque[tuple[str, Sequence[Samples]]] = deque(maxlen=_WAITING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console-history", daemon=True)
        self._written = 0.0
        self._trimmed = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Writes what has been heard so far."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if not self._thread.is_alive():
            self.write(float("inf"))

    def write(self, until: float) -> None:
        """Stores the heartbeats heard before `until` (POSIX seconds)."""
        offset = clock_offset()
        for job in self._jobs():
            drained = job.recording.drain(until, offset)
            self._unsaved.extend((job.job_id, drained[i : i + GROUPS]) for i in range(0, len(drained), GROUPS))
        while self._unsaved:
            job_id, part = self._unsaved[0]
            try:
                self.heartbeats.add(job_id, part)
            except IntegrityError:
                log.info("heartbeats of a job that is gone are dropped", job=job_id)
            except SQLAlchemyError as error:
                log.warning("heartbeats could not be added to the history", reason=type(error).__name__)
                return
            self._unsaved.popleft()
            self._rest()

    def tidy(self, now: float) -> None:
        """A few steps of what is to be rolled up and to be deleted. Raises SQLAlchemyError."""
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
        """Deletes what no longer counts of everything else, until nothing is left to. Raises SQLAlchemyError."""
        for job_id in self._job_ids():
            while self._retention.trim_job(
                job_id,
                events=self.keep.events,
                states=self.keep.states,
                generations=self.keep.generations,
                plans=self.keep.plans,
            ):
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
                # A clock that was put back must not stop it for as long.
                if minute != self._written or self._unsaved:
                    self._written = minute
                    self.write(minute)
                self.tidy(now)
                if time.monotonic() - self._trimmed >= TRIM_SECONDS:
                    self._trimmed = time.monotonic()
                    self.trim()
            except SQLAlchemyError as error:
                log.warning("the history waits for the database", reason=type(error).__name__)
            except Exception:
                log.exception("the history could not be kept")

    def _rest(self) -> bool:
        """True when it is to end."""
        return self._stop.wait(REST)


def clock_offset() -> float:
    """What, added to the monotonic clock, gives POSIX seconds."""
    return time.time() - time.monotonic()
