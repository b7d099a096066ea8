"""The gate in front of the application: routes of the console that is up, else who leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from openrecycle.app.console.leadership import ConsoleHost, Gate, LeaderStatus
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import EventLoopWatch
from openrecycle.app.runtime.settings import Settings
from openrecycle.app.security.access import Caller, Role
from openrecycle.app.server import make_console
from openrecycle.db.session import Database
from tests.golden import golden

pytestmark = pytest.mark.processes


class Seat:
    """A host whose console comes and goes as the test says."""

    def __init__(self) -> None:
        self.console: Any = None
        self.status = LeaderStatus(None, "http://a:1", "http://a:1 leads (term 4)")
        self.callbacks: list[Callable[[], None]] = []

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def lose(self) -> None:
        self.console = None
        for callback in self.callbacks:
            callback()


def application(console: ConsoleService) -> ASGIApp:
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send_text(await socket.receive_text())
        except WebSocketDisconnect:
            pass

    async def who(request: object) -> PlainTextResponse:
        return PlainTextResponse(str(console))

    return Starlette(routes=[WebSocketRoute("/ws", echo), Route("/{path:path}", who)])


async def page(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("the standby's page")(scope, receive, send)


@pytest.fixture
def seat() -> Seat:
    return Seat()


@pytest.fixture
def client(seat: Seat) -> Iterator[TestClient]:
    gate = Gate(seat, application, lambda app: app, page)
    with TestClient(Starlette(routes=[Mount("/", gate)])) as client:
        yield client


def test_a_standby_has_pages_of_its_own_and_refuses_the_rest(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/planner").text == "the standby's page"
    for path in ("/readyz", "/metrics", "/api", "/api/v1/jobs"):
        answer = client.post(path) if path.endswith("jobs") else client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        said = "this console is a standby: http://a:1 leads (term 4); ask http://a:1"
        assert answer.json()["detail"] == said


def test_one_whose_lead_is_in_doubt_names_nobody_else(client: TestClient, seat: Seat) -> None:
    seat.status = LeaderStatus(None, "", "the database does not answer; nobody is known to lead", True, 0.5)
    said = client.get("/api/v1/jobs").json()["detail"]
    assert said == (golden("this-consoles-lead-is-in"))


def test_one_that_takes_the_jobs_up_is_no_standby(client: TestClient, seat: Seat) -> None:
    seat.status = LeaderStatus(1, "", "this console leads (term 1) and is taking up the jobs")
    assert client.get("/api/v1/jobs").json()["detail"] == golden("this-console-leads-term-1")


def test_each_console_has_its_own_application(client: TestClient, seat: Seat) -> None:
    seat.console = "first"
    assert client.get("/api/v1/jobs").text == "first"
    seat.lose()
    assert client.get("/api/v1/jobs").status_code == 503
    seat.console = "second"
    assert client.get("/api/v1/jobs").text == "second"


def test_open_pages_are_disconnected_when_the_lead_is_lost(client: TestClient, seat: Seat) -> None:
    seat.console = "first"
    with client.websocket_connect("/ws") as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"
        seat.lose()
        with pytest.raises(WebSocketDisconnect) as error:
            socket.receive_text()
        assert error.value.code == 1012


def test_an_open_page_ends_as_it_likes(client: TestClient, seat: Seat) -> None:
    seat.console = "first"
    with client.websocket_connect("/ws") as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"
    seat.lose()
    assert client.get("/healthz").status_code == 200


def test_a_page_that_was_open_finds_the_new_console_guarded_before_any_request(tmp_path: Path) -> None:
    """Its WebSocket went through the standby's guard, and acts on the console as soon as that is up."""
    settings, url = Settings(token="of more than sixteen letters"), f"sqlite:///{tmp_path / 'console.db'}"
    loop_watch = EventLoopWatch()
    host = ConsoleHost(lambda term: Database(url), None, lambda found: make_console(settings, found, loop_watch))
    host.start()
    try:
        access = get_console().security.access
        with pytest.raises(ConsoleError) as refused:
            access.operator(Caller("oidc:vera", "vera", Role.VIEW).to_header().decode())
        assert refused.value.status == 403
        with pytest.raises(ConsoleError):
            access.operator(None)
    finally:
        host.close()
