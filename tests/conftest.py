"""What the tests of several folders need."""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing.process
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import ANY

import pytest
from hypothesis import settings

from openrecycle.planner.jobs.errors import InputError
from tests.golden import learn

gc.disable()  # until all tests are collected: there is little garbage, and very much to look through
# Consoles and jobs that tests start are many: they need not compile this program anew each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# They run this clone's code, also where another one is installed.
_SOURCE = str(Path(__file__).resolve().parents[1] / ".src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SOURCE, os.environ.get("PYTHONPATH"))))
# torch asks the name server who is at the other end of each connection, even of 127.0.0.1. Where one query is lost, as
# where so many are, a job's start takes a second longer then, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The same examples in each run, however long a busy machine takes for one. tests/chaos looks for new ones.
_SAME = settings(deadline=None, derandomize=True, database=None)
settings.register_profile("at-length", _SAME, max_examples=100)
settings.register_profile("tests", _SAME, max_examples=15)
settings.register_profile("fast", _SAME, max_examples=5)
settings.load_profile("tests")


# For a process whose files may not grow: Python would leave modules behind that are cut short, and no process could
# import them any more.
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}

# What `make test FAST=1` leaves out.
_SLOW = ("processes", "browser", "postgresql", "chaos")


def at_length(*values: Any) -> Any:
    """A parameter's value that `make test` spares itself, as another one goes the same way; `make chaos` does not."""
    return pytest.param(*values, marks=pytest.mark.chaos)


@contextmanager
def refuses(field: str, value: object = ANY) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expects an InputError of that field, and with that value."""
    with pytest.raises(InputError) as refused:
        yield refused
    assert (refused.value.field, refused.value.value) == (field, value), refused.value


def examples(most: int, **others: Any) -> Any:
    """Settings of a test of hypothesis: so many examples in `make chaos`, a sixth of them in `make test`, a third of
    these with FAST=1."""
    part = {"tests": 6, "fast": 18}.get(settings.get_current_profile_name(), 1)
    return settings(max_examples=max(-(-most // part), min(most, 5)), **others)


def pytest_configure(config: pytest.Config) -> None:
    # pytest 9.1 gives a folder's fixtures to those of its files alone that it collects before files of another folder.
    folders = [Path(argument.partition("::")[0]).parent for argument in config.args]
    config.args.sort(key=lambda argument: folders.index(Path(argument.partition("::")[0]).parent))
    if config.getoption("--fast") and settings.get_current_profile_name() == "tests":
        settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help=f"without the tests marked {', '.join(_SLOW)}")
    parser.addoption("--golden", action="store_true", help="take what is said now into tests/golden (with -n 0)")


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> None:
    if config.getoption("--golden"):
        learn(op, left, right)


def pytest_collection(session: pytest.Session) -> None:
    """Each of several test processes begins to import at another place. What one has compiled the others find: in a
    fresh clone that is half of what a collection takes, and else each does all of it, all at the same time."""
    place = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if place is None:
        return
    root = session.config.rootpath
    asked = [root / argument.partition("::")[0] for argument in session.config.args]
    files = [f for path in asked for f in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    at = int(place[1]) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    left_out = [root / folder for folder in session.config.getoption("ignore") or ()]
    fast = session.config.getoption("--fast")
    for file in files[at:] + files[:at]:
        if not any(file.is_relative_to(folder) for folder in left_out) and not (fast and _all_slow(file)):
            with suppress(Exception, pytest.skip.Exception):  # collecting it says what is wrong
                importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Read for nothing, with all that it imports.
    return True if config.getoption("--fast") and _all_slow(collection_path) else None


def _all_slow(file: Path) -> bool:
    """Does a file say so of all its tests?"""
    if not file.match("test_*.py"):
        return False
    marks = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", file.read_text(), re.MULTILINE)
    return marks is not None and any(f"pytest.mark.{mark}" in marks[1] for mark in _SLOW)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is there by now stays, the garbage too, which is little: 700,000 objects, which every full collection would
    # look through, for a tenth of the processor time of tests that start no process.
    if session.items:
        # Whoever distributes the tests needs none of what is imported here, and starts sooner.
        from openrecycle.planner.solvers.loops import compiled_functions

        with suppress(ImportError):  # without numba
            compiled_functions()  # small plans too are made by machine code then: those of tests are many
    _freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
    # Whoever distributes the tests has none to run.
    if session.config.getoption("--fast") and session.items:
        _refuse_processes()


_imported = 0


def _freeze() -> None:
    global _imported
    gc.freeze()
    _imported = len(sys.modules)
    # pytest gives its handlers to each logger that keeps its lines to itself, six times a test. Libraries have 140.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def main_stays() -> Iterator[None]:
    """Streamlit puts the page that it runs in the place of `__main__` and leaves it there, and multiprocessing has
    children run that."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the tests of a file have imported stays, too."""
    other = nextitem is not None and nextitem.path != item.path
    if other and len(sys.modules) > _imported + 200:
        gc.collect()
        _freeze()


