"""The event feed: lines that come from no decision of the coordinator, and who has taken note of which."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.events import Note
from openrecycle.agent.messages.protocol import ValidationReport
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import unavailable
from openrecycle.db.observations import Observations
from openrecycle.db.store import Store

log = structlog.get_logger()

# A report that was sent twice stands among so many of the newest events.
LOOK_BACK = 200


def validation_note(report: ValidationReport) -> Note:
    """What came of checking an iteration's gradients, as a line of the feed."""
    if report.coefficient is None:
        undone = "; its step had been taken already and was rolled back" if report.redone else ""
        text = (
            f"iteration {report.iteration} is skipped: a gradient was NaN, infinite or out of range, so no "
            f"parameter has changed{undone}"
        )
        return Note("warning", "step", text)
    if report.coefficient < 1:
        text = (
            f"iteration {report.iteration}: gradients were too large and clipped to {report.coefficient:.3g} of "
            "their length; the step taken before that was known was rolled back and taken again"
        )
    else:
        text = (
            f"iteration {report.iteration}: the step was rolled back and taken again without the clipping that "
            "had been expected"
        )
    return Note("info", "step", text)


class Feed:
    """Of all jobs. Thread-safe."""

    def __init__(self, store: Store, observations: Observations) -> None:
        self._store, self._observations = store, observations

    def take_validation(self, job: LiveJob, report: ValidationReport) -> None:
        """A report that is known already changes nothing. Raises ConsoleError (503)."""
        note = validation_note(report)
        try:
            with job.lock:
                newest = self._store.events(job.job_id, limit=LOOK_BACK, newest=True)
                if any(row["kind"] == note.kind and row["text"] == note.text for row in newest):
                    return
                job.record(note)
        except SQLAlchemyError as error:
            raise unavailable(error) from error

    def acknowledge(self, job: LiveJob, seqs: Sequence[int], actor: str) -> int:
        """`actor` has taken note of these events; returns how many nobody had before. Raises ConsoleError (503)."""
        try:
            new = self._observations.see_events(job.job_id, seqs, actor.strip()[:80] or "unknown")
        except SQLAlchemyError as error:
            raise unavailable(error) from error
        if new:
            with job.lock:
                job.unfold()
            job.stored()
            log.info("events acknowledged", job=job.job_id, events=new, actor=actor)
            job.topic.publish()
        return new
