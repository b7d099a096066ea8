from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from console_server import Agents, ConsoleServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A real console process, shared by the tests of a module: each makes a job of its own."""
    folder: Path = tmp_path_factory.mktemp("console")
    server = ConsoleServer(f"sqlite:///{folder / 'console.db'}", "--api-only")
    yield server
    server.close()


@pytest.fixture
def agents(server: ConsoleServer) -> Agents:
    """A 3 x 4 job of which nobody has registered yet."""
    return Agents(server)
