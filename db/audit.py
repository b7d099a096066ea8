"""The audit log: what operators did, in the order in which it was stored. Nothing here deletes from it."""

from __future__ import annotations

from sqlalchemy import insert, select

from openrecycle.db.models import AuditRow
from openrecycle.db.session import Database
from openrecycle.db.store import Record


class AuditStore:
    """Thread-safe. Lines that belong to a change of a job are stored with that change, by db.store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: Record) -> None:
        """row: columns of db.models.AuditRow, without the id."""
        with self._database.write() as session:
            session.execute(insert(AuditRow).values(row))

    def read(self, *, after: int = 0, limit: int = 200, job_id: str | None = None) -> list[Record]:
        """Lines with an id > after, oldest first. job_id: those of one job alone."""
        query = select(AuditRow.__table__).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit)
        if job_id is not None:
            query = query.where(AuditRow.job_id == job_id)
        with self._database.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]
