"""Catalogs over HTTP: the whole life of one, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.app.server import create_routes
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import Plan, job_doc
from tests.conftest import examples
from tests.golden import golden

pytestmark = pytest.mark.processes

API = "/api/v1"
SMALL = {"pipelines": 2, "stages": 2, "micro_batches": 3, "tolerance": 1}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    made = ConsoleHere(tmp_path_factory.mktemp("api"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(here: ConsoleHere) -> TestClient:
    return TestClient(Starlette(routes=create_routes(here.console)), raise_server_exceptions=False)


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
    made = filled(client, SMALL)
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
    for form, entry in (("json", "index.json"), ("stored", f"{fingerprint}/catalog.json")):
        answer = client.get(f"{API}/catalogs/{fingerprint}/export", params={"format": form})
        assert answer.headers["Content-Type"] == "application/zip"
        assert f"catalog-{fingerprint[:12]}.{form}.zip" in answer.headers["Content-Disposition"]
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            assert json.loads(archive.read(entry))
            assert sum(name.count("/") for name in archive.namelist()) >= 3
    assert client.delete(f"{API}/catalogs/{fingerprint}").status_code == 204
    assert client.get(f"{API}/catalogs/{fingerprint}").status_code == 404
    assert client.get(f"{API}/catalogs/{fingerprint}/filling").status_code == 404


def test_a_jobs_catalog(here: ConsoleHere, client: TestClient) -> None:
    job = JobHere(here.console, "has a catalog")
    until(lambda: client.get(f"{API}/jobs/{job.job_id}/catalog").json()["covered"] == 1, "it is planned ahead")
    made = filled(client, {"job_id": job.job_id, "tolerance": 2})
    assert made["planned"] == 16 and made["total"] == 21
    detail = client.get(f"{API}/jobs/{job.job_id}/catalog", params={"tolerance": 2}).json()
    assert detail["fingerprint"] == made["fingerprint"] and detail["covered"] == 2


def test_cancelled_by_its_address(client: TestClient) -> None:
    body = {"pipelines": 4, "stages": 4, "tolerance": 3, "solver": "cp-sat", "time_limit": 60}
    fingerprint = client.post(f"{API}/catalogs", json=body).json()["fingerprint"]
    answer = client.delete(f"{API}/catalogs/{fingerprint}/filling")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    assert client.post(f"{API}/catalogs", json=body | {"tolerance": 2}).status_code in (202, 409)
    client.delete(f"{API}/catalogs/{fingerprint}/filling")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"pipelines": 0}, "pipelines: got 0"),
        ({"pipelines": 4096, "stages": 4096}, golden("pipelines-x-stages-got-16777216-2")),
        ({"tolerance": 9}, golden("tolerance-got-9-expected-a")),
        ({"memory": "lots"}, "memory: got 'lots'"),
        ({"solver": "oracle"}, "solver: got 'oracle'"),
        ({"durations": {"X": 1}}, "durations"),
        ({"colour": "red"}, golden("colour-got-red-expected-no")),
        ({"job": {"pipelines": -1}}, "job."),
    ],
)
def test_what_is_refused_names_the_field(client: TestClient, body: dict[str, Any], words: str) -> None:
    answer = client.post(f"{API}/catalogs", json=body)
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
        ("GET", f"{'0' * 32}/export?format=exe", 422),
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


def ended(client: TestClient, job: str) -> None:
    """Else the job's plans would be made ahead, in one of the places for fillings, for as long as that takes."""
    over = {"state": "stopped", "reason": "the test is over"}
    assert client.post(f"{API}/jobs/{job}/finish", json=over).status_code == 204


LARGE = {"name": "n", "pipelines": 1, "stages": 2048, "micro_batches": 8, "iterations": 5}


def test_a_large_jobs_catalog_is_answered_at_once(client: TestClient) -> None:
    address = f"{API}/jobs/{client.post(f'{API}/jobs', json=LARGE).json()['job_id']}/catalog"
    answer = client.get(address)
    assert answer.status_code == 200
    assert (answer.json()["wanted"], answer.json()["tolerance"], answer.json()["reference"]) == (1, 0, None)
    ended(client, address.split("/")[-2])