def _refuse_processes() -> None:
    """A test that starts one without the mark fails; what it starts is not started."""

    def refuse(*_: Any) -> NoReturn:
        # Not an Exception, which the program may catch.
        pytest.fail("this test starts a process: mark it with pytest.mark.processes")

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
            refuse()

    sys.addaudithook(hear)
    # multiprocessing starts its processes below what Python audits.
    multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign, assignment]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file run in one test process: what they import and keep, another one need not make again. Whoever
    distributes them counts files then, not thousands of tests after each test."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class ByGroupOrFile(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return scope if scope != nodeid else nodeid.partition("::")[0]

    return ByGroupOrFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what runs on PostgreSQL and what lies in tests/chaos, and keeps together what shares a fixture:
    what is set up once for a module, or once in all with a parameter, is set up in one test process, not in each."""
    for item in items:
        if Path(__file__).parent / "chaos" in item.path.parents:  # not any folder of that name above the clone
            item.add_marker(pytest.mark.chaos)
        if not isinstance(item, pytest.Function):
            continue
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if "postgres_url" in item.fixturenames or any(str(value) == "postgresql" for value in values.values()):
            item.add_marker(pytest.mark.postgresql)
        if item.get_closest_marker("xdist_group"):
            continue
        found = item._fixtureinfo.name2fixturedefs
        scopes = {name: definitions[-1].scope for name, definitions in found.items()}
        shared = sorted(name for name, scope in scopes.items() if scope == "module")
        wide = sorted(name for name, scope in scopes.items() if scope == "session" and name in values)
        if item.get_closest_marker("postgresql"):
            # One server of PostgreSQL for all: it takes longer to start than what modules share.
            item.add_marker(pytest.mark.xdist_group("server-postgresql"))
        elif wide:
            item.add_marker(pytest.mark.xdist_group("-".join(f"{name}-{values[name]}" for name in wide)))
        elif shared:
            kinds = [str(values[name]) for name in shared if name in values]
            item.add_marker(pytest.mark.xdist_group("-".join([item.path.stem, *kinds])))
    if config.getoption("--fast"):
        slow = {item for item in items if any(map(item.get_closest_marker, _SLOW))}
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def _postgres_bin() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return candidates[-1].parent if candidates else None


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A throw-away cluster on a free loopback port; gone with the test session."""
    with postgres_cluster() as url:
        yield url


@contextmanager
def postgres_cluster(disk_mib: int | None = None) -> Iterator[str]:
    """disk_mib: on a disk of its own, in memory, of that size."""
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed here (no initdb on the PATH or in /usr/lib/postgresql)")
    # PostgreSQL refuses to run as root: its own user runs it then.
    root = os.geteuid() == 0
    if root and not shutil.which("runuser"):
        pytest.skip("PostgreSQL does not run as root, and runuser is not here")
    as_user = ["runuser", "-u", "postgres", "--"] if root else []
    on_disk: list[str] = []
    if disk_mib is not None:
        # PostgreSQL would not run as the root of this name space either: it runs in another one inside.
        inside = 'mount -t tmpfs -o size="$1"m tmpfs "$0" && shift && cd "$0" && exec unshare -U --map-user=1000 "$@"'
        trial = subprocess.run([*as_user, "unshare", "-Urm", "unshare", "-U", "--map-user=1000", "true"], check=False)
        if trial.returncode:
            pytest.skip("this system has no name spaces for users, or unshare is not here")
    folder = Path(tempfile.mkdtemp(prefix="openrecycle-pg-"))
    if disk_mib is not None:
        on_disk = ["unshare", "-Urm", "sh", "-c", inside, str(folder), str(disk_mib)]
    if root:
        shutil.chown(folder, "postgres")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [str(binaries), str(folder), str(port)]
    process = subprocess.Popen(
        [*as_user, *on_disk, "sh", "-c", _CLUSTER, "cluster", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    assert process.stdin and process.stdout
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "ready\n":
                break
        else:
            pytest.fail("PostgreSQL did not start: " + "".join(said))
        yield f"postgresql://postgres@127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


# Its standard input ends with the tests, however and whenever they end: no server is left behind.
_CLUSTER = """
trap '' PIPE
"$1"/initdb -D "$2"/data -A trust -U postgres -E UTF8 || exit 1
"$1"/pg_ctl -D "$2"/data -l "$2"/log -w start \\
    -o "-p $3 -k $2 -c listen_addresses=127.0.0.1 -c fsync=off" || { cat "$2"/log; exit 1; }
echo ready
cat > /dev/null
"$1"/pg_ctl -D "$2"/data -m immediate stop > /dev/null 2>&1
rm -rf "$2"/*
"""


def new_database(server: str) -> str:
    """Makes an empty database on the PostgreSQL server; returns its address."""
    from sqlalchemy import create_engine, text

    name = f"t{secrets.token_hex(8)}"
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg:") + "/postgres")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"create database {name}"))
    engine.dispose()
    return f"{server}/{name}"
