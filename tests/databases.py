"""Databases that have their tables already. A migration costs 26 ms of CPU on SQLite and 60 on PostgreSQL: it is made
once in a test process, and what it made is copied."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TypeVar

from openrecycle.db.session import Database
from tests.conftest import new_database

Kind = TypeVar("Kind", bound=Database)


def sqlite_in(folder: Path, kind: type[Kind] = Database) -> Kind:  # type: ignore[assignment]
    """Opens a new file there."""
    file = folder / "console.db"
    with file.open("xb") as new:
        new.write(_file())
    return kind(f"sqlite:///{file}")


def on_postgresql(server: str) -> Database:
    """Opens a new database there."""
    return Database(new_database(server, like=_on_postgresql(server)))


@functools.cache
def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "console.db"
        _upgrade(f"sqlite:///{file}")
        return file.read_bytes()


@functools.cache
def _on_postgresql(server: str) -> str:
    url = new_database(server)
    _upgrade(url)
    return url


def _upgrade(url: str) -> None:
    database = Database(url)
    database.upgrade()
    database.close()
