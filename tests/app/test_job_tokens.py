"""What a console with a token gives to the workers of a new job, and what its operators give to others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, until

from openrecycle.agent.messages.client import ConsoleClient
from openrecycle.agent.messages.protocol import AGENT_TOKEN, JobSpec
from openrecycle.agent.monitoring import console_link
from openrecycle.agent.monitoring.console_link import ConsoleCoordination, create_job
from openrecycle.app.security.access import Access
from openrecycle.app.security.guard import AccessGuard
from openrecycle.app.server import create_routes
from tests.golden import golden

pytestmark = pytest.mark.processes

TOKEN = "a-token-for-the-tests"
SPEC = {"name": "job", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 9, "demo": True}


@pytest.fixture(scope="module")
def app(here: ConsoleHere) -> Iterator[TestClient]:
    console = here.console
    console.security.access = Access(TOKEN, console.security.tokens)
    guarded = AccessGuard(Starlette(routes=create_routes(console)), console.security.access)
    yield TestClient(guarded, base_url="http://localhost", client=("127.0.0.1", 50000), raise_server_exceptions=False)
    console.security.access = Access()


@pytest.fixture(scope="module")
def url(app: TestClient) -> Iterator[str]:
    """The same, on a server of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app.app, log_config=None, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(30)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def make(app: TestClient, **wanted: object) -> str:
    answer = app.post("/api/v1/tokens", json=wanted, headers=bearer(TOKEN))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def test_the_workers_of_a_job_get_a_token_that_can_do_nothing_else(app: TestClient) -> None:
    made = app.post("/api/v1/jobs", json=SPEC, headers=bearer(make(app, role="operate", name="ada")))
    assert made.status_code == 201
    path, worker = f"/api/v1/jobs/{made.json()['job_id']}", bearer(made.headers[AGENT_TOKEN])
    came = {"registrations": [{"worker": "W0_0", "incarnation": "a", "host": "node1", "pid": 1}]}
    beat = {"worker": "W0_0", "incarnation": "a", "seq": 1, "generation": 0, "iteration": 0, "phase": "training"}
    assert app.post(f"{path}/workers", json=came, headers=worker).status_code == 200
    assert app.post(f"{path}/heartbeats", json={"heartbeats": [beat]}, headers=worker).status_code == 200
    for method, where in (
        ("POST", f"{path}/workers/W0_0/kill"),
        ("POST", f"{path}/pause"),
        ("GET", f"{path}/workers"),
        ("GET", "/api/v1/jobs"),
        ("POST", "/api/v1/jobs"),
        ("GET", "/api/v1/tokens"),
    ):
        assert app.request(method, where, headers=worker).status_code == 403, where
    other = app.post("/api/v1/jobs", json=SPEC, headers=bearer(TOKEN)).json()["job_id"]
    refused = app.post(f"/api/v1/jobs/{other}/heartbeats", json=beat, headers=worker)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


def test_a_launcher_with_an_agents_token_hears_why_its_job_stands_still(
    app: TestClient, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks whenever there has been no new generation for some seconds; a refusal would end the job."""
    for choice_timeout in ("SAY_WHY_NOT_SECONDS", "LONG_POLL_SECONDS"):
        monkeypatch.setattr(console_link, choice_timeout, 0.1)
    token = make(app, role="agent")
    said: list[str] = []
    created = create_job(ConsoleClient(url, token=token), JobSpec.model_validate(SPEC), print)
    link = ConsoleCoordination(lambda: ConsoleClient(url, token=token), created.job_id, said.append)
    until(lambda: bool(said), "the launcher says what its job waits for")
    assert said[0].startswith(golden("waiting-for-4-of-4"))
    assert link.poll(0.0) == []
    app.post(f"/api/v1/jobs/{created.job_id}/finish", json={"state": "stopped"}, headers=bearer(token))
    link.close(lambda: True)


def test_asked_again_who_operates_gets_another_and_an_agent_keeps_its_own(app: TestClient) -> None:
    key = {"Idempotency-Key": "run 7"}
    operator, agent = bearer(make(app, role="operate")), bearer(make(app, role="agent"))
    first, again = (app.post("/api/v1/jobs", json=SPEC, headers={**operator, **key}) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert first.headers[AGENT_TOKEN] != again.headers[AGENT_TOKEN]
    assert AGENT_TOKEN not in app.post("/api/v1/jobs", json=SPEC, headers={**agent, **key}).headers
    assert AGENT_TOKEN in app.post("/api/v1/jobs", json=SPEC, headers=agent).headers


def test_tokens_are_listed_without_their_secret_and_revoked(app: TestClient) -> None:
    text = make(app, role="view", name="wall screen", days=2)
    assert app.get("/api/v1/jobs", headers=bearer(text)).status_code == 200
    assert app.get("/api/v1/caller", headers=bearer(text)).json() == {
        "name": "wall screen",
        "role": "view",
        "job_id": None,
    }
    listed = app.get("/api/v1/tokens", headers=bearer(TOKEN))
    assert text.split("_", 2)[2] not in listed.text
    assert "secret_hash" not in listed.text
    mine = next(token for token in listed.json()["tokens"] if token["name"] == "wall screen")
    assert mine["expires_at"] - mine["created_at"] == pytest.approx(2 * 86_400)
    assert app.delete(f"/api/v1/tokens/{mine['id']}", headers=bearer(TOKEN)).status_code == 204
    assert app.get("/api/v1/jobs", headers=bearer(text)).status_code == 401
    assert app.delete(f"/api/v1/tokens/{mine['id']}", headers=bearer(TOKEN)).status_code == 409


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ({"role": "boss"}, 422, "role: got 'boss'"),
        ({"role": "agent", "job_id": "none"}, 404, "job: got 'none'"),
        ({"role": "view", "days": -1}, 422, "days: got -1"),
        ({"role": "view", "days": 1e9}, 422, "days: got 1000000000.0"),
        ({"role": "view", "name": "\u0007"}, 422, "name: got '\\x07'"),
        ({"role": "view", "secret": "mine"}, 422, "secret: got 'mine'"),
    ],
)
def test_tokens_that_are_refused(app: TestClient, wanted: dict[str, object], status: int, words: str) -> None:
    answer = app.post("/api/v1/tokens", json=wanted, headers=bearer(TOKEN))
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
