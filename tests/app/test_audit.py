"""Whatever changes something says who did it: every such route of the API, found by its own document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import API
from openrecycle.app.security.access import Access, Caller, Role, agent_route, refusal
from openrecycle.app.security.guard import AccessGuard
from openrecycle.app.server import create_api, create_routes
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc

pytestmark = pytest.mark.processes

TOKEN = "a-token-for-the-tests"
JOB = job_doc(Job.uniform(3, 4, 6)).model_dump(mode="json")
SPEC = {"name": "job", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 9}
LARGE = {"pipelines": 6, "stages": 6, "micro_batches": 12, "durations": {"F": 40.0, "I": 52.0, "W": 28.0}}

Operation = tuple[str, str]
# Their own tests read the line that they leave in the log.
ELSEWHERE: dict[Operation, str] = {
    ("PUT", "/jobs/{job_id}/plan"): "test_applying",
    ("DELETE", "/jobs/{job_id}"): "test_history",
}


@cache
def operations(here: ConsoleHere) -> dict[Operation, list[str]]:
    """Of the API, with their tags."""
    paths = create_api(here.console).openapi()["paths"]
    return {
        (method.upper(), path): operation.get("tags", [])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def changing(here: ConsoleHere) -> set[Operation]:
    """What is not a report of an agent."""
    found = {op for op, tags in operations(here).items() if op[0] != "GET" and "agents" not in tags}
    return found | {("POST", "/jobs")}


@pytest.fixture(scope="module")
def app(here: ConsoleHere) -> Iterator[TestClient]:
    console = here.console
    console.security.access = Access(TOKEN, console.security.tokens)
    guarded = AccessGuard(Starlette(routes=create_routes(console)), console.security.access)
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Actor": "ada"}
    yield TestClient(
        guarded,
        base_url="http://localhost",
        client=("127.0.0.1", 50000),
        raise_server_exceptions=False,
        headers=headers,
    )
    console.security.access = Access()


def test_each_change_leaves_a_line_that_says_who(here: ConsoleHere, app: TestClient) -> None:
    console, done = here.console, set[Operation]()

    def audit() -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        while more := app.get(f"{API}/audit", params={"after": lines[-1]["id"] if lines else 0}).json()["audit"]:
            lines += more
        return lines

    def call(method: str, path: str, body: object = None, **values: str) -> dict[str, Any]:
        before = len(audit())
        answer = app.request(method, API + path.format(**values), json=body)
        assert answer.status_code < 300, (method, path, answer.text)
        lines = audit()[before:]
        assert [line["actor"] for line in lines] == ["administrator for ada"], (method, path)
        done.add((method, path))
        return answer.json() if answer.content else {}  # type: ignore[no-any-return]

    call("POST", "/jobs", SPEC)
    call("DELETE", "/tokens/{token_id}", token_id=call("POST", "/tokens", {"role": "view"})["id"])

    job = JobHere(console, "audited").register().commit(0, 2, 1)
    at = {"job_id": job.job_id}
    call("PUT", "/jobs/{job_id}/mode", {"mode": "manual", "choice_timeout": 900}, **at)
    call("PUT", "/jobs/{job_id}/frozen", {"frozen": True}, **at)
    call("PUT", "/jobs/{job_id}/frozen", {"frozen": False}, **at)
    call("POST", "/jobs/{job_id}/pause", **at)
    call("POST", "/jobs/{job_id}/resume", **at)
    call("POST", "/jobs/{job_id}/events/acknowledge", {"seqs": [1]}, **at)
    call("POST", "/jobs/{job_id}/workers/{worker}/kill", worker="W1_2", **at)
    job.die("W1_2")
    until(lambda: bool(app.get(f"{API}/jobs/{job.job_id}/choice").json()["candidates"]), "there are options")
    best = app.get(f"{API}/jobs/{job.job_id}/choice").json()["candidates"][0]["name"]
    call("POST", "/jobs/{job_id}/choice", {"name": best}, **at)
    job.resume(2)
    call("POST", "/jobs/{job_id}/workers/{worker}/restart", worker="W1_2", **at)
    call("POST", "/jobs/{job_id}/workers/{worker}/drain", worker="W0_1", **at)

    steady = JobHere(console, "steady", iterations=80).register().commit(0, 40, 1)

    def measured() -> bool:
        figures = console.queries.view(steady.job_id).figures
        return figures is not None and figures.baseline is not None and figures.baseline.source == "measured"

    until(measured, "its rate is measured")
    call("POST", "/jobs/{job_id}/baseline", job_id=steady.job_id)

    # Without the loss the first plan is proven best at once, and there would be nothing to stop.
    large = JobHere(console, "large", **LARGE).register().commit(0, 2, 1).die("W1_2")
    large.resume(2)
    call("POST", "/jobs/{job_id}/replan", {"solver": "cp-sat", "seconds": 60}, job_id=large.job_id)
    call("POST", "/jobs/{job_id}/replan/stop", job_id=large.job_id)

    asked = {"kind": "plan", "job": JOB, "failed": [], "technique": "staggered", "memory": "uniform"}
    solve = call("POST", "/solves", asked)["id"]
    call("POST", "/solves/{solve_id}/stop", solve_id=solve)
    until(lambda: app.get(f"{API}/solves/{solve}").json()["plan_fingerprint"] is not None, "the plan is made")
    kept = call("POST", "/plans", {"name": "kept", "solve": solve})["fingerprint"]
    call("DELETE", "/plans/{fingerprint}", fingerprint=kept)

    call("PUT", "/profiles/{name}", JOB, name="mine")
    call("DELETE", "/profiles/{name}", name="mine")

    question = {"job_id": steady.job_id}
    name = {"fingerprint": call("POST", "/catalogs", {**question, "tolerance": 0})["fingerprint"]}

    def filling() -> str:
        return str(app.get(f"{API}/catalogs/{name['fingerprint']}/filling").json()["state"])

    until(lambda: filling() == "done", "the catalog has a plan")
    call("POST", "/catalogs", {**question, "tolerance": 3})
    call("DELETE", "/catalogs/{fingerprint}/filling", **name)
    until(lambda: filling() != "running", "the filling has ended")
    call("DELETE", "/catalogs/{fingerprint}", **name)

    missing = changing(here) - done - set(ELSEWHERE)
    assert missing == set(), "call them above: each must leave a line in the audit log"
    of_job = app.get(f"{API}/audit", params={"job_id": job.job_id}).json()["audit"]
    assert {line["job_id"] for line in of_job} == {job.job_id}
    assert len(of_job) == 10


def test_the_log_is_read_page_by_page(app: TestClient) -> None:
    for _ in range(3):
        app.post(f"{API}/jobs", json=SPEC)
    first = app.get(f"{API}/audit", params={"limit": 2}).json()["audit"]
    second = app.get(f"{API}/audit", params={"limit": 2, "after": first[-1]["id"]}).json()["audit"]
    ids = [line["id"] for line in first + second]
    assert ids == sorted(set(ids))
    assert app.get(f"{API}/audit", params={"after": 2**53}).json() == {"audit": []}
    assert app.get(f"{API}/audit", params={"limit": 0}).status_code == 422


def test_every_route_has_the_role_that_its_tag_says(here: ConsoleHere) -> None:
    """Agents may send what is tagged as theirs, read plans and how their job is, and nothing else; viewers change
    nothing."""
    agent, viewer = (Caller("token:1", "x", role) for role in (Role.AGENT, Role.VIEW))
    for (method, path), tags in operations(here).items():
        address = API + path.format_map(_Any())
        read = ("/jobs/{job_id}", "/jobs/{job_id}/plans/{fingerprint}", "/caller")
        theirs = "agents" in tags or (method == "GET" and path in read)
        assert (refusal(agent, method, address) == "") == theirs, (method, path)
        assert agent_route(method, address)[0] == (theirs and path != "/caller"), (method, path)
        reads = method == "GET" and not path.startswith(("/audit", "/tokens"))
        assert (refusal(viewer, method, address) == "") == reads, (method, path)


def test_without_a_token_nothing_is_reachable(here: ConsoleHere) -> None:
    """Every route, pages' and metrics' included, is asked for by a stranger on another machine."""
    routes = create_routes(here.console)
    guard = AccessGuard(Starlette(routes=routes), Access(TOKEN, here.console.security.tokens))
    asked = {("GET", getattr(route, "path", "/")) for route in routes}
    asked |= {(method, API + path) for method, path in operations(here)}
    asked |= {("GET", path) for path in ("/", "/_stcore/health", "/_stcore/stream", "/static/x.js", "/metrics")}
    for i, (method, path) in enumerate(sorted(asked)):
        stranger = TestClient(guard, client=(f"10.0.{i}.1", 1), base_url="http://console", follow_redirects=False)
        expected = 200 if path == "/healthz" else 401
        assert stranger.request(method, path).status_code == expected, (method, path)


class _Any(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "1"
