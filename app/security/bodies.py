"""How large the body of a request may be."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agent.protocol import API
from app.api.problems import problem
from app.api.replay import replayed
from app.security.hosts import UNSAFE

BODY_LIMIT = 64 * 1024
LOGIN_LIMIT = 4 * 1024
_KIB, _MIB = 1024, 1024 * 1024
# What may stand for thousands of ops, stages or workers; plans are read in a process of their own. By the end of
# the path below /api/v1.
_LARGER = {
    "/plans": 8 * _MIB,
    "/measured": 4 * _MIB,
    "/heartbeats/batch": 4 * _MIB,
    "/jobs": 2 * _MIB,
    "/solves": 2 * _MIB,
    "/catalogs": 2 * _MIB,
    "/iterations": 512 * _KIB,
    "/choice": 512 * _KIB,
    "/logs": 1 * _MIB,
}
_NAMED_PROFILE = re.compile(rf"{API}/profiles/[^/]*", re.DOTALL)
_PROFILE_LIMIT = 2 * _MIB


class BodyLimit:
    """Reads the body of an API request before the handler does, up to its limit: 413 beyond."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = _limit(scope)
        if limit is None:
            await self.app(scope, receive, send)
            return
        body, more = bytearray(), True
        too_large = int(Headers(scope=scope).get("content-length") or 0) > limit
        while more and not too_large:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            too_large = len(body) > limit
        if too_large:
            response = problem(413, "too_large", f"the body: got more than {limit:,} bytes, expected at most that")
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self.app(scope, replayed(bytes(body), receive), send)


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
