"""What the tests of several folders need."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text


def _postgres_bin() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return candidates[-1].parent if candidates else None


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A throw-away cluster on a free loopback port; gone with the test session."""
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed here (no initdb on the PATH or in /usr/lib/postgresql)")
    # PostgreSQL refuses to run as root: its own user runs it then.
    root = os.geteuid() == 0
    if root and not shutil.which("runuser"):
        pytest.skip("PostgreSQL does not run as root, and runuser is not here")
    as_user = ["runuser", "-u", "postgres", "--"] if root else []
    folder = Path(tempfile.mkdtemp(prefix="openrecycle-pg-"))
    if root:
        shutil.chown(folder, "postgres")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    data = folder / "data"
    user = "postgres"

    def run(*command: str) -> None:
        done = subprocess.run([*as_user, *command], capture_output=True, text=True, timeout=60, cwd=folder)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"

    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    try:
        run(str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", user, "-E", "UTF8")
        run(str(binaries / "pg_ctl"), "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
        yield f"postgresql://{user}@127.0.0.1:{port}"
    finally:
        stop = [str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop"]
        subprocess.run([*as_user, *stop], capture_output=True, timeout=60, cwd=folder)
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str) -> str:
    """Makes an empty database on the PostgreSQL server; returns its address."""
    name = f"t{secrets.token_hex(8)}"
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg:") + "/postgres")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"create database {name}"))
    engine.dispose()
    return f"{server}/{name}"
