"""Who may do what with a console, and who did what."""

from __future__ import annotations

from openrecycle.app.security.access import Access
from openrecycle.app.security.audit import AuditLog
from openrecycle.app.security.tokens import Tokens
from openrecycle.db.audit import AuditStore
from openrecycle.db.session import Database
from openrecycle.db.tokens import TokenStore


class Security:
    """One per console. access: everybody's, until whoever serves it has said otherwise."""

    def __init__(self, database: Database) -> None:
        self.tokens = Tokens(TokenStore(database))
        self.audit = AuditLog(AuditStore(database))
        self.access = Access()

    def close(self) -> None:
        self.tokens.close()
