"""Several consoles' watches on one real PostgreSQL, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from ui_console import until

from openrecycle.app.console.leadership import ConsoleHost, Leadership, LeaderStatus, LeaseTimes
from openrecycle.app.console.service import ConsoleService
from openrecycle.db.session import NOT_LEADING, Database, DatabaseError, LeaderSession, NotThere
from openrecycle.db.store import Store
from tests.conftest import new_database
from tests.golden import golden

pytestmark = pytest.mark.processes

LONG = 60.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(postgres_url: str) -> str:
    return new_database(postgres_url)


def watch(
    stack: ExitStack, url: str, me: str, times: LeaseTimes | None = None, clock: Callable[[], float] | None = None
) -> Leadership:
    database = Database(url, me=me, term=NOT_LEADING)

    def prepare() -> None:
        own = Database(url)
        own.upgrade()
        own.close()

    # No lease runs out because this machine is busy, unless a test wants one to.
    times = times or LeaseTimes(renew=0.05, lease=LONG, poll=0.05)
    made = Leadership(database, me, f"http://{me}:1", prepare=prepare, times=times, clock=clock or Clock())
    stack.callback(database.close)
    stack.callback(made.close)
    return made


def until_leading(made: Leadership) -> int:
    stop = threading.Event()
    timer = threading.Timer(LONG, lambda: (stop.set(), made.notify()))
    timer.start()
    term = made.wait_change(None, stop)
    timer.cancel()
    assert term is not None, made.status
    return term


def until_lost(made: Leadership, term: int) -> None:
    stop = threading.Event()
    timer = threading.Timer(LONG, lambda: (stop.set(), made.notify()))
    timer.start()
    now = made.wait_change(term, stop)
    timer.cancel()
    assert now != term, made.status


def test_the_first_leads_at_once_and_makes_the_tables(stack: ExitStack, url: str) -> None:
    first = watch(stack, url, "a")
    first.start()
    assert first.status.term == 1 and first.leads(1) and not first.leads(2)


def test_a_standby_says_who_leads_and_follows_one_that_ends(stack: ExitStack, url: str) -> None:
    first, second = watch(stack, url, "a"), watch(stack, url, "b")
    first.start()
    second.start()
    status = second.status
    assert (status.term, status.leader) == (None, "http://a:1")
    assert "http://a:1 leads (term 1)" in status.reason
    first.close()
    assert until_leading(second) == 2
    assert first.status.term is None


def test_one_whose_session_is_ended_steps_down_and_may_lead_again(stack: ExitStack, url: str) -> None:
    first = watch(stack, url, "a")
    first.start()
    end_sessions(url)
    until_lost(first, 1)
    assert until_leading(first) >= 2


def test_what_is_logged_has_been_done_by_then(stack: ExitStack, url: str) -> None:
    """Whoever reads the log may keep this one waiting."""
    first, terms = watch(stack, url, "a"), dict[str, int | None]()

    def note(_logger: object, _method: str, about: structlog.typing.EventDict) -> structlog.typing.EventDict:
        terms.setdefault(about["event"], first.status.term)
        raise structlog.DropEvent

    stack.callback(structlog.reset_defaults)
    structlog.configure(processors=[note])
    first.start()
    end_sessions(url)
    until_lost(first, 1)
    until_leading(first)
    first.close()
    assert terms[golden("this-console-leads")] == 1
    assert terms[golden("this-console-does-not-lead")] is None
    assert terms[golden("could-not-be-asked-about")] is None


def test_one_that_stands_still_is_replaced_and_knows_it_at_once(stack: ExitStack, url: str) -> None:
    clock = Clock()
    still = watch(stack, url, "a", LeaseTimes(renew=LONG, lease=1.0, poll=0.05), clock)  # does not renew
    second = watch(stack, url, "b", LeaseTimes(renew=0.05, lease=1.0, poll=0.05), time.monotonic)
    still.start()
    set_back(url)
    second.start()
    assert until_leading(second) == 2
    assert still.status.term == 1, "it has not looked yet"
    clock.now += 1.0
    assert not still.leads(1), "but does not trust itself any more"
    still.look()
    until_lost(still, 1)
    assert "leads" in still.status.reason or "lost" in still.status.reason


def set_back(url: str) -> None:
    """The database's clock, by an hour, since the lease was renewed."""
    database = Database(url)
    with database.write() as session:
        session.execute(text("update leadership set renewed_at = renewed_at + 3600"))
    database.close()


