"""Which of the consoles on one PostgreSQL database leads: what they say to the database about it.

Two things together. A *lock* (an advisory lock of one session) falls free the moment a console's
process dies. A *lease* (a row with a term, renewed every second) runs out when the process is there
and does not run, or its machine is gone and the database has not noticed. Each new leader has a
higher term, and a transaction that writes checks its own (db.session): one of an earlier leader fails.

Times are the database's: no clock of a console is compared with another's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from openrecycle.db.session import Database, application_name, connect_arguments, explained

# Any number, so that our lock doesn't meet those of other users of the database.
_LOCK = 0x0C1E_0002

STATEMENT_SECONDS = 4.0
"""The longest that one question may take before the database counts as not answering."""
WRITERS_SECONDS = 2.0
"""How long a new leader waits for the transactions of the one before, which it has ended by then."""

_NOW = "extract(epoch from clock_timestamp())"


@dataclass(frozen=True)
class Lease:
    """What the database holds of the lead.

    term: how many leads there were. holder: the console that leads, "" after it has resigned; address:
    where it is reached. age: seconds since it renewed its lease.
    """

    term: int
    holder: str
    address: str
    age: float


class LeaderSession:
    """One console's session with the database, about nothing but the lead. Not thread-safe.

    me: what this process calls itself, no two the same. Every method raises SQLAlchemyError when the
    database does not answer; the session, and a lock that it held, may be gone then: close it.
    Opening it raises DatabaseError.
    """

    def __init__(self, database: Database, me: str) -> None:
        self._me = me
        milliseconds = round(STATEMENT_SECONDS * 1000)
        arguments = connect_arguments(database.url, me)
        own = f"-c statement_timeout={milliseconds}"
        arguments["options"] = f"{database.url.query.get('options', '')} {own}".strip()
        with explained(database.shown_url):
            engine = create_engine(database.url, connect_args=arguments, poolclass=NullPool)
            self._connection: Connection = engine.connect()

    def try_lock(self) -> bool:
        """Takes the lock if it is free, and keeps it until `close`."""
        with self._connection.begin():
            return bool(self._connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": _LOCK}))

    def lease(self) -> Lease | None:
        """None in a database whose tables are older than leases."""
        with self._connection.begin():
            if self._connection.scalar(text("select to_regclass('leadership')")) is None:
                return None
            row = self._connection.execute(
                text(f"select term, holder, address, {_NOW} - renewed_at from leadership where id = 1")
            ).one()
        return Lease(row[0], row[1], row[2], float(row[3]))

    def claim(self, address: str) -> int:
        """The new term, in which this console leads. Call with the lock held.

        From its return on, nothing that another console writes reaches the database any more.
        """
        with self._connection.begin():
            self._connection.execute(text(f"set local lock_timeout = {round(WRITERS_SECONDS * 1000)}"))
            # Writing transactions share this row until they end: here they are waited for.
            before = self._connection.scalar(text("select term from leadership where id = 1 for update"))
            term = int(before or 0) + 1
            self._connection.execute(
                text(
                    f"update leadership set term = :term, holder = :me, address = :address, renewed_at = {_NOW} "
                    "where id = 1"
                ),
                {"term": term, "me": self._me, "address": address},
            )
        return term

    def renew(self, term: int) -> bool:
        """False when another console has a later term."""
        with self._connection.begin():
            done = self._connection.execute(
                text(f"update leadership set renewed_at = {_NOW} where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )
            return done.rowcount == 1

    def resign(self, term: int) -> None:
        """Says that nobody leads; the lock goes with `close`."""
        with self._connection.begin():
            self._connection.execute(
                text("update leadership set holder = '' where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )

    def evict(self, holder: str, silent: float) -> int:
        """Ends every session of the console `holder`, if it still holds the lead and has not renewed its lease
        for `silent` seconds; returns how many. Its transactions are rolled back, its lock falls free."""
        with self._connection.begin():
            ended = self._connection.execute(
                text(
                    "select pg_terminate_backend(a.pid) from pg_stat_activity a, leadership l "
                    "where a.datname = current_database() and a.application_name = :name and a.pid <> pg_backend_pid() "
                    f"and l.id = 1 and l.holder = :holder and {_NOW} - l.renewed_at >= :silent"
                ),
                {"name": application_name(holder), "holder": holder, "silent": silent},
            )
            return len(ended.all())

    def close(self) -> None:
        """Gives up the lock."""
        with suppress(SQLAlchemyError):
            self._connection.close()
