"""Access tokens, the audit log, and the answers to requests that carried an idempotency key."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Table, bindparam, delete, insert, or_, select, update

from openrecycle.db.models import AuditRow, IdempotentRequestRow, TokenRow
from openrecycle.db.session import Database, Record

# -- access tokens and the audit log ------------------------------------------------------------


def audit_row(actor: str, action: str, target: str = "", *, job_id: str | None = None, detail: str = "") -> Record:
    """Make an audit line with the present time. action: a verb and its object. Long targets and details are cut."""
    what = {"actor": actor, "action": action, "job_id": job_id, "target": target[:255], "detail": detail[:2000]}
    return {"at": time.time(), **what}


class AuditStore:
    """The audit log. Thread-safe. Lines about a change of a job are stored together with that change, by db.store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: Record) -> None:
        """Adds a line. row: columns of db.models.AuditRow, without the id."""
        with self._database.write() as session:
            self._database.write_audit(session, row)

    def read(self, *, after: int = 0, limit: int = 200, job_id: str | None = None) -> list[Record]:
        """Returns lines with an id > after, oldest first. job_id: only those of one job."""
        query = select(AuditRow.__table__).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit)
        if job_id is not None:
            query = query.where(AuditRow.job_id == job_id)
        return self._database.rows(query)


class TokenStore:
    """The tokens. Thread-safe. Rows are dictionaries with the columns of db.models.TokenRow. Times are POSIX
    seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: Record) -> None:
        with self._database.write() as session:
            session.execute(insert(TokenRow).values(row))

    def get(self, token_id: str) -> Record | None:
        return self._database.row(select(TokenRow.__table__).where(TokenRow.id == token_id))

    def all(self, *, valid_at: float | None = None) -> list[Record]:
        """Returns all tokens, newest first; with valid_at, only those that are neither revoked nor expired then."""
        query = select(TokenRow.__table__).order_by(TokenRow.created_at.desc(), TokenRow.id)
        if valid_at is not None:
            query = query.where(
                TokenRow.revoked_at.is_(None), or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > valid_at)
            )
        return self._database.rows(query)

    def revoke(self, token_id: str, at: float) -> bool:
        """Revokes a token. Returns False when there is no such token, or it was revoked before."""
        statement = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None))
        with self._database.write() as session:
            done = session.execute(statement.values(revoked_at=at).returning(TokenRow.id))
            return done.first() is not None

    def end_job(self, job_id: str, at: float) -> None:
        """Makes the job's own tokens expire then, unless they expire before."""
        ends_later = or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > at)
        with self._database.write() as session:
            session.execute(update(TokenRow).where(TokenRow.job_id == job_id, ends_later).values(expires_at=at))

    def used(self, when: Mapping[str, float]) -> None:
        """Stores when tokens were last used: id -> time."""
        table = TokenRow.__table__
        assert isinstance(table, Table)
        statement = update(table).where(table.c.id == bindparam("_id")).values(last_used_at=bindparam("_at"))
        with self._database.write() as session:
            session.connection().execute(statement, [{"_id": name, "_at": at} for name, at in when.items()])


# -- answers to requests that carried an idempotency key ----------------------------------------

# Keys are kept for a day.
KEPT_SECONDS = 86_400.0


@dataclass(frozen=True)
class Earlier:
    """An earlier request with the same key. status, media_type, body: of its answer; status 0: it has none yet."""

    request: str
    status: int
    media_type: str
    location: str
    body: bytes
    at: float


class IdempotentRequests:
    """Thread-safe. Each function is one transaction. key: a hash of the key, and of who used it for what."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, key: str, request: str, *, stale: float) -> Earlier | None:
        """Takes a new key for this request (a hash of it), and returns None; for a known key it returns the earlier
        request. A key that was taken `stale` seconds ago and never answered is taken again: its console is gone."""
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
        """Forgets a request that came to nothing, so that it can be tried again."""
        with self._database.write() as session:
            session.execute(delete(IdempotentRequestRow).where(IdempotentRequestRow.key == key))
