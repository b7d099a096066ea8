from __future__ import annotations

from collections.abc import Iterator

import pytest
from console_server import Agents, ConsoleServer

from tests.conftest import new_database


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A real console process, shared by the tests of a module: each makes a job of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('console') / 'console.db'}"
    else:
        url = new_database(request.getfixturevalue("postgres_url"))
    server = ConsoleServer(url, "--api-only")
    yield server
    server.close()


@pytest.fixture
def agents(server: ConsoleServer) -> Agents:
    """A 3 x 4 job of which nobody has registered yet."""
    return Agents(server)
