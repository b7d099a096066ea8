"""Of every job, how long it has waited for a person, and in which iterations."""

from __future__ import annotations

import time

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.waiting import NOTHING, Waited, joined
from openrecycle.db.observations import Observations


class Waiting:
    """Of all jobs of a console. Thread-safe."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._found: dict[tuple[str, float, float], tuple[int, float] | None] = {}

    def of(self, job: LiveJob) -> Waited:
        """Raises SQLAlchemyError."""
        if not (waits := job.waits):
            return NOTHING
        now, iterations = time.time(), dict[int, float]()
        whole = joined(waits)
        for wait in whole:
            if wait.end is not None and (found := self._iteration(job.job_id, wait.begin, wait.end)) is not None:
                iterations[found[0]] = iterations.get(found[0], 0.0) + found[1]
        chosen: dict[int, float] = {}
        for wait in job.choices:
            if wait.end is not None:
                chosen[wait.generation] = chosen.get(wait.generation, 0.0) + wait.end - wait.begin
        total = sum((now if w.end is None else w.end) - w.begin for w in whole)
        since = next((w.begin for w in whole if w.end is None), None)
        return Waited(iterations, chosen, tuple(w for w in waits if not w.generation), max(0.0, total), since)

    def _iteration(self, job_id: str, begin: float, end: float) -> tuple[int, float] | None:
        """Number of the iteration that the wait was in, and how much of it; None: it is not committed yet."""
        key = (job_id, begin, end)
        if key not in self._found:
            row = self._observations.committed_after(job_id, end)
            if row is None:
                return None
            seconds = min(end, row["committed_at"]) - max(begin, row["committed_at"] - row["seconds"])
            self._found[key] = row["iteration"], max(0.0, min(seconds, row["seconds"]))
        return self._found[key]
