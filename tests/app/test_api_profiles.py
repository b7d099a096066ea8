"""Profiles under a name, over HTTP: kept, listed, used for jobs, plans and catalogs, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere

from openrecycle.app.plans import profiles
from openrecycle.app.server import create_routes
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import StageDoc, job_doc
from openrecycle.planner.profiles import job_on, load_profile, shipped
from tests.golden import golden

pytestmark = pytest.mark.processes

API = "/api/v1"
UNEVEN = job_doc(Job.uniform(2, 3, 4, durations={"F": 2, "I": 3, "W": 1, "transfer": 0.5})).model_dump(mode="json")
MEASURED = load_profile(shipped()[0]).model_dump(mode="json")
SPEC = {"name": "n", "pipelines": 4, "stages": 3, "micro_batches": 8, "iterations": 5}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    here = ConsoleHere(tmp_path_factory.mktemp("profiles"))
    client = TestClient(Starlette(routes=create_routes(here.console)), raise_server_exceptions=False)
    assert client.put(f"{API}/profiles/uneven", json=UNEVEN, headers={"X-Actor": "ada"}).status_code == 201
    yield client
    here.close()


def refused(answer: Any, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]


def test_kept_listed_replaced_and_deleted(client: TestClient) -> None:
    path = f"{API}/profiles/llama-8b_v1.2+lora"
    first = client.put(path, json=MEASURED)
    assert (first.status_code, first.json()["kind"], first.json()["stages"]) == (201, "measured", None)
    again = client.put(path, json=UNEVEN, headers={"X-Actor": "eve"})
    assert (again.status_code, again.json()["kind"], again.json()["stages"]) == (200, "job", 3)
    assert (again.json()["saved_by"], again.json()["source"]) == ("eve", "saved")
    assert again.json()["created_at"] == first.json()["created_at"]
    found = client.get(path).json()
    assert found["document"] == found["job"] == UNEVEN
    names = [row["name"] for row in client.get(f"{API}/profiles").json()["profiles"]]
    assert names == sorted([*shipped(), "llama-8b_v1.2+lora", "uneven"])
    page = client.get(f"{API}/profiles", params={"limit": 2}).json()
    rest = client.get(f"{API}/profiles", params={"after": page["next"]}).json()
    assert [row["name"] for row in page["profiles"] + rest["profiles"]] == names and rest["next"] is None
    assert client.delete(path).status_code == 204
    for answer in (client.get(path), client.delete(path)):
        refused(answer, 404, "profile: got 'llama-8b_v1.2+lora', expected the name of one")
    audit = client.get(f"{API}/audit").json()["audit"]
    told = [(row["actor"], row["action"], row["detail"]) for row in audit if row["target"].startswith("llama")]
    assert told == [("API", "save profile", ""), ("eve", "save profile", "replaced"), ("API", "delete profile", "")]


def test_a_job_takes_its_op_times_by_name(client: TestClient) -> None:
    asked = {**SPEC, "profile_name": "uneven"}
    made = client.post(f"{API}/jobs", json=asked, headers={"Idempotency-Key": "once"})
    assert made.status_code == 201
    spec = client.get(f"{API}/jobs/{made.json()['job_id']}").json()["spec"]
    assert spec["profile"] == {**UNEVEN, "pipelines": 4, "micro_batches": 8} and "profile_name" not in spec
    again = client.post(f"{API}/jobs", json=asked, headers={"Idempotency-Key": "once"})
    assert (again.status_code, again.json()) == (200, made.json())
    measured = client.post(f"{API}/jobs", json={**SPEC, "profile_name": shipped()[0]}).json()
    spec = client.get(f"{API}/jobs/{measured['job_id']}").json()["spec"]
    assert (spec["profile"]["time_unit"], len(spec["profile"]["profiles"])) == ("ms", 3)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"profile_name": "none"}, 404, "profile_name: got 'none'"),
        ({"profile_name": "../x"}, 422, "profile_name: got '../x'"),
        ({"profile_name": "uneven", "stages": 4}, 422, "stages: got 4,"),
        ({"profile_name": "uneven", "profile": UNEVEN}, 422, "profile, profile_name: got both"),
        ({"profile_name": "uneven", "durations": {"F": 1}}, 422, "durations: got"),
        ({"profile_name": shipped()[0], "stages": 999}, 422, "stages: got 999,"),
    ],
)
def test_a_job_without_such_a_profile(client: TestClient, change: dict[str, Any], status: int, words: str) -> None:
    answer = client.post(f"{API}/jobs", json={**SPEC, **change})
    refused(answer, status, words)
    assert answer.json()["field"] == words.partition(":")[0]


def test_a_plan_takes_its_op_times_by_name(client: TestClient) -> None:
    asked = {"kind": "plan", "profile_name": "uneven", "pipelines": 3, "failed": ["W2_1"], "solver": "list"}
    by_name = client.post(f"{API}/solves", json=asked)
    assert by_name.status_code == 202
    job = {**UNEVEN, "pipelines": 3}
    whole = client.post(f"{API}/solves", json={"kind": "plan", "job": job, "failed": ["W2_1"], "solver": "list"})
    assert whole.json()["id"] == by_name.json()["id"], "it is the same question"
    asked = {"kind": "migrations", "profile_name": "uneven"}
    assert client.post(f"{API}/solves", json=asked).status_code == 202
    body = {"kind": "plan", "profile_name": "none"}
    refused(client.post(f"{API}/solves", json=body), 404, "profile_name: got 'none'")
    for body in ({}, {"job": UNEVEN, "profile_name": "uneven"}):
        refused(client.post(f"{API}/solves", json={"kind": "plan", **body}), 422, "expected one of them")
    body = {"kind": "plan", "job": UNEVEN, "pipelines": 3}
    refused(client.post(f"{API}/solves", json=body), 422, "expected none of them beside job")


@pytest.mark.parametrize(
    ("name", "document", "status", "words"),
    [
        (shipped()[0], UNEVEN, 409, golden("comes-with-the-planner-choose")),
        (".hidden", UNEVEN, 422, "name: got '.hidden'"),
        ("x" * 81, UNEVEN, 422, "name: got 'xxx"),
        ("x", {**UNEVEN, "transfers": [1]}, 422, "transfers: got 1,"),
        ("x", {**UNEVEN, "surprise": 1}, 422, "surprise: got 1,"),
        ("x", {"profile_version": 1}, 422, "model: missing,"),
        ("x", [], 422, "expected an object"),
        ("x", {**UNEVEN, "pipelines": 10**9}, 422, "pipelines"),
        ("x", {**MEASURED, "reductions": {**MEASURED["reductions"], "bytes": 10**400}}, 422, "reductions.bytes"),
    ],
)
def test_what_is_no_profile(client: TestClient, name: str, document: Any, status: int, words: str) -> None:
    refused(client.put(f"{API}/profiles/{name}", json=document), status, words)


def test_a_shipped_one_stays(client: TestClient) -> None:
    refused(client.delete(f"{API}/profiles/{shipped()[0]}"), 409, "comes with the planner, and stays")
    found = client.get(f"{API}/profiles/{shipped()[0]}").json()
    assert (found["source"], found["saved_by"], found["document"]["profile_version"]) == ("shipped", "", 1)


def test_how_much_is_kept_is_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MOST", 1)
    refused(client.put(f"{API}/profiles/second", json=UNEVEN), 409, "1 are kept already")
    assert client.put(f"{API}/profiles/uneven", json=UNEVEN).status_code == 200
    monkeypatch.setattr(profiles, "MAX_DOCUMENT", 100)
    refused(client.put(f"{API}/profiles/uneven", json=UNEVEN), 422, "expected at most 100")


def test_speeds_and_reductions_are_those_of_the_grid() -> None:
    doc = job_doc(
        Job.uniform(3, 2, 2, durations={"F": 1}),
    ).model_copy(update={"speeds": {"W0_0": 0.5, "W2_1": 0.5}})
    assert job_on(doc, pipelines=2).speeds == ((Worker(0, 0), 0.5),)
    assert job_on(doc).speeds == ((Worker(0, 0), 0.5), (Worker(2, 1), 0.5))
    stages = tuple(
        StageDoc(forward=1, input_backward=1, weight_backward=1, optimizer=1, reductions=(0, 5, 9)) for _ in range(2)
    )
    assert job_on(doc.model_copy(update={"profiles": stages}), pipelines=2).profiles[0].reductions == (0, 5)
