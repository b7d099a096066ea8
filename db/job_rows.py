"""Everything that is stored of one job, table by table, for export, import and deletion.

A job that is being imported or deleted has a state of its own (HIDDEN), so no console runs it. If the process dies
meanwhile, what it left half done is found by this state and deleted.

Old rows that are deleted beyond some number, and plans that nobody refers to any more, are deleted a bounded number at
a time, each in a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    String,
    Table,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from openrecycle.db.models import (
    AcknowledgementRow,
    AuditRow,
    Base,
    CommandRow,
    EventRow,
    EventSeenRow,
    GenerationRow,
    HeartbeatRow,
    IterationRow,
    JobPlanRow,
    JobRow,
    MeasuredIterationRow,
    PlanRow,
    RecoveryRow,
    SavedPlanRow,
    WorkerRow,
    WorkerStateRow,
)
from openrecycle.db.plan_rows import keep_plan
from openrecycle.db.session import Database
from openrecycle.db.session import Record as Record

# -- rows that are deleted beyond some number ---------------------------------------------------

ROWS = 5_000
"""How many rows one transaction deletes at most."""
PLANS = 100


class Retention:
    """Deletes old rows. Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def trim_job(self, job_id: str, *, events: int, states: int, generations: int, plans: int) -> int:
        """Deletes some of a job's oldest rows beyond these numbers; returns how many (0: none are left to delete).

        events: how many of the newest lines of the feed are kept. states: changes of workers' states; the last one of
        each worker is always kept. generations: those whose acknowledgements are kept. plans: those made ahead that no
        generation has run.
        """
        with self._database.write() as session:
            return (
                _trim_events(session, job_id, events)
                + _trim_states(session, job_id, states)
                + _trim_acknowledgements(session, job_id, generations)
                + _trim_plans(session, job_id, plans)
            )

    def drop_orphans(self) -> int:
        """Deletes some of the plans that no job, generation or name refers to; returns how many."""
        with self._database.write() as session:
            return drop_orphans(session)


def drop_orphans(session: Session) -> int:
    used = (
        PlanRow.fingerprint.not_in(select(JobPlanRow.fingerprint)),
        PlanRow.fingerprint.not_in(select(GenerationRow.plan_fingerprint)),
        PlanRow.fingerprint.not_in(select(SavedPlanRow.fingerprint)),
        PlanRow.fingerprint.not_in(select(GenerationRow.interim_plan)),  # last, since this column has no index
    )
    # A transaction that begins to use a plan locks its row (db.plan_rows): such a plan is skipped this time.
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
    # One generation at a time, since in a large job it has thousands of rows.
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


# -- everything that is stored of one job, table by table ---------------------------------------

OVER = ("finished", "stopped")

IMPORTING, DELETING = "importing", "deleting"
HIDDEN = (IMPORTING, DELETING)


class HiddenJob(NamedTuple):
    """A job that is being imported or deleted. note: of an import, the importer; of a deletion, the job's reason."""

    job_id: str
    state: str
    note: str


# In the order in which they can be written. The first columns of each table are its key, by which a job's rows are
# unique and ordered; tables with an `id` of their own are ordered by that.
MODELS: dict[str, type[Base]] = {
    model.__tablename__: model
    for model in (
        WorkerRow,
        JobPlanRow,
        GenerationRow,
        AcknowledgementRow,
        EventRow,
        EventSeenRow,
        IterationRow,
        RecoveryRow,
        MeasuredIterationRow,
        WorkerStateRow,
        CommandRow,
        HeartbeatRow,
    )
}


def table(name: str) -> Table:
    made = (JobRow if name == "job" else AuditRow if name == "audit" else MODELS[name]).__table__
    assert isinstance(made, Table)
    return made


