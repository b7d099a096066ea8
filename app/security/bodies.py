"""How large the body of a request may be."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API
from openrecycle.app.runtime.documents import MOST_LARGE, PLAN_MIB
from openrecycle.app.runtime.problems import problem
from openrecycle.app.security.hosts import UNSAFE

BODY_LIMIT = 64 * 1024
LOGIN_LIMIT = 4 * 1024
_KIB, _MIB = 1024, 1024 * 1024
# What may stand for thousands of ops, stages or workers; plans are read in a process of their own. By the end of
# the path below /api/v1.
_LARGER = {
    "/plans": PLAN_MIB * _MIB,
    "/measured": 4 * _MIB,
    "/heartbeats": 4 * _MIB,
    "/acknowledgements": 4 * _MIB,
    "/jobs": 2 * _MIB,
    "/solves": 2 * _MIB,
    "/catalogs": 2 * _MIB,
    "/iterations": 512 * _KIB,
    "/interim": 8 * _MIB,
    "/choice": 512 * _KIB,
    "/logs": 1 * _MIB,
}
_NAMED_PROFILE = re.compile(rf"{API}/profiles/[^/]*", re.DOTALL)
_PROFILE_LIMIT = 2 * _MIB


# Of bodies beyond this only a few are held at once (MOST_LARGE).
LARGE_BODY = 8 * _MIB
# A body that takes longer holds its memory for nothing.
BODY_SECONDS = 60.0
# Of one that is refused: what is still taken, so that who sends it comes to read the answer. A plan that is too large
# is mostly not much too large.
DRAINED_BYTES, DRAIN_SECONDS = 2 * PLAN_MIB * _MIB, 15.0


class BodyLimit:
    """Reads the body of an API request before the handler does, up to its limit: 413 beyond, 408 for one that does not
    come."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._large = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = _limit(scope)
        if limit is None:
            await self.app(scope, receive, send)
        elif limit <= LARGE_BODY or 0 < _said(scope) <= LARGE_BODY or _said(scope) > limit:
            await self._limited(scope, receive, send, limit)
        elif self._large >= MOST_LARGE:
            why = f"{MOST_LARGE} bodies of more than {LARGE_BODY:,} bytes, or of unknown size, are being read already"
            await _refuse(problem(429, "too_many", f"{why}; try again later"), scope, receive, send)
        else:
            self._large += 1
            try:
                await self._limited(scope, receive, send, limit)
            finally:
                self._large -= 1

    async def _limited(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read(scope, receive, limit)
        except TimeoutError:
            response = problem(408, "too_slow", f"the body: not all of it came within {BODY_SECONDS:g} s")
        except _TooLarge:
            response = problem(413, "too_large", f"the body: got more than {limit:,} bytes, expected at most that")
        else:
            if body is not None:
                await self.app(scope, replayed(body, receive), send)
            return
        await _refuse(response, scope, receive, send)


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """The answer, and then what is left of the body, of which a bounded amount is thrown away: a connection that is
    closed while data are on their way is reset, and the answer is lost with it."""
    response.headers["Connection"] = "close"
    last: Message = {"type": "http.response.body", "body": b""}

    async def hold(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    await response(scope, receive, hold)
    left, more = DRAINED_BYTES, True
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)
    await send(last)


class _TooLarge(Exception):
    """The body has more bytes than it may have."""


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """None: the client has gone. Raises _TooLarge as soon as that is known."""
    body, more = bytearray(), True
    if _said(scope) > limit:
        raise _TooLarge
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise _TooLarge
    return bytes(body)


def _said(scope: Scope) -> int:
    """Bytes that the body has by its header; 0: it does not say."""
    return int(Headers(scope=scope).get("content-length") or 0)


def _limit(scope: Scope) -> int | None:
    """Bytes that the request's body may have; None: not ours to say (Streamlit has its own)."""
    if scope["type"] != "http" or scope["method"] not in UNSAFE:
        return None
    path = scope["path"]
    if path == "/login":
        return LOGIN_LIMIT
    if path == f"{API}/history/import":  # goes to a file as it comes, and is limited there
        return None
    if path.startswith(API):
        if _NAMED_PROFILE.fullmatch(path):
            return _PROFILE_LIMIT
        return next((limit for end, limit in _LARGER.items() if path.endswith(end)), BODY_LIMIT)
    return None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the whole body first, and then what else there is to receive."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
