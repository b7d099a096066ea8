"""Lets a request through when it is known who asks, they do not ask too often, and their role is enough.

`Authorization: Bearer` is for programs, cookies for browsers. Behind the guard, the header
`X-OpenRecycle-Caller` says who it is, and `X-Actor` under which name they act; neither is taken from
outside where the console has a token.
"""

from __future__ import annotations

from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.problems import problem
from openrecycle.app.security.access import Access
from openrecycle.app.security.bodies import BodyLimit
from openrecycle.app.security.callers import ACTOR, CALLER, LOCAL, MAX_ACTOR, STILL, Caller, Role, agent_route, refusal
from openrecycle.app.security.hosts import CLOSED, foreign_page, hostname, refuse
from openrecycle.app.security.limits import AGENTS, PEOPLE, UNKNOWN, RateLimits
from openrecycle.app.security.login import COOKIE, SESSION_SECONDS, local, login_page
from openrecycle.app.security.oidc import CALLBACK, LOGOUT, account
from openrecycle.app.settings import is_loopback

# What must work for whoever has not signed in; none of it says anything about a job.
HEALTH, LOGIN, LOGIN_OIDC, LOGIN_STREAMLIT = "/healthz", "/login", "/login/oidc", "/auth/login"
SIGN_OUT = "/logout"
# What proxies add, whatever it says; those that begin with X-Forwarded- too.
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
LOCAL_ADDRESS = "127.0.0.1"  # what a Unix socket stands for


class AccessGuard:
    """Around the application. With an open Access it only says who asks, and refuses what a proxy passes on."""

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
            await refuse(scope, receive, send, problem(error.status, error.code, error.detail, again))
            return
        if caller is None:
            rate, key = UNKNOWN, address
        else:
            rate, key = (AGENTS if agent_route(method, path)[0] else PEOPLE), caller.key
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
            inner = {**_as(scope, caller, headers.get(ACTOR)), STILL: lambda: self.access.still(caller)}
            await self.app(inner, receive, self._while_valid(scope, caller, send))

    async def _caller(self, headers: Headers, address: str) -> Caller | None:
        """Raises ConsoleError (429, 503)."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return await self.access.by_token(given.strip(), address)
        return self.access.by_cookies(headers)

    def _while_valid(self, scope: Scope, caller: Caller, send: Send) -> Send:
        """An open page is closed when its session ends or its token is revoked."""
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
        return problem(
            401,
            "unauthorized",
            "Authorization: expected `Bearer` and a token of this console",
            {"WWW-Authenticate": 'Bearer realm="OpenReCycle"'},
        )

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
            return problem(
                405, "method_not_allowed", f"method: got {request.method}, expected GET or POST", {"Allow": "GET, POST"}
            )
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
            return problem(404, "unknown_provider", f"provider: got {provider!r}, expected one of the sign-in page's")
        return RedirectResponse(self.access.login.start(provider), 303)

    def _sign_out(self) -> Response:
        response = RedirectResponse(LOGOUT if self.access.oidc is not None else LOGIN, 303)
        response.delete_cookie(COOKIE)
        return response


def _as(scope: Scope, caller: Caller | None, claimed: str | None) -> Scope:
    """The request as those behind the guard see it. claimed: who the sender says that it acts for."""
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
        headers.append((ACTOR.encode(), actor[:MAX_ACTOR].encode("latin-1", "replace")))
    headers.append((CALLER.encode(), caller.to_header()))
    return {**scope, "headers": headers}


def _not_from_here(scope: Scope) -> str:
    """By what a request shows that it comes from elsewhere, or through a proxy; empty: by nothing."""
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
    """Of the client; behind a proxy that is trusted, the one that it names."""
    client = scope.get("client")
    return client[0] if client else LOCAL_ADDRESS
