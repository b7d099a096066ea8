"""Catalogs over HTTP: the whole life of one, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.app.server import create_routes
from openrecycle.planner.check import check
from openrecycle.planner.plans.plan import Plan
from tests.conftest import examples

pytestmark = pytest.mark.processes

API = "/api/v1"
SMALL = {"name": "small", "pipelines": 2, "stages": 2, "micro_batches": 3, "iterations": 9}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    made = ConsoleHere(tmp_path_factory.mktemp("api"))
    made.console.plans.ahead.plans_ahead = False
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(here: ConsoleHere) -> TestClient:
    return TestClient(Starlette(routes=create_routes(here.console)), raise_server_exceptions=False)


def job_of(client: TestClient, **changes: Any) -> str:
    """A job for which nothing is planned ahead but what a test asks for."""
    made: str = client.post(f"{API}/jobs", json=SMALL | changes).json()["job_id"]
    return made


def filled(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(f"{API}/catalogs", json=body)
    assert answer.status_code == 202, answer.text
    made: dict[str, Any] = answer.json()

    def over() -> bool:
        made.update(client.get(f"{API}/catalogs/{made['fingerprint']}/filling").json())
        return made["state"] != "running"

    until(over, "it is filled")
    return made


def test_the_life_of_a_catalog(client: TestClient) -> None:
    made = filled(client, {"job_id": job_of(client), "tolerance": 1})
    assert (made["state"], made["planned"], made["done"], made["total"], made["why"]) == ("done", 3, 3, 3, "")
    fingerprint = made["fingerprint"]
    (line,) = (c for c in client.get(f"{API}/catalogs").json()["catalogs"] if c["fingerprint"] == fingerprint)
    assert (line["plans"], line["failures"], line["current"]) == (3, 1, True)
    detail = client.get(f"{API}/catalogs/{fingerprint}", params={"tolerance": 1}).json()
    assert (detail["wanted"], detail["there"], detail["covered"], detail["by_pattern"]) == (3, 3, 1, True)
    assert client.get(f"{API}/catalogs/{fingerprint}").json()["tolerance"] == 1, "the console's own"
    # More than the grid can lose is cut to what it can.
    assert client.get(f"{API}/catalogs/{fingerprint}", params={"tolerance": 1000}).json()["tolerance"] == 2
    for count in detail["lines"]:
        for row in count["plans"]:
            text = client.get(f"{API}/catalogs/{fingerprint}/plans/{row['name']}").text
            plan = Plan.from_json(text)
            assert check(plan) == []
            assert (plan.metrics.period, list(plan.failed)) == (row["period"], row["failed"])
    answer = client.get(f"{API}/catalogs/{fingerprint}/export")
    assert answer.headers["Content-Type"] == "application/zip"
    assert f"catalog-{fingerprint[:12]}.zip" in answer.headers["Content-Disposition"]
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert json.loads(archive.read(f"{fingerprint}/catalog.json"))
        assert len(archive.namelist()) == 4
    assert client.delete(f"{API}/catalogs/{fingerprint}").status_code == 204
    assert client.get(f"{API}/catalogs/{fingerprint}").status_code == 404
    assert client.get(f"{API}/catalogs/{fingerprint}/filling").status_code == 404


def test_a_jobs_catalog(here: ConsoleHere, client: TestClient) -> None:
    job = JobHere(here.console, "has a catalog")
    assert client.get(f"{API}/jobs/{job.job_id}/catalog").json()["covered"] is None
    assert filled(client, {"job_id": job.job_id, "tolerance": 1})["planned"] == 5
    made = filled(client, {"job_id": job.job_id, "tolerance": 2})
    assert made["planned"] == 16 and made["total"] == 21
    detail = client.get(f"{API}/jobs/{job.job_id}/catalog", params={"tolerance": 2}).json()
    assert detail["fingerprint"] == made["fingerprint"] and detail["covered"] == 2


def test_cancelled_by_its_address(client: TestClient) -> None:
    job = job_of(client, pipelines=4, stages=4)
    body = {"job_id": job, "tolerance": 3, "solver": "cp-sat", "time_limit": 60}
    fingerprint = client.post(f"{API}/catalogs", json=body).json()["fingerprint"]
    answer = client.delete(f"{API}/catalogs/{fingerprint}/filling")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    assert client.post(f"{API}/catalogs", json=body | {"tolerance": 2}).status_code in (202, 409)
    client.delete(f"{API}/catalogs/{fingerprint}/filling")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tolerance": 3}, "tolerance: got 3,"),
        ({"tolerance": 1025}, "tolerance: got 1025"),
        ({"time_limit": 0}, "time_limit: got 0"),
        ({"job_id": 7}, "job_id: got 7"),
        ({"solver": "oracle"}, "solver: got 'oracle'"),
        ({"colour": "red"}, "colour: got 'red',"),
    ],
)
def test_what_is_refused_names_the_field(client: TestClient, body: dict[str, Any], words: str) -> None:
    answer = client.post(f"{API}/catalogs", json={"job_id": job_of(client)} | body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "tail", "status"),
    [
        ("GET", "0" * 32, 404),
        ("GET", "no-fingerprint", 422),
        ("DELETE", "0" * 32, 404),
        ("GET", f"{'0' * 32}/export", 404),
        ("GET", f"{'0' * 32}/plans/000000-{'0' * 24}", 404),
        ("GET", f"{'0' * 32}/plans/..%2F", 404),
        ("DELETE", f"{'0' * 32}/filling", 404),
        ("PUT", "0" * 32, 405),
    ],
)
def test_addresses_without_a_catalog(client: TestClient, method: str, tail: str, status: int) -> None:
    answer = client.request(method, f"{API}/catalogs/{tail}")
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]


LARGE = {"name": "n", "pipelines": 1, "stages": 2048, "micro_batches": 8, "iterations": 5}


def test_a_large_jobs_catalog_is_answered_at_once(client: TestClient) -> None:
    address = f"{API}/jobs/{client.post(f'{API}/jobs', json=LARGE).json()['job_id']}/catalog"
    answer = client.get(address)
    assert answer.status_code == 200
    assert (answer.json()["wanted"], answer.json()["tolerance"], answer.json()["reference"]) == (1, 0, None)


def test_a_job_that_is_not_there(client: TestClient) -> None:
    assert client.post(f"{API}/catalogs", json={"job_id": "nobody"}).status_code == 404
    assert client.get(f"{API}/jobs/nobody/catalog").status_code == 404


number = st.one_of(st.integers(-2, 12), st.sampled_from([2**53, 2**63, 10**400, -(2**70)]), st.floats(), st.none())
junk = st.one_of(st.none(), st.booleans(), number, st.text(max_size=40), st.lists(number, max_size=2))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "tolerance": number,
    "time_limit": number,
    "solver": st.sampled_from(["list", "cp-sat", "milp", "auto", "oracle"]),
    "extra": junk,
}


def test_no_body_breaks_it(here: ConsoleHere, client: TestClient) -> None:
    # As many are filled as there may be, so that what is right is refused as well, without a process.
    question = {"tolerance": 3, "solver": "cp-sat", "time_limit": 600}
    jobs = [job_of(client, pipelines=4, stages=4, micro_batches=count) for count in (21, 22)]
    small, busy = job_of(client), []

    def begun(job: str) -> bool:
        """What another test has cancelled may not have ended yet."""
        answer = client.post(f"{API}/catalogs", json={**question, "job_id": job})
        busy.append(answer.json().get("fingerprint"))
        return answer.status_code == 202

    for job in jobs:
        until(partial(begun, job), "there is room for another")
    seen: set[int] = set()

    @examples(240, suppress_health_check=list(HealthCheck))
    @example(body={"job_id": "JOB"})
    @example(body={"job_id": "nobody"})
    @given(body=st.one_of(junk, st.fixed_dictionaries({"job_id": st.one_of(st.just("JOB"), junk)}, optional=FIELDS)))
    def send(body: Any) -> None:
        if isinstance(body, dict) and body.get("job_id") == "JOB":
            body["job_id"] = small
        content = json.dumps(body).encode()
        answer = client.post(f"{API}/catalogs", content=content, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json()["detail"]
        seen.add(answer.status_code)

    try:
        send()
    finally:
        for fingerprint in filter(None, busy):
            client.delete(f"{API}/catalogs/{fingerprint}/filling")
        until(here.console.catalogs.idle, "they are gone")
    assert seen == {404, 409, 422}, "some of them were right"


def test_the_document_names_what_a_catalog_and_a_solve_may_be_asked_for(client: TestClient) -> None:
    """What their fields refuse whatever the others are is in the published schema."""
    kinds = client.get(f"{API}/openapi.json").json()["components"]["schemas"]
    for name in ("PlanWanted", "MigrationsWanted"):
        assert kinds[name]["properties"]["memory"]["pattern"]
    for name in ("CatalogAsked", "PlanWanted"):
        assert kinds[name]["properties"]["solver"]["enum"] == ["auto", "list", "cp-sat", "milp"]
    assert "kind" in kinds["PlanWanted"]["required"] and "kind" in kinds["MigrationsWanted"]["required"]
    assert kinds["StageDoc"]["properties"]["forward"]["minimum"] == 0
    assert kinds["JobDoc"]["properties"]["stages"]["minimum"] == 1
    assert "0x" in kinds["Iteration"]["properties"]["loss_hex"]["pattern"]
    for path, wrong in (("/solves", {"job": {}}), ("/catalogs", {"solver": "me"})):
        assert client.post(f"{API}{path}", json=wrong).status_code == 422