def test_one_that_can_not_take_the_jobs_up_leaves_the_lead_to_the_other(stack: ExitStack, url: str) -> None:
    first, second = watch(stack, url, "a"), watch(stack, url, "b")
    first.start()
    second.start()
    first.give_up()
    assert until_leading(second) == 2
    assert golden("could-not-take-the-jobs") in first.status.reason


def test_an_only_console_whose_connection_broke_says_so_and_leads_on(
    stack: ExitStack, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has not noticed that the connection is gone: its session, and the lock, live on."""
    only = watch(stack, url, "a", LeaseTimes(renew=LONG, lease=LONG, poll=LONG))
    only.start()
    with monkeypatch.context() as network:
        close = LeaderSession.close  # the word does not reach the database
        network.setattr(LeaderSession, "close", lambda self: stack.callback(close, self))
        network.setattr(LeaderSession, "renew", _unreachable)
        network.setattr(LeaderSession, "try_lock", _unreachable)
        look_once(only)
        look_once(only)
    assert only.status.term is None
    assert only.status.sentence == (golden("this-consoles-lead-is-in-doubt-the", f"{LONG:g}"))
    evict, try_lock, said = LeaderSession.evict, LeaderSession.try_lock, list[LeaderStatus]()

    def watched(session: LeaderSession, *whose: Any) -> int:
        said.append(only.status)
        # The second time, the session that held the lock when it was tried has ended: none is left.
        return evict(session, *whose) if len(said) == 1 else 0

    def held(session: LeaderSession) -> bool:
        if len(said) > 1:
            until(lambda: try_lock(session))
        return len(said) > 1

    monkeypatch.setattr(LeaderSession, "evict", watched)
    monkeypatch.setattr(LeaderSession, "try_lock", held)
    only.look()
    assert until_leading(only) == 2, "what was left of its session was ended at once, not after a lease"
    assert said[0].doubt and golden("the-lead-of-term-1") in said[0].reason
    assert not only.status.doubt


def look_once(watch: Leadership) -> None:
    """To the end of that look."""
    before = watch.status
    watch.look()
    until(lambda: watch.status is not before)


def _unreachable(*_: object) -> None:
    raise OperationalError("", {}, Exception("the network is gone"))


def test_a_console_that_is_up_and_not_confirmed_says_for_how_long(stack: ExitStack, url: str) -> None:
    clock = Clock()
    only = watch(stack, url, "a", LeaseTimes(renew=LONG, lease=4.0, poll=LONG), clock)
    said: list[str] = []

    def make(database: Database) -> ConsoleService:
        said.append(host.status.sentence)
        return ConsoleService(Store(database))

    host = ConsoleHost(lambda term: Database(url), only, make)
    stack.callback(host.close)
    host.start()
    assert said[0].endswith(golden("this-console-leads-term-1"))
    assert host.console is not None
    clock.now += 5.2
    assert host.console is None
    assert host.status.sentence == (golden("this-consoles-lead-is-in-doubt", f"{LONG:g}"))


def test_a_database_that_is_not_there_is_said_at_the_start(stack: ExitStack) -> None:
    times = LeaseTimes(arrival=0.0)
    with pytest.raises(DatabaseError, match=golden("cant-be-used")):
        watch(stack, "postgresql://nobody@127.0.0.1:1/none", "a", times).start()


def test_a_console_waits_for_a_database_that_starts_and_ends_where_it_refuses(stack: ExitStack) -> None:
    """A service of the system may start both at the same time. A wrong password gets no better by waiting."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    answers = [("57P03", "the database system is starting up"), ("57P03", "the database system is starting up")]
    answers.append(("28P01", 'password authentication failed for user "nobody"'))
    asked = []

    def answer() -> None:
        for code, said in answers:
            connection, _ = server.accept()
            with connection:
                while len(connection.recv(4096)) == 8:  # asks for TLS or GSSAPI first
                    connection.sendall(b"N")
                fields = b"".join(
                    f"{name}{text}\0".encode() for name, text in (("S", "FATAL"), ("C", code), ("M", said))
                )
                connection.sendall(b"E" + (len(fields) + 5).to_bytes(4, "big") + fields + b"\0")
            asked.append(code)

    threading.Thread(target=answer, daemon=True).start()
    times = LeaseTimes(poll=0.01, arrival=LONG)
    with pytest.raises(DatabaseError) as refused:
        watch(stack, f"postgresql://nobody@127.0.0.1:{server.getsockname()[1]}/none", "a", times).start()
    assert not isinstance(refused.value, NotThere) and asked[:2] == ["57P03", "57P03"]


def end_sessions(url: str) -> None:
    database = Database(url, me="operator")
    with database.read() as session:
        session.execute(
            text(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and application_name = 'openrecycle a'"
            )
        )
    database.close()