def test_a_job_that_is_not_there(client: TestClient) -> None:
    assert client.post(f"{API}/catalogs", json={"job_id": "nobody"}).status_code == 404
    assert client.get(f"{API}/jobs/nobody/catalog").status_code == 404


number = st.one_of(st.integers(-2, 12), st.sampled_from([2**53, 2**63, 10**400, -(2**70)]), st.floats(), st.none())
junk = st.one_of(st.none(), st.booleans(), number, st.text(max_size=40), st.lists(number, max_size=2))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "pipelines": number,
    "stages": number,
    "micro_batches": number,
    "tolerance": number,
    "time_limit": number,
    "memory": st.sampled_from(["uniform", "1", "none", "0", "999999999", "1f1b", "bytes"]),
    "technique": st.sampled_from(["staggered", "adaptive", "fault-free", "magic"]),
    "solver": st.sampled_from(["list", "cp-sat", "milp", "auto", "oracle"]),
    "durations": st.dictionaries(st.sampled_from(["F", "I", "W", "O", "transfer", "X"]), number, max_size=3),
    "time_unit": st.text(max_size=22),
    "job": junk,
    "job_id": junk,
    "extra": junk,
}


def test_no_body_breaks_it(here: ConsoleHere, client: TestClient) -> None:
    # As many are filled as there may be, so that what is right is refused as well, without a process.
    question = {"pipelines": 4, "stages": 4, "tolerance": 3, "solver": "cp-sat", "time_limit": 600}

    busy = []

    def begun(micro_batches: int) -> bool:
        """What another test has cancelled may not have ended yet."""
        answer = client.post(f"{API}/catalogs", json={**question, "micro_batches": micro_batches})
        busy.append(answer.json().get("fingerprint"))
        return answer.status_code == 202

    for number_of in (21, 22):
        until(partial(begun, number_of), "there is room for another")
    seen: set[int] = set()

    @examples(240, suppress_health_check=list(HealthCheck))
    @given(body=st.one_of(junk, st.fixed_dictionaries({}, optional=FIELDS)))
    def send(body: Any) -> None:
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
    assert seen == {409, 422}, "some of them were right"


def test_the_document_names_what_a_catalog_and_a_solve_may_be_asked_for(client: TestClient) -> None:
    """What their fields refuse whatever the others are is in the published schema."""
    kinds = client.get(f"{API}/openapi.json").json()["components"]["schemas"]
    for name in ("CatalogAsked", "PlanWanted", "MigrationsWanted"):
        fields = kinds[name]["properties"]
        assert fields["memory"]["pattern"]
        assert "migrations" in name.lower() or fields["solver"]["enum"] == ["auto", "list", "cp-sat", "milp"]
    assert "kind" in kinds["PlanWanted"]["required"] and "kind" in kinds["MigrationsWanted"]["required"]
    assert kinds["StageDoc"]["properties"]["forward"]["minimum"] == 0
    assert kinds["JobDoc"]["properties"]["stages"]["minimum"] == 1
    assert "0x" in kinds["Iteration"]["properties"]["loss_hex"]["pattern"]
    for path, wrong in (("/catalogs", {"memory": "12 GB"}), ("/solves", {"job": {}}), ("/catalogs", {"solver": "me"})):
        assert client.post(f"{API}{path}", json=wrong).status_code == 422


def test_a_memory_limit_that_no_plan_can_keep_is_refused_in_words(client: TestClient) -> None:
    job = job_doc(Job.uniform(2, 2, 2)).model_dump(mode="json")
    job["profiles"] = [stage | {"weight_bytes": 1000, "activation_bytes": 1} for stage in job["profiles"]]
    asked = {"job": job | {"capacity_bytes": 500}, "memory": "bytes", "tolerance": 1}
    answer = client.post(f"{API}/catalogs", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid"), answer.text
    assert "500" in answer.json()["detail"]
