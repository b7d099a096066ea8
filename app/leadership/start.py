"""A console's host, as its settings want it: alone on a file, or one of several on PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from openrecycle.app.console.service import Console
from openrecycle.app.leadership.host import ConsoleHost
from openrecycle.app.leadership.watch import Leadership
from openrecycle.app.security.tokens import Tokens
from openrecycle.app.settings import Settings, default_database_url
from openrecycle.db.session import NOT_LEADING, Database


def make_host(
    settings: Settings, make: Callable[[Database], Console], standby_tokens: Callable[[Tokens], None]
) -> ConsoleHost:
    """Not yet started. Raises DatabaseError for an address that is none."""
    url, me = settings.database_url or default_database_url(), secrets.token_hex(8)
    leadership: Leadership | None = None

    def open_database(term: int | None) -> Database:
        noticed = leadership.look if leadership is not None else lambda: None
        return Database(url, me=me, term=term, on_fenced=noticed)

    def prepare() -> None:
        database = open_database(None)
        try:
            database.upgrade()
        finally:
            database.close()

    standby = open_database(NOT_LEADING)
    if not standby.is_sqlite:
        leadership = Leadership(standby, me, settings.advertised, prepare=prepare)
    standby.close()
    return ConsoleHost(
        open_database,
        leadership,
        make,
        shown_url=standby.shown_url,
        guarded=settings.token is not None,
        standby_tokens=standby_tokens,
    )
