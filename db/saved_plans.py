"""The plans that people keep under a name: their queries, beside those of db.store."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import delete, exists, select, update

from openrecycle.db.models import GenerationRow, JobPlanRow, PlanRow, SavedPlanRow
from openrecycle.db.plan_rows import keep_plan, plan_document
from openrecycle.db.session import Database
from openrecycle.planner.plans.packed import Packed


class SavedPlans:
    """Thread-safe. A plan that a job has too is stored once for both."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, fingerprint: str, document: str | Packed, name: str, summary: dict[str, Any]) -> None:
        """Under a new name if it is kept already; the time it was first saved stays.

        summary: plain data for lists of plans, given back by `saved`.
        """
        row = {"fingerprint": fingerprint, "name": name, "summary": json.dumps(summary), "created_at": time.time()}
        with self._database.write() as session:
            keep_plan(self._database, session, fingerprint, document)
            session.execute(self._database.insert_new(SavedPlanRow).values(row))
            session.execute(update(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint).values(name=name))

    def saved(self) -> list[dict[str, Any]]:
        """Newest first: fingerprint, name, created (POSIX seconds), and what the summary says."""
        order = (SavedPlanRow.created_at.desc(), SavedPlanRow.fingerprint)
        with self._database.read() as session:
            rows = session.execute(select(SavedPlanRow.__table__).order_by(*order)).mappings().all()
        return [
            {
                **json.loads(row["summary"]),
                "fingerprint": row["fingerprint"],
                "name": row["name"],
                "created": row["created_at"],
            }
            for row in rows
        ]

    def has(self, fingerprint: str) -> bool:
        query = select(SavedPlanRow.fingerprint).where(SavedPlanRow.fingerprint == fingerprint)
        with self._database.read() as session:
            return session.scalar(query) is not None

    def document(self, fingerprint: str) -> str | None:
        """The Plan document as JSON; None when no plan is saved under that fingerprint."""
        if not self.has(fingerprint):
            return None
        with self._database.read() as session:
            return plan_document(session, fingerprint)

    def forget(self, fingerprint: str) -> bool:
        """False when it is not saved. The plan itself goes too, unless a job has it."""
        of_job = exists().where(JobPlanRow.fingerprint == PlanRow.fingerprint)
        of_generation = exists().where(GenerationRow.plan_fingerprint == PlanRow.fingerprint)
        with self._database.write() as session:
            gone = delete(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint)
            if session.scalar(gone.returning(SavedPlanRow.fingerprint)) is None:
                return False
            # Whoever takes the plan up at this moment holds its row (keep_plan): seen first, or it waits for us.
            session.execute(select(PlanRow.fingerprint).where(PlanRow.fingerprint == fingerprint).with_for_update())
            session.execute(delete(PlanRow).where(PlanRow.fingerprint == fingerprint, ~of_job, ~of_generation))
        return True
