from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from console_server import Agents, ConsoleServer, ForkedConsole
from streamlit import config
from streamlit.components.v2 import manifest_scanner
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.testing.v1 import app_test, local_script_runner
from ui_console import ConsoleHere

from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.conftest import new_database
from tests.databases import sqlite_in

# Streamlit's AppTest looks at all installed packages for components anew for each page: 0.15 s of 0.25.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)
# A console does not gather what its pages call.
config.set_option("browser.gatherUsageStats", False)
# AppTest compiles each page anew, where a server does it once: a fifth of what its script takes then.
app_test.ScriptCache = local_script_runner.ScriptCache = functools.cache(ScriptCache)  # type: ignore[misc]

# An exception that is logged here is not drawn with all its variables: 0.7 s each.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A real console process, shared by all tests that need no other one: each makes a job of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('console') / 'console.db'}"
    else:
        url = new_database(request.getfixturevalue("postgres_url"))
    # Agents here are as quick as the machine: none may be suspected for its load.
    server = ForkedConsole(url, "--api-only", "--suspect", "40", "--dead", "90")
    yield server
    server.close()


@pytest.fixture
def agents(server: ConsoleServer) -> Agents:
    """A 3 x 4 job of which nobody has registered yet."""
    return Agents(server)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """An empty file of SQLite, its tables up to date."""
    database = sqlite_in(tmp_path)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    """A console in this process, shared by the tests of a module."""
    console = ConsoleHere(tmp_path_factory.mktemp("console"))
    yield console
    console.close()


@pytest.fixture
def console(here: ConsoleHere) -> Iterator[ConsoleService]:
    """That one, as the pages find it."""
    set_console(here.console)
    yield here.console
    set_console(None)
