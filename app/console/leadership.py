"""Leadership among several consoles on one database: keeps the lead or waits for it, and brings the console up and
down.

`decide` is a pure function that says what a console does about the lead. `Leadership` does that in a thread of its own,
`ConsoleHost` starts and ends the console accordingly, and `Gate` stands in front of the application: it serves the
console's routes while this process leads, and otherwise says who leads.

A standby answers the API with 503, and never passes a request on or redirects it. A client that has several addresses
asks the next one, and so does a proxy that asks `/readyz`. A redirect could lead clients to an address that they can't
reach, and would come without their token, since HTTP clients rightly keep it from other hosts.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.notify import Topic
from openrecycle.app.runtime.problems import problem
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.runtime.settings import Settings, default_database_url
from openrecycle.app.security.access import Tokens
from openrecycle.db.access import TokenStore
from openrecycle.db.session import NOT_LEADING, Database, DatabaseError, LeaderSession, Lease, NotThere

# -- keeps the lead, or waits for it ------------------------------------------------------------

log = structlog.get_logger()


@dataclass(frozen=True)
class LeaseTimes:
    """Times in seconds. renew: between two renewals of the lease. lease: time without renewal after which the lease has
    run out. poll: between two looks of a console that does not lead. A takeover takes at most about lease + 2 poll,
    plus the reading of the jobs. arrival: how long a console that starts waits for a database that is not there yet, as
    where both are started at the same time."""

    renew: float = 1.0
    lease: float = 4.0
    poll: float = 0.5
    arrival: float = 60.0


class Action(Enum):
    STAY = "stay"  # and renew the lease again
    STEP_DOWN = "step down"
    LEAD = "lead"  # claim a new term
    EVICT = "evict"  # end the sessions of a leader that does not run, or those that this console had before
    WAIT = "wait"


@dataclass(frozen=True)
class Seen:
    """What a console sees of the lead. reached: the database answered. locked: this console's session holds the lock.
    lease: None if there is none yet."""

    reached: bool
    locked: bool = False
    lease: Lease | None = None


@dataclass(frozen=True)
class Decision:
    """What to do about the lead. reason: a sentence for people, without a full stop."""

    action: Action
    reason: str


def decide(me: str, term: int | None, seen: Seen, times: LeaseTimes) -> Decision:
    """Decides what a console does about the lead. me: this console's name. term: the term in which it leads, or
    None."""
    return _waiting(me, seen, times) if term is None else _leading(me, term, seen)


def _leading(me: str, term: int, seen: Seen) -> Decision:
    if not seen.reached:
        return Decision(Action.STEP_DOWN, "the connection to the database is lost, and the lead with it")
    lease = seen.lease
    if lease is None or lease.term != term:
        return Decision(Action.STEP_DOWN, f"{leader(lease)} leads since")
    if lease.holder != me or not seen.locked:
        return Decision(Action.STEP_DOWN, f"the lead of term {term} was taken from this console")
    return Decision(Action.STAY, f"this console leads (term {term})")


def _waiting(me: str, seen: Seen, times: LeaseTimes) -> Decision:
    if not seen.reached:
        return Decision(Action.WAIT, "the database does not answer; nobody is known to lead")
    lease = seen.lease
    if seen.locked:
        return Decision(Action.LEAD, f"nobody leads{_after(lease)}")
    if lease is None or not lease.holder:
        # The other one has the lock, but no lease yet; or it is an old version of this program, which has no leases.
        return Decision(Action.WAIT, "another console is about to lead")
    if lease.holder == me:
        # This console's connection broke, and the database has not noticed; nobody else knows that.
        reason = f"the database still holds the lead of term {lease.term} for an earlier connection of this console"
        return Decision(Action.EVICT, reason)
    if lease.age >= times.lease:
        return Decision(Action.EVICT, f"{leader(lease)} leads, but was not heard for {lease.age:.1f} s")
    return Decision(Action.WAIT, f"{leader(lease)} leads (term {lease.term}); it was heard {lease.age:.1f} s ago")


def leader(lease: Lease | None) -> str:
    return lease.address if lease is not None and lease.address else "another console"


def _after(lease: Lease | None) -> str:
    return f" after term {lease.term}" if lease is not None and lease.term else ""


def boot_seconds() -> float:
    """Returns monotonic seconds that also count while the machine sleeps, if the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class LeaderStatus:
    """Which console leads, as this one knows it.

    term: the term in which this console leads; None: it does not lead. leader: the address of another console that
    leads, "" if none is known. reason: a sentence for people, without a full stop. doubt: this console led last, and no
    other is known to lead. again: seconds from one look to the next.
    """

    term: int | None
    leader: str
    reason: str
    doubt: bool = False
    again: float = 0.0

    @property
    def sentence(self) -> str:
        """The answer to requests while no console is up here; without a full stop."""
        if self.doubt:
            return f"this console may no longer lead: {self.reason}; it tries again every {self.again:g} s"
        if self.term is not None:
            return f"{self.reason}; try again"
        return f"this console is a standby: {self.reason}; " + (f"ask {self.leader}" if self.leader else "try again")


