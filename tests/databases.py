"""Databases that have their tables already, made once in a test process. On SQLite a migration costs 26 ms of CPU, and
a copy of its file 1 ms; on PostgreSQL a new database with its tables costs 0.3 s and 330 files, and one that is used
again 12 ms."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import TypeVar, overload

from sqlalchemy import func, select, text

from openrecycle.db.heartbeats import Level
from openrecycle.db.models import Base, HeartbeatRow
from openrecycle.db.session import Database, Record
from tests.conftest import new_database

Kind = TypeVar("Kind", bound=Database)


@overload
def sqlite_in(folder: Path) -> Database: ...
@overload
def sqlite_in(folder: Path, kind: type[Kind]) -> Kind: ...
def sqlite_in(folder: Path, kind: type[Database] = Database) -> Database:
    """Opens the file there, as a console that starts again does; where there is none, a new one."""
    file = folder / "console.db"
    if not file.exists():
        file.write_bytes(_file())
    return kind(f"sqlite:///{file}")


def on_postgresql(server: str) -> Database:
    """Opens the one there that has been used before, as it was when its tables were made, with nobody else connected.
    Not for a test that changes tables."""
    url, rows = _on_postgresql(server)
    database = Database(url)
    others = "pid <> pg_backend_pid() and datname = current_database()"
    with database.engine.begin() as connection:
        connection.execute(text(f"select pg_terminate_backend(pid, 10000) from pg_stat_activity where {others}"))
        connection.execute(text(f"truncate {', '.join(Base.metadata.tables)} restart identity"))
        for table, made in rows.items():
            connection.execute(Base.metadata.tables[table].insert(), made)
    return database


@functools.cache
def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "console.db"
        _upgrade(f"sqlite:///{file}")
        return file.read_bytes()


@functools.cache
def _on_postgresql(server: str) -> tuple[str, dict[str, list[Record]]]:
    """Its address, and the rows that its tables begin with."""
    url = new_database(server)
    return url, _upgrade(url)


def _upgrade(url: str) -> dict[str, list[Record]]:
    database = Database(url)
    database.upgrade()
    rows = {name: database.rows(select(table)) for name, table in Base.metadata.tables.items()}
    database.close()
    return {name: made for name, made in rows.items() if made}


def until_waiting(database: Database) -> None:
    """Until a session of this database on PostgreSQL waits for another's lock."""
    deadline = time.monotonic() + 30
    question = text(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    while True:
        with database.read() as transaction:
            if transaction.scalar(question):
                return
        assert time.monotonic() < deadline, "nobody waits"


def history_bytes(database: Database, job_id: str) -> dict[Level, int]:
    """Returns the bytes of the blocks of a job's heartbeats alone, without what the database adds."""
    query = select(HeartbeatRow.level, func.sum(func.length(HeartbeatRow.data))).where(HeartbeatRow.job_id == job_id)
    with database.read() as session:
        return {Level(level): size for level, size in session.execute(query.group_by(HeartbeatRow.level))}
