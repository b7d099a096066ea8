"""The profiles that people keep under a name: their queries, beside those of db.store."""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from sqlalchemy import delete, select, update

from openrecycle.db.models import ProfileRow
from openrecycle.db.session import Database

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
