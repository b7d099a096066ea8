"""What every request must pass, as plain ASGI middleware, WebSockets included.

From the outside in: the Host allow list (DNS rebinding), the origin of requests that change
something (CSRF), the body limits of the API, the token.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import time
from collections import deque
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent.protocol import API
from app.api.problems import problem

COOKIE = "openrecycle_session"
SESSION_SECONDS = 12 * 3600
HEARTBEAT_LIMIT = 64 * 1024
BODY_LIMIT = 8 * 1024 * 1024
LOGIN_LIMIT = 4 * 1024
# Wrong tokens per minute, from everybody together, before the login page asks for patience.
MAX_FAILURES = 20

_UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_OPEN = frozenset({"/healthz", "/login"})


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
            await _refuse(scope, receive, send, problem(421, "wrong_host", detail))
            return
        origin = headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] in _UNSAFE
        foreign = origin is not None and urlsplit(origin).netloc != host
        if changes and (foreign or headers.get("sec-fetch-site") == "cross-site"):
            detail = f"Origin: got {origin!r}, expected a page of this console"
            await _refuse(scope, receive, send, problem(403, "wrong_origin", detail))
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out["X-Content-Type-Options"] = "nosniff"
                out["X-Frame-Options"] = "SAMEORIGIN"
                out["Referrer-Policy"] = "same-origin"
            await send(message)

        await self.app(scope, receive, hardened)


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
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, replay, send)


class TokenGuard:
    """Lets nothing through without the token: `Authorization: Bearer` for programs, a cookie made by
    /login for browsers. The cookie is an expiry time and its HMAC under the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token.encode()
        self.failures: deque[float] = deque(maxlen=MAX_FAILURES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if scope["type"] == "http" and path == "/login":
            response = await self._login(Request(scope, receive))
            await response(scope, receive, send)
        elif path in _OPEN or self._known(Headers(scope=scope)):
            await self.app(scope, receive, send)
        else:
            await _refuse(scope, receive, send, self._unknown(scope))

    def _known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return hmac.compare_digest(given.strip().encode(), self.token)
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        if cookie is None:
            return False
        expiry = cookie.value.partition(".")[0]
        if not (expiry.isascii() and expiry.isdigit() and len(expiry) <= 12):
            return False
        return hmac.compare_digest(cookie.value.encode(), self.session(int(expiry)).encode()) and (
            time.time() < int(expiry)
        )

    def session(self, expiry: int) -> str:
        """The cookie's value. expiry: POSIX seconds."""
        mac = hmac.new(self.token, b"openrecycle session " + str(expiry).encode(), hashlib.sha256)
        return f"{expiry}.{mac.hexdigest()}"

    def _unknown(self, scope: Scope) -> Response:
        headers = Headers(scope=scope)
        if scope["type"] == "http" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            back = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            return RedirectResponse(f"/login?next={quote(back, safe='')}", 303)
        return problem(
            401,
            "unauthorized",
            "Authorization: expected `Bearer` and this console's token",
            {"WWW-Authenticate": 'Bearer realm="OpenReCycle"'},
        )

    async def _login(self, request: Request) -> Response:
        back = _local(request.query_params.get("next", "/"))
        if request.method == "GET":
            return _login_page(back, "", 200)
        if request.method != "POST":
            return problem(405, "method_not_allowed", f"method: got {request.method}, expected GET or POST")
        now = time.monotonic()
        if len(self.failures) == MAX_FAILURES and now - self.failures[0] < 60:
            response = _login_page(back, "Too many wrong tokens. Wait a minute, then try again.", 429)
            response.headers["Retry-After"] = "60"
            return response
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        given = form.get("token", [""])[0].strip()
        if not hmac.compare_digest(given.encode(), self.token):
            self.failures.append(now)
            return _login_page(back, "That is not this console's token.", 401)
        response = RedirectResponse(back, 303)
        response.set_cookie(
            COOKIE,
            self.session(int(time.time()) + SESSION_SECONDS),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response


def _hostname(host: str) -> str:
    """`[::1]:8501` -> `[::1]`, `localhost:8501` -> `localhost`."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _limit(scope: Scope) -> int | None:
    """Bytes that the request's body may have; None: not ours to say (Streamlit has its own)."""
    if scope["type"] != "http" or scope["method"] not in _UNSAFE:
        return None
    path = scope["path"]
    if path == "/login":
        return LOGIN_LIMIT
    if path.startswith(API):
        return HEARTBEAT_LIMIT if path.endswith("/heartbeats") else BODY_LIMIT
    return None


def _local(path: str) -> str:
    """A path of this server, whatever was asked for: never another site."""
    local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if local else "/"


async def _refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        # Before `accept` this is an HTTP 403.
        await send({"type": "websocket.close", "code": 4401})
        return
    await response(scope, receive, send)


def _login_page(back: str, message: str, status: int) -> Response:
    note = f'<p role="alert">{html.escape(message)}</p>' if message else ""
    action = html.escape(f"/login?next={quote(back, safe='')}")
    page = _LOGIN.replace("{{note}}", note).replace("{{action}}", action)
    policy = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    return HTMLResponse(page, status, {"Content-Security-Policy": policy, "Cache-Control": "no-store"})


_LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>OpenReCycle: sign in</title><style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { display: grid; place-items: center; min-height: 100vh; margin: 0 }
main { width: min(22rem, calc(100vw - 3rem)) }
h1 { font-size: 1.4rem; margin: 0 0 .25rem }
label { display: block; margin: 1rem 0 .25rem }
input, button { box-sizing: border-box; width: 100%; padding: .6rem; font: inherit; border-radius: .4rem;
  border: 1px solid #8a949e }
button { margin-top: .75rem; background: #2862B2; border-color: #2862B2; color: #fff; cursor: pointer }
[role=alert] { color: #D7541F; margin: .75rem 0 0 }
</style></head><body><main><h1>OpenReCycle</h1>
<div>This console asks for the token it was started with.</div>{{note}}
<form method="post" action="{{action}}"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button></form></main></body></html>
"""
