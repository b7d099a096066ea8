"""Server-sent events, long-polls and batches, against a real console process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole

from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc

pytestmark = pytest.mark.processes

JOB = job_doc(Job.uniform(2, 2, 2)).model_dump(mode="json")


class Stream:
    """The messages of a stream, as a browser's EventSource would give them."""

    def __init__(self, server: ConsoleServer, path: str, last: int | None = None) -> None:
        headers = {} if last is None else {"Last-Event-ID": str(last)}
        self.answer = requests.get(server.base + path, headers=headers, stream=True, timeout=60)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        message: dict[str, str] = {}
        for line in self.answer.iter_lines(decode_unicode=True, chunk_size=1):
            field, _, value = line.partition(": ")
            if field:
                message[field] = value
            elif "data" in message:
                yield int(message["id"]), json.loads(message.pop("data"))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('streams') / 'console.db'}", "--api-only")
    yield server
    server.close()


def test_events_come_as_they_happen_and_none_is_missed(agents: Agents) -> None:
    server = agents.server
    agents.register_all()
    known = server.get(agents.path("/events")).json()["events"]
    with Stream(server, agents.path("/events/stream")) as stream:
        assert stream.answer.headers["Content-Type"].startswith("text/event-stream")
        messages = iter(stream)
        assert [next(messages)[1] for _ in known] == known
        agents.exit("W1_2")
        number, event = next(messages)
        assert number == event["seq"] == known[-1]["seq"] + 1
    # Somebody who comes back gets what came meanwhile, and no more.
    with Stream(server, agents.path("/events/stream"), last=number - 1) as stream:
        assert next(iter(stream)) == (number, event)
    assert server.post(agents.path("/finish"), {"state": "finished"}).status_code == 204
    with Stream(server, agents.path(f"/events/stream?after={number - 1}")) as stream:
        rest = list(stream)
    assert rest[0] == (number, event), "it ends with the job"
    over = server.get(agents.path("/events/stream"), headers={"Last-Event-ID": str(rest[-1][0])})
    assert over.status_code == 204


def test_a_stream_of_no_job_is_a_problem(server: ConsoleServer) -> None:
    answer = server.get("/jobs/none/events/stream")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_job")
    answer = server.get("/solves/none/stream")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_solve")
    answer = server.get("/jobs/none/events/stream", headers={"Last-Event-ID": "later"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")


def test_a_solve_is_followed_to_its_end(server: ConsoleServer) -> None:
    asked = server.post("/solves", {"kind": "plan", "job": JOB, "failed": ["W1_0"], "time_limit": 10})
    solve_id = asked.json()["id"]
    with Stream(server, f"/solves/{solve_id}/stream") as stream:
        messages = list(stream)
    points = [point for _, info in messages for point in info["points"]]
    number, last = messages[-1]
    assert last["state"] == "done"
    assert number == len(points) > 0
    whole = server.get(f"/solves/{solve_id}").json()
    assert points == whole["points"], "each once"
    assert last["plan_fingerprint"] == whole["plan_fingerprint"]
    assert server.get(f"/solves/{solve_id}/stream", headers={"Last-Event-ID": str(number)}).status_code == 204


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


def test_streams_end_when_the_console_does(server: ConsoleServer) -> None:
    """The last test of the module: it ends the console that they share."""
    agents = Agents(server, pipelines=2, stages=2)
    agents.register_all()
    with Stream(server, agents.path("/events/stream")) as stream:
        messages = iter(stream)
        next(messages)
        server.stop()
        for _ in messages:
            pass
    assert server.process.returncode == 0
