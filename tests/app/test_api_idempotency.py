"""A request with a key is done once, whatever happens in between."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from console_server import Agents, ConsoleServer
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import API
from openrecycle.app.api import idempotency
from openrecycle.app.api.idempotency import Idempotency, keeps_keys
from openrecycle.app.runtime import problems
from openrecycle.app.security.access import Access
from openrecycle.app.security.guard import AccessGuard
from openrecycle.app.server import create_routes
from openrecycle.db.access import KEPT_SECONDS, IdempotentRequests
from openrecycle.db.session import Database
from tests.databases import sqlite_in

pytestmark = pytest.mark.processes

KEY = {"Idempotency-Key": "the operator's click"}


def kills(agents: Agents) -> int:
    """How often the launcher was asked to kill somebody."""
    return len(agents.server.get(agents.path("/commands")).json()["commands"])


@pytest.fixture
def demo(server: ConsoleServer) -> Agents:
    agents = Agents(server, demo=True)
    agents.register_all()
    return agents


def test_a_request_that_is_sent_again_is_done_once(demo: Agents) -> None:
    first, again = (demo.server.post(demo.path("/workers/W1_2/kill"), headers=KEY) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert again.headers["Content-Type"] == first.headers["Content-Type"]
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert kills(demo) == 1
    # Without a key, each is one of its own.
    assert demo.server.post(demo.path("/workers/W1_2/kill")).status_code == 202
    assert kills(demo) == 2


def test_a_key_is_for_one_request(demo: Agents) -> None:
    post = demo.server.post
    bodies = [{"state": "finished"}, {"state": "stopped"}]
    assert post(demo.path("/finish"), bodies[0], headers=KEY).status_code == 204
    other = post(demo.path("/finish"), bodies[1], headers=KEY)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    # The same key to another path, or from somebody else, is another one.
    assert post(demo.path("/workers/W1_2/kill"), headers=KEY).json()["code"] == "job_over"
    again = post(demo.path("/finish"), bodies[0], headers={**KEY, "X-Actor": "somebody else"})
    assert "Idempotent-Replayed" not in again.headers


def test_what_was_refused_stays_refused(demo: Agents) -> None:
    path = demo.path("/workers/W1_2/restart")
    first = demo.server.post(path, headers=KEY)
    assert first.json()["code"] == "not_failed"
    demo.exit("W1_2")
    again = demo.server.post(path, headers=KEY)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["Content-Type"] == "application/problem+json"
    assert demo.server.post(path, headers={"Idempotency-Key": "a new click"}).status_code == 202


@pytest.mark.parametrize("key", ["", "x" * 256, "\u00e9"])
def test_a_key_that_is_none(demo: Agents, key: str) -> None:
    headers = {"Idempotency-Key": key.encode("latin-1")}
    answer = requests.post(demo.server.base + demo.path("/pause"), headers=headers, timeout=30)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert answer.json()["detail"].startswith("Idempotency-Key: got")


def test_of_many_at_once_one_is_done(demo: Agents) -> None:
    answers: list[requests.Response] = []

    def send() -> None:
        path = demo.server.base + demo.path("/workers/W0_1/kill")
        answers.append(requests.post(path, headers=KEY, timeout=60))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kills(demo) == 1
    for answer in answers:
        assert answer.status_code == 202 or answer.json()["code"] == "in_progress", answer.text


def test_a_restart_forgets_no_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keys")
    one = sqlite_in(folder)
    assert IdempotentRequests(one).begin("k", "r", stale=60) is None
    IdempotentRequests(one).answered("k", 202, "application/json", "there", b"{}")
    one.close()
    two = sqlite_in(folder)
    earlier = IdempotentRequests(two).begin("k", "r", stale=60)
    assert earlier is not None
    assert (earlier.status, earlier.media_type, earlier.location, earlier.body) == (
        202,
        "application/json",
        "there",
        b"{}",
    )
    two.close()


def test_work_that_ended_with_its_console_begins_anew_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """A plan and a filling of a catalog are in the memory of the process that makes them."""
    grid = {"profile_name": "gpt-3-medium", "pipelines": 2, "stages": 2, "micro_batches": 2}
    bodies: dict[str, dict[str, object]] = {"/solves": {"kind": "plan", "solver": "list", **grid}}
    for _ in range(2):
        here = ConsoleHere(tmp_path)
        client = TestClient(Starlette(routes=create_routes(here.console)), base_url="http://localhost")
        if "/catalogs" not in bodies:
            job = client.post(f"{API}/jobs", json={**grid, "name": "job", "iterations": 9}).json()["job_id"]
            bodies["/catalogs"] = {"job_id": job, "tolerance": 1}
        made = {path: client.post(API + path, json=body, headers=KEY).json() for path, body in bodies.items()}
        assert client.get(f"{API}/solves/{made['/solves']['id']}").status_code == 200
        assert client.get(f"{API}/catalogs/{made['/catalogs']['fingerprint']}/filling").status_code == 200
        # Asked for again here, it is the same.
        again = client.post(f"{API}/solves", json=bodies["/solves"], headers=KEY).json()
        assert again["id"] == made["/solves"]["id"] and len(client.get(f"{API}/solves").json()["solves"]) == 1
        until(here.console.catalogs.idle, "the filling to end")
        here.close()


def test_what_was_never_answered_can_be_done_anew(tmp_path_factory: pytest.TempPathFactory) -> None:
    database = sqlite_in(tmp_path_factory.mktemp("keys"))
    keys = IdempotentRequests(database)
    assert keys.begin("k", "r", stale=60) is None
    taken = keys.begin("k", "r", stale=60)
    assert taken is not None and taken.status == 0
    assert keys.begin("k", "r", stale=-1) is None, "whoever had it is gone"
    keys.forget("k")
    assert keys.begin("k", "another", stale=60) is None
    assert KEPT_SECONDS >= 3600
    database.close()


def test_which_requests_keep_keys() -> None:
    assert keeps_keys("/jobs/x/workers/W0_0/kill") and keeps_keys("/plans") and keeps_keys("/solves/x/stop")
    assert not keeps_keys("/jobs")
    assert not keeps_keys("/tokens"), "the answer has the token in it"
    assert not keeps_keys("/jobs/x/heartbeats")


def test_a_request_that_fails_is_answered_as_it_is_without_a_key(database: Database) -> None:
    api = FastAPI()
    problems.install(api)

    @api.post("/fails")
    async def fails() -> None:
        raise RuntimeError("a bug")

    client = TestClient(Idempotency(api, IdempotentRequests(database)), raise_server_exceptions=False)
    plain, keyed, again = (client.post("/fails", headers=headers) for headers in ({}, KEY, KEY))
    assert (keyed.status_code, keyed.json(), keyed.headers) == (500, plain.json(), plain.headers)
    assert again.json() == plain.json(), "and it may be tried again"


def test_a_request_that_takes_long_is_not_done_again_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was done twice if the first took more than two minutes."""
    monkeypatch.setattr(idempotency, "STALE", -1.0)  # any time is too long
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()
    api = FastAPI()

    @api.post("/takes-long")
    def takes_long() -> dict[str, int]:
        done.append(len(done))
        begun.set()
        go_on.wait(60)
        return {"number": len(done)}

    with TestClient(Idempotency(api, IdempotentRequests(database))) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/takes-long", headers=KEY)
        assert begun.wait(60)
        second = pool.submit(client.post, "/takes-long", headers=KEY)
        try:
            assert second.result(60).json()["code"] == "in_progress"
        finally:
            go_on.set()
        assert first.result(60).json() == client.post("/takes-long", headers=KEY).json() == {"number": 1}


def test_names_of_any_alphabet_act_under_them_and_share_no_keys(here: ConsoleHere) -> None:
    console, job = here.console, JobHere(here.console, "keys").register()
    access = console.security.access = Access("the console's own", console.security.tokens)
    client = TestClient(AccessGuard(Starlette(routes=create_routes(console)), access), base_url="http://localhost")
    names = ["\u674e", "\u738b", "\u674e"]  # two of them alike
    for name in names:
        token = console.security.tokens.create("operate", created_by="ada", name=name)[1]
        headers = {**KEY, "Authorization": f"Bearer {token}"}
        answer = client.post(f"{API}/jobs/{job.job_id}/workers/W1_2/kill", headers=headers)
        assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (202, False), answer.text
    lines = console.security.audit.read(0, 5000, job.job_id)
    assert [line["actor"] for line in lines if line["target"] == "W1_2"] == names
    console.security.access = Access()
