"""What others write ends on terminals, in logs and in databases: nothing of it is obeyed there, and nothing of it makes
the console fail or try again for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from openrecycle.agent.messages.protocol import JobSpec, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import malformed
from openrecycle.app.server import create_routes
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.solvers.portfolio import make_plan
from tests.app.console_server import ROOT
from tests.conftest import new_database
from tests.golden import golden

pytestmark = pytest.mark.processes

API = "/api/v1"
# Clears the screen, sets a title, and begins what looks like another line; a mark of direction; C1's CSI.
OBEYED = "a\x1b[2J\x1b]0;owned\x07\r\n2026-01-01 [info] all is well\u202e\x9b31m"


def obeyed(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_a_line_of_the_log_stays_one_line() -> None:
    script = (
        "import json, sys, structlog; from openrecycle.app.runtime.processes import configure_logging;"
        "configure_logging();"
        "structlog.get_logger().warning(json.loads(sys.argv[1]), actor=json.loads(sys.argv[1]), number=3)"
    )
    command = [sys.executable, "-c", script, json.dumps(OBEYED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert obeyed(done.stderr) == []
    assert golden("all-is-well") in done.stderr and "number=3" in done.stderr, "it can be read all the same"


@pytest.mark.parametrize("place", ["key", "value", "number"])
def test_a_plan_of_others_writes_nothing_to_the_terminal(place: str, tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(make_plan(Problem(Job.uniform(2, 2, 2)), solver="list").to_json())
    if place == "key":
        document[OBEYED] = 1
    elif place == "value":
        document["solver"]["message"] = OBEYED
    else:
        document["metrics"]["period"] = OBEYED
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    command = [sys.executable, "-m", "planner", "check", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert obeyed(done.stdout + done.stderr) == []


def test_a_refusal_of_the_api_writes_nothing_to_the_agents_terminal() -> None:
    text = malformed([{"loc": ("body", OBEYED), "type": "extra_forbidden", "msg": "", "input": OBEYED}]).detail
    assert obeyed(text) == [] and "\n" not in text


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, str]]:
    """Of a job that runs."""
    file = tmp_path_factory.mktemp("odd") / "console.db"
    server = request.param == "postgresql"
    database = Database(new_database(request.getfixturevalue("postgres_url")) if server else f"sqlite:///{file}")
    database.upgrade()
    console = ConsoleService(Store(database), tolerance=0)
    console.start()
    spec = {"name": "x", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 9, "demo": True}
    job = console.jobs.create(JobSpec.model_validate(spec))[0].job_id
    console.reports.register(
        job, [Registration(worker=name, incarnation="a", host="h", pid=1) for name in ("W0_0", "W0_1", "W1_0", "W1_1")]
    )
    yield TestClient(Starlette(routes=create_routes(console)), raise_server_exceptions=False), job
    console.close()
    database.close()


MOST = 2**53
ODD: list[tuple[str, str, Any]] = [
    ("GET", "/jobs/%00", None),
    ("GET", "/jobs/{job}%00/plans", None),
    ("GET", "/jobs/{job}/plans/%00", None),
    ("GET", "/plans/%00", None),
    ("DELETE", "/plans/%00", None),
    ("GET", "/plans/%00/export?format=json", None),
    ("GET", "/audit?job_id=%00", None),
    ("GET", "/audit?after=9223372036854775807", None),
    ("GET", "/jobs/{job}/events?after=9007199254740992", None),
    ("GET", "/jobs/{job}/iterations?after=9007199254740992", None),
    ("GET", "/jobs/{job}/workers/W0_0%00/history", None),
    ("POST", "/catalogs", {"job_id": "\u0000"}),
    ("PUT", "/jobs/{job}/plan", {"fingerprint": "\u0000"}),
    ("POST", "/plans", {"name": "a\u0000", "solve": "\u0000"}),
    (
        "POST",
        "/jobs/{job}/workers",
        {"registrations": [{"worker": "W1_1", "incarnation": "a", "host": OBEYED + "\0", "pid": MOST}]},
    ),
    ("POST", "/jobs/{job}/logs", {"worker": "W1_0", "incarnation": "a", "lines": [{"at": 1.0, "text": OBEYED + "\0"}]}),
    (
        "POST",
        "/jobs/{job}/heartbeats",
        {
            "heartbeats": [
                {
                    "worker": "W1_0",
                    "incarnation": "a",
                    "seq": MOST,
                    "generation": 1,
                    "iteration": MOST,
                    "phase": "training",
                    "resident_bytes": MOST,
                    "op_milliseconds": {"F": 1e9},
                }
            ]
        },
    ),
    (
        "POST",
        "/jobs/{job}/iterations",
        {
            "iterations": [
                {"iteration": 0, "loss": 1, "loss_hex": "0x1p+0", "seconds": 1, "generation": MOST, "living": MOST}
            ]
        },
    ),
    ("POST", "/jobs/{job}/validations", {"iteration": MOST, "coefficient": None, "redone": False}),
    (
        "POST",
        "/jobs/{job}/failures",
        {
            "failures": [
                {"worker": "W0_0", "incarnation": "a", "cause": "exit", "reporter": "l", "detail": OBEYED + "\0"}
            ]
        },
    ),
]


@pytest.mark.parametrize(("method", "path", "body"), ODD, ids=[f"{m} {p}" for m, p, _ in ODD])
def test_whatever_the_database_can_not_hold_is_refused_for_good(
    client: tuple[TestClient, str], method: str, path: str, body: Any
) -> None:
    """Never a 5xx: agents send again what gets one."""
    asked, job = client
    sent = {"X-Actor": "somebody\x9b31m".encode("latin-1")}
    answer = asked.request(method, API + path.replace("{job}", job), json=body, headers=sent)
    assert answer.status_code < 500, answer.text
    assert asked.get(f"{API}/jobs/{job}").status_code == 200
    assert asked.get("/readyz").status_code == 200