class Leadership:
    """Keeps the lead or waits for it, in a thread. Thread-safe.

    me: the name of this process; address: where others reach it. prepare: brings the tables of `database` up to date;
    called with the lock held if there is no lease yet.
    """

    def __init__(
        self,
        database: Database,
        me: str,
        address: str,
        *,
        prepare: Callable[[], None],
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.times = times or LeaseTimes()
        self._database, self._me, self._address = database, me, address
        self._prepare, self._clock = prepare, clock
        self._session: LeaderSession | None = None
        self._locked = False
        self._evicted = False  # has the last look ended sessions?
        self._confirmed = 0.0  # a time before the newest renewal of the lease: when it was asked for
        self._led = False  # whether this console led last, as far as is known
        self._status = LeaderStatus(None, "", "this console is starting")
        self._renewal = (0, 0.0), 0.0  # (term, time) of the newest renewal that was seen, and when it was first seen
        self._seldom = Seldom()
        self._changed = threading.Condition()
        self._wake, self._stop, self._unfit = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    # -- for others -----------------------------------------------------------------------------

    @property
    def status(self) -> LeaderStatus:
        return self._status

    def leads(self, term: int) -> bool:
        """Says whether this console leads in that term beyond doubt. After a standstill of its own it does not: another
        console may lead by then."""
        return self._status.term == term and self._clock() - self._confirmed < self.times.lease

    @property
    def unconfirmed(self) -> float:
        """Seconds since the database last confirmed that this console leads."""
        return self._clock() - self._confirmed

    def wait_change(self, term: int | None, stop: threading.Event) -> int | None:
        """Waits until the term in which this console leads differs from `term`, and returns it. Also returns after
        `stop` was set and `notify` called."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.term != term or stop.is_set())
            return self._status.term

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def look(self) -> None:
        """Has the thread look at once, since there is a sign that another console leads."""
        self._wake.set()

    def start(self) -> None:
        """Takes a first look, then starts the thread. Waits for a database that is not there yet. Raises DatabaseError
        if it can't be opened."""
        self._session = self._arrived()
        self._step()
        self._thread.start()

    def _arrived(self) -> LeaderSession:
        began = self._clock()
        while True:
            try:
                return LeaderSession(self._database, self._me)
            except NotThere as error:
                left = self.times.arrival - (self._clock() - began)
                if left <= 0 or self._stop.is_set():
                    raise
                self._seldom.warn("the database is not there yet; the console waits for it", reason=str(error))
            self._stop.wait(min(self.times.poll, left))

    def give_up(self) -> None:
        """Leaves the lead to others for a while, because this console can't take the jobs up."""
        self._unfit.set()
        self._wake.set()

    def close(self) -> None:
        """Ends the thread and gives the lead up, so that another console can lead at once."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._resign("this console has ended")

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.times.renew if self._status.term is not None else self.times.poll)
            self._wake.clear()
            if self._unfit.is_set():
                self._unfit.clear()
                self._resign("this console could not take the jobs up; its log says why")
                self._stop.wait(2 * self.times.lease)
            elif not self._stop.is_set():
                self._step()

    def _step(self) -> None:
        asked = self._clock()
        term = self._status.term
        try:
            seen = self._see(term)
            decision = decide(self._me, term, seen, self.times)
            self._act(decision, seen.lease, asked)
        except (SQLAlchemyError, DatabaseError) as error:
            self._drop()
            self._act(decide(self._me, term, Seen(False), self.times), None, asked)
            reason = str(getattr(error, "orig", error)).strip().partition("\n")[0]
            self._seldom.warn("the database could not be asked about the lead", reason=reason)

    def _see(self, term: int | None) -> Seen:
        if self._session is None:
            self._session = LeaderSession(self._database, self._me)
        if term is not None:
            self._session.renew(term)
        elif not self._locked:
            self._locked = self._session.try_lock()
        return Seen(True, self._locked, self._watched(self._session.lease()))

    def _watched(self, lease: Lease | None) -> Lease | None:
        """Returns the lease with its age by this console's own clock: time since it first saw the newest renewal."""
        if lease is None:
            return None
        now, renewal = self._clock(), (lease.term, lease.renewed)
        if renewal != self._renewal[0]:
            self._renewal = renewal, now
        return replace(lease, age=now - self._renewal[1])

    def _act(self, decision: Decision, lease: Lease | None, asked: float) -> None:
        action, reason = decision.action, decision.reason
        if action is Action.STAY:
            self._confirmed = asked
        elif action is Action.STEP_DOWN:
            self._drop()
            self._stand(None, lease, reason)
            log.warning("this console does not lead any more", reason=reason)
        elif action is Action.LEAD:
            self._lead(lease)
        else:
            self._stand(None, lease, reason)
            if action is Action.EVICT:
                assert self._session is not None and lease is not None
                ended = self._session.evict(lease.holder, None if lease.holder == self._me else lease.renewed)
                log.warning("sessions that held the lead were ended", reason=reason, ended=ended)
                # A session gives the lock back before it leaves the list. So if none is left to be ended, the lock may
                # have become free since it was tried.
                if ended or self._evicted:
                    self._wake.set()
                self._evicted = bool(ended)

    def _lead(self, lease: Lease | None) -> None:
        assert self._session is not None
        if lease is None:
            self._prepare()
        elif lease.holder not in ("", self._me):
            # Sessions of the former leader may still hold locks: its machine can be gone while they are still open.
            self._session.evict(lease.holder, None)
        asked = self._clock()
        term = self._session.claim(self._address)
        self._confirmed, self._led = asked, True
        self._stand(term, None, f"this console leads (term {term})")
        log.info("this console leads", term=term, address=self._address)

    def _stand(self, term: int | None, lease: Lease | None, reason: str) -> None:
        other = lease is not None and lease.holder != self._me
        self._led = self._led and not other
        leader = lease.address if lease is not None and lease.holder not in ("", self._me) else ""
        with self._changed:
            self._status = LeaderStatus(term, leader, reason, self._led and term is None, self.times.poll)
            self._changed.notify_all()

    def _drop(self) -> None:
        """Closes the session, which also frees the lock if this console holds it."""
        session, self._session, self._locked = self._session, None, False
        if session is not None:
            session.close()

    def _resign(self, reason: str) -> None:
        term = self._status.term
        if term is not None and self._session is not None:
            with suppress(SQLAlchemyError):
                self._session.resign(term)
        self._drop()
        self._led = False
        self._stand(None, None, reason)


# -- the console comes up where this process leads ----------------------------------------------


@dataclass(frozen=True)
class ActiveConsole:
    """A console that is up, its database, and the term in which it leads (None: on SQLite, where no other can lead)."""

    console: ConsoleService
    database: Database
    term: int | None


class ConsoleHost:
    """Brings the console of this process up when it leads, and down when it does not. Thread-safe.

    open_database: called with the term in which this process leads, or NOT_LEADING; with None on SQLite. leadership:
    None on SQLite, where a file has only one console. make: makes a console on a database, not yet started. shown_url:
    the database's address without its password. guarded: whether access tokens are required. standby_tokens: called
    with the Tokens in which requests are to be looked up while this process does not lead.
    """

    def __init__(
        self,
        open_database: Callable[[int | None], Database],
        leadership: Leadership | None,
        make: Callable[[Database], ConsoleService],
        *,
        shown_url: str = "",
        guarded: bool = False,
        standby_tokens: Callable[[Tokens], None] = lambda tokens: None,
    ) -> None:
        self._open, self._leadership, self._make = open_database, leadership, make
        self.shown_url = shown_url
        self._guarded, self._standby_tokens = guarded, standby_tokens
        self._standby: _StandbyResources | None = None
        self._seat: ActiveConsole | None = None
        self._failed: int | None = None  # the term in which this console failed to take the jobs up
        self._lost: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console-host", daemon=True)

    # -- for others -----------------------------------------------------------------------------

    @property
    def console(self) -> ConsoleService | None:
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
            # The console is up but may not lead any more: the database has not answered for longer than the lease.
            silent = f"the database has not confirmed it for {self._leadership.unconfirmed:.1f} s"
            return LeaderStatus(status.term, "", silent, True, self._leadership.times.renew)
        return LeaderStatus(status.term, "", f"{status.reason} and is taking up the jobs")

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Adds a callback, which is called in the host's thread when the console goes down as it has lost the lead."""
        self._lost.append(callback)

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts; on return the console is up, unless another one leads. Raises DatabaseError."""
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
        """Ends every long-poll, so that the server can end."""
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
                # Also used while this process does not know whether it leads: its agents' tokens must stay valid then.
                self._standby_tokens(console.security.tokens)
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
            self._standby = _StandbyResources(self._open(NOT_LEADING))
            if self._guarded:
                self._standby.tokens.start()
            self._standby_tokens(self._standby.tokens)

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.tokens.close()
            standby.database.close()


class _StandbyResources:
    """What a console needs while it does not lead: it answers requests that bring a token with who leads."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tokens = Tokens(_ReadTokens(database))


class _ReadTokens(TokenStore):
    def used(self, when: Mapping[str, float]) -> None:
        """Does nothing: only the console that leads writes."""


# -- what stands in front of the application ----------------------------------------------------

_host: ConsoleHost | None = None


def set_host(host: ConsoleHost | None) -> None:
    """Sets the host of this process, which its pages ask who leads."""
    global _host
    _host = host


def standby_status() -> LeaderStatus | None:
    """Returns who leads, or None if this process leads or has no host."""
    return None if _host is None or _host.console is not None else _host.status


def make_host(
    settings: Settings, make: Callable[[Database], ConsoleService], standby_tokens: Callable[[Tokens], None]
) -> ConsoleHost:
    """Makes the host of this process, not yet started. Raises DatabaseError for a malformed database URL."""
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


STANDBY = "standby"
"""The `code` of the problem document that a standby answers."""
RETRY_AFTER = "1"
_RESTARTS = 1012
"""The WebSocket close code for "the service restarts, connect again"."""


class Gate:
    """The ASGI application in front of the console's.

    host: has the console while this process leads. leading: makes the application for a console. guarded: puts the
    guards around the answers while there is no console. pages: what a browser gets then; None: only the API is served.

    A page that is open when the lead is lost is disconnected. It connects again by itself, and then shows who leads.
    """

    def __init__(
        self,
        host: ConsoleHost,
        leading: Callable[[ConsoleService], ASGIApp],
        guarded: Callable[[ASGIApp], ASGIApp],
        pages: ASGIApp | None,
    ) -> None:
        self._host, self._leading, self._pages = host, leading, pages
        self._standby = guarded(self._stand_by)
        self._made: tuple[ConsoleService, ASGIApp] | None = None
        self._losses = 0
        self._lost = Topic()
        host.on_lost(self._disconnect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        console = self._host.console
        if console is None:
            await self._standby(scope, receive, send)
            return
        if self._made is None or self._made[0] is not console:
            self._made = console, self._leading(console)
        if scope["type"] == "websocket":
            await self._connected(self._made[1], scope, receive, send)
        else:
            await self._made[1](scope, receive, send)

    async def _stand_by(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "http" and path == "/healthz":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif self._pages is not None and not (path in ("/readyz", "/metrics", "/api") or path.startswith("/api/")):
            await self._pages(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _RESTARTS})
        else:
            await self.refusal()(scope, receive, send)

    def refusal(self) -> Response:
        return problem(503, STANDBY, self._host.status.sentence, {"Retry-After": RETRY_AFTER})

    def _disconnect(self) -> None:
        self._losses += 1
        self._lost.publish()

    async def _connected(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        before = self._losses
        waiting = self._lost.wait_for(lambda: True if self._losses != before else None, float("inf"))
        lost: asyncio.Future[Any] = asyncio.ensure_future(waiting)
        take: asyncio.Future[Any] | None = None

        async def until_lost() -> Message:
            nonlocal take
            take = take or asyncio.ensure_future(receive())  # type: ignore[arg-type]
            await asyncio.wait({take, lost}, return_when=asyncio.FIRST_COMPLETED)
            if take.done():
                message: Message = take.result()
                take = None
                return message
            with suppress(RuntimeError):  # it was closed from the other side
                await send({"type": "websocket.close", "code": _RESTARTS})
            return {"type": "websocket.disconnect", "code": _RESTARTS}

        try:
            await app(scope, until_lost, send)
        finally:
            lost.cancel()
            if take is not None:
                take.cancel()
