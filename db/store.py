"""The queries about jobs: their state, and what was observed of them (measured iterations, workers' states over time,
events that somebody has seen). Each function is one transaction and returns plain data.

Thread-safe: a Store holds nothing but the Database.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from openrecycle.db.job_rows import HIDDEN, OVER
from openrecycle.db.models import (
    AcknowledgementRow,
    CatalogPlanRow,
    CatalogRow,
    CommandRow,
    EventRow,
    EventSeenRow,
    GenerationRow,
    IdempotentRequestRow,
    IterationRow,
    JobPlanRow,
    JobRow,
    MeasuredIterationRow,
    PlanRow,
    RecoveryRow,
    WorkerRow,
    WorkerStateRow,
    listed,
)
from openrecycle.db.plan_rows import keep_plan
from openrecycle.db.session import Database
from openrecycle.db.session import Record as Record

# -- all queries about jobs ---------------------------------------------------------------------

# Larger than a page can hold beside other rows. The bytes are random, so PostgreSQL can't compress them, and the
# database has to find free pages.
PROBE_BYTES = 16 * 1024

CATALOG_BATCH = 64  # plans per statement; a large plan has some 10^5 bytes


@dataclass(frozen=True)
class JobUpdate:
    """What one step of the coordinator adds to a job's history; it is stored in one transaction.

    job: columns of the job row that changed. workers, generation, events, acknowledgements, states, audit: rows
    without their job_id. plan: (fingerprint, its packed form, failed workers, made ahead). states: workers that came
    into another state. later: (number of a stored generation, its columns that changed). audit: an operator's action.
    repeats: changed columns of events that are stored already, with their seq.
    """

    job: Record = field(default_factory=dict)
    workers: Sequence[Record] = ()
    plan: tuple[str, bytes, Sequence[str], bool] | None = None
    generation: Record | None = None
    events: Sequence[Record] = ()
    acknowledgements: Sequence[Record] = ()
    states: Sequence[Record] = ()
    later: Sequence[tuple[int, Record]] = ()
    audit: Record | None = None
    repeats: Sequence[Record] = ()

    def __bool__(self) -> bool:
        parts = (self.job, self.workers, self.plan, self.generation, self.events, self.acknowledgements, self.audit)
        return any(parts) or bool(self.repeats) or bool(self.later)

    @property
    def lasting(self) -> bool:
        """Must it survive a loss of power? Launchers that have been told of it could not go on with a console that has
        forgotten it. Acknowledgements come by the hundred and need not: the last one changes the job, and what is
        stored of the others becomes safe with that."""
        parts = (self.job, self.plan, self.generation, self.later, self.audit)
        return any(parts) or (bool(self.workers) and not self.acknowledgements)


class Store:
    def __init__(self, database: Database) -> None:
        self.database = database

    def ping(self) -> None:
        """Raises an error when the database does not answer."""
        with self.database.read() as session:
            session.execute(select(1))

    def try_to_write(self) -> None:
        """Raises an error when nothing can be stored: on a full disk reading still works. It writes a row and deletes
        it in the same transaction; the row reaches the disk nevertheless."""
        key = "is there room?"
        row = {"key": key, "request": "", "status": 0, "media_type": "", "location": "", "at": time.time()}
        with self.database.write() as session:
            session.execute(
                self.database.insert_new(IdempotentRequestRow).values(row | {"body": os.urandom(PROBE_BYTES)})
            )
            session.execute(delete(IdempotentRequestRow).where(IdempotentRequestRow.key == key))

    # -- jobs -------------------------------------------------------------------------------

    def create_job(
        self,
        job_id: str,
        *,
        name: str,
        spec: str,
        state: str,
        created_at: float,
        workers: Sequence[Record],
        idempotency_key: str | None = None,
    ) -> Record:
        """Stores a new job, and returns its row. If a job was created under this key before, returns that job's row."""
        with self.database.write() as session:
            row = {
                "id": job_id,
                "name": name,
                "spec": spec,
                "state": state,
                "reason": "",
                "idempotency_key": idempotency_key,
                "created_at": created_at,
            }
            created = session.scalar(self.database.insert_new(JobRow).values(row).returning(JobRow.id))
            if created is None:
                found = select(JobRow.__table__).where(JobRow.idempotency_key == idempotency_key)
                return dict(session.execute(found).mappings().one())
            if workers:
                session.execute(insert(WorkerRow), [{"job_id": job_id, **w} for w in workers])
            return row

    def job_of_key(self, idempotency_key: str) -> Record | None:
        """Returns the job that was created under this key, unless it is hidden (being imported or deleted)."""
        query = select(JobRow.__table__).where(JobRow.idempotency_key == idempotency_key)
        return self.database.row(query.where(JobRow.state.not_in(HIDDEN)))

    def jobs(self) -> list[Record]:
        """Returns every job, oldest first, except those that are being imported or deleted."""
        query = select(JobRow.__table__).where(JobRow.state.not_in(HIDDEN)).order_by(JobRow.created_at, JobRow.id)
        return self.database.rows(query)

    def job_states(self) -> dict[str, str]:
        """Returns the state of every job, oldest first, except those that are being imported or deleted."""
        query = select(JobRow.id, JobRow.state).where(JobRow.state.not_in(HIDDEN))
        with self.database.read() as session:
            return {row.id: row.state for row in session.execute(query.order_by(JobRow.created_at, JobRow.id))}

    def jobs_over(self, job_ids: Collection[str] | None = None) -> list[Record]:
        """Returns the jobs that are over (all, or these), oldest first: id, name, spec, state, reason, created_at, and
        of the newest generation its number and how many workers live in it (0: there was no generation)."""
        newest = (
            select(GenerationRow.job_id, func.max(GenerationRow.generation).label("generation"))
            .group_by(GenerationRow.job_id)
            .subquery()
        )
        living = listed(GenerationRow.living)  # only the count is read: lists may be long, and jobs thousands
        columns = (JobRow.id, JobRow.name, JobRow.spec, JobRow.state, JobRow.reason, JobRow.created_at)
        query = (
            select(*columns, func.coalesce(newest.c.generation, 0).label("generation"), living.label("living"))
            .outerjoin(newest, newest.c.job_id == JobRow.id)
            .outerjoin(
                GenerationRow, and_(GenerationRow.job_id == JobRow.id, GenerationRow.generation == newest.c.generation)
            )
            .where(JobRow.state.in_(OVER))
            .order_by(JobRow.created_at, JobRow.id)
        )
        if job_ids is not None:
            query = query.where(JobRow.id.in_(job_ids))
        return self.database.rows(query)

    def job(self, job_id: str) -> Record | None:
        """Returns one job; None if there is none, or it is being imported or deleted."""
        query = select(JobRow.__table__).where(JobRow.id == job_id, JobRow.state.not_in(HIDDEN))
        return self.database.row(query)

    def take_lead(self, job_id: str, term: int, node: int, before: int) -> bool:
        """Stores which node leads a job of several nodes from now on. Returns False if its newest term is no longer
        `before`."""
        same = (JobRow.id == job_id, JobRow.lead_term == before)
        with self.database.write() as session:
            done = update(JobRow).where(*same).values(lead_term=term, lead_node=node).returning(JobRow.id)
            return session.scalar(done) is not None

    def workers(self, job_id: str) -> list[Record]:
        return self.database.rows(select(WorkerRow.__table__).where(WorkerRow.job_id == job_id))

    # -- the coordinator's steps ------------------------------------------------------------

    def apply(self, job_id: str, change: JobUpdate) -> bool:
        """Stores all of `change` or nothing. Returns False if the job's row was to change, and the job has been deleted
        or is being deleted."""
        with self.database.write(lasting=change.lasting) as session:
            if change.job:
                done = update(JobRow).where(JobRow.id == job_id, JobRow.state.not_in(HIDDEN)).values(change.job)
                if session.scalar(done.returning(JobRow.id)) is None:
                    return False
            update_workers(session, job_id, change.workers)
            if change.plan:
                self._put_plan(session, job_id, *change.plan)
            if change.generation:
                row = {k: _text(v) for k, v in change.generation.items()}
                session.execute(insert(GenerationRow).values(job_id=job_id, **row))
            for number, columns in change.later:
                same = (GenerationRow.job_id == job_id, GenerationRow.generation == number)
                session.execute(update(GenerationRow).where(*same).values({k: _text(v) for k, v in columns.items()}))
            if change.events:
                session.execute(insert(EventRow), [{"job_id": job_id, **e} for e in change.events])
            for row in change.repeats:
                same = (EventRow.job_id == job_id, EventRow.seq == row["seq"])
                session.execute(update(EventRow).where(*same).values(row))
            if change.acknowledgements:
                rows = [{"job_id": job_id, **row} for row in change.acknowledgements]
                session.connection().execute(self.database.insert_new(AcknowledgementRow), rows)
            if change.states:
                session.execute(insert(WorkerStateRow), [{"job_id": job_id, **s} for s in change.states])
            if change.audit:
                self.database.write_audit(session, {**change.audit, "job_id": job_id})
            return True

    def heartbeats(self, beats: Mapping[str, Sequence[Record]]) -> None:
        """Stores the latest heartbeat of many workers at once. beats: job -> worker columns."""
        with self.database.write(lasting=False) as session:
            for job_id, workers in beats.items():
                update_workers(session, job_id, workers)

    def last_event(self, job_id: str) -> int:
        return self.database.scalar(select(func.max(EventRow.seq)).where(EventRow.job_id == job_id)) or 0

    def events(
        self, job_id: str, *, after: int = 0, limit: int = 200, newest: bool = False, severe: bool = False
    ) -> list[Record]:
        """Returns events with seq > after: the first `limit`, oldest first; or the newest, newest first. severe: only
        warnings and errors. last_at is set for events that happened once, too."""
        order = EventRow.seq.desc() if newest else EventRow.seq
        where = [EventRow.job_id == job_id, EventRow.seq > after]
        if severe:
            where.append(EventRow.severity != "info")
        rows = self.database.rows(select(EventRow.__table__).where(*where).order_by(order).limit(limit))
        return [{**row, "last_at": row["last_at"] or row["at"]} for row in rows]

    def generations(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[Record]:
        """Returns generations with a number > after, oldest first; living, failed and joining as lists."""
        return self._generations(list(GenerationRow.__table__.columns), job_id, after, limit)

    def all_generations(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[Record]:
        """As `generations`, but without `living`, which would be megabytes for thousands of workers, and gigabytes for
        weeks of generations."""
        columns = [c for c in GenerationRow.__table__.columns if c.name != "living"]
        return self._generations(columns, job_id, after, limit)

    def _generations(
        self, columns: Sequence[ColumnElement[Any]], job_id: str, after: int = 0, limit: int | None = None
    ) -> list[Record]:
        where = (GenerationRow.job_id == job_id, GenerationRow.generation > after)
        query = select(*columns).where(*where).order_by(GenerationRow.generation).limit(limit)
        rows = self.database.rows(query)
        for row in rows:
            for key in ("living", "failed", "joining", "moves", "interim_failed", "partition", "let_go", "lost"):
                if key in row:
                    row[key] = json.loads(row[key])
        return rows

    def generation(self, job_id: str, number: int) -> Record | None:
        """Returns one generation; None if there is none of this number."""
        found = self.generations(job_id, after=number - 1, limit=1)
        return found[0] if found and found[0]["generation"] == number else None

    def newest_move(self, job_id: str) -> Record | None:
        """Returns the last generation in which layers moved to other stages: its number, `partition` and `moved_at`."""
        row = GenerationRow
        query = select(row.generation, row.partition, row.moved_at).where(
            row.job_id == job_id, row.moved_at.is_not(None)
        )
        found = self.database.row(query.order_by(row.generation.desc()).limit(1))
        return {**found, "partition": json.loads(found["partition"])} if found else None

    def newest_generation(self, job_id: str) -> Record | None:
        """Returns the newest generation; None if there is none."""
        last = self.database.scalar(select(func.max(GenerationRow.generation)).where(GenerationRow.job_id == job_id))
        return None if last is None else self.generation(job_id, last)

    def acknowledgements(
        self, job_id: str, generation: int | None = None, *, after: int = 0, last: int | None = None
    ) -> list[Record]:
        """Returns the acknowledgements of one generation; or of those with a number > after, up to and including
        `last`."""
        where = [AcknowledgementRow.job_id == job_id]
        if generation is not None:
            where.append(AcknowledgementRow.generation == generation)
        if after:
            where.append(AcknowledgementRow.generation > after)
        if last is not None:
            where.append(AcknowledgementRow.generation <= last)
        return self.database.rows(select(AcknowledgementRow.__table__).where(*where).order_by(AcknowledgementRow.at))

    def last_acknowledgements(self, job_id: str) -> list[Record]:
        """Returns (generation, state, at) for each generation and state, of the worker that came last: there may be
        thousands of workers, and one row is enough."""
        key = (AcknowledgementRow.generation, AcknowledgementRow.state)
        query = select(*key, func.max(AcknowledgementRow.at).label("at")).where(AcknowledgementRow.job_id == job_id)
        return self.database.rows(query.group_by(*key).order_by(*key))

    # -- plans ------------------------------------------------------------------------------

    def put_plan(self, job_id: str, fingerprint: str, data: bytes, failed: Sequence[str], ahead: bool) -> bool:
        """Stores a plan of a job. data: its packed form. A plan that is stored already, for this or another job, is not
        stored twice. Returns False, and stores nothing, if the job has been deleted or is being deleted."""
        with self.database.write() as session:
            job = select(JobRow.id).where(JobRow.id == job_id, JobRow.state.not_in(HIDDEN))
            if session.scalar(job.with_for_update(read=True, key_share=True)) is None:
                return False
            self._put_plan(session, job_id, fingerprint, data, failed, ahead)
            return True

    def plan(self, fingerprint: str) -> bytes | None:
        """Returns a plan in its packed form (planner.plans.packed)."""
        found: bytes | None = self.database.scalar(select(PlanRow.data).where(PlanRow.fingerprint == fingerprint))
        return found

    def is_plan_of(self, job_id: str, fingerprint: str) -> bool:
        """Has the job this plan, or has it ever run it?"""
        link, ran = JobPlanRow, GenerationRow
        has = select(link.job_id).where(link.job_id == job_id, link.fingerprint == fingerprint)
        run = or_(ran.plan_fingerprint == fingerprint, ran.interim_plan == fingerprint)
        had = select(ran.job_id).where(ran.job_id == job_id, run)
        return self.database.scalar(has.limit(1)) is not None or self.database.scalar(had.limit(1)) is not None

    def job_plans(self, job_id: str) -> list[Record]:
        """Returns the job's plans without their documents, with `failed` as a list; fewest failures first."""
        rows = self.database.rows(select(JobPlanRow.__table__).where(JobPlanRow.job_id == job_id))
        for row in rows:
            row["failed"] = json.loads(row["failed"])
        return sorted(rows, key=lambda r: (len(r["failed"]), ".".join(r["failed"]), r["created_at"], r["fingerprint"]))

    # -- catalogs ---------------------------------------------------------------------------

    def save_catalog(self, fingerprint: str, info: str, plans: Iterable[tuple[str, int, bytes]]) -> None:
        """Adds plans (name, failures, stored form) to a catalog, which is created if it is not there.

        A plan of the same name is replaced. Stores all of them or none.
        """
        with self.database.write() as session:
            row = {"fingerprint": fingerprint, "info": info, "created_at": time.time()}
            session.execute(self.database.insert_new(CatalogRow).values(row))
            rows = iter(plans)
            while batch := [
                {"fingerprint": fingerprint, "name": name, "failures": failures, "data": data}
                for name, failures, data in islice(rows, CATALOG_BATCH)
            ]:
                names = [row["name"] for row in batch]
                session.execute(
                    delete(CatalogPlanRow).where(
                        CatalogPlanRow.fingerprint == fingerprint, CatalogPlanRow.name.in_(names)
                    )
                )
                session.execute(insert(CatalogPlanRow), batch)

    def catalogs(self) -> list[Record]:
        """Returns every catalog, oldest first: fingerprint, info, created_at, and the number of its plans, the most
        failures of one, and their bytes."""
        plans = (
            select(
                CatalogPlanRow.fingerprint,
                func.count().label("plans"),
                func.max(CatalogPlanRow.failures).label("failures"),
                func.sum(func.length(CatalogPlanRow.data)).label("bytes"),
            )
            .group_by(CatalogPlanRow.fingerprint)
            .subquery()
        )
        query = (
            select(
                CatalogRow.__table__,
                func.coalesce(plans.c.plans, 0).label("plans"),
                func.coalesce(plans.c.failures, 0).label("failures"),
                func.coalesce(plans.c.bytes, 0).label("bytes"),
            )
            .outerjoin(plans, plans.c.fingerprint == CatalogRow.fingerprint)
            .order_by(CatalogRow.created_at, CatalogRow.fingerprint)
        )
        return self.database.rows(query)

    def catalog_info(self, fingerprint: str) -> str | None:
        found: str | None = self.database.scalar(select(CatalogRow.info).where(CatalogRow.fingerprint == fingerprint))
        return found

    def catalog_blobs(self, fingerprint: str) -> CatalogBlobs:
        """Returns the plans of a catalog, which are read one by one (a planner.catalogs.catalog.PlanStore)."""
        return CatalogBlobs(self.database, fingerprint)

    def delete_catalog(self, fingerprint: str) -> None:
        with self.database.write() as session:
            session.execute(delete(CatalogPlanRow).where(CatalogPlanRow.fingerprint == fingerprint))
            session.execute(delete(CatalogRow).where(CatalogRow.fingerprint == fingerprint))

    # -- reports ----------------------------------------------------------------------------

    def add_iterations(self, job_id: str, rows: Sequence[Record]) -> None:
        """Stores reports of iterations. The first report of an iteration counts; later ones are ignored."""
        if rows:
            with self.database.write(lasting=False) as session:
                own = ({k: _text(v) for k, v in row.items()} for row in rows)
                session.execute(self.database.insert_new(IterationRow), [{"job_id": job_id, **row} for row in own])

    def iterations(self, job_id: str, *, after: int = -1, limit: int = 1000, newest: bool = False) -> list[Record]:
        """Returns iterations with a number > after, oldest first: the first `limit` or, with `newest`, the last
        ones."""
        order = IterationRow.iteration.desc() if newest else IterationRow.iteration
        where = (IterationRow.job_id == job_id, IterationRow.iteration > after)
        rows = self.database.rows(select(IterationRow.__table__).where(*where).order_by(order).limit(limit))
        for row in rows:
            row["skipped"] = json.loads(row["skipped"])
        return rows[::-1] if newest else rows

    def committed_iterations(self, job_id: str) -> int:
        """Returns how many are committed; they are numbered from 0 and committed in order."""
        last = self.database.scalar(select(func.max(IterationRow.iteration)).where(IterationRow.job_id == job_id))
        return 0 if last is None else last + 1

    def add_recovery(self, job_id: str, row: Record, events: Sequence[Record] = ()) -> bool:
        """Stores a recovery and its events. Returns False, and stores nothing, if it was reported before."""
        with self.database.write() as session:
            statement = self.database.insert_new(RecoveryRow).values(job_id=job_id, **row)
            if session.scalar(statement.returning(RecoveryRow.worker)) is None:
                return False
            if events:
                session.execute(insert(EventRow), [{"job_id": job_id, **e} for e in events])
            return True

    def recoveries(self, job_id: str, *, after: int = 0) -> list[Record]:
        """Returns recoveries, oldest first. after: only those of generations with a number > after, and the latest
        recovery, whatever its generation."""
        row = RecoveryRow
        query = select(row.__table__).where(row.job_id == job_id)
        if after:
            latest = select(func.max(row.at)).where(row.job_id == job_id).scalar_subquery()
            query = query.where(or_(row.generation > after, row.at == latest))
        return self.database.rows(query.order_by(row.at, row.generation))

    # -- operators --------------------------------------------------------------------------

    def add_command(self, job_id: str, *, kind: str, worker: str, actor: str, events: Sequence[Record]) -> int:
        """Stores a command, its line in the audit log and its events; returns the command's seq."""
        now = time.time()
        with self.database.write() as session:
            # Locks the job's row, so that two operators on PostgreSQL get different numbers.
            session.execute(select(JobRow.id).where(JobRow.id == job_id).with_for_update())
            last = session.scalar(select(func.max(CommandRow.seq)).where(CommandRow.job_id == job_id)) or 0
            command = {"seq": last + 1, "kind": kind, "worker": worker, "actor": actor, "at": now}
            session.execute(insert(CommandRow).values(job_id=job_id, **command))
            audit = {"at": now, "actor": actor, "action": kind, "job_id": job_id, "target": worker, "detail": ""}
            if events:
                session.execute(insert(EventRow), [{"job_id": job_id, **e} for e in events])
            self.database.write_audit(session, audit)
            return last + 1

    def commands(self, job_id: str) -> list[Record]:
        own = select(CommandRow.__table__).where(CommandRow.job_id == job_id)
        return self.database.rows(own.order_by(CommandRow.seq))

    # -- measured iterations --------------------------------------------------------------------

    def put_measured(
        self, job_id: str, iteration: int, document: str, at: float, *, keep: Collection[int] = ()
    ) -> None:
        """Stores a measured iteration, and deletes the job's earlier ones except those in `keep`. document: JSON."""
        row = {"job_id": job_id, "iteration": iteration, "document": zlib.compress(document.encode()), "at": at}
        left = MeasuredIterationRow.iteration.notin_(set(keep) - {iteration})
        with self.database.write() as session:
            session.execute(delete(MeasuredIterationRow).where(MeasuredIterationRow.job_id == job_id, left))
            session.execute(insert(MeasuredIterationRow).values(row))

    def measured(self, job_id: str, iteration: int | None = None) -> str | None:
        """Returns one measured iteration as JSON, by default the newest; None if it is not stored."""
        query = select(MeasuredIterationRow.document).where(MeasuredIterationRow.job_id == job_id)
        if iteration is not None:
            query = query.where(MeasuredIterationRow.iteration == iteration)
        data = self.database.scalar(query.order_by(MeasuredIterationRow.at.desc()).limit(1))
        return None if data is None else zlib.decompress(data).decode()

    def measured_iterations(self, job_id: str) -> list[int]:
        """Returns the numbers of the stored ones, in the order in which they were measured."""
        row = MeasuredIterationRow
        query = select(row.iteration).where(row.job_id == job_id).order_by(row.at, row.iteration)
        return self.database.scalars(query)

    # -- what was observed of workers -----------------------------------------------------------

    def worker_states(self, job_id: str, worker: str, *, limit: int = 200) -> list[Record]:
        """Returns the newest changes of a worker's state, oldest first: state, at."""
        query = (
            select(WorkerStateRow.state, WorkerStateRow.at)
            .where(WorkerStateRow.job_id == job_id, WorkerStateRow.worker == worker)
            .order_by(WorkerStateRow.id.desc())
            .limit(limit)
        )
        return self.database.rows(query)[::-1]

    def events_of(self, job_id: str, worker: str, *, limit: int = 20) -> list[Record]:
        """Returns the newest events that name this worker, newest first."""
        query = (
            select(EventRow.__table__)
            .where(EventRow.job_id == job_id, EventRow.worker == worker)
            .order_by(EventRow.seq.desc())
            .limit(limit)
        )
        return self.database.rows(query)

    # -- events that somebody has seen ----------------------------------------------------------

    def see_events(self, job_id: str, seqs: Sequence[int], actor: str) -> int:
        """Marks events as seen; returns how many are new to that. Events that the job does not have are left out."""
        now = time.time()
        with self.database.write() as session:
            known = select(EventRow.seq).where(EventRow.job_id == job_id, EventRow.seq.in_(seqs))
            rows: list[Record] = [
                {"job_id": job_id, "seq": seq, "actor": actor, "at": now} for seq in session.scalars(known)
            ]
            if not rows:
                return 0
            seen = select(EventSeenRow.seq).where(EventSeenRow.job_id == job_id, EventSeenRow.seq.in_(seqs))
            new = {row["seq"] for row in rows} - set(session.scalars(seen))
            session.execute(self.database.insert_new(EventSeenRow), rows)
            if new:
                detail = ", ".join(str(seq) for seq in sorted(new))
                audit = {"at": now, "actor": actor, "action": "acknowledge", "job_id": job_id, "target": "events"}
                self.database.write_audit(session, {**audit, "detail": detail})
            return len(new)

    def seen_events(self, job_id: str, seqs: Sequence[int]) -> dict[int, tuple[str, float]]:
        """Returns which of these events somebody has seen: seq -> (who, when)."""
        query = select(EventSeenRow.__table__).where(EventSeenRow.job_id == job_id, EventSeenRow.seq.in_(seqs))
        return {row["seq"]: (row["actor"], row["at"]) for row in self.database.rows(query)}

    # -- iterations, added up -------------------------------------------------------------------

    def iteration_sums(self, job_id: str, through: int) -> list[Record]:
        """Returns for each generation, oldest first, its iterations up to `through`: generation, living, count,
        seconds, how many micro-batches were skipped, and the number and the seconds of the first iteration."""
        where = (IterationRow.job_id == job_id, IterationRow.iteration <= through)
        sums = (
            select(
                IterationRow.generation,
                func.count().label("count"),
                func.sum(IterationRow.seconds).label("seconds"),
                func.sum(listed(IterationRow.skipped)).label("skipped"),
                func.min(IterationRow.iteration).label("first"),
            )
            .where(*where)
            .group_by(IterationRow.generation)
            .subquery()
        )
        query = (
            select(
                sums.c.generation,
                IterationRow.living,
                sums.c.count,
                sums.c.seconds,
                sums.c.skipped,
                sums.c.first,
                IterationRow.seconds.label("first_seconds"),
            )
            .join(sums, (IterationRow.job_id == job_id) & (IterationRow.iteration == sums.c.first))
            .order_by(sums.c.first)
        )
        return self.database.rows(query)

    def committed_after(self, job_id: str, at: float) -> Record | None:
        """Returns the first iteration that was committed at this time (POSIX seconds) or later; None if there is none
        yet. It is found by bisection: there may be millions, and pages ask again and again. Where a clock was put back,
        there may be several iterations whose predecessor was committed earlier than `at`; it is one of those."""
        row = IterationRow
        query = select(row.iteration, row.generation, row.seconds, row.committed_at).where(row.job_id == job_id)
        with self.database.read() as session:
            found = session.execute(query.order_by(row.iteration.desc()).limit(1)).mappings().first()
            if found is None or found["committed_at"] < at:
                return None
            low, high = 0, found["iteration"]
            while low < high:
                middle = (low + high) // 2
                first = query.where(row.iteration >= middle).order_by(row.iteration).limit(1)
                between = session.execute(first).mappings().one()
                if between["committed_at"] >= at:
                    found, high = between, middle
                else:
                    low = between["iteration"] + 1
            return dict(found)

    def last_commit(self, job_id: str, before: int | None = None) -> float:
        """Returns when the newest iteration was committed (POSIX seconds), of all or of those with a smaller number;
        0 if there is none."""
        row = IterationRow
        query = select(row.committed_at).where(row.job_id == job_id)
        if before is not None:
            query = query.where(row.iteration < before)
        return self.database.scalar(query.order_by(row.iteration.desc()).limit(1)) or 0.0

    # -- details ----------------------------------------------------------------------------

    def _put_plan(
        self,
        session: Session,
        job_id: str,
        fingerprint: str,
        data: bytes,
        failed: Sequence[str],
        ahead: bool,
    ) -> None:
        keep_plan(self.database, session, fingerprint, data)
        link = {
            "job_id": job_id,
            "fingerprint": fingerprint,
            "failed": json.dumps(list(failed)),
            "ahead": ahead,
            "created_at": time.time(),
        }
        session.execute(self.database.insert_new(JobPlanRow).values(link))


def _text(value: object) -> object:
    """Convert a value to what its column holds: a list becomes JSON."""
    return json.dumps(value) if isinstance(value, (list, tuple)) else value


def update_workers(session: Session, job_id: str, workers: Iterable[Mapping[str, Any]]) -> None:
    """Update many rows per statement.

    Other transactions may update the same rows. If two take them in different orders, PostgreSQL ends one of the two.
    So the first statement takes all rows, sorted, and sets the columns that all of them have. The statements after it
    set what only some have.
    """
    rows = sorted(workers, key=lambda row: str(row["name"]))
    if not rows:
        return
    common = set(rows[0]).intersection(*rows[1:]) - {"name"}
    if common:
        _update_columns(session, job_id, tuple(sorted(common)), rows)
    others: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if more := row.keys() - common - {"name"}:
            others.setdefault(tuple(sorted(more)), []).append(row)
    for columns, some in others.items():
        _update_columns(session, job_id, columns, some)


def _update_columns(session: Session, job_id: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> None:
    table = WorkerRow.__table__
    assert isinstance(table, Table)
    statement = (
        update(table)
        .where(table.c.job_id == bindparam("_job"), table.c.name == bindparam("_name"))
        .values({c: bindparam(f"_{c}_") for c in columns})
    )
    values = [{"_job": job_id, "_name": row["name"], **{f"_{c}_": row[c] for c in columns}} for row in rows]
    session.connection().execute(statement, values)


class CatalogBlobs:
    """The stored plans of one catalog, each read when it is asked for."""

    def __init__(self, database: Database, fingerprint: str) -> None:
        self._database = database
        self._fingerprint = fingerprint

    def names(self) -> list[str]:
        query = select(CatalogPlanRow.name).where(CatalogPlanRow.fingerprint == self._fingerprint)
        return sorted(self._database.scalars(query))

    def get(self, name: str) -> bytes | None:
        where = (CatalogPlanRow.fingerprint == self._fingerprint, CatalogPlanRow.name == name)
        found: bytes | None = self._database.scalar(select(CatalogPlanRow.data).where(*where))
        return found

    def all(self) -> dict[str, bytes]:
        """Returns every plan by its name, all at once."""
        query = select(CatalogPlanRow.name, CatalogPlanRow.data).where(CatalogPlanRow.fingerprint == self._fingerprint)
        with self._database.read() as session:
            return {row.name: row.data for row in session.execute(query)}
