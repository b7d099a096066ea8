"""Plan documents in the `plan` table, which jobs and saved plans share."""

from __future__ import annotations

import time
import zlib

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from openrecycle.db.models import JobPlanRow, PlanColumnsRow, PlanRow
from openrecycle.db.session import Database
from openrecycle.planner.plans.packed import Packed


def keep_plan(database: Database, session: Session, fingerprint: str, document: str | Packed) -> None:
    """Stores a plan that is not stored already, and holds its row until the transaction ends. document: JSON; or what
    a process has packed, which is stored as it is.

    Without the hold, whoever forgets the plan at the same moment would delete it under the row that
    is about to refer to it. SQLite has one writer, and needs none.
    """
    data = document.document if isinstance(document, Packed) else zlib.compress(document.encode())
    row = {"fingerprint": fingerprint, "document": data, "created_at": time.time()}
    if database.is_sqlite:
        session.execute(database.insert_new(PlanRow).values(row))
    else:
        insert = postgresql.insert(PlanRow).values(row)
        held = {"created_at": PlanRow.created_at}
        session.execute(insert.on_conflict_do_update(index_elements=[PlanRow.fingerprint], set_=held))
    if isinstance(document, Packed) and document.columns:
        columns = {"fingerprint": fingerprint, "data": document.columns}
        session.execute(database.insert_new(PlanColumnsRow).values(columns))


def plan_document(session: Session | Connection, fingerprint: str) -> str | None:
    """As JSON."""
    data = session.scalar(select(PlanRow.document).where(PlanRow.fingerprint == fingerprint))
    return None if data is None else zlib.decompress(data).decode()


class PlanColumns:
    """Thread-safe. They go with the plan."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, fingerprint: str) -> bytes | None:
        with self._database.read() as session:
            return session.scalar(select(PlanColumnsRow.data).where(PlanColumnsRow.fingerprint == fingerprint))

    def put(self, fingerprint: str, data: bytes) -> None:
        """Does nothing where the plan has them already, or is not stored any more."""
        with self._database.write() as session:
            kept = select(PlanRow.fingerprint).where(PlanRow.fingerprint == fingerprint).with_for_update()
            if session.scalar(kept) is not None:
                row = {"fingerprint": fingerprint, "data": data}
                session.execute(self._database.insert_new(PlanColumnsRow).values(row))

    def deflated_document(self, fingerprint: str, job_id: str | None = None) -> bytes | None:
        """The plan's JSON as it is stored, for a process that has more time to read it. job_id: of the job that it
        must be a plan of."""
        query = select(PlanRow.document).where(PlanRow.fingerprint == fingerprint)
        if job_id is not None:
            of_job = (JobPlanRow.fingerprint == fingerprint) & (JobPlanRow.job_id == job_id)
            query = query.where(select(JobPlanRow.job_id).where(of_job).exists())
        with self._database.read() as session:
            return session.scalar(query)
