"""Brings the console up when this process leads, and takes it down when it does not any more."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.console.service import Console, set_console
from openrecycle.app.leadership.watch import Leadership, LeaderStatus
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.tokens import Tokens
from openrecycle.app.settings import Settings, default_database_url
from openrecycle.db.session import NOT_LEADING, Database, DatabaseError
from openrecycle.db.tokens import TokenStore

log = structlog.get_logger()


@dataclass(frozen=True)
class ActiveConsole:
    """A console that is up, its database, and the term in which it leads (None: nobody else could)."""

    console: Console
    database: Database
    term: int | None


class ConsoleHost:
    """Thread-safe.

    open_database: called with the term that this process leads in, or NOT_LEADING; with None on SQLite.
    leadership: None on SQLite, where a file has one console. make: a console on a database, not yet
    started. shown_url: the database's, without its password. guarded: are access tokens asked for?
    standby_tokens: called with where a standby looks them up.
    """

    def __init__(
        self,
        open_database: Callable[[int | None], Database],
        leadership: Leadership | None,
        make: Callable[[Database], Console],
        *,
        shown_url: str = "",
        guarded: bool = False,
        standby_tokens: Callable[[Tokens], None] = lambda tokens: None,
    ) -> None:
        self._open, self._leadership, self._make = open_database, leadership, make
        self.shown_url = shown_url
        self._guarded, self._standby_tokens = guarded, standby_tokens
        self._standby: _Standby | None = None
        self._seat: ActiveConsole | None = None
        self._failed: int | None = None  # the term in which the jobs could not be taken up
        self._lost: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console-host", daemon=True)

    # -- for others -----------------------------------------------------------------------------

    @property
    def console(self) -> Console | None:
        """The console, as long as this process leads beyond doubt."""
        active = self._seat
        if active is None or self._leadership is None or active.term is None:
            return active.console if active is not None else None
        return active.console if self._leadership.leads(active.term) else None

    @property
    def status(self) -> LeaderStatus:
        if self._leadership is None:
            return LeaderStatus(0, "", "this console is the only one of its database")
        status = self._leadership.status
        if status.term is None:
            return status
        if self._seat is not None and self._seat.term == status.term:
            # It is up, and does not trust itself: the database has been silent for longer than its lease.
            silent = f"the database has not confirmed it for {self._leadership.unconfirmed:.1f} s"
            return LeaderStatus(status.term, "", silent, True, self._leadership.times.renew)
        return LeaderStatus(status.term, "", f"{status.reason} and is taking up the jobs")

    def on_lost(self, callback: Callable[[], None]) -> None:
        """callback: called, from any thread, when the console goes down because another one leads."""
        self._lost.append(callback)

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """On return the console is up, unless another one leads. Raises DatabaseError."""
        if self._leadership is None:
            self._up(None)
            return
        self._leadership.start()
        term = self._leadership.status.term
        if term is None:
            self._stand_by()
        else:
            self._up(term)
        self._thread.start()

    def stop_waiting(self) -> None:
        """Sends every long-poll home, so that the server can end."""
        if self._seat is not None:
            self._seat.console.stop_waiting()

    def close(self) -> None:
        """Writes what is not yet written, and leaves the lead to another console."""
        self._stop.set()
        if self._thread.is_alive():
            assert self._leadership is not None
            self._leadership.notify()
            self._thread.join()
        self._down()
        self._end_standby()
        if self._leadership is not None:
            self._leadership.close()

    # -- the thread -----------------------------------------------------------------------------

    def _follow(self) -> None:
        assert self._leadership is not None
        while not self._stop.is_set():
            held = self._seat.term if self._seat is not None else self._failed
            term = self._leadership.wait_change(held, self._stop)
            if term == held or self._stop.is_set():
                continue
            self._failed = None
            if self._seat is not None:
                self._down()
                for callback in self._lost:
                    callback()
            if term is None:
                self._stand_by()
                continue
            try:
                self._up(term)
            except (DatabaseError, ConsoleError, SQLAlchemyError) as error:
                log.error("the jobs could not be taken up", term=term, reason=str(error))
            except Exception:
                log.exception("the jobs could not be taken up", term=term)
            if self._seat is None:
                self._failed = term
                self._leadership.give_up()

    def _up(self, term: int | None) -> None:
        database = self._open(term)
        try:
            if database.is_sqlite:
                database.lead()
            database.upgrade()
            console = self._make(database)
            try:
                console.start()
                if self._guarded:
                    console.security.tokens.start()
            except BaseException:
                console.close()
                raise
        except BaseException:
            database.close()
            raise
        self._end_standby()
        set_console(console)
        self._seat = ActiveConsole(console, database, term)

    def _down(self) -> None:
        active, self._seat = self._seat, None
        if active is not None:
            set_console(None)
            active.console.close()
            active.database.close()

    def _stand_by(self) -> None:
        if self._standby is None:
            self._standby = _Standby(self._open(NOT_LEADING))
            if self._guarded:
                self._standby.tokens.start()
            self._standby_tokens(self._standby.tokens)

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.tokens.close()
            standby.database.close()


class _Standby:
    """What a console needs that does not lead: whoever has a token may ask it who does."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tokens = Tokens(_ReadTokens(database))


class _ReadTokens(TokenStore):
    def used(self, when: Mapping[str, float]) -> None:
        """Not noted: only the console that leads writes."""


_host: ConsoleHost | None = None


def set_host(host: ConsoleHost | None) -> None:
    """The one of this process, for its pages."""
    global _host
    _host = host


def standing_by() -> LeaderStatus | None:
    """Who leads, where it is not this process; None where it is, or where nobody else could."""
    return None if _host is None or _host.console is not None else _host.status


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
