"""Which names the console answers to, and from whose pages it takes orders."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.lane import PASS
from app.api.problems import problem
from app.security.refusing import refuse

_HARDENING = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "SAMEORIGIN"),
    ("Referrer-Policy", "same-origin"),
)
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
        host = headers.get("host", "")
        if self.allowed and _hostname(host) not in self.allowed:
            detail = f"Host: got {host!r}, expected one of {', '.join(sorted(self.allowed))}"
            await refuse(scope, receive, send, problem(421, "wrong_host", detail))
            return
        origin = headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] in UNSAFE
        foreign = origin is not None and urlsplit(origin).netloc != host
        if changes and (foreign or headers.get("sec-fetch-site") == "cross-site"):
            detail = f"Origin: got {origin!r}, expected a page of this console"
            await refuse(scope, receive, send, problem(403, "wrong_origin", detail))
            return
        encrypted = scope["scheme"] in ("https", "wss")
        if PASS in scope:
            scope[PASS].headers += [(name.lower().encode(), value.encode()) for name, value in _HARDENING]

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


def _hostname(host: str) -> str:
    """`[::1]:8501` -> `[::1]`, `localhost:8501` -> `localhost`."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
