"""The console dies and comes back in the middle of things: the job goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_server import Agents, ConsoleServer, ForkedConsole

from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes


def _events(agents: Agents) -> list[dict[str, Any]]:
    """Without lines of a console that stood still: on a busy machine one more may come, or one be counted once more."""
    told: list[dict[str, Any]] = agents.server.get(agents.path("/events"), params={"limit": 500}).json()["events"]
    return [event for event in told if not event["text"].startswith(golden("the-console-stood-still"))]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path / 'console.db'}", "--api-only", "--suspect", "5", "--dead", "20")
    yield server
    server.close()


@pytest.mark.parametrize("number", [at_length(signal.SIGTERM), signal.SIGKILL])
def test_a_restarted_console_goes_on_where_it_was(own_server: ConsoleServer, number: int) -> None:
    agents = Agents(own_server, demo=True)
    agents.register_all()
    agents.resume(agents.names, 1)
    agents.exit("W1_2")
    survivors = [name for name in agents.names if name != "W1_2"]
    second = agents.deployment(after=1)
    row = {"loss": 2.5, "loss_hex": (2.5).hex(), "seconds": 0.25, "generation": 1, "living": 12}
    own_server.post(agents.path("/iterations"), {"iterations": [{"iteration": 0, **row}]})
    own_server.post(agents.path("/workers/W0_0/kill"))
    where, who = own_server.base + agents.path("/frozen"), {"X-Actor": "ada"}
    assert own_server.session.put(where, json={"frozen": True}, headers=who, timeout=30).status_code == 200
    for name in survivors[:5]:
        agents.resume([name], 2)
    before = agents.job()
    events = _events(agents)

    own_server.stop(number)
    own_server.start(own_server.port)

    after = agents.job()
    for key in ("state", "generation", "plan_fingerprint", "committed", "spec", "created_at", "living"):
        assert after[key] == before[key], key
    assert agents.deployment(after=1) == second
    assert own_server.get(agents.path("/choice")).json()["frozen_by"] == "ada"
    kept = _events(agents)
    assert kept[: len(events)] == events
    assert kept[len(events)]["text"] == golden("the-console-was-restarted-and")
    commands = own_server.get(agents.path("/commands")).json()["commands"]
    assert commands == [{"seq": 1, "kind": "kill", "worker": "W0_0"}]
    workers = {w["name"]: w for w in own_server.get(agents.path("/workers")).json()["workers"]}
    assert workers["W0_0"]["acknowledged"] == "resumed"
    assert workers["W2_3"]["acknowledged"] == ""
    assert workers["W1_2"]["detail"] == golden("its-process-was-killed-by")

    # Agents go on without registering again; the dead one stays fenced; recovery ends as it would have.
    assert agents.heartbeat("W1_2").json()["refused"][0]["code"] == "fenced"
    for name in survivors:
        assert agents.heartbeat(name, generation=2).json()["generation"] == 2
    agents.resume(survivors[5:], 2)
    assert agents.job()["state"] == "running"
    agents.exit("W0_0")
    assert agents.deployment(after=2)["failed"] == ["W0_0", "W1_2"]
    assert agents.register("W1_2", incarnation="W1_2-a")["refused"][0]["code"] == "fenced"


@pytest.mark.chaos
def test_a_job_that_is_over_stays_readable(own_server: ConsoleServer) -> None:
    agents = Agents(own_server)
    agents.register_all()
    own_server.post(agents.path("/finish"), {"state": "stopped", "reason": "Ctrl-C"})
    before, gone = agents.job(), {"planned_ahead": 0}  # plans that are being made are given up at the end
    own_server.stop()
    own_server.start(own_server.port)
    assert agents.job() | gone == before | gone
    assert before["state"] == "stopped"


def test_silence_is_found_out(tmp_path: Path) -> None:
    server = ForkedConsole(
        f"sqlite:///{tmp_path / 'console.db'}", "--api-only", "--heartbeat", "0.1", "--suspect", "1.5", "--dead", "5"
    )
    try:
        agents = Agents(server, pipelines=2, stages=1)
        agents.register_all()
        agents.resume(agents.names, 1)
        seen: set[str] = set()
        while (job := agents.job())["generation"] == 1:
            agents.heartbeat("W0_0")
            workers = {w["name"]: w for w in server.get(agents.path("/workers")).json()["workers"]}
            seen.add(workers["W1_0"]["state"])
            assert workers["W0_0"]["state"] != "failed"
            time.sleep(0.05)
        assert {"running", "suspect"} <= seen
        assert job["state"] == "recovering"
        assert agents.deployment(after=1)["failed"] == ["W1_0"]
    finally:
        server.close()
