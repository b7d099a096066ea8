"""Which names the console answers to, and from whose pages it takes orders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.app.runtime.problems import problem

_HARDENING = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "SAMEORIGIN"),
    ("Referrer-Policy", "same-origin"),
)
# RFC 9110, as far as names and addresses go that a console may have.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?", re.ASCII)
UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class HostGuard:
    """Refuses a Host that is not in `allowed` (host names without port; empty: any), and a request
    that changes something, or a WebSocket, which a page of another origin sent."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = ()) -> None:
        self.app = app
        self.allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, given = headers.get("host", ""), headers.getlist("host")
        if len(given) > 1 or (host and not _HOST.fullmatch(host)):
            detail = f"Host: got {', '.join(given)!r:.200}, expected one name or address, with or without a port"
            await refuse(scope, receive, send, problem(400, "invalid", detail))
            return
        if self.allowed and hostname(host) not in self.allowed:
            detail = f"Host: got {host!r}, expected one of {', '.join(sorted(self.allowed))}"
            await refuse(scope, receive, send, problem(421, "wrong_host", detail))
            return
        origin = headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] in UNSAFE
        foreign = False
        if origin is not None:
            try:
                foreign = urlsplit(origin).netloc != host
            except ValueError:
                detail = f"Origin: got {origin!r:.200}, expected the address of a page"
                await refuse(scope, receive, send, problem(400, "invalid", detail))
                return
        if changes and (foreign or headers.get("sec-fetch-site") == "cross-site"):
            detail = f"Origin: got {origin!r}, expected a page of this console"
            await refuse(scope, receive, send, problem(403, "wrong_origin", detail))
            return
        encrypted = scope["scheme"] in ("https", "wss")

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in _HARDENING:
                    out[name] = value
                if encrypted:
                    message["headers"] = [_secure(*header) for header in message["headers"]]
            await send(message)

        await self.app(scope, receive, hardened)


def _secure(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A cookie that was set over TLS never travels without it; Streamlit's own do not ask for that."""
    if name.lower() == b"set-cookie" and b"; secure" not in value.lower():
        value += b"; Secure"
    return name, value


def hostname(host: str) -> str:
    """`[::1]:8501` -> `[::1]`, `localhost:8501` -> `localhost`."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def foreign_page(headers: Headers) -> bool:
    """Was the request caused by a page of another address, as far as the browser tells?"""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    for name in ("origin", "referer"):
        if (value := headers.get(name)) is not None:
            try:
                return urlsplit(value).netloc != headers.get("host", "")
            except ValueError:
                return True
    return False


# Of a WebSocket that is closed because its caller may not (or no longer) have it open.
CLOSED = 4401


async def refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        # Before `accept` this is an HTTP 403.
        await send({"type": "websocket.close", "code": CLOSED})
        return
    await response(scope, receive, send)
