"""Whatever is sent: problem details that name the field, the value and what was expected."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from console_server import Agents, ConsoleServer

from tests.golden import golden

pytestmark = pytest.mark.processes

STAGE = {"forward": 1, "input_backward": 1, "weight_backward": 1, "optimizer": 0}
PROFILE = {"pipelines": 2, "stages": 2, "micro_batches": 2, "profiles": [STAGE, STAGE], "transfers": [0]}
ROOM = {"beside": [1, 1], "layers": [[1, 1]], "activations": [1], "held": [1, 1], "places": [[9, [1, 1], ""]]}
BYTES = {"memory": "bytes"}
SPEC = {"name": "n", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 5}


UNNAMED = {"weights and optimizer state take 9 bytes on stage 0, which has 8"}
"""What is wrong between several of a request's fields."""


def assert_problem(answer: requests.Response, status: int, code: str, detail: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == {"type", "title", "status", "code", "detail", "field"}
    assert (body["status"], body["code"]) == (status, code)
    assert detail in body["detail"]
    # Of what a request says wrong, programs get the name as a field of its own.
    assert body["field"] or status not in (413, 422) or detail in UNNAMED
    assert body["detail"].startswith(f"{body['field']}: " if body["field"] else "")
    assert "Traceback" not in answer.text


# What is refused before any SQL is the same on each database.
ONE_DATABASE = pytest.mark.parametrize("server", ["sqlite"], indirect=True)


@ONE_DATABASE
@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"pipelines": 0}, "pipelines: got 0,"),
        ({"stages": -3}, "stages: got -3,"),
        ({"micro_batches": "many"}, "micro_batches: got 'many',"),
        ({"iterations": 1e300}, "iterations: got 1e+300"),
        ({"name": ""}, "name: got '',"),
        ({"name": "x" * 200}, "name: got 'xxx"),
        ({"memory": "lots"}, "memory: got 'lots',"),
        ({"technique": "magic"}, "technique: got 'magic', expected 'adaptive', 'decoupled' or 'staggered'"),
        ({"durations": {"F": -1}}, "durations.F: got -1"),
        ({"durations": {"F": 0, "I": 1, "W": 1}}, "profiles[0].forward: got 0.0,"),
        ({"durations": {"Q": 1}}, "durations.Q"),
        ({"stage_bytes": [1, 2, 3]}, "stage_bytes: got 3,"),
        ({"stage_bytes": [1, -2]}, "stage_bytes.1: got -2"),
        ({"room": {**ROOM, "beside": [1, -1]}}, "room.beside.1: got -1"),
        ({"room": ROOM}, 'room: got "another job\'s", expected that of 2 stages and 0 layers'),
        ({"extra": 1}, "extra: got 1,"),
        ({"memory": "bytes"}, "capacity_bytes: got None,"),
        ({"profile": {**PROFILE, "stages": 3}}, "profile.stages: got 3,"),
        ({"profile": {**PROFILE, "transfers": [1, 1]}}, "transfers: got 2,"),
        ({"profile": {**PROFILE, "profiles": [STAGE]}}, "profiles: got 1,"),
        ({"profile": {**PROFILE, "profiles": [{**STAGE, "forward": 0}, STAGE]}}, "profiles[0].forward: got 0"),
        ({"profile": {**PROFILE, "transfers": [10**400]}}, "profile.transfers.0: got 1000"),
        ({"profile": {**PROFILE, "profiles": [{**STAGE, "forwards": 1}, STAGE]}}, "forwards: got 1,"),
        ({"profile": {**PROFILE, "speeds": {"W7_0": 0.5}}}, "speeds: got 'W7_0',"),
        ({"profile": PROFILE, "durations": {"F": 1}}, "durations: got {'F': 1.0},"),
        (
            {
                "profile": {**PROFILE, "profiles": [{**STAGE, "weight_bytes": 9}] * 2, "capacity_bytes": 8},
                "memory": "bytes",
            },
            golden("weights-and-optimizer-state-take-9"),
        ),
        ({"pipelines": 4096, "stages": 4096}, "stages: got 16777216,"),
        ({"pipelines": 64, "stages": 64, "micro_batches": 65536}, golden("expected-at-most-4-000")),
    ],
)
def test_a_job_that_is_none(server: ConsoleServer, change: dict[str, Any], detail: str) -> None:
    assert_problem(server.post("/jobs", {**SPEC, **change}), 422, "invalid", detail)


@ONE_DATABASE
def test_a_missing_field_is_named(server: ConsoleServer) -> None:
    spec = {k: v for k, v in SPEC.items() if k != "stages"}
    assert_problem(server.post("/jobs", spec), 422, "invalid", "stages: missing")


def raw(server: ConsoleServer, path: str, data: bytes, kind: str = "application/json") -> requests.Response:
    return requests.post(server.base + path, data=data, headers={"Content-Type": kind}, timeout=30)


