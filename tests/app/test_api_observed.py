"""Logs, validations, acknowledgements and measured iterations over the API, on both databases."""

from __future__ import annotations

import time

import pytest
from console_server import Agents, ConsoleServer

from openrecycle.agent.messages.protocol import clock_name
from tests.golden import golden

pytestmark = pytest.mark.processes


def test_the_clock_of_the_console(server: ConsoleServer) -> None:
    reading = server.get("/clock").json()
    assert reading["name"] == clock_name(), "this test and the console run on one host"
    assert abs(reading["microseconds"] - time.monotonic_ns() // 1000) < 30e6


def test_logs_and_states_of_a_worker(agents: Agents) -> None:
    agents.register_all()
    body = {"worker": "W1_2", "incarnation": "W1_2-a", "lines": [{"at": time.time(), "text": "hello"}]}
    assert agents.server.post(agents.path("/logs"), body).status_code == 204
    assert agents.server.post(agents.path("/logs"), {**body, "lines": [{"at": -1, "text": "x"}]}).status_code == 422
    history = agents.server.get(agents.path("/workers/W1_2/history")).json()
    assert [line["text"] for line in history["log"]] == ["hello"]
    assert [state["state"] for state in history["states"]] == ["running"]
    unknown = agents.server.get(agents.path("/workers/W7_7/history"))
    assert unknown.status_code == 404 and unknown.json()["code"] == "unknown_worker"


def test_validations_and_their_acknowledgement(agents: Agents) -> None:
    agents.register_all()
    report = {"iteration": 4, "coefficient": None, "redone": True}
    for _ in range(2):
        assert agents.server.post(agents.path("/validations"), report).status_code == 204
    events = agents.server.get(agents.path("/events")).json()["events"]
    skipped = [e for e in events if e["kind"] == "step"]
    assert len(skipped) == 1 and "iteration 4 is skipped" in skipped[0]["text"]
    path = agents.path("/events/acknowledge")
    first = agents.server.post(path, {"seqs": [skipped[0]["seq"]]})
    assert first.status_code == 200 and first.json()["reason"].startswith("1 event")
    assert agents.server.post(path, {"seqs": [skipped[0]["seq"]]}).json()["reason"].startswith("0 events")
    assert agents.server.post(path, {"seqs": [0]}).status_code == 422


def test_measured_ops_are_checked(agents: Agents) -> None:
    agents.register_all()
    path = agents.path("/measured")
    assert agents.server.get(path).status_code == 204
    body = {
        "worker": "W0_0",
        "incarnation": "W0_0-a",
        "generation": 1,
        "iteration": 3,
        "clock": "one",
        "started_us": 5,
        "offset_us": -3,
        "uncertainty_us": 0,
        "kinds": "FBO",
        "pipelines": [0, 0, 0],
        "micro_batches": [0, 0, -1],
        "starts_us": [0, 10, 20],
        "durations_us": [10, 10, 1],
    }
    asked = agents.server.post(path, body)
    assert asked.status_code == 200 and golden("not-asked-for") in asked.json()["reason"]
    for change, words in (
        ({"starts_us": [0, 10]}, "starts_us"),
        ({"kinds": "FXO"}, "kinds"),
        ({"durations_us": [10, -1, 1]}, "durations_us"),
        ({"micro_batches": [0, 0, 0]}, "micro_batches"),
        ({"pipelines": [0, 3, 0]}, "pipelines"),
    ):
        answer = agents.server.post(path, {**body, **change})
        assert answer.status_code == 422 and words in answer.json()["detail"], answer.text
    assert agents.server.post(path, {**body, "incarnation": "other"}).json()["code"] == "fenced"
