"""Hundreds of histories of jobs whose database, network, workers and console fail at will; a few of the same lie in
tests/app/test_stored_history.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.app.flaky_database import FlakyDatabase
from tests.app.history_machine import History


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    History.database = FlakyDatabase(f"sqlite:///{tmp_path_factory.mktemp('history') / 'console.db'}")
    History.database.upgrade()
    yield
    History.database.close()


TestManyHistories = pytest.mark.timeout(1200)(History.TestCase)
TestManyHistories.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    derandomize=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
