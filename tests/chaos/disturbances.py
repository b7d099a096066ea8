"""What goes wrong around a job: its console, its database, its disk, its clocks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tests.app.console_server import ConsoleServer
from tests.chaos.chaotic_job import Disturbance
from tests.conftest import _postgres_bin

START_SECONDS = 60.0


class ConsoleKilled:
    """kill -9 of the console, which is started again on the same port and database."""

    def __init__(self, server: ConsoleServer) -> None:
        self._server = server

    def begin(self) -> None:
        self._server.stop(signal.SIGKILL)

    def end(self) -> None:
        self._server.start(self._server.port)


class ConsoleStopped:
    """The console's process stands still for longer than a worker may be silent."""

    def __init__(self, server: ConsoleServer, seconds: float) -> None:
        self._server, self._seconds = server, seconds

    def begin(self) -> None:
        self._server.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        time.sleep(self._seconds)
        self._server.process.send_signal(signal.SIGCONT)


class PostgresKilled:
    """kill -9 of the PostgreSQL server; the next one recovers from its log."""

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url) as connection:
            row = connection.execute("show data_directory").fetchone()
        assert row is not None
        self._data = Path(row[0])
        self._options = (self._data / "postmaster.opts").read_text().split('"-p"')[1]

    def begin(self) -> None:
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
            time.sleep(0.01)

    def end(self) -> None:
        """Its children may hold its memory for a moment longer, and then it does not start."""
        deadline = time.monotonic() + START_SECONDS
        as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        options = '"-p"' + self._options
        command = [*as_user, f"{_postgres_bin()}/pg_ctl", "-D", str(self._data), "-w", "-o", options.strip()]
        while True:
            log = str(self._data / "restarts.log")
            done = subprocess.run([*command, "-l", log, "start"], capture_output=True, text=True, check=False, cwd="/")
            with suppress(psycopg.OperationalError), psycopg.connect(self._url):
                return
            assert time.monotonic() < deadline, done.stdout + done.stderr
            time.sleep(0.2)


class DiskFull:
    """Not a byte is left on the file system of the database."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def begin(self) -> None:
        with self._ballast.open("wb", buffering=0) as stream, suppress(OSError):
            size = 1 << 16
            while True:
                try:
                    stream.write(bytes(size))
                except OSError:
                    if size == 1:
                        raise
                    size //= 2

    def end(self) -> None:
        self._ballast.unlink()


class ClockJumps:
    """The console's wall clock is wrong from now on, by up to some days either way."""

    def __init__(self, file: Path, seed: int) -> None:
        self.file, self._random = file, random.Random(seed)
        file.write_text("0")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OPENRECYCLE_TEST_CLOCK": str(self.file),
            "PYTHONPATH": f"{Path(__file__).parent / 'wrong_clock'}:{os.environ.get('PYTHONPATH', '')}",
        }

    def begin(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(self._random.uniform(-3e5, 3e5)))
        new.replace(self.file)

    def end(self) -> None:
        """It stays wrong."""


class InTurn:
    """One after the other."""

    def __init__(self, *disturbances: Disturbance) -> None:
        self._all, self._next = disturbances, 0

    def begin(self) -> None:
        self._all[self._next % len(self._all)].begin()

    def end(self) -> None:
        self._all[self._next % len(self._all)].end()
        self._next += 1


@contextmanager
def small_disk(folder: Path, megabytes: int = 48) -> Iterator[Path]:
    """A file system of that size, in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here: that needs root, and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
