"""Plan documents in the `plan` table, which jobs and saved plans share; and the plans and profiles that people keep
under a name.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from sqlalchemy import Connection, delete, exists, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from openrecycle.db.models import GenerationRow, JobPlanRow, PlanColumnsRow, PlanRow, ProfileRow, SavedPlanRow
from openrecycle.db.session import Database
from openrecycle.planner.plans.packed import Packed, bound_of

# -- plan documents, and the plans that people keep under a name --------------------------------


def keep_plan(database: Database, session: Session, fingerprint: str, document: str | Packed) -> bool:
    """Stores a plan that is not stored already, and holds its row until the transaction ends. document: JSON; or what
    a process has packed, which is stored as it is.

    A fingerprint is of the ops alone, so the same plan may come again with a better proof, and takes the place of the
    other then. False: what is stored has the better one.

    Without the hold, whoever forgets the plan at the same moment would delete it under the row that
    is about to refer to it. SQLite has one writer, and needs none.
    """
    given = document if isinstance(document, Packed) else Packed(b"", zlib.compress(document.encode()))
    row = {"fingerprint": fingerprint, "document": given.document, "created_at": time.time()}
    if database.is_sqlite:
        put = database.insert_new(PlanRow).values(row)
    else:
        held = {"created_at": PlanRow.created_at}
        insert = postgresql.insert(PlanRow).values(row)
        put = insert.on_conflict_do_update(index_elements=[PlanRow.fingerprint], set_=held)
    if session.scalar(put.returning(PlanRow.created_at)) != row["created_at"]:  # it was there
        said, stored = bound_of(given), bound_of(_stored(session, fingerprint))
        if said < stored:
            return False
        if said > stored:
            session.execute(update(PlanRow).where(PlanRow.fingerprint == fingerprint).values(document=given.document))
            session.execute(delete(PlanColumnsRow).where(PlanColumnsRow.fingerprint == fingerprint))
    if given.columns:
        columns = {"fingerprint": fingerprint, "data": given.columns}
        session.execute(database.insert_new(PlanColumnsRow).values(columns))
    return True


def _stored(session: Session, fingerprint: str) -> Packed:
    """The columns, or where there are none the document."""
    columns = session.scalar(select(PlanColumnsRow.data).where(PlanColumnsRow.fingerprint == fingerprint))
    if columns:
        return Packed(columns, b"")
    return Packed(b"", session.scalars(select(PlanRow.document).where(PlanRow.fingerprint == fingerprint)).one())


def plan_document(session: Session | Connection, fingerprint: str) -> str | None:
    """As JSON."""
    data = session.scalar(select(PlanRow.document).where(PlanRow.fingerprint == fingerprint))
    return None if data is None else zlib.decompress(data).decode()


class SavedPlans:
    """Thread-safe. A plan that a job has too is stored once for both."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, fingerprint: str, document: str | Packed, name: str, summary: dict[str, Any]) -> bool:
        """Under a new name if it is kept already; the time it was first saved stays.

        summary: plain data for lists of plans, given back by `saved`. False: it is stored with a better proof, which
        the summary does not tell.
        """
        row = {"fingerprint": fingerprint, "name": name, "summary": json.dumps(summary), "created_at": time.time()}
        with self._database.write() as session:
            taken = keep_plan(self._database, session, fingerprint, document)
            session.execute(self._database.insert_new(SavedPlanRow).values(row))
            change = {"name": name, **({"summary": row["summary"]} if taken else {})}
            session.execute(update(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint).values(change))
        return taken

    def saved(self) -> list[dict[str, Any]]:
        """Newest first: fingerprint, name, created (POSIX seconds), and what the summary says."""
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
        of_interim = exists().where(GenerationRow.interim_plan == PlanRow.fingerprint)
        with self._database.write() as session:
            gone = delete(SavedPlanRow).where(SavedPlanRow.fingerprint == fingerprint)
            if session.scalar(gone.returning(SavedPlanRow.fingerprint)) is None:
                return False
            # Whoever takes the plan up at this moment holds its row (keep_plan): seen first, or it waits for us.
            session.execute(select(PlanRow.fingerprint).where(PlanRow.fingerprint == fingerprint).with_for_update())
            unused = (~of_job, ~of_generation, ~of_interim)
            session.execute(delete(PlanRow).where(PlanRow.fingerprint == fingerprint, *unused))
        return True


# -- the profiles that people keep under a name -------------------------------------------------

_LISTED = (
    ProfileRow.name,
    ProfileRow.summary,
    ProfileRow.saved_by,
    ProfileRow.created_at,
    ProfileRow.updated_at,
)


class Profiles:
    """Thread-safe. Raises SQLAlchemyError."""

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
        """Keeps `document` in the place of what had the name before, if anything; says whether it is new."""
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
        """Keeps `document` in the place of the one that was saved then (POSIX seconds, as `all` says); None: of none.

        False, and nothing is changed, where another has the name meanwhile, or the one before is gone.
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
        """By name: name, saved_by, created_at, updated_at (POSIX seconds), and what the summary says."""
        rows = self._database.rows(select(*_LISTED).order_by(ProfileRow.name))
        return [_plain(dict(row)) for row in rows]

    def get(self, name: str) -> tuple[dict[str, Any], str] | None:
        """What `all` says of it, and its document."""
        found = select(*_LISTED, ProfileRow.document).where(ProfileRow.name == name)
        row = self._database.row(found)
        if row is None:
            return None
        fields = dict(row)
        document = zlib.decompress(fields.pop("document")).decode()
        return _plain(fields), document

    def delete(self, name: str) -> bool:
        """False when there is none."""
        gone = delete(ProfileRow).where(ProfileRow.name == name).returning(ProfileRow.name)
        with self._database.write() as session:
            return session.scalar(gone) is not None


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    summary = json.loads(row.pop("summary"))
    return {**row, **summary}
