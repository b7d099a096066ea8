"""A short way for the few requests that come thousands of times a second: heartbeats, acknowledgements, long-polls.

Guards, routing and metering of a request cost several times what a heartbeat does itself. The first of its
kind goes the whole way, and whoever lets it through leaves in its scope what must still hold for the next:
a `Pass`. An equal request (the same path, headers and address) then goes straight to its endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from openrecycle.agent.protocol import API

PASS, RAW = "openrecycle.pass", "openrecycle.raw"  # in the scope
# Kinds of requests that are known: nodes times jobs, and some more. Beyond, all begin anew.
_MOST = 4096
# Larger bodies are for the guard of bodies.
_MOST_BYTES = 64 * 1024
_ENDS = {"POST": ("/heartbeats", "/acknowledgements"), "GET": ("/deployment",)}
_JOBS = f"{API}/jobs/"

Headers = Sequence[tuple[bytes, bytes]]
Raw = tuple[bytes, bytes, str | None, str | None]
"""A request as it came: its head before and behind the value of Content-Length, scheme and address."""
Answer = Callable[[Scope, Receive, Send, Headers, ASGIApp], Awaitable[int]]


@dataclass
class Pass:
    """still: what guards ask of the next one, in their order; it goes the whole way when one says no. headers: what
    they add to the answer. answer: the endpoint, which sets it when it has answered as usual; it takes such headers,
    and who answers what is not as usual, and returns the status, 0 when that one did. meter: takes the status and
    the seconds."""

    still: list[Callable[[], bool]] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    answer: Answer | None = None
    at_once: Callable[[bytes], bytes] | None = None
    meter: Callable[[int, float], None] | None = None


class Lane:
    """Around the whole application. leader: the console that leads now; another one may not know the job.

    express: those with an `at_once`, for app.api.express.
    """

    def __init__(self, app: ASGIApp, leader: Callable[[], object]) -> None:
        self.app = app
        self._leader = leader
        self._known: dict[tuple[object, ...], Pass] = {}
        self.express: dict[Raw, Pass] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _kind(scope)
        if kind is None:
            await self.app(scope, receive, send)
            return
        known = self._known.get(kind)
        if known is None or known.answer is None or not all(still() for still in known.still):
            await self._whole_way(kind, scope, receive, send)
            return
        self._learn(scope, known)
        began = time.perf_counter()
        status = await known.answer(scope, receive, send, known.headers, self.app)
        if status and known.meter is not None:
            known.meter(status, time.perf_counter() - began)

    async def _whole_way(self, kind: tuple[object, ...], scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._leader()
        passed = Pass([lambda: self._leader() is leader])
        await self.app({**scope, PASS: passed}, receive, send)
        if passed.answer is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
                self.express.clear()
            self._known[kind] = passed
            self._learn(scope, passed)
        else:
            self._known.pop(kind, None)
            self.express.pop(scope.get(RAW, ()), None)

    def _learn(self, scope: Scope, passed: Pass) -> None:
        if passed.at_once is not None and (raw := scope.get(RAW)) is not None:
            if len(self.express) >= _MOST:
                self.express.clear()
            self.express[raw] = passed


def _kind(scope: Scope) -> tuple[object, ...] | None:
    """What guards and routes go by, all of it; None: not one for the lane."""
    if scope["type"] != "http":
        return None
    path: str = scope["path"]
    if not path.endswith(_ENDS.get(scope["method"], ())) or not path.startswith(_JOBS):
        return None
    if scope["method"] == "POST" and scope["query_string"]:
        return None  # these have none: it is refused where all are
    headers: list[object] = []
    sized = scope["method"] == "GET"
    for name, value in scope["headers"]:
        if name == b"content-length":
            if len(value) > 5 or not value.isdigit() or int(value) > _MOST_BYTES:
                return None
            sized = True
        elif name in (b"transfer-encoding", b"idempotency-key"):
            return None
        else:
            headers += (name, value)
    client = scope.get("client")
    return (path, scope["method"], scope["scheme"], client and client[0], *headers) if sized else None
