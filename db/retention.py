"""What is deleted when there is enough of it, and what nobody refers to any more: a bounded number of rows
in each transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from openrecycle.db.models import (
    AcknowledgementRow,
    EventRow,
    EventSeenRow,
    GenerationRow,
    JobPlanRow,
    PlanRow,
    SavedPlanRow,
    WorkerStateRow,
)
from openrecycle.db.session import Database

ROWS = 5_000
PLANS = 100


class Retention:
    """Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def trim_job(self, job_id: str, *, events: int, states: int, generations: int, plans: int) -> int:
        """Deletes some of a job's oldest rows beyond these numbers; returns how many it were (0: none are left).

        events: the newest lines of the feed that are kept. states: changes of workers' states; the last
        one of each worker always is. generations: those whose acknowledgements are kept. plans: those made
        ahead that no generation has run.
        """
        with self._database.write() as session:
            return (
                _trim_events(session, job_id, events)
                + _trim_states(session, job_id, states)
                + _trim_acknowledgements(session, job_id, generations)
                + _trim_plans(session, job_id, plans)
            )

    def drop_orphans(self) -> int:
        """Deletes some of the plans that no job, generation or name refers to; returns how many it were."""
        with self._database.write() as session:
            return drop_orphans(session)


def drop_orphans(session: Session) -> int:
    used = (
        PlanRow.fingerprint.not_in(select(JobPlanRow.fingerprint)),
        PlanRow.fingerprint.not_in(select(GenerationRow.plan_fingerprint)),
        PlanRow.fingerprint.not_in(select(SavedPlanRow.fingerprint)),
        PlanRow.fingerprint.not_in(select(GenerationRow.interim_plan)),  # it has no index, and is looked at last
    )
    # Whoever takes a plan up at this moment holds its row (db.plan_rows): it is left for another time.
    found = select(PlanRow.fingerprint).where(*used).limit(PLANS).with_for_update(skip_locked=True)
    orphans = list(session.scalars(found))
    if not orphans:
        return 0
    return _deleted(session, delete(PlanRow).where(PlanRow.fingerprint.in_(orphans), *used))


def _trim_events(session: Session, job_id: str, keep: int) -> int:
    first, last = session.execute(
        select(func.min(EventRow.seq), func.max(EventRow.seq)).where(EventRow.job_id == job_id)
    ).one()
    if last is None or last - first < keep:
        return 0
    end = min(last - keep, first + ROWS - 1)
    session.execute(delete(EventSeenRow).where(EventSeenRow.job_id == job_id, EventSeenRow.seq <= end))
    return _deleted(session, delete(EventRow).where(EventRow.job_id == job_id, EventRow.seq <= end))


def _trim_states(session: Session, job_id: str, keep: int) -> int:
    of_job = WorkerStateRow.job_id == job_id
    newest = select(WorkerStateRow.id).where(of_job).order_by(WorkerStateRow.id.desc())
    cut = session.scalar(newest.offset(keep).limit(1))
    if cut is None:
        return 0
    last = select(func.max(WorkerStateRow.id)).where(of_job).group_by(WorkerStateRow.worker)
    old = select(WorkerStateRow.id).where(of_job, WorkerStateRow.id <= cut, WorkerStateRow.id.not_in(last))
    ids = list(session.scalars(old.order_by(WorkerStateRow.id).limit(ROWS)))
    return _deleted(session, delete(WorkerStateRow).where(WorkerStateRow.id.in_(ids))) if ids else 0


def _trim_acknowledgements(session: Session, job_id: str, keep: int) -> int:
    of_job = AcknowledgementRow.job_id == job_id
    first, last = session.execute(
        select(func.min(AcknowledgementRow.generation), func.max(AcknowledgementRow.generation)).where(of_job)
    ).one()
    if last is None or last - first < keep:
        return 0
    # One generation at a time: of a large job it has thousands.
    return _deleted(session, delete(AcknowledgementRow).where(of_job, AcknowledgementRow.generation == first))


def _trim_plans(session: Session, job_id: str, keep: int) -> int:
    of_job = JobPlanRow.job_id == job_id
    ran = select(GenerationRow.plan_fingerprint).where(GenerationRow.job_id == job_id)
    old = (
        select(JobPlanRow.fingerprint)
        .where(of_job, JobPlanRow.ahead, JobPlanRow.fingerprint.not_in(ran))
        .order_by(JobPlanRow.created_at.desc(), JobPlanRow.fingerprint)
        .offset(keep)
        .limit(ROWS)
    )
    if gone := set(session.scalars(old)):
        meanwhile = (GenerationRow.job_id == job_id, GenerationRow.interim_plan.in_(gone))
        gone.difference_update(session.scalars(select(GenerationRow.interim_plan).where(*meanwhile)))
    return _deleted(session, delete(JobPlanRow).where(of_job, JobPlanRow.fingerprint.in_(gone))) if gone else 0


def _deleted(session: Session, statement: Any) -> int:
    return int(session.execute(statement).rowcount)  # type: ignore[attr-defined]
