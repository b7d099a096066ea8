"""Databases to test on: an SQLite file, and one on a PostgreSQL server of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.conftest import new_database


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'console.db'}"
    return new_database(request.getfixturevalue("postgres_url"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Opened, its tables up to date."""
    database = Database(database_url)
    database.upgrade()
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)
