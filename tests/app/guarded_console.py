"""A console behind its guards, without a server."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from ui_console import JobHere

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.observing.metrics import Metering
from openrecycle.app.security.access import Access
from openrecycle.app.security.guard import AccessGuard, BodyLimit, HostGuard
from openrecycle.app.server import create_routes


class Served:
    """A console behind its guards."""

    def __init__(self, console: ConsoleService, job: JobHere) -> None:
        self.console, self.job = console, job
        console.security.access = Access("the console's own", console.security.tokens)
        guards = [
            Middleware(Metering, metrics=console.metrics),
            Middleware(HostGuard, allowed=("localhost",)),
            Middleware(AccessGuard, access=console.security.access),
            Middleware(BodyLimit),
        ]
        self.app = Starlette(routes=create_routes(console), middleware=guards)
        self.token, text = console.security.tokens.create("agent", created_by="ada", job_id=job.job_id)
        self.headers = {"Authorization": f"Bearer {text}"}


def heartbeat(worker: str, seq: int) -> dict[str, Any]:
    """A batch of one."""
    said = {"generation": 1, "iteration": 3, "phase": "training"}
    return {"heartbeats": [{"worker": worker, "incarnation": f"{worker}-a", "seq": seq, **said}]}