@ONE_DATABASE
@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"', b"{" * 5000, b"NaN"])
def test_a_body_that_is_no_message(server: ConsoleServer, agents: Agents, data: bytes) -> None:
    for path in ("/jobs", agents.path("/workers"), agents.path("/heartbeats"), agents.path("/failures")):
        answer = raw(server, path, data)
        assert answer.status_code in (400, 422), (path, answer.text)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert "Traceback" not in answer.text


@ONE_DATABASE
def test_a_loss_that_is_no_number(agents: Agents) -> None:
    row = '{"iteration": 1, "loss": Infinity, "loss_hex": "inf", "seconds": 1, "generation": 1, "living": 2}'
    answer = raw(agents.server, agents.path("/iterations"), f'{{"iterations": [{row}]}}'.encode())
    assert_problem(answer, 422, "invalid", "iterations.0.loss: got inf")


@ONE_DATABASE
def test_another_content_type_is_not_taken(server: ConsoleServer) -> None:
    answer = raw(server, "/jobs", json.dumps(SPEC).encode(), "text/plain")
    assert_problem(answer, 422, "invalid", "Content-Type: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/api/v1/nothing", 404, "not_found"),
        ("GET", "/api/v2/jobs", 404, "not_found"),
        ("POST", "/api", 404, "not_found"),
        ("GET", "/api/v1/jobs/line%0Abreak", 404, "not_found"),
        ("POST", "/api/v1/jobs/line%0Abreak/pause", 404, "not_found"),
        ("GET", "/api/v1/jobs/%00", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none/deployment", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none/commands", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none/events", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none/generations", 404, "unknown_job"),
        ("GET", "/api/v1/jobs/none/plans/x", 404, "unknown_job"),
        ("DELETE", "/api/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/api/v1/jobs/none/events?limit=0", 422, "invalid"),
        ("GET", "/api/v1/jobs/none/events?after=-1", 422, "invalid"),
        ("GET", "/api/v1/jobs/none/deployment?wait=1e9", 422, "invalid"),
        ("GET", "/elsewhere", 404, "not_found"),
    ],
)
def test_an_address_that_is_none(server: ConsoleServer, method: str, path: str, status: int, code: str) -> None:
    assert_problem(requests.request(method, server.root + path, timeout=30), status, code, "")


@ONE_DATABASE
def test_a_refused_method_names_all_that_the_path_takes(server: ConsoleServer) -> None:
    paths: dict[str, dict[str, Any]] = server.get("/openapi.json").json()["paths"]
    expected = {f"/api/v1{path}": {method.upper() for method in taken} for path, taken in paths.items()}
    expected |= {path: {"GET", "HEAD"} for path in ("/healthz", "/readyz", "/metrics", "/api/v1/docs")}
    assert expected["/api/v1/jobs"] == {"GET", "POST"}
    with requests.Session() as session:
        for path, methods in expected.items():
            answer = session.request("PATCH", server.root + path, timeout=60)
            assert_problem(answer, 405, "method_not_allowed", "method: got PATCH, expected one that")
            assert answer.headers["Allow"] == ", ".join(sorted(methods)), path


def test_a_worker_outside_the_grid(agents: Agents) -> None:
    ended = {"worker": "W9_9", "incarnation": "a", "cause": "exit", "reporter": "launcher"}
    (refused,) = agents.server.post(agents.path("/failures"), {"failures": [ended]}).json()["refused"]
    assert (refused["index"], refused["worker"], refused["code"]) == (0, "W9_9", "unknown_worker")


def test_a_stranger_that_registers_keeps_nobody_out(agents: Agents) -> None:
    process = {"incarnation": "a", "host": "h", "pid": 1}
    came = {"registrations": [{**process, "worker": name} for name in ("W0_0", "W9_9", "W0_1")]}
    for _ in range(2):  # the first answer may be lost
        answer = agents.server.post(agents.path("/workers"), came).json()
        refused = [(r["index"], r["worker"], r["code"]) for r in answer["refused"]]
        assert (refused, answer["taken"]) == ([(1, "W9_9", "unknown_worker")], 2)
    workers = {w["name"]: w for w in agents.server.get(agents.path("/workers")).json()["workers"]}
    assert [name for name, worker in workers.items() if worker["state"] == "joining"] == ["W0_0", "W0_1"]
    alone = agents.server.post(agents.path("/workers"), {**process, "worker": "W0_2"})
    assert_problem(alone, 422, "invalid", "registrations: missing")


def test_a_heartbeat_of_a_stranger(agents: Agents) -> None:
    beat = {"worker": "W9_9", "incarnation": "a", "seq": 1, "generation": 0, "iteration": 0, "phase": "starting"}
    known = {**beat, "worker": "W0_0"}
    ack = {"incarnation": "a", "generation": 1, "state": "adopted"}
    for path, batch in (
        ("/heartbeats", {"heartbeats": [beat, known]}),
        ("/acknowledgements", {"acknowledgements": [{**ack, "worker": "W9_9"}, {**ack, "worker": "W0_0"}]}),
    ):
        answer = agents.server.post(agents.path(path), batch).json()
        codes = [(r["index"], r["worker"], r["code"]) for r in answer["refused"]]
        assert (codes, answer["taken"]) == ([(0, "W9_9", "unknown_worker"), (1, "W0_0", "fenced")], 0)
        assert_problem(agents.server.post(f"/jobs/none{path}", batch), 404, "unknown_job", "'none'")


