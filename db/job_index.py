"""What there is of jobs, without reading each: their states, and a line of each one that is over."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import and_, case, func, select

from openrecycle.db.job_rows import HIDDEN
from openrecycle.db.models import GenerationRow, JobRow
from openrecycle.db.session import Database
from openrecycle.db.store import Record

OVER = ("finished", "stopped")


class JobIndex:
    """Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def states(self) -> dict[str, str]:
        """Of every job, oldest first; without those on their way in or out."""
        query = select(JobRow.id, JobRow.state).where(JobRow.state.not_in(HIDDEN))
        with self._database.read() as session:
            return {row.id: row.state for row in session.execute(query.order_by(JobRow.created_at, JobRow.id))}

    def over(self, job_ids: Collection[str] | None = None) -> list[Record]:
        """Jobs that are over (all of them, or these), oldest first: id, name, spec, state, reason, created_at, and of
        the newest generation its number and how many are living in it (0: there was none)."""
        newest = (
            select(GenerationRow.job_id, func.max(GenerationRow.generation).label("generation"))
            .group_by(GenerationRow.job_id)
            .subquery()
        )
        # A JSON list of names, which have no commas: it may be long, and there may be thousands.
        commas = func.length(GenerationRow.living) - func.length(func.replace(GenerationRow.living, ",", ""))
        living = case((GenerationRow.living.is_(None), 0), (GenerationRow.living == "[]", 0), else_=commas + 1)
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
        with self._database.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]
