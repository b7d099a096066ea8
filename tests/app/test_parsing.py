"""Bodies of some size are read beside the event loop, and what a wrong one costs has a bound."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere

from openrecycle.app.api import models
from openrecycle.app.plans.files import answer, of_file
from openrecycle.app.runtime import errors
from openrecycle.app.runtime.errors import MOST_CONTAINERS, MOST_FIELDS, MOST_FIELDS_OF_ONE, ConsoleError, bounded
from openrecycle.app.server import create_api, create_routes
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import JobDoc, job_doc
from tests.golden import golden

pytestmark = pytest.mark.processes

API = "/api/v1"
SPEC = {"name": "n", "pipelines": 1, "stages": 200, "micro_batches": 2, "iterations": 5}
DOCUMENT = job_doc(Job.uniform(1, 200, 2)).model_dump(mode="json")
BEAT = {"worker": "W0_0", "incarnation": "a", "seq": 1, "generation": 0, "iteration": 0, "phase": "starting"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    here = ConsoleHere(tmp_path_factory.mktemp("parsing"))
    yield here
    here.close()


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each document that is read: whether an event loop waited meanwhile."""
    seen: list[bool] = []
    original = errors.orjson.loads

    def loads(body: bytes) -> Any:
        try:
            asyncio.get_running_loop()
            seen.append(True)
        except RuntimeError:
            seen.append(False)
        assert threading.current_thread().name.startswith("bodies")
        return original(body)

    monkeypatch.setattr(errors, "orjson", type("Spy", (), {"loads": loads, "JSONDecodeError": ValueError}))
    return seen


@pytest.fixture
def client(home: ConsoleHere, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """With a loop on which no JSON of more than some kilobytes is read."""
    original = json.loads

    def loads(text: str | bytes, *args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return original(text, *args, **kwargs)
        assert len(text) <= models.SHORT, "read on the loop"
        return original(text, *args, **kwargs)

    monkeypatch.setattr(json, "loads", loads)
    return TestClient(Starlette(routes=create_routes(home.console)), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def routes(home: ConsoleHere) -> list[APIRoute]:
    """All that take a body."""

    def below(routes: Any) -> Iterator[APIRoute]:
        for route in routes:
            if isinstance(route, APIRoute):
                yield route
            elif router := getattr(route, "original_router", None):  # of one that was included
                yield from below(router.routes)

    return [route for route in below(create_api(home.console).routes) if route.body_field is not None]


def test_every_route_with_a_body_reads_large_ones_beside_the_loop(routes: list[APIRoute]) -> None:
    assert len(routes) > 20
    assert [r.path for r in routes if not isinstance(r, models.ReadBeside)] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/jobs", {**SPEC, "profile": DOCUMENT}, 201, "job_id"),
        ("POST", "/solves", {"kind": "plan", "job": DOCUMENT, "memory": "lots"}, 422, "memory: got 'lots'"),
        (
            "POST",
            "/solves",
            {"kind": "migrations", "job": DOCUMENT, "stages": 2},
            422,
            "pipelines, stages, micro_batches: ",
        ),
        ("PUT", "/profiles/long", DOCUMENT, 201, '"stages":200'),
        ("POST", "/jobs/none/heartbeats", {"heartbeats": [BEAT] * 200}, 404, "unknown_job"),
        (
            "POST",
            "/jobs/none/heartbeats",
            {"heartbeats": [{**BEAT, "more": "x" * 9_000}]},
            422,
            "heartbeats.0.more: got 'xxx",
        ),
        ("POST", "/jobs", {**SPEC, "more": "x" * 9_000}, 422, "more: got 'xxx"),
    ],
)
def test_a_long_body_is_answered_as_a_short_one(
    client: TestClient, read_by: list[bool], method: str, path: str, body: Any, status: int, words: str
) -> None:
    data = json.dumps(body)
    assert len(data) > models.SHORT
    for kind in ("application/json", "application/vnd.some+json; charset=utf-8"):
        got = client.request(method, API + path, content=data, headers={"Content-Type": kind})
        assert got.status_code in (status, 200) and words in got.text, got.text  # 200: the same profile again
    assert read_by == [False, False]


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/jobs", {**SPEC, "profile": {**DOCUMENT, "profiles": [{}] * 30_000}}, "profile.profiles.0.forward: missing"),
        ("/jobs", {**SPEC, "profile": {**DOCUMENT, "transfers": [-1] * 300_000}}, "profile.transfers.0: got -1"),
        ("/jobs", {**SPEC, "profile": {**DOCUMENT, "backward_transfers": ["x"] * 300_000}}, "backward_transfers.0"),
        ("/jobs", {**SPEC, "profile": {**DOCUMENT, "capacity_bytes": [-1] * 300_000}}, "profile.capacity_bytes"),
        ("/solves", {"kind": "plan", "job": DOCUMENT, "failed": ["x"] * 300_000}, "plan.failed.0: got 'x'"),
        ("/jobs/{job_id}/heartbeats", {"heartbeats": [{}] * 8_192}, "heartbeats.0.worker: missing"),
        ("/jobs/{job_id}/heartbeats", {"heartbeats": [BEAT] * 8_192, "x": 1}, "x: got 1,"),
        ("/jobs/{job_id}/measured", {"starts_us": [-1] * 99_999}, "kinds: missing"),
        ("/jobs/{job_id}/iterations", {"iterations": [{}] * 1_000}, "iterations.0.iteration: missing"),
        ("/jobs/{job_id}/choice", {"name": "x", "failed": ["x"] * 16_000}, "failed.0: got 'x'"),
        ("/jobs/{job_id}/events/acknowledge", {"seqs": [0] * 1_000}, "seqs.0: got 0"),
    ],
)
def test_of_many_wrong_entries_the_first_is_said(routes: list[APIRoute], path: str, body: Any, detail: str) -> None:
    field: Any = next(route.body_field for route in routes if route.path == path)
    with pytest.raises(ConsoleError) as refused:
        models.read(field, json.dumps(body).encode())
    assert refused.value.status == 422 and detail in refused.value.detail
    more = refused.value.detail.rpartition("; and ")[2].split()[0]
    assert not more.isdigit() or int(more) < 20, refused.value.detail


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"[" * (MOST_CONTAINERS + 1), "the body: got 65,537 objects"),
        (b"[" + b"{}," * MOST_CONTAINERS, "the body: got 65,537 objects"),
        (b'{"a":1,' * (MOST_FIELDS + 1), "the body: got 131,073 objects"),
        (b'"' + b":" * (MOST_FIELDS + 1) + b'"', "the body: got 131,073 fields,"),
        (b"[" * 5_000, golden("the-body-is-not-json")),
        (b"\xff" * 9_000, golden("the-body-is-not-json")),
        (
            json.dumps({"x": [1, {"deep": {str(i): i for i in range(MOST_FIELDS_OF_ONE + 1)}}]}).encode(),
            "with 16,385 fields,",
        ),
        (
            json.dumps({"speeds": {f"W{i}_0": 1 for i in range(1_000)} | {"X" * 200: 1}}).encode(),
            f"speeds: got {'X' * 80!r} among 1,001 fields,",
        ),
    ],
)
def test_what_no_message_has_is_refused_before_it_is_looked_at(body: bytes, detail: str) -> None:
    with pytest.raises(ConsoleError) as refused:
        errors.bounded(body)
    assert refused.value.status == 422 and detail in refused.value.detail


