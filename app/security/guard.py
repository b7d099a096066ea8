"""The guards that every request must pass, WebSockets included, as plain ASGI middleware.

From the outside in: HostGuard checks the name that the console is addressed by (DNS rebinding), and the origin of
requests that change something (CSRF). AccessGuard checks who asks, how often, and whether their role is enough.
BodyLimit checks how much they send.

Programs use `Authorization: Bearer`, and browsers cookies. Behind the guards, the header `X-OpenRecycle-Caller` says
who the caller is, and `X-Actor` the name under which they act. If the console has a token, the guard writes both
itself: from outside, `X-Actor` only adds whom the caller acts for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API, is_loopback
from openrecycle.app.runtime.errors import BODY, MOST_LARGE, PLAN_MIB, ConsoleError
from openrecycle.app.runtime.problems import answered, problem
from openrecycle.app.security.access import (
    ACTOR,
    AGENTS,
    CALLBACK,
    CALLER,
    COOKIE,
    LOCAL,
    LOGIN_STREAMLIT,
    LOGOUT,
    MAX_ACTOR,
    PEOPLE,
    SESSION_SECONDS,
    SIGN_OUT,
    UNKNOWN,
    Access,
    Caller,
    RateLimits,
    Role,
    account,
    agent_route,
    local,
    login_page,
    refusal,
)

_HARDENING = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "SAMEORIGIN"),
    ("Referrer-Policy", "same-origin"),
)
# RFC 9110, limited to the names and addresses that a console may have.
_HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?", re.ASCII)
UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class HostGuard:
    """Refuses a Host that is not in `allowed` (host names without port; empty: any). Also refuses requests that change
    something, and WebSockets, if a page of another origin sent them."""

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
            said = f"got {', '.join(given)!r:.200}, expected one name or address, with or without a port"
            await refuse(scope, receive, send, answered(ConsoleError(400, "invalid", said, field="Host")))
            return
        if self.allowed and hostname(host) not in self.allowed:
            said = f"got {host!r}, expected one of {', '.join(sorted(self.allowed))}"
            await refuse(scope, receive, send, answered(ConsoleError(421, "wrong_host", said, field="Host")))
            return
        origin = headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] in UNSAFE
        foreign = False
        if origin is not None:
            try:
                foreign = urlsplit(origin).netloc != host
            except ValueError:
                said = f"got {origin!r:.200}, expected the address of a page"
                await refuse(scope, receive, send, answered(ConsoleError(400, "invalid", said, field="Origin")))
                return
        if changes and (foreign or headers.get("sec-fetch-site") == "cross-site"):
            said = f"got {origin!r}, expected a page of this console"
            await refuse(scope, receive, send, answered(ConsoleError(403, "wrong_origin", said, field="Origin")))
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
    """Adds `Secure` to a cookie that is set over TLS, since Streamlit's own cookies lack it."""
    if name.lower() == b"set-cookie" and b"; secure" not in value.lower():
        value += b"; Secure"
    return name, value


def hostname(host: str) -> str:
    """Returns a Host without its port: `[::1]:8501` -> `[::1]`, `localhost:8501` -> `localhost`."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def foreign_page(headers: Headers) -> bool:
    """Says whether a page of another address caused the request, as far as the browser tells."""
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


# The close code of a WebSocket whose caller may not, or no longer, have it open.
CLOSED = 4401


async def refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        # Before `accept` this is an HTTP 403.
        await send({"type": "websocket.close", "code": CLOSED})
        return
    await response(scope, receive, send)


BODY_LIMIT = 64 * 1024
LOGIN_LIMIT = 4 * 1024
_KIB, _MIB = 1024, 1024 * 1024
# Limits for bodies that may have thousands of ops, stages or workers, by the end of the path below /api/v1. Plans are
# read in a process of their own.
_LARGER = {
    "/plans": PLAN_MIB * _MIB,
    "/measured": 4 * _MIB,
    "/workers": 4 * _MIB,
    "/heartbeats": 4 * _MIB,
    "/acknowledgements": 4 * _MIB,
    "/failures": 4 * _MIB,
    "/jobs": 2 * _MIB,
    "/solves": 2 * _MIB,
    "/iterations": 512 * _KIB,
    "/interim": 4 * _MIB,
    "/choice": 512 * _KIB,
    "/logs": 1 * _MIB,
}
_NAMED_PROFILE = re.compile(rf"{API}/profiles/[^/]*", re.DOTALL)
_PROFILE_LIMIT = 2 * _MIB


# Only a few bodies larger than this are held at once (MOST_LARGE).
LARGE_BODY = 8 * _MIB
# A body that takes longer to come is refused: it would hold its memory for nothing.
BODY_SECONDS = 60.0
# How much of a refused body is still received, so that its sender gets to read the answer. A plan that is too large is
# mostly not much too large.
DRAINED_BYTES, DRAIN_SECONDS = 2 * PLAN_MIB * _MIB, 15.0


class BodyLimit:
    """Reads the body of an API request before the handler does. Answers 413 if it is above its limit, and 408 if it
    does not come in time."""

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
            await _refuse(
                problem(429, "too_many", f"{why}; try again later", {"Retry-After": "1"}), scope, receive, send
            )
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
            said = f"not all of it came within {BODY_SECONDS:g} s"
            response = answered(ConsoleError(408, "too_slow", said, field=BODY))
        except _TooLarge:
            said = f"got more than {limit:,} bytes, expected at most that"
            response = answered(ConsoleError(413, "too_large", said, field=BODY))
        else:
            if body is not None:
                await self.app(scope, replayed(body, receive), send)
            return
        await _refuse(response, scope, receive, send)


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the answer, then receives and drops a bounded amount of the rest of the body before it ends: a connection
    that is closed while data are on their way is reset, and the answer is lost with it."""
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
    """Raised when a body is above its limit."""


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """Reads the body; None: the client has gone. Raises _TooLarge as soon as the body is known to be too large."""
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
    """Returns the body's size in bytes by its header; 0: the header does not say."""
    return int(Headers(scope=scope).get("content-length") or 0)