@ONE_DATABASE
def test_bodies_have_limits(agents: Agents) -> None:
    server = agents.server
    assert_problem(raw(server, agents.path("/finish"), b" " * (64 * 1024 + 1)), 413, "too_large", "65,536 bytes")
    assert raw(server, agents.path("/finish"), b" " * (64 * 1024)).status_code == 422
    assert_problem(raw(server, "/jobs", b" " * (2 * 1024 * 1024 + 1)), 413, "too_large", "2,097,152 bytes")
    assert_problem(
        raw(server, "/measured-by-nobody/measured", b" " * (4 * 1024 * 1024 + 1)), 413, "too_large", "4,194,304"
    )

    def chunks() -> Any:
        for _ in range(80):
            yield b" " * 1024

    # Without a Content-Length the limit is found while reading.
    answer = requests.post(server.base + agents.path("/finish"), data=chunks(), timeout=30)
    assert_problem(answer, 413, "too_large", "65,536 bytes")


def test_a_job_is_created_once_per_key(server: ConsoleServer) -> None:
    headers = {"Idempotency-Key": "once"}
    first, again = (server.post("/jobs", SPEC, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.json()["heartbeat_seconds"] == 1.0
    other = server.post("/jobs", {**SPEC, "name": "another"}, headers=headers)
    assert_problem(other, 409, "idempotency_conflict", "Idempotency-Key: 'once' was used for another job")
    assert server.post("/jobs", SPEC).json()["job_id"] != first.json()["job_id"]


@ONE_DATABASE
def test_no_operation_takes_a_query_parameter_that_it_does_not_know_or_one_twice(server: ConsoleServer) -> None:
    document = server.get("/openapi.json").json()
    asked = {**SPEC, "pipelines": 2}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = {"json": asked} if "requestBody" in operation and "json" in str(operation["requestBody"]) else {}
            address = f"{server.base}{path.format_map(_Anything())}"
            answer = server.session.request(method, f"{address}?misspelt=1", **body)
            refused = answer.status_code == 422 and answer.json()["detail"].startswith("query: got 'misspelt=1'")
            assert refused or (answer.json()["code"] == "invalid" and body), (method, path, answer.text)
    assert_problem(server.get("/jobs?limit=1&limit=2"), 422, "invalid", "query: got 'limit=2', expected it once")
    assert_problem(server.get("/jobs?limits=1"), 422, "invalid", "limit")


class _Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "1"


@ONE_DATABASE
@pytest.mark.parametrize("value", ["1_0", "+5", "%2B5", "5.0", "1e1", "%20", "5%20", "05", "%D9%A1", "", "true", "-"])
def test_a_number_in_a_query_is_written_as_in_json(server: ConsoleServer, value: str) -> None:
    answer = requests.get(f"{server.base}/jobs?limit={value}", timeout=30)
    assert_problem(answer, 422, "invalid", "limit: got ")


@ONE_DATABASE
@pytest.mark.parametrize(
    ("path", "field"),
    [("deployment?wait=1_0", "wait"), ("deployment?wait=nan", "wait"), ("measured?watch=yes", "watch")],
)
def test_other_values_of_a_query_too(server: ConsoleServer, agents: Agents, path: str, field: str) -> None:
    answer = requests.get(f"{server.base}/jobs/{agents.job_id}/{path}", timeout=30)
    assert_problem(answer, 422, "invalid", f"{field}: got ")


@pytest.mark.parametrize("text", ["", "no base64", "AAAA", "\ud800", None])
def test_an_interim_plan_is_a_packed_plan(server: ConsoleServer, agents: Agents, text: str | None) -> None:
    message = {"generation": 1, "plan": text}
    answer = requests.post(f"{server.base}/jobs/{agents.job_id}/interim", json=message, timeout=30)
    assert_problem(answer, 422, "invalid", "" if text == "\ud800" else "plan")


def test_an_interim_plan_is_no_larger_than_the_plan_of_a_large_job(server: ConsoleServer, agents: Agents) -> None:
    """Of 2,048 workers with speeds of their own, 40 of them lost, it has 126,000 characters."""
    for size, status in ((3 << 20, 422), (5 << 20, 413)):
        message = {"generation": 1, "plan": "A" * size}
        answer = requests.post(f"{server.base}/jobs/{agents.job_id}/interim", json=message, timeout=30)
        assert answer.status_code == status


def test_the_api_describes_itself(server: ConsoleServer) -> None:
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert {"/jobs", "/jobs/{job_id}/heartbeats", "/jobs/{job_id}/deployment"} <= set(document["paths"])
    assert requests.get(f"{server.root}/readyz", timeout=10).json() == {"status": "ready"}
