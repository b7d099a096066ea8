"""Plans apart from any job, over HTTP: made in the background, kept, read, forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, console_refuses, until
from ui_factory import plan

from openrecycle.app.api import plans
from openrecycle.app.plans.files import Uploads, answer
from openrecycle.app.runtime.errors import BODY, MOST_LARGE, PLAN_MIB, ConsoleError, invalid
from openrecycle.app.security.guard import LARGE_BODY, BodyLimit
from openrecycle.app.server import create_routes
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem
from openrecycle.planner.plans.plan import Plan, job_doc
from openrecycle.planner.solvers.portfolio import check_effort, make_plan
from tests.golden import golden
from tests.planner.plans import with_another

pytestmark = pytest.mark.processes

API = "/api/v1"
JOB = job_doc(Job.uniform(3, 4, 6)).model_dump(mode="json")
LAYERED = job_doc(Job.uniform(3, 4, 6, layers=12)).model_dump(mode="json")
HARD = job_doc(Job.uniform(6, 6, 12, durations={"F": 1, "I": 1.3, "W": 0.7, "transfer": 0.4})).model_dump(mode="json")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    here = ConsoleHere(tmp_path_factory.mktemp("api"))
    yield TestClient(Starlette(routes=create_routes(here.console)), raise_server_exceptions=False)
    here.close()


def over(client: TestClient, solve: str) -> dict[str, Any]:
    until(lambda: client.get(f"{API}/solves/{solve}").json()["state"] in ("done", "failed"), "the solve is over")
    return client.get(f"{API}/solves/{solve}").json()  # type: ignore[no-any-return]


def refused(answer: Any, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]


def test_a_plan_is_made_kept_read_and_forgotten(client: TestClient) -> None:
    asked = client.post(
        f"{API}/solves",
        json={"kind": "plan", "job": JOB, "failed": ["W1_2"], "technique": "decoupled", "memory": "none"},
    )
    assert asked.status_code == 202
    solve = asked.json()["id"]
    assert asked.headers["Location"].endswith(solve)
    done = over(client, solve)
    assert (done["state"], done["incumbent"], done["bound"]) == ("done", 29, 29)
    assert client.get(f"{API}/solves/{solve}", params={"after": len(done["points"])}).json()["points"] == []
    assert solve in [s["id"] for s in client.get(f"{API}/solves").json()["solves"]]
    document = Plan.from_json(client.get(f"{API}/solves/{solve}/plan").content)
    assert document.fingerprint == done["plan_fingerprint"]

    kept = client.post(f"{API}/plans", json={"name": "barrier", "solve": solve})
    assert (kept.status_code, kept.json()) == (201, {"fingerprint": document.fingerprint})
    (row,) = client.get(f"{API}/plans").json()["plans"]
    assert (row["name"], row["period"], row["failed"], row["workers"]) == ("barrier", 29, ["W1_2"], 12)
    assert Plan.from_json(client.get(f"{API}/plans/{document.fingerprint}").content) == document
    assert client.delete(f"{API}/plans/{document.fingerprint}").status_code == 204
    refused(client.get(f"{API}/plans/{document.fingerprint}"), 404, "expected the fingerprint of a plan")
    refused(client.delete(f"{API}/plans/{document.fingerprint}"), 404, "expected the fingerprint of a plan")


def test_stopping_keeps_the_best_so_far(client: TestClient) -> None:
    body = {"kind": "plan", "job": HARD, "failed": ["W0_1", "W1_4"], "memory": "7", "time_limit": 300}
    solve = client.post(f"{API}/solves", json=body).json()["id"]
    refused(client.get(f"{API}/solves/{solve}/plan"), 409, "it is not done")
    until(lambda: client.get(f"{API}/solves/{solve}").json()["incumbent"] is not None, "there is a plan")
    stopped = client.post(f"{API}/solves/{solve}/stop").json()
    assert stopped["stopped"]
    assert over(client, solve)["plan_fingerprint"]


def test_migrations(client: TestClient) -> None:
    body = {"kind": "migrations", "job": JOB, "failed": ["W0_2", "W1_2"], "memory": "none"}
    found = over(client, client.post(f"{API}/solves", json=body).json()["id"])["migrations"]
    assert (found["period_now"], found["period"], len(found["migrations"])) == (54, 27, 1)
    endless = {**body, "state_bytes": 2**60, "bandwidth": 1e-300}  # a pause that JSON has no number for
    refused(client.post(f"{API}/solves", json=endless), 422, "bandwidth")


def test_a_stage_that_is_dead_is_given_other_workers(client: TestClient) -> None:
    dead = ["W0_2", "W1_2", "W2_2"]
    body = {"kind": "plan", "job": LAYERED, "failed": dead, "over": "layouts", "solver": "list"}
    found = over(client, client.post(f"{API}/solves", json=body).json()["id"])
    assert found["state"] == "done", found
    made = Plan.from_json(client.get(f"{API}/solves/{found['id']}/plan").text)
    assert len(made.failed) == 3 and sum(made.partition) == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"failed": ["W0_2", "W1_2", "W2_2"]}, golden("stage-2-has-no-living-worker")),
        ({"failed": ["W7_7"]}, "failed: got 'W7_7'"),
        ({"failed": ["x"]}, "failed.0: got 'x'"),
        ({"job": {**JOB, "pipelines": 10**9}}, "at most 400,000 ops here"),
        ({"job": {**JOB, "transfers": [1]}}, "transfers: got 1"),
        ({"memory": "lots"}, "memory: got 'lots'"),
        ({"solver": "magic"}, "solver: got 'magic'"),
        ({"time_limit": 0}, "time_limit: got 0"),
        ({"kind": "miracle"}, "miracle"),
        ({"surprise": 1}, "surprise: got 1,"),
        ({"over": "layouts"}, "over: got 'layouts'"),
        ({"job": LAYERED, "over": "layouts", "failed": ["W7_7"]}, "failed: got 'W7_7'"),
        (
            {"job": LAYERED, "over": "partitions", "failed": ["W0_2", "W1_2", "W2_2"]},
            golden("stage-2-has-no-living-worker"),
        ),
    ],
)
def test_what_can_not_be_planned_is_refused_at_once(client: TestClient, change: dict[str, Any], words: str) -> None:
    refused(client.post(f"{API}/solves", json={"kind": "plan", "job": JOB, **change}), 422, words)


def test_a_plan_from_elsewhere_is_checked(client: TestClient) -> None:
    good = plan(("W2_1",))
    body = good.model_dump(mode="json")
    assert client.post(f"{API}/plans", json={"name": "from elsewhere", "plan": body}).status_code == 201
    boasting = {**body, "metrics": {**body["metrics"], "period": 1}}
    refused(client.post(f"{API}/plans", json={"name": "x", "plan": boasting}), 422, "plan: ")
    for at, value in (("job.pipelines", "3"), ("failed", ["W02_1"]), ("workers.W0_0.0.start", 0.5)):
        wrong = client.post(f"{API}/plans", json={"name": "x", "plan": json.loads(with_another(good, at, value))})
        assert wrong.status_code == 422 and wrong.json()["detail"].startswith(f"plan: {at}: "), wrong.text
    refused(client.post(f"{API}/plans", json={"name": "x"}), 422, "plan, solve: expected one of them")
    refused(client.post(f"{API}/plans", json={"name": "", "plan": body}), 422, "name: got ''")
    refused(client.post(f"{API}/plans", json={"name": "x", "solve": "none"}), 404, "solve: got 'none'")


def test_lists_come_page_by_page(client: TestClient) -> None:
    spec = {"name": "n", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 5}
    for number in range(3):
        client.post(f"{API}/jobs", json={**spec, "name": f"job {number}"})
        body = {"kind": "plan", "job": JOB, "failed": [f"W{number}_0"], "solver": "list"}
        client.post(f"{API}/plans", json={"name": "x", "plan": plan((f"W{number}_3",)).model_dump(mode="json")})
        assert client.post(f"{API}/solves", json=body).status_code == 202
    for path, rows in (("/jobs", "jobs"), ("/plans", "plans"), ("/solves", "solves")):
        whole = client.get(API + path).json()
        assert whole["next"] is None and len(whole[rows]) >= 3
        seen, after = [], ""
        while after is not None:
            found = client.get(API + path, params={"limit": 2, "after": after}).json()
            seen += found[rows]
            after = found["next"]
        ids = [
            [row.get("job_id") or row.get("id") or row["fingerprint"] for row in some] for some in (seen, whole[rows])
        ]
        assert ids[0] == ids[1], path
        refused(client.get(API + path, params={"after": "x"}), 422, "after: got 'x', expected the `next` of a page")
        refused(client.get(API + path, params={"limit": 0}), 422, "limit: got '0'")
    assert [row["name"] for row in client.get(f"{API}/jobs").json()["jobs"]] == ["job 2", "job 1", "job 0"]


def test_a_large_upload_is_read_in_a_process_of_its_own(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(("W0_2", "W2_2"))
    body = {"name": " read  elsewhere ", "plan": made.model_dump(mode="json")}
    monkeypatch.setattr(plans, "LARGE", 1_000)
    key = {"Idempotency-Key": "upload", "X-Actor": "ada"}
    kept = client.post(f"{API}/plans", json=body, headers=key)
    assert (kept.status_code, kept.json()) == (201, {"fingerprint": made.fingerprint})
    assert Plan.from_json(client.get(f"{API}/plans/{made.fingerprint}").content) == made
    row = next(r for r in client.get(f"{API}/plans").json()["plans"] if r["fingerprint"] == made.fingerprint)
    assert (row["name"], row["period"], row["workers"]) == ("read elsewhere", made.metrics.period, 12)
    assert client.post(f"{API}/plans", json=body, headers=key).headers["Idempotent-Replayed"] == "true"
    lines = client.get(f"{API}/audit").json()["audit"]
    assert [r["actor"] for r in lines if r["target"] == made.fingerprint] == ["ada"]
    # Here and there alike: what is refused, and how.
    boasting = {**body, "plan": {**body["plan"], "metrics": {**body["plan"]["metrics"], "period": 1}}}  # type: ignore[dict-item]
    wrong = [boasting, {**body, "surprise": "x" * 2_000}, {"plan": {"x": ["y"] * 500}}]
    for document in wrong:
        data = json.dumps(document).encode()
        monkeypatch.setattr(plans, "LARGE", 10**9)
        here = client.post(f"{API}/plans", content=data, headers={"Content-Type": "application/json"})
        with pytest.raises(ConsoleError) as there:
            answer(data)
        assert (there.value.field, there.value.detail) == (here.json()["field"], here.json()["detail"])
    with console_refuses("invalid", BODY) as there:
        answer(b'["x"]')
    assert there.value.said == "got ['x'], expected an object"
    with console_refuses("invalid", BODY):
        answer(b"{" * 9)


def large_document(pipelines: int) -> bytes:
    """Of a plan of `pipelines` x 32 workers, 64 micro-batches each."""
    problem = Problem(Job.uniform(pipelines, 32, 64), memory=MemoryLimit("uniform"))
    return make_plan(problem, solver="list").to_json().encode()


@pytest.mark.chaos
def test_a_plan_of_more_than_ten_megabytes_is_taken(client: TestClient) -> None:
    """As `openrecycle plan --out` writes one for a thousand workers."""
    document = large_document(32)
    assert 14 << 20 < len(document) < PLAN_MIB << 20
    body = b'{"name":"large","plan":' + document + b"}"
    kept = client.post(f"{API}/plans", content=body, headers={"Content-Type": "application/json"})
    assert kept.status_code == 201, kept.text
    assert kept.json()["fingerprint"] == json.loads(document)["fingerprint"]
    row = next(r for r in client.get(f"{API}/plans").json()["plans"] if r["name"] == "large")
    assert row["workers"] == 1024


def test_a_large_plan_that_breaks_a_rule_is_refused_in_words() -> None:
    document = json.loads(large_document(8))
    op = document["workers"]["W3_3"][5]
    op["start"] -= 0.5
    with console_refuses("invalid", "plan"):
        answer(json.dumps({"name": "x", "plan": document}).encode())


def test_few_bodies_of_many_megabytes_are_held_at_once() -> None:
    async def run() -> list[int]:
        held, go = asyncio.Event(), asyncio.Event()
        inside = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal inside
            inside += 1
            if inside == MOST_LARGE:
                held.set()
            await go.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        limited, statuses = BodyLimit(app), list[int]()

        async def post(size: int) -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    assert message["status"] != 429 or (b"retry-after", b"1") in message["headers"]

            headers = [(b"content-length", str(size).encode())]
            scope = {"type": "http", "method": "POST", "path": f"{API}/plans", "headers": headers}
            await limited(scope, receive, send)

        first = [asyncio.create_task(post(LARGE_BODY + 1)) for _ in range(MOST_LARGE)]
        await asyncio.wait_for(held.wait(), 30)
        await post(LARGE_BODY + 1)
        small = asyncio.create_task(post(100))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*first, small)
        await post(129 << 20)
        return statuses

    assert sorted(asyncio.run(run())) == [201] * (MOST_LARGE + 1) + [413, 429]


def test_so_many_large_uploads_wait() -> None:
    uploads = Uploads(most_waiting=-1)  # not even one may be read
    with console_refuses("too_many"):
        uploads.read(b"")
    uploads = Uploads()
    uploads.close()
    with console_refuses("unavailable"):
        uploads.read(b"")


@pytest.mark.parametrize("tail", ["/solves/none", "/solves/none/plan", "/plans/none"])
def test_unknown_ones(client: TestClient, tail: str) -> None:
    refused(client.get(API + tail), 404, "got 'none'")


def test_a_refused_field_has_the_name_of_the_api(client: TestClient) -> None:
    """It had that of the command line."""
    asked = {"kind": "plan", "solver": "list", "pipelines": 2, "stages": 2, "micro_batches": 2, "failed": ["W0_0"]}
    asked |= {"profile_name": "gpt-3-medium", "technique": "fault-free"}
    refused(client.post(f"{API}/solves", json=asked), 422, "technique: got 'fault-free'")
    with pytest.raises(InputError) as wrong:
        check_effort("list", -1.0)
    assert invalid(wrong.value, "plan").detail.startswith("plan: time_limit: got")
