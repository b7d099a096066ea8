"""A real training job with two consoles: the one that leads is killed, and nothing of the job is."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from tests.agent.consoles import until
from tests.agent.launches import Launched
from tests.agent.runs import SQUARE, TINY
from tests.app.console_server import ConsoleServer, ForkedConsole
from tests.conftest import new_database

pytestmark = pytest.mark.processes


def test_training_goes_on_when_the_leading_console_is_killed(postgres_url: str, tmp_path: Path) -> None:
    """Every iteration is in the database once, and the new leader decides on the next death."""
    url, record = new_database(postgres_url), tmp_path / "run.jsonl"
    with ExitStack() as stack:
        leader, standby = ForkedConsole(url, "--api-only"), ForkedConsole(url, "--api-only")
        stack.callback(standby.close)
        stack.callback(leader.close)
        command = ["train", "--record", str(record), *SQUARE, *TINY, "--demo"]
        command += ["--no-migrate", "--iterations", "100000", "--pace", "F=60ms,I=60ms,W=60ms"]
        command += ["--console", f"{leader.root},{standby.root}"]
        launcher = Launched(*command, errors=tmp_path / "errors.txt")
        stack.callback(launcher.end)

        def read(server: ConsoleServer, path: str) -> dict[str, object]:
            answer = server.get(path)
            answer.raise_for_status()
            return answer.json()  # type: ignore[no-any-return]

        job_id = str(until(lambda: leader.get("/jobs").json()["jobs"], "a job", 90)[0]["job_id"])
        until(lambda: int(str(read(leader, f"/jobs/{job_id}")["committed"])) >= 3, "training", 90)
        leader.process.send_signal(signal.SIGKILL)
        leader.process.wait(30)
        lines = record.read_text().count("\n")
        until(lambda: record.read_text().count("\n") >= lines + 5, "training without a leader", 90)
        until(lambda: requests.get(f"{standby.root}/readyz", timeout=10).ok, "the standby to lead", 90)
        until(lambda: int(str(read(standby, f"/jobs/{job_id}")["committed"])) >= lines + 5, "it to catch up", 90)
        assert read(standby, f"/jobs/{job_id}")["generation"] == 1, "nobody was given up meanwhile"
        assert standby.post(f"/jobs/{job_id}/workers/W0_1/kill").ok
        until(lambda: read(standby, f"/jobs/{job_id}")["living"] == 3, "the death", 90)
        after = int(str(read(standby, f"/jobs/{job_id}")["committed"]))
        until(lambda: int(str(read(standby, f"/jobs/{job_id}")["committed"])) >= after + 3, "training goes on", 90)
        assert launcher.poll() is None
        rows = standby.get(f"/jobs/{job_id}/iterations", params={"limit": 1000}).json()["iterations"]
        assert [row["iteration"] for row in rows] == list(range(len(rows)))
