"""Jobs that are over: a line of each is enough, until somebody opens one. There may be thousands."""

from __future__ import annotations

import threading
from collections.abc import Collection

import orjson
import structlog

from openrecycle.agent.protocol import JobState
from openrecycle.app.jobs.view import JobSummary
from openrecycle.app.workers.sentence import over_sentence
from openrecycle.app.workers.states import Condition
from openrecycle.db.job_index import JobIndex
from openrecycle.db.store import Record

log = structlog.get_logger()


class PastJobs:
    """Those that no LiveJob stands for. Thread-safe."""

    def __init__(self, index: JobIndex) -> None:
        self._index = index
        self._lines: dict[str, JobSummary] = {}  # replaced as a whole: readers need no lock
        self._lock = threading.Lock()

    def read(self, job_ids: Collection[str] | None = None) -> None:
        """Notes all that there are, or these. Raises SQLAlchemyError."""
        found = [line for row in self._index.over(job_ids) if (line := _line(row)) is not None]
        with self._lock:
            self._lines = {**self._lines, **{line.job_id: line for line in found}}

    def lines(self) -> dict[str, JobSummary]:
        """By the job's id, oldest first among those that were noted together."""
        return self._lines

    def states(self) -> list[JobState]:
        return [line.state for line in self._lines.values()]

    def drop(self, job_id: str) -> None:
        if job_id in self._lines:
            with self._lock:
                self._lines = {known: line for known, line in self._lines.items() if known != job_id}


def _line(row: Record) -> JobSummary | None:
    try:
        spec = orjson.loads(row["spec"])
        workers = int(spec["pipelines"]) * int(spec["stages"])
    except (ValueError, KeyError, TypeError):
        log.error("a stored job can't be read; it is left out", job=row["id"])
        return None
    state = JobState(row["state"])
    return JobSummary(
        job_id=row["id"],
        name=row["name"],
        state=state,
        sentence=over_sentence(state, row["reason"]),
        created_at=row["created_at"],
        generation=row["generation"],
        living=row["living"],
        workers=workers,
        condition=Condition(state.value),
    )
