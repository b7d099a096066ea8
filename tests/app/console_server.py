"""Starts a real console process on a free port, and speaks to it as agents do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 150
_NOT_INHERITED = ("DATABASE_URL", "OPENRECYCLE_TOKEN")


class ConsoleServer:
    """`openrecycle serve` on a free port. `base` ends in /api/v1."""

    module: tuple[str, ...] = ("-m", "app")

    def __init__(self, database_url: str, *options: str, environment: dict[str, str] | None = None) -> None:
        self.database_url = database_url
        self.options = options
        self.environment = environment or {}
        self.session = requests.Session()
        self.start()

    def start(self, port: int = 0) -> None:
        line = self._begin("serve", "--port", str(port), "--database-url", self.database_url, *self.options)
        found = re.search(r"http://\S+?:(\d+) ", line)
        assert found, f"the console did not start: {line!r} {''.join(self.errors)}"
        self.port = int(found[1])
        self.root = f"http://127.0.0.1:{self.port}"
        self.base = f"{self.root}/api/v1"

    def _begin(self, *arguments: str) -> str:
        """Starts the process; returns the line that it prints."""
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        process = subprocess.Popen(
            [sys.executable, *self.module, *arguments],
            cwd=ROOT,
            env={**environment, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        self.process: Any = process
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._errors.extend, args=(process.stderr,), daemon=True)
        self._reader.start()
        timer = threading.Timer(READY_SECONDS, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        return line

    @property
    def errors(self) -> list[str]:
        """The lines of its standard error, as far as they have been read."""
        return self._errors

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Seconds until the process was gone."""
        begin = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(30)
        seconds = time.monotonic() - begin
        self._let_go()
        return seconds

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._let_go()
        self.session.close()

    def _let_go(self) -> None:
        """Closes the pipes of a process that has ended."""
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(self.base + path, timeout=30, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return self.session.post(self.base + path, json=body, timeout=30, **options)


class ForkedConsole(ConsoleServer):
    """The same, forked from what this test process's jobs are forked from (tests.agent.launches): that has its imports,
    which are most of a second of a processor. How a console starts and ends is for tests that start it as users do."""

    def _begin(self, *arguments: str) -> str:
        # It imports torch, for which benchmarks of consoles have no use.
        from tests.agent.launches import Launched

        folder = Path(tempfile.mkdtemp(prefix="console-"))
        prints, self._written = folder / "prints", folder / "errors"
        environment = {**dict.fromkeys(_NOT_INHERITED), **self.environment}
        self.process = Launched(
            *arguments, errors=self._written, prints=prints, environment=environment, module="openrecycle.app"
        )
        deadline = time.monotonic() + READY_SECONDS
        while "\n" not in (line := prints.read_text()) and self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
            time.sleep(0.01)
        return line

    @property
    def errors(self) -> list[str]:
        return self._written.read_text().splitlines(keepends=True) if self._written.exists() else []

    def _let_go(self) -> None:
        sys.stderr.writelines(self.errors)  # shown with a test that fails
        shutil.rmtree(self._written.parent, ignore_errors=True)


class Agents:
    """A job's workers as the console sees them: they register, report, and take up generations."""

    def __init__(self, server: ConsoleServer, *, pipelines: int = 3, stages: int = 4, **spec: Any) -> None:
        self.server = server
        self.names = [f"W{p}_{s}" for p in range(pipelines) for s in range(stages)]
        self.spec = {
            "name": "job under test",
            "pipelines": pipelines,
            "stages": stages,
            "micro_batches": 6,
            "iterations": 100,
            **spec,
        }
        answer = server.post("/jobs", self.spec)
        assert answer.status_code == 201, answer.text
        self.job_id = answer.json()["job_id"]
        self.incarnations = {name: f"{name}-a" for name in self.names}
        self.seq = dict.fromkeys(self.names, 0)

    def path(self, tail: str = "") -> str:
        return f"/jobs/{self.job_id}{tail}"

    def register(self, *names: str, incarnation: str | None = None) -> dict[str, Any]:
        """As one launcher's. incarnation: another than they have had. Returns the answer, a BatchReply."""
        for name in names:
            self.incarnations[name] = incarnation or self.incarnations[name]
        process = {"host": "node1", "pid": 4242}
        said = [{"worker": name, "incarnation": self.incarnations[name], **process} for name in names]
        answer = self.server.post(self.path("/workers"), {"registrations": said})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def register_all(self) -> dict[str, Any]:
        """Returns the first deployment."""
        assert not self.register(*self.names)["refused"]
        return self.deployment(after=0)

    def heartbeat(
        self, name: str, *, generation: int = 1, incarnation: str | None = None, **more: Any
    ) -> requests.Response:
        self.seq[name] += 1
        body = {
            "worker": name,
            "incarnation": incarnation or self.incarnations[name],
            "seq": self.seq[name],
            "generation": generation,
            "iteration": 3,
            "phase": "training",
            **more,
        }
        return self.server.post(self.path("/heartbeats"), {"heartbeats": [body]})

    def acknowledge(self, name: str, generation: int, state: str) -> requests.Response:
        body = {"worker": name, "incarnation": self.incarnations[name], "generation": generation, "state": state}
        return self.server.post(self.path("/acknowledgements"), {"acknowledgements": [body]})

    def resume(self, names: list[str], generation: int) -> None:
        """Takes all of `names` through adopted, formed and resumed."""
        for state in ("adopted", "formed", "resumed"):
            for name in names:
                answer = self.acknowledge(name, generation, state)
                assert answer.status_code == 200 and not answer.json()["refused"], answer.text

    def exit(self, name: str, incarnation: str | None = None) -> requests.Response:
        body = {
            "worker": name,
            "incarnation": incarnation or self.incarnations[name],
            "cause": "exit",
            "reporter": "launcher node1",
            "detail": "was killed by SIGKILL",
            "age_milliseconds": 2,
        }
        return self.server.post(self.path("/failures"), {"failures": [body]})

    def deployment(self, after: int, wait: float = 20) -> dict[str, Any]:
        answer = self.server.get(self.path("/deployment"), params={"after": after, "wait": wait})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def job(self) -> dict[str, Any]:
        return self.server.get(self.path()).json()  # type: ignore[no-any-return]
