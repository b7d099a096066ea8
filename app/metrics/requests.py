"""Counts and times requests, as plain ASGI middleware: a few microseconds each."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi.routing import APIRoute
from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.protocol import API
from openrecycle.app.api.lane import PASS
from openrecycle.app.metrics.exposition import Metrics

# The key in the scope under which the name comes back: a list of one.
_NAMED = "openrecycle.route"
_PLAIN = frozenset({"/healthz", "/readyz", "/metrics", "/login"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# What FastAPI does not see.
LEAN = ("/heartbeats", "/acknowledgements", "/deployment")


class Metering:
    """route: the path with its parameters' names, or `pages`, or `other`: never what somebody made up."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        named = scope[_NAMED] = [""]
        try:
            await self.app(scope, receive, watched)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = named[0] or route_of(scope["path"], status)
            meter = self._meter(method, route)
            if PASS in scope:
                scope[PASS].meter = meter
            meter(status, time.perf_counter() - began)

    def _meter(self, method: str, route: str) -> Callable[[int, float], None]:
        """Takes the status and the seconds of a request."""
        counters: dict[int, Counter] = {}
        observe = self.metrics.latency.labels(method, route).observe

        def meter(status: int, seconds: float) -> None:
            counter = counters.get(status)
            if counter is None:
                counter = counters[status] = self.metrics.requests.labels(method, route, f"{status // 100}xx")
            counter.inc()
            observe(seconds)

        return meter


class Named:
    """Around FastAPI: tells Metering which of its routes a request has taken. What is between them may hand
    on copies of the scope, but not of what is in it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            route = scope.get("route")
            if isinstance(route, APIRoute) and _NAMED in scope:
                scope[_NAMED][0] = API + str(route.path)


def route_of(path: str, status: int) -> str:
    """Of a request that FastAPI has not seen, or has no route for."""
    if path in _PLAIN:
        return path
    if not path.startswith("/api"):
        return "pages"
    if status == 404 or not path.endswith(LEAN):
        return "other"
    return f"{API}/jobs/{{job_id}}/{path.rpartition('/')[2]}"
