"""Who may do what with a console, and who did what."""

from __future__ import annotations

import time

from openrecycle.app.runtime.errors import storing
from openrecycle.app.security.access import Access
from openrecycle.app.security.tokens import Tokens
from openrecycle.db.audit import AuditStore
from openrecycle.db.session import Database
from openrecycle.db.store import Record
from openrecycle.db.tokens import TokenStore


class Security:
    """One per console. access: everybody's, until whoever serves it has said otherwise."""

    def __init__(self, database: Database) -> None:
        self.tokens = Tokens(TokenStore(database))
        self.audit = AuditLog(AuditStore(database))
        self.access = Access()

    def close(self) -> None:
        self.tokens.close()


class AuditLog:
    """Thread-safe. Its methods raise ConsoleError (503)."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    def record(self, actor: str, action: str, target: str = "", *, job_id: str | None = None, detail: str = "") -> None:
        """actor: the name of a token or an account. action: a verb and what it is done to."""
        row = {"actor": actor.strip()[:80] or "unknown", "action": action, "target": target[:255], "detail": detail}
        with storing():
            self._store.add({"at": time.time(), "job_id": job_id, **row})

    def read(self, after: int = 0, limit: int = 200, job_id: str | None = None) -> list[Record]:
        """Lines with an id > after, oldest first."""
        with storing():
            return self._store.read(after=after, limit=limit, job_id=job_id)