def _limit(scope: Scope) -> int | None:
    """Returns how many bytes the request's body may have; None: others limit it, such as Streamlit."""
    if scope["type"] != "http" or scope["method"] not in UNSAFE:
        return None
    path = scope["path"]
    if path == "/login":
        return LOGIN_LIMIT
    if path.startswith(API):
        if _NAMED_PROFILE.fullmatch(path):
            return _PROFILE_LIMIT
        return next((limit for end, limit in _LARGER.items() if path.endswith(end)), BODY_LIMIT)
    return None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that first gives the whole body, and then further messages."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


# Paths that work without signing in; none of them says anything about a job.
HEALTH, LOGIN, LOGIN_OIDC = "/healthz", "/login", "/login/oidc"
# Headers that proxies add; those that begin with X-Forwarded- count too.
_OF_PROXIES = frozenset(
    (
        "forwarded",
        "via",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-original-host",
        "x-original-forwarded-for",
        "x-envoy-external-address",
        "x-envoy-original-path",
        "true-client-ip",
        "cf-connecting-ip",
        "cf-ray",
        "fastly-client-ip",
        "x-azure-clientip",
        "x-arr-log-id",
        "x-proxyuser-ip",
        "proxy-connection",
        "client-ip",
        "x-forwarded",
    )
)
LOCAL_ADDRESS = "127.0.0.1"  # the address for a client on a Unix socket, which has none