def test_what_is_large_and_right_is_taken() -> None:
    for right in ({"heartbeats": [{**BEAT, "op_milliseconds": dict.fromkeys("FIWBO", 1.5)}] * 8_192}, [["x"]] * 9_999):
        assert errors.bounded(json.dumps(right).encode()) == right
    speeds = {"speeds": {f"W{i}_0": 0.5 for i in range(MOST_FIELDS_OF_ONE)}}
    assert errors.bounded(json.dumps(speeds).encode()) == speeds


@pytest.mark.parametrize("value", [-1, "fast"])
def test_of_thousands_of_wrong_speeds_the_first_are_said(value: object) -> None:
    job = job_doc(Job.uniform(128, 128, 1)).model_dump(mode="json")
    names = [f"W{p}_{s}" for p in range(128) for s in range(128)]
    assert len(JobDoc.model_validate({**job, "speeds": dict.fromkeys(names, 0.5)}).speeds) == MOST_FIELDS_OF_ONE
    with pytest.raises(ValidationError) as refused:
        JobDoc.model_validate({**job, "speeds": dict.fromkeys(names, value)})
    assert refused.value.error_count() == 256


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (
            {"workers": {str(i): 1 for i in range(20_000)}},
            golden("workers-got-an-object-with"),
        ),
        ({"job": {"profiles": [{}] * 150_000}}, "the body: got 150,004 objects"),
    ],
)
def test_a_plan_with_a_million_wrong_things_is_refused_for_their_number(plan: Any, wrong: str) -> None:
    with pytest.raises(ConsoleError) as refused:
        answer(json.dumps({"name": "x", "plan": plan}).encode())
    assert refused.value.detail.startswith(wrong)


@pytest.mark.parametrize(
    ("document", "place"),
    [(b'{"schema_version" 1}', "line 1 column 19"), (b'{"job":\n  nothing}', "line 2 column 3"), (b'{"job": 3', "")],
)
def test_what_is_wrong_with_a_file_is_said_of_the_file(document: bytes, place: str) -> None:
    """It is read in a body with its name."""
    before = b'{"name":"a plan","plan":'
    with pytest.raises(ConsoleError) as wrong:
        bounded(before + document + b"}")
    said = of_file(wrong.value, len(before))
    assert said.startswith(golden("the-file-is-not-json")) and said.endswith(place)
    assert of_file(ConsoleError(422, "invalid", "missing", field="job"), len(before)) == "job: missing"
