"""A real console process for tests, on a free port and a database of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import requests

T = TypeVar("T")


class ConsoleProcess:
    """`python -m app serve` as a user runs it. May be killed and started again on its database."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "app", "serve", "--port", str(self.port), *arguments]
        self._command += ["--database-url", f"sqlite:///{folder / 'console.db'}"]
        self._log = (folder / "console.log").open("a")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        until(self._healthy, "the console to answer", 60)

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(15)
        self._log.close()

    def get(self, path: str) -> Any:
        answer = requests.get(f"{self.url}/api/v1{path}", timeout=10)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str) -> requests.Response:
        return requests.post(f"{self.url}/api/v1{path}", timeout=10)

    def job(self) -> str:
        """The id of the only job, as soon as there is one."""
        return str(until(lambda: self.get("/jobs")["jobs"], "a job", 90)[0]["job_id"])

    def _healthy(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "the console ended"
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/healthz", timeout=2).status_code == 200
        return False


def until(condition: Callable[[], T], what: str, timeout: float = 60.0) -> T:
    """Asks again until the answer is true; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            answer = condition()
            if answer:
                return answer
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout:.0f} s for {what}")


@contextlib.contextmanager
def console(folder: Path, *arguments: str) -> Iterator[ConsoleProcess]:
    process = ConsoleProcess(folder, *arguments)
    try:
        process.start()
        yield process
    finally:
        process.stop()