class AccessGuard:
    """Checks who asks, how often, and whether their role is enough. With an open Access it only names the caller, and
    refuses requests from other machines or through a proxy."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access
        self.limits = RateLimits()
        self._sign_in = BodyLimit(self._login)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif self.access.guarded:
            await self._guarded(scope, receive, send)
        elif why := _not_from_here(scope):
            detail = f"this console has no token, so it answers this machine alone, and no proxy ({why}): "
            await refuse(scope, receive, send, problem(403, "token_needed", detail + "set OPENRECYCLE_TOKEN"))
        else:
            await self.app(_as(scope, LOCAL, Headers(scope=scope).get(ACTOR)), receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers, address = scope["path"], Headers(scope=scope), _address(scope)
        method = scope.get("method", "GET")
        if path in (SIGN_OUT, LOGOUT) and foreign_page(headers):
            detail = f"{path}: a page of another address asked for it, expected one of this console"
            await refuse(scope, receive, send, problem(403, "wrong_origin", detail))
            return
        if path == SIGN_OUT and scope["type"] == "http":
            await self._sign_out()(scope, receive, send)
            return
        try:
            caller = await self._caller(headers, address)
        except ConsoleError as error:
            again = {"Retry-After": "60" if error.status == 429 else "1"}
            await refuse(scope, receive, send, answered(error, again))
            return
        if caller is None:
            rate, key = UNKNOWN, address
        else:
            rate, key = (AGENTS if caller.reports and agent_route(method, path)[0] else PEOPLE), caller.key
        if wait := self.limits.take(rate, key):
            detail = f"more than {rate.per_second:,.0f} requests a second; try again in {wait} s"
            await refuse(scope, receive, send, problem(429, "too_many", detail, {"Retry-After": str(wait)}))
        elif scope["type"] == "http" and path == LOGIN:
            await self._sign_in(scope, receive, send)
        elif scope["type"] == "http" and path == LOGIN_OIDC and self.access.oidc is not None:
            await self._start_oidc(Request(scope))(scope, receive, send)
        elif path == HEALTH or (scope["type"] == "http" and self._oidc_path(path)):
            await self.app(_as(scope, caller, None), receive, send)
        elif caller is None:
            await refuse(scope, receive, send, self._unknown(scope))
        elif why := refusal(caller, method, path):
            await refuse(scope, receive, send, problem(403, "forbidden", why))
        else:
            inner = _as(scope, caller, headers.get(ACTOR))
            await self.app(inner, receive, self._while_valid(scope, caller, send))

    async def _caller(self, headers: Headers, address: str) -> Caller | None:
        """Returns the caller; None: unknown. Raises ConsoleError (429, 503)."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return await self.access.by_token(given.strip(), address)
        return self.access.by_cookies(headers)

    def _while_valid(self, scope: Scope, caller: Caller, send: Send) -> Send:
        """Returns a `send` that closes a page's WebSocket when its session ends or its token is revoked."""
        if scope["type"] != "websocket":
            return send
        closed = False

        async def checked(message: Message) -> None:
            nonlocal closed
            if closed:
                return
            if not self.access.still(caller):
                closed = True
                message = {"type": "websocket.close", "code": CLOSED}
            await send(message)

        return checked

    def _oidc_path(self, path: str) -> bool:
        return self.access.oidc is not None and path in (LOGIN_STREAMLIT, CALLBACK, LOGOUT)

    # -- pages of the guard's own -----------------------------------------------------------

    def _unknown(self, scope: Scope) -> Response:
        headers = Headers(scope=scope)
        if scope["type"] == "http" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            back = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            return RedirectResponse(f"{LOGIN}?next={quote(back, safe='')}", 303)
        scheme = headers.get("authorization", "").partition(" ")[0]  # it may be a token: never shown
        given = {"": "none", "bearer": "a token that is unknown here, or has ended"}.get(
            scheme.lower(), "another scheme"
        )
        said = f"got {given}, expected `Bearer` and a token of this console"
        refused = ConsoleError(401, "unauthorized", said, field="Authorization")
        return answered(refused, {"WWW-Authenticate": 'Bearer realm="OpenReCycle"'})

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer_login(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer_login(self, request: Request) -> Response:
        back = local(request.query_params.get("next", "/"))
        providers = self.access.oidc.providers if self.access.oidc is not None else ()
        if request.method == "GET":
            if claims := self.access.stranger(request.headers):
                words = f"{account(claims)} has no role on this console. Ask who runs it, or sign in as somebody else."
                return login_page(back, words, 403, providers, of_account=True)
            return login_page(back, "", 200, providers)
        if request.method != "POST":
            said = f"got {request.method}, expected GET or POST"
            return answered(ConsoleError(405, "method_not_allowed", said, field="method"), {"Allow": "GET, POST"})
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        given = form.get("token", [""])[0].strip()
        try:
            caller = await self.access.by_token(given, _address(request.scope))
        except ConsoleError as error:
            page = login_page(back, "Too many wrong tokens. Wait a minute, then try again.", error.status, providers)
            page.headers["Retry-After"] = "60"
            return page
        if caller is None:
            return login_page(back, "That is not a token of this console.", 401, providers)
        if caller.role is Role.AGENT:
            return login_page(back, "That is an agent's token. It opens no pages.", 403, providers)
        response = RedirectResponse(back, 303)
        response.set_cookie(
            COOKIE,
            self.access.session(caller),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    def _start_oidc(self, request: Request) -> Response:
        assert self.access.oidc is not None and self.access.login is not None
        provider = request.query_params.get("provider", "")
        if provider not in self.access.oidc.providers:
            said = f"got {provider!r}, expected one of the sign-in page's"
            return answered(ConsoleError(404, "unknown_provider", said, field="provider"))
        return RedirectResponse(self.access.login.start(provider), 303)

    def _sign_out(self) -> Response:
        response = RedirectResponse(LOGOUT if self.access.oidc is not None else LOGIN, 303)
        response.delete_cookie(COOKIE)
        return response


def _as(scope: Scope, caller: Caller | None, claimed: str | None) -> Scope:
    """Returns the request with the headers CALLER and ACTOR. claimed: whom the sender says that it acts for."""
    headers = [
        (name, value) for name, value in scope["headers"] if name.lower() not in (CALLER.encode(), ACTOR.encode())
    ]
    if caller is None:
        return {**scope, "headers": headers}
    if caller is not LOCAL:
        actor = f"{caller.name} for {claimed}" if claimed and claimed != caller.name else caller.name
    else:
        actor = claimed or ""
    if actor:
        headers.append((ACTOR.encode(), actor[:MAX_ACTOR].encode()))
    headers.append((CALLER.encode(), caller.to_header()))
    return {**scope, "headers": headers}


def _not_from_here(scope: Scope) -> str:
    """Says by what a request shows that it comes from another machine, or through a proxy; "": by nothing."""
    headers = Headers(scope=scope)
    if not is_loopback(_address(scope)):
        return f"it comes from {_address(scope)}"
    for name in headers:
        if name in _OF_PROXIES or name.startswith("x-forwarded-"):
            return f"the header {name.title()} is a proxy's"
    host = headers.get("host", "localhost")
    if not is_loopback(hostname(host).strip("[]")):
        return f"Host is {host!r:.100}"
    return ""


def _address(scope: Scope) -> str:
    """Returns the client's address; behind a trusted proxy, the one that the proxy names."""
    client = scope.get("client")
    return client[0] if client else LOCAL_ADDRESS
