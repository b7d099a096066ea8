"""Counts and times requests, as plain ASGI middleware: a few microseconds each."""

from __future__ import annotations

import time

from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API
from openrecycle.app.metrics.exposition import Metrics

# The key in the scope under which the name comes back: a list of one.
_NAMED = "openrecycle.route"
_PLAIN = frozenset({"/healthz", "/readyz", "/metrics", "/login"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


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
            route = named[0] or route_of(scope["path"])
            self.metrics.requests.labels(method, route, f"{status // 100}xx").inc()
            self.metrics.latency.labels(method, route).observe(time.perf_counter() - began)


class NamedRoutes:
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


def route_of(path: str) -> str:
    """Of a request that FastAPI has not seen, or has no route for."""
    if path in _PLAIN:
        return path
    return "other" if path.startswith("/api") else "pages"
