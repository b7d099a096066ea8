"""The lead on a real PostgreSQL: one lock, one lease, and no write of whoever does not have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from openrecycle.db.session import NOT_LEADING, Database, DatabaseError, LeaderSession, Lease, WriteFenced
from tests.conftest import new_database
from tests.databases import on_postgresql, until_waiting
from tests.golden import golden

INSERT = "insert into audit (at, actor, action, target, detail) values (1, 'me', :action, '', '')"


@pytest.fixture
def url(postgres_url: str) -> str:
    """Of a database that nobody leads."""
    database = on_postgresql(postgres_url)
    database.close()
    return database.url.render_as_string(hide_password=False)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, url: str, me: str = "", term: int | None = None, **options: Any) -> Database:
    database = Database(url, me=me, term=term, **options)
    stack.callback(database.close)
    return database


def session(stack: ExitStack, url: str, me: str) -> LeaderSession:
    made = LeaderSession(opened(stack, url), me)
    stack.callback(made.close)
    return made


def leading(stack: ExitStack, url: str, me: str, **options: Any) -> tuple[LeaderSession, Database]:
    """A console's session that leads, and its database."""
    made = session(stack, url, me)
    assert made.try_lock()
    return made, opened(stack, url, me, made.claim(f"http://{me}:8501"), **options)


def write(database: Database, action: str) -> None:
    with database.write() as transaction:
        transaction.execute(text(INSERT), {"action": action})


def written(database: Database) -> list[str]:
    with database.read() as transaction:
        return list(transaction.scalars(text("select action from audit order by id")))


def until_free(waiting: LeaderSession) -> None:
    deadline = time.monotonic() + 30
    while not waiting.try_lock():
        assert time.monotonic() < deadline, "the lock did not fall free"


def test_a_database_without_leases_says_so(stack: ExitStack, postgres_url: str) -> None:
    url = new_database(postgres_url)
    first = session(stack, url, "a")
    assert first.lease() is None
    opened(stack, url).upgrade()
    lease = first.lease()
    assert lease is not None and (lease.term, lease.holder, lease.address) == (0, "", "")


def test_one_leads_and_the_next_after_it_has_resigned(stack: ExitStack, url: str) -> None:
    first, second = session(stack, url, "a"), session(stack, url, "b")
    assert first.try_lock() and not second.try_lock()
    assert first.claim("http://a:8501") == 1
    lease = second.lease()
    assert lease is not None and (lease.term, lease.holder, lease.address) == (1, "a", "http://a:8501")
    assert first.renew(1) and not second.renew(1)
    first.resign(1)
    assert not first.renew(1)
    first.close()
    until_free(second)
    assert second.claim("http://b:8501") == 2


def test_a_lease_says_when_it_was_renewed(stack: ExitStack, url: str) -> None:
    first, _ = leading(stack, url, "a")
    old = first.lease()
    assert old == first.lease()
    assert first.renew(1)
    new = first.lease()
    assert isinstance(old, Lease) and isinstance(new, Lease) and old.renewed != new.renewed


def test_a_silent_leader_loses_its_sessions_and_the_lock(stack: ExitStack, url: str) -> None:
    first, database = leading(stack, url, "a")
    write(database, "before")
    second = session(stack, url, "b")
    seen = second.lease()
    assert seen is not None and first.renew(1)
    assert second.evict("a", seen.renewed) == 0, "it has renewed its lease since"
    assert second.evict("c", None) == 0, "not the one that holds it"
    seen = second.lease()
    assert seen is not None
    assert second.evict("a", seen.renewed) == 2  # its own session and the one it wrote with
    with pytest.raises(DBAPIError):
        first.renew(1)
    until_free(second)


def test_what_an_earlier_leader_writes_is_refused(stack: ExitStack, url: str) -> None:
    fenced: list[str] = []
    first, database = leading(stack, url, "a", on_fenced=lambda: fenced.append("a"))
    write(database, "its own")
    first.close()
    second, newer = session(stack, url, "b"), None
    until_free(second)
    newer = opened(stack, url, "b", second.claim("http://b:8501"))
    with pytest.raises(WriteFenced):
        write(database, "too late")
    assert fenced == ["a"]
    write(newer, "the new one's")
    assert written(database) == ["its own", "the new one's"], "it may still read"


def test_whoever_does_not_lead_writes_nothing(stack: ExitStack, url: str) -> None:
    standby = opened(stack, url, "b", NOT_LEADING)
    with pytest.raises(WriteFenced):
        write(standby, "nothing")
    assert written(standby) == []


def test_a_new_leader_waits_for_the_writes_of_the_one_before(stack: ExitStack, url: str) -> None:
    """A transaction that has begun in the old term ends before the new one begins: never after."""
    first, database = leading(stack, url, "a")
    second = session(stack, url, "b")
    terms: list[int] = []
    with database.write() as transaction:
        transaction.execute(text(INSERT), {"action": "in flight"})
        transaction.flush()
        assert first.renew(1), "a write in flight does not hold up the lease"
        first.close()
        until_free(second)
        claim = threading.Thread(target=lambda: terms.append(second.claim("http://b:8501")))
        claim.start()
        until_waiting(opened(stack, url))
        assert terms == []
    claim.join(30)
    assert terms == [2]
    assert written(database) == ["in flight"]


def test_a_new_leader_does_not_wait_for_a_transaction_that_does_not_end(stack: ExitStack, url: str) -> None:
    first, database = leading(stack, url, "a")
    second = session(stack, url, "b")
    with pytest.raises(DBAPIError), database.write() as transaction:
        transaction.execute(text(INSERT), {"action": "stopped half way"})
        transaction.flush()
        first.close()
        until_free(second)
        second.evict("a", None)
        assert second.claim("http://b:8501") == 2
    assert written(opened(stack, url)) == []


def test_nobody_there_is_one_sentence_without_the_password() -> None:
    database = Database("postgresql://user:secret@127.0.0.1:1/none")
    with pytest.raises(DatabaseError, match=golden("cant-be-used")) as error:
        LeaderSession(database, "a")
    assert "secret" not in str(error.value)
