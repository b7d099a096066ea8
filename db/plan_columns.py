"""Large plans in columns (planner.packed), beside their documents: what pages read."""

from __future__ import annotations

from sqlalchemy import select

from openrecycle.db.models import JobPlanRow, PlanColumnsRow, PlanRow
from openrecycle.db.session import Database


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
