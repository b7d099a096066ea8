"""Plans in the `plan` table, which jobs and saved plans share; and the plans and profiles that people save under a
name.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from typing import Any

from sqlalchemy import delete, exists, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from openrecycle.db.models import GenerationRow, JobPlanRow, PlanRow, ProfileRow, SavedPlanRow
from openrecycle.db.session import Database
from openrecycle.planner.plans.packed import decode_header
from openrecycle.planner.plans.plan import PlanError

# -- plans, and those that people save under a name ---------------------------------------------


def keep_plan(database: Database, session: Session, fingerprint: str, data: bytes) -> bool:
    """Stores a plan unless it is stored already, and locks its row until the transaction ends. data: its packed form.

    A fingerprint is of the ops alone, so the same plan may come again with a better proof; it then replaces the stored
    one. Returns False if the stored one has the better proof.

    Without the lock, a transaction that deletes unused plans could delete this one just before a row refers to it.
    SQLite has one writer and needs no lock.
    """
    row = {"fingerprint": fingerprint, "data": data, "created_at": time.time()}
    if database.is_sqlite:
        put = database.insert_new(PlanRow).values(row)
    else:
        held = {"created_at": PlanRow.created_at}
        insert = postgresql.insert(PlanRow).values(row)
        put = insert.on_conflict_do_update(index_elements=[PlanRow.fingerprint], set_=held)
    if session.scalar(put.returning(PlanRow.created_at)) != row["created_at"]:  # it was stored before
        stored = session.scalars(select(PlanRow.data).where(PlanRow.fingerprint == fingerprint)).one()
        said, known = (0.0, 0.0) if stored == data else (_bound(data, fingerprint), _bound(stored, fingerprint))
        if said < known:
            return False
        if said > known:
            session.execute(update(PlanRow).where(PlanRow.fingerprint == fingerprint).values(data=data))
    return True


def _bound(data: bytes, fingerprint: str) -> float:
    """Read the lower bound that a plan claims, without its ops. Returns -inf if the plan is damaged, or another one."""
    try:
        header = decode_header(data)
    except PlanError:
        return -math.inf
    return header.metrics.lower_bound if header.fingerprint == fingerprint else -math.inf


class SavedPlans:
    """The plans that people save. Thread-safe. A plan that a job has too is stored once for both."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, fingerprint: str, data: bytes, name: str, summary: dict[str, Any]) -> bool:
        """Saves a plan. One that is saved already gets the new name, and keeps the time when it was first saved.

        data: its packed form. summary: plain data for lists of plans, which `saved` returns. Returns False if the plan
        is stored with a better proof, so that the stored summary stays.
        """
        row = {"fingerprint": fingerprint, "name": name, "summary": json.dumps(summary), "created_at": time.time()}
        with self._database.write() as session:
            taken = keep_plan(self._database, session, fingerprint, data)
            session.execute(self._database.insert_new(SavedPlanRow).values(row))
            change = {"name": name, **({"summary": row["summary"]} if taken else {})}
            session.execute(update(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint).values(change))
        return taken

    def saved(self) -> list[dict[str, Any]]:
        """Returns the saved plans, newest first: fingerprint, name, created (POSIX seconds), and the summary's
        fields."""
        order = (SavedPlanRow.created_at.desc(), SavedPlanRow.fingerprint)
        rows = self._database.rows(select(SavedPlanRow.__table__).order_by(*order))
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
        return self._database.scalar(query) is not None

    def forget(self, fingerprint: str) -> bool:
        """Forgets a saved plan. The plan itself is deleted too, unless a job has it. Returns False if it is not
        saved."""
        of_job = exists().where(JobPlanRow.fingerprint == PlanRow.fingerprint)
        of_generation = exists().where(GenerationRow.plan_fingerprint == PlanRow.fingerprint)
        of_interim = exists().where(GenerationRow.interim_plan == PlanRow.fingerprint)
        with self._database.write() as session:
            # A transaction that begins to use the plan locks its row (keep_plan). So either its reference is seen here,
            # or it waits for this transaction. The lock comes first in both: else they could wait for each other.
            session.execute(select(PlanRow.fingerprint).where(PlanRow.fingerprint == fingerprint).with_for_update())
            gone = delete(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint)
            if session.scalar(gone.returning(SavedPlanRow.fingerprint)) is None:
                return False
            unused = (~of_job, ~of_generation, ~of_interim)
            session.execute(delete(PlanRow).where(PlanRow.fingerprint == fingerprint, *unused))
        return True


# -- the profiles that people save under a name -------------------------------------------------

_LISTED = (
    ProfileRow.name,
    ProfileRow.summary,
    ProfileRow.saved_by,
    ProfileRow.created_at,
    ProfileRow.updated_at,
)


class Profiles:
    """The profiles that people save. Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @staticmethod
    def _values(document: str, summary: dict[str, Any], actor: str) -> dict[str, Any]:
        return {
            "document": zlib.compress(document.encode()),
            "summary": json.dumps(summary),
            "saved_by": actor,
            "updated_at": time.time(),
        }

    def put(self, name: str, document: str, summary: dict[str, Any], actor: str) -> bool:
        """Saves `document` in place of any that had the name. Returns whether the name is new."""
        values = self._values(document, summary, actor)
        with self._database.write() as session:
            row = {"name": name, "created_at": values["updated_at"], **values}
            added = self._database.insert_new(ProfileRow).values(row).returning(ProfileRow.name)
            new = session.scalar(added) is not None
            if not new:
                session.execute(update(ProfileRow).where(ProfileRow.name == name).values(values))
        return new

    def put_over(
        self, name: str, document: str, summary: dict[str, Any], actor: str, *, updated_at: float | None
    ) -> bool:
        """Saves `document` in place of the one that was saved at `updated_at` (POSIX seconds, as in `all`); None: only
        if the name is free.

        Changes nothing and returns False if another has been saved under the name since, or that one is gone.
        """
        values = self._values(document, summary, actor)
        with self._database.write() as session:
            if updated_at is None:
                row = {"name": name, "created_at": values["updated_at"], **values}
                added = self._database.insert_new(ProfileRow).values(row).returning(ProfileRow.name)
                return session.scalar(added) is not None
            same = (ProfileRow.name == name, ProfileRow.updated_at == updated_at)
            changed = update(ProfileRow).where(*same).values(values).returning(ProfileRow.name)
            return session.scalar(changed) is not None

    def all(self) -> list[dict[str, Any]]:
        """Returns by name: name, saved_by, created_at, updated_at (POSIX seconds), and the summary's fields."""
        rows = self._database.rows(select(*_LISTED).order_by(ProfileRow.name))
        return [_plain(dict(row)) for row in rows]

    def get(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Returns the fields that `all` has of a profile, and its document."""
        found = select(*_LISTED, ProfileRow.document).where(ProfileRow.name == name)
        row = self._database.row(found)
        if row is None:
            return None
        fields = dict(row)
        document = zlib.decompress(fields.pop("document")).decode()
        return _plain(fields), document

    def delete(self, name: str) -> bool:
        """Deletes a profile. Returns False when there is none."""
        gone = delete(ProfileRow).where(ProfileRow.name == name).returning(ProfileRow.name)
        with self._database.write() as session:
            return session.scalar(gone) is not None


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    summary = json.loads(row.pop("summary"))
    return {**row, **summary}