class JobRows:
    """Exports, imports and deletes jobs. Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- out ------------------------------------------------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a view of the database at one moment, however long reading takes."""
        with self._database.engine.connect() as connection:
            if not self._database.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield Snapshot(connection)

    # -- in -------------------------------------------------------------------------------------

    def begin(self, job: Record, note: str) -> HiddenJob | None:
        """Stores the row of a job that is being imported. note: the importer. Returns None if the id is taken."""
        try:
            with self._database.write() as session:
                session.execute(insert(JobRow).values({**job, "state": IMPORTING, "reason": note}))
        except IntegrityError:
            return None
        return HiddenJob(job["id"], IMPORTING, note)

    def add(self, name: str, job_id: str, rows: Sequence[Record], plans: Iterable[tuple[str, bytes]] = ()) -> None:
        """Adds rows, all with the same columns. plans: (fingerprint, packed form) of plans that these rows refer to and
        that may not be stored yet."""
        with self._database.write() as session:
            for fingerprint, data in plans:
                keep_plan(self._database, session, fingerprint, data)
            session.connection().execute(insert(table(name)), [{"job_id": job_id, **row} for row in rows])

    def exists(self, job_id: str) -> bool:
        return self._database.scalar(select(JobRow.id).where(JobRow.id == job_id)) is not None

    def finish(self, job: Record, audit: Record) -> None:
        """Ends the import: from now on it is a job like any other. audit: the line about the person who asked."""
        columns = {"state": job["state"], "reason": job["reason"]}
        with self._database.write() as session:
            session.execute(update(JobRow).where(JobRow.id == job["id"]).values(columns))
            self._database.write_audit(session, audit)

    # -- away -----------------------------------------------------------------------------------

    def hide(self, job_id: str, audit: Record) -> HiddenJob | None:
        """Takes the first step of deleting a job, whose idempotency key is free from then on. Returns None if there is
        no such job. audit: the line about the person who asked."""
        with self._database.write() as session:
            done = update(JobRow).where(JobRow.id == job_id, JobRow.state.not_in(HIDDEN))
            reason = session.scalar(done.values(state=DELETING, idempotency_key=None).returning(JobRow.reason))
            if reason is None:
                return None
            self._database.write_audit(session, audit)
        return HiddenJob(job_id, DELETING, reason)

    def delete_some(self, job: HiddenJob) -> bool:
        """Deletes a bounded number of a hidden job's rows, and finally the job. Returns False when nothing is left of
        it, or its id has been taken by another job.

        Plans that other jobs have, or that are saved under a name, stay. The audit log stays.
        """
        job_id = job.job_id
        place: ColumnElement[Any] = literal_column("rowid" if self._database.is_sqlite else "ctid")
        with self._database.write() as session:
            same = (JobRow.id == job_id, JobRow.state == job.state, JobRow.reason == job.note)
            if session.scalar(select(JobRow.id).where(*same).with_for_update()) is None:
                return drop_orphans(session) > 0
            left = ROWS
            for name in reversed(MODELS):
                rows = table(name)
                some = select(place).select_from(rows).where(rows.c.job_id == job_id).limit(left)
                left -= session.connection().execute(delete(rows).where(place.in_(some))).rowcount
                if left <= 0:
                    return True
            session.execute(delete(JobRow).where(JobRow.id == job_id))
        return True

    def hidden(self) -> list[HiddenJob]:
        """Returns the jobs that are being imported or deleted."""
        query = select(JobRow.id, JobRow.state, JobRow.reason).where(JobRow.state.in_(HIDDEN))
        with self._database.read() as session:
            return [HiddenJob(*row) for row in session.execute(query)]


class Snapshot:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def job(self, job_id: str) -> Record | None:
        row = self._connection.execute(select(table("job")).where(table("job").c.id == job_id)).mappings().first()
        return None if row is None or row["state"] in HIDDEN else dict(row)

    def rows(self, name: str, job_id: str) -> Iterator[Record]:
        """Yields a table's rows in the order of its key, texts by their bytes; they are read as they are taken."""
        rows = table(name)
        bytewise = "C" if self._connection.dialect.name == "postgresql" else "BINARY"
        keys = [c.collate(bytewise) if isinstance(c.type, String) else c for c in rows.primary_key.columns]
        query = select(rows).where(rows.c.job_id == job_id).order_by(*keys)
        with self._connection.execution_options(yield_per=500).execute(query) as result:
            for row in result.mappings():
                yield dict(row)

    def plan(self, fingerprint: str) -> bytes:
        """Returns a stored plan in its packed form."""
        found = self._connection.scalars(select(PlanRow.data).where(PlanRow.fingerprint == fingerprint))
        return found.one()

    def fingerprints(self, job_id: str) -> list[str]:
        """Returns the fingerprints of all plans that the job has or has run."""
        plans, generations = table("job_plan"), table("generation")
        ran = select(generations.c.plan_fingerprint).where(generations.c.job_id == job_id)
        query = select(plans.c.fingerprint).where(plans.c.job_id == job_id).union(ran)
        return sorted(self._connection.scalars(query))
