"""Long-polls and batches, against a real console process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('waits') / 'console.db'}", "--api-only")
    yield server
    server.close()


def test_events_can_be_waited_for(agents: Agents) -> None:
    server = agents.server
    agents.register_all()
    last = server.get(agents.path("/events")).json()["events"][-1]["seq"]
    assert server.get(agents.path(f"/events?after={last}&wait=0.05")).json() == {"events": []}
    threading.Timer(0.2, agents.exit, ["W0_0"]).start()
    found = requests.get(server.base + agents.path(f"/events?after={last}&wait=60"), timeout=90).json()["events"]
    assert found and found[0]["seq"] == last + 1


def beat(worker: str, seq: int, **change: Any) -> dict[str, Any]:
    values = {"worker": worker, "incarnation": f"{worker}-a", "seq": seq, "generation": 1, "iteration": 3}
    return {**values, "phase": "training", **change}


def test_heartbeats_in_one_request_stand_for_themselves(agents: Agents) -> None:
    agents.register_all()
    beats = [beat(name, 1, iteration=7) for name in agents.names]
    beats[4]["incarnation"] = "another"
    beats[5]["worker"] = "W9_9"
    answer = agents.server.post(agents.path("/heartbeats"), {"heartbeats": beats})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["generation"], body["measure"], body["taken"]) == (1, None, 10)
    assert [(r["index"], r["worker"], r["code"]) for r in body["refused"]] == [
        (4, agents.names[4], "fenced"),
        (5, "W9_9", "unknown_worker"),
    ]
    # What was taken is seen once the console has looked, at its next tick.
    expected = {name: 0 if name in agents.names[4:6] else 7 for name in agents.names}
    for _ in range(600):
        workers = {w["name"]: w["iteration"] for w in agents.server.get(agents.path("/workers")).json()["workers"]}
        if workers == expected:
            break
        agents.server.get(agents.path("/events?after=1000000&wait=0.05"))
    assert workers == expected


def test_a_malformed_heartbeat_refuses_the_request(agents: Agents) -> None:
    beats = [beat(agents.names[0], 1), beat(agents.names[1], -1)]
    answer = agents.server.post(agents.path("/heartbeats"), {"heartbeats": beats})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("heartbeats.1.seq: got -1")
    assert agents.server.post(agents.path("/heartbeats"), {"heartbeats": []}).status_code == 422
    assert agents.server.post("/jobs/none/heartbeats", {"heartbeats": beats[:1]}).status_code == 404
