"""Databases to test on: an SQLite file, and one on a PostgreSQL server of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.conftest import new_database
from tests.databases import on_postgresql, sqlite_in


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'console.db'}"
    return new_database(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Of either kind, with its tables."""
    if request.param == "sqlite":
        database = sqlite_in(tmp_path)
    else:
        database = on_postgresql(request.getfixturevalue("postgres_url"))
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)
