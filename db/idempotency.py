"""What was answered to requests that carried an idempotency key: their queries, beside those of db.store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import delete, select, update

from openrecycle.db.models import IdempotentRequestRow
from openrecycle.db.session import Database

# Keys are kept for a day.
KEPT_SECONDS = 86_400.0


@dataclass(frozen=True)
class Earlier:
    """A request that came under the key before. status, media_type, body: of its answer; status 0: it has none yet."""

    request: str
    status: int
    media_type: str
    location: str
    body: bytes
    at: float


class IdempotentRequests:
    """Thread-safe. Each function is one transaction. key: a hash of the key and of who used it for what."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, key: str, request: str, *, stale: float) -> Earlier | None:
        """None: the key is new, and taken now for this request (a hash of it). One that was taken `stale` seconds
        ago and never answered is taken again: the console that had it is gone."""
        now = time.time()
        table = IdempotentRequestRow
        with self._database.write() as session:
            session.execute(delete(table).where(table.at < now - KEPT_SECONDS))
            session.execute(delete(table).where(table.key == key, table.status == 0, table.at < now - stale))
            row = {
                "key": key,
                "request": request,
                "status": 0,
                "media_type": "",
                "location": "",
                "body": b"",
                "at": now,
            }
            new = session.scalar(self._database.insert_new(table).values(row).returning(table.key))
            if new is not None:
                return None
            found = session.execute(select(table.__table__).where(table.key == key)).mappings().one()
        return Earlier(**{name: found[name] for name in ("request", "status", "media_type", "location", "body", "at")})

    def answered(self, key: str, status: int, media_type: str, location: str, body: bytes) -> None:
        row = {"status": status, "media_type": media_type, "location": location, "body": body}
        with self._database.write() as session:
            session.execute(update(IdempotentRequestRow).where(IdempotentRequestRow.key == key).values(row))

    def forget(self, key: str) -> None:
        """It came to nothing, and may be tried again."""
        with self._database.write() as session:
            session.execute(delete(IdempotentRequestRow).where(IdempotentRequestRow.key == key))
