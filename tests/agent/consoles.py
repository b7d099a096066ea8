"""A console that a real job is started against, and how tests wait for what it says."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import requests

from tests.app.console_server import ForkedConsole

T = TypeVar("T")


class JobConsole(ForkedConsole):
    """A console process with a database file of its own; may be killed and started again on both.

    Without pages, which a job has nothing to do with: half of its start is theirs.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(f"sqlite:///{folder / 'console.db'}", "--api-only", *options)

    def read(self, path: str) -> Any:
        answer = self.get(path)
        answer.raise_for_status()
        return answer.json()

    def job_id(self, name: str | None = None) -> str:
        """Of the job of that name, or of the only one, as soon as there is one."""

        def found() -> list[dict[str, Any]]:
            return [job for job in self.read("/jobs")["jobs"] if name in (None, job["name"])]

        return str(until(found, "a job", 90)[0]["job_id"])

    def crash(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        self.stop(signal.SIGKILL)


def until(condition: Callable[[], T], what: str, timeout: float = 60.0) -> T:
    """Asks again until the answer is true; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = 0.01
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            answer = condition()
            if answer:
                return answer
        # Each answer costs the console as much as a worker of these jobs needs for an iteration.
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    raise AssertionError(f"waited {timeout:.0f} s for {what}")


@contextlib.contextmanager
def console(folder: Path, *options: str) -> Iterator[JobConsole]:
    server = JobConsole(folder, *options)
    try:
        yield server
    finally:
        server.close()
