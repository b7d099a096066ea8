"""A console behind its guards and the lane, without a server."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from ui_console import JobHere

from openrecycle.agent.protocol import API
from openrecycle.app.api.lane import Lane
from openrecycle.app.api.routes import create_routes
from openrecycle.app.console import Console
from openrecycle.app.metrics.requests import Metering
from openrecycle.app.security.access import Access
from openrecycle.app.security.bodies import BodyLimit
from openrecycle.app.security.guard import AccessGuard
from openrecycle.app.security.hosts import HostGuard

HARDENED = ("x-content-type-options", "x-frame-options", "referrer-policy")


class Served:
    """A console behind its guards and the lane. whole: how many requests went the whole way."""

    def __init__(self, console: Console, job: JobHere) -> None:
        self.console, self.job, self.whole = console, job, 0
        console.access = Access("the console's own", console.tokens)
        guards = [
            Middleware(Metering, metrics=console.metrics),
            Middleware(HostGuard, allowed=("localhost",)),
            Middleware(AccessGuard, access=console.access),
            Middleware(BodyLimit),
        ]
        inner = Starlette(routes=create_routes(console), middleware=guards)
        self.leader: object = console

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self.whole += 1
            await inner(scope, receive, send)

        self.lane = lane = Lane(counted, lambda: self.leader)
        self.client = TestClient(lane, base_url="http://localhost:8501", client=("127.0.0.1", 50000))
        self.token, text = console.tokens.create("agent", created_by="ada", job_id=job.job_id)
        self.headers = {"Authorization": f"Bearer {text}"}

    def post(self, what: str, body: dict[str, Any], **headers: str) -> tuple[int, bool, Any]:
        """Status, did it go the whole way, and the answer."""
        before = self.whole
        answer = self.client.post(
            f"{API}/jobs/{self.job.job_id}/{what}", json=body, headers={**self.headers, **headers}
        )
        assert answer.status_code >= 400 or all(name in answer.headers for name in HARDENED)
        return answer.status_code, self.whole > before, answer.json()

    def beat(self, worker: str = "W0_1", seq: int = 1, **headers: str) -> tuple[int, bool, Any]:
        return self.post("heartbeats", heartbeat(worker, seq), **headers)


def heartbeat(worker: str, seq: int) -> dict[str, Any]:
    said = {"generation": 1, "iteration": 3, "phase": "training"}
    return {"worker": worker, "incarnation": f"{worker}-a", "seq": seq, **said}
