from __future__ import annotations

import threading
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer

from tests.golden import golden

pytestmark = pytest.mark.processes


def test_a_kill_reaches_the_waiting_launcher_of_a_demo_job(server: ConsoleServer) -> None:
    agents = Agents(server, demo=True)
    agents.register_all()
    got: list[dict[str, Any]] = []

    def launcher() -> None:
        # A session of its own: the server's is in use by another thread.
        answer = requests.get(server.base + agents.path("/commands"), params={"wait": 20}, timeout=30)
        got.extend(answer.json()["commands"])

    waiting = threading.Thread(target=launcher)
    waiting.start()
    asked = server.post(agents.path("/workers/W1_2/kill"), headers={"X-Actor": "ada"})
    assert (asked.status_code, asked.json()) == (202, {"reason": golden("the-launcher-is-asked-to")})
    waiting.join(30)
    assert got == [{"seq": 1, "kind": "kill", "worker": "W1_2"}]
    events = server.get(agents.path("/events"), params={"limit": 500}).json()["events"]
    assert events[-1]["text"] == golden("ada-asked-to-kill-w1")

    early = server.post(agents.path("/workers/W0_0/restart"))
    assert (early.status_code, early.json()["code"]) == (409, "not_failed")
    agents.exit("W1_2")
    late = server.post(agents.path("/workers/W1_2/kill"))
    assert (late.status_code, late.json()["code"]) == (409, "not_running")
    assert server.post(agents.path("/workers/W1_2/restart")).status_code == 202
    commands = server.get(agents.path("/commands"), params={"after": 1}).json()["commands"]
    assert commands == [{"seq": 2, "kind": "restart", "worker": "W1_2"}]


def test_only_a_demo_job_can_be_killed(agents: Agents) -> None:
    agents.register_all()
    refused = agents.server.post(agents.path("/workers/W1_2/kill"))
    assert refused.status_code == 403
    assert refused.json()["code"] == "not_a_demo"
    assert refused.json()["detail"].startswith("demo: got false")


def test_an_operator_who_names_no_worker_is_told(agents: Agents) -> None:
    refused = agents.server.post(agents.path("/workers/W9_9/kill"))
    assert refused.status_code == 404
    assert refused.json()["detail"].startswith("worker: got 'W9_9',")
