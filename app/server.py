"""`openrecycle serve`: Streamlit pages and REST API in one process, on one port.

A Starlette application carries both: first the routes of the API (FastAPI below /api/v1, health at the root), then
Streamlit's for everything else, with the guards of app.security around all of it. If several consoles share a database,
it is served only while this one leads (app.console.leadership).

To import the pages' modules, and what Plotly reads for a figure, takes half a second of processor time. `Preload` does
it soon after the console has told its address. If there are jobs to look after, it waits until a page is first asked
for, or the console has been up for a while. Streamlit's pages are not imported before.

The OpenAPI document is FastAPI's own, corrected where it does not match the answers. It is also served for people, as
one HTML page without scripts or anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import pkgutil
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from html import escape
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import structlog
import uvicorn
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API, ProblemDetails
from openrecycle.app.api import access, agents, jobs, plans
from openrecycle.app.api.connection import connections
from openrecycle.app.api.idempotency import HEADER, MOST_CHARACTERS, Idempotency, keeps_keys
from openrecycle.app.api.models import ReadBeside, known_query
from openrecycle.app.console.leadership import ConsoleHost, Gate, make_host, set_host
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.observing.metrics import Metering, NamedRoutes
from openrecycle.app.runtime import problems, runner
from openrecycle.app.runtime.errors import PLAN_MIB, ConsoleError, SettingsError
from openrecycle.app.runtime.patches import GarbageCollection, PageBase, StaticFiles, tune_process
from openrecycle.app.runtime.problems import MEDIA_TYPE
from openrecycle.app.runtime.processes import configure_logging
from openrecycle.app.runtime.runner import EventLoopWatch, in_thread
from openrecycle.app.runtime.settings import Settings
from openrecycle.app.security.access import LOGIN_STREAMLIT, Access, Login, Tokens
from openrecycle.app.security.guard import AccessGuard, BodyLimit, HostGuard
from openrecycle.db.access import IdempotentRequests
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.plans.baseline import one_forward_one_backward
from openrecycle.planner.plans.drawing import Drawing

# -- what Streamlit calls, and what is done before the first page -------------------------------

log = structlog.get_logger()

# How long the preload waits for a page. After this time the workers of running jobs have come back to the console.
BUSY_SECONDS = 20.0
# The same without running jobs: only until the console has told its address.
CALM_SECONDS = 0.2
_PAGES = Path(__file__).parent / "ui"
# Modules that Streamlit imports for its first table and picture.
_OTHERS = ("pandas", "pyarrow", "PIL.PngImagePlugin")


def warm_up() -> None:
    """Imports the pages' modules and draws a figure. Takes about half a second of processor time."""
    for name in _OTHERS:
        import_module(name)
    for found in pkgutil.walk_packages([str(_PAGES)], "openrecycle.app.ui."):
        if found.name != "openrecycle.app.ui.main":  # which Streamlit runs
            import_module(found.name)
    _draw()


def _draw() -> None:
    from openrecycle.app.charts.gantt import gantt
    from openrecycle.app.charts.theme import LIGHT

    schedule = one_forward_one_backward(Problem(Job.uniform(2, 2, 2)))
    gantt(Drawing.of(schedule), LIGHT).to_json()


class Preload:
    """Prepares pages in threads of its own. One per process.

    work: done once, when a page is first asked for, or after `quiet` seconds. each: by the name of a page, called
    whenever that page is asked for; a repeated call should do nothing."""

    def __init__(
        self,
        work: Callable[[], object],
        each: Mapping[str, Callable[[], object]] | None = None,
        *,
        quiet: float = BUSY_SECONDS,
    ) -> None:
        self._work, self._each, self._quiet = work, each or {}, quiet
        self._asked = threading.Event()
        self.thread = threading.Thread(target=self._run, name="preload", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def page_asked_for(self, page: str) -> None:
        """page: its name in the address; empty for the first one."""
        if page in self._each:
            threading.Thread(target=_tried, args=(self._each[page],), name="preload", daemon=True).start()
        self._asked.set()

    def _run(self) -> None:
        self._asked.wait(self._quiet)
        _tried(self._work)


def _tried(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        log.exception("the pages could not be prepared; the first one to be opened takes longer")


def page_failed(error: Exception) -> bool:
    """Shows an error that a page, a fragment or a callback of st.App has raised, as one sentence; the log has the rest.

    Returns True: Streamlit shows nothing else of it.
    """
    import streamlit as st  # here, since StreamlitLogin alone needs less of it

    from openrecycle.app.ui.access import say_error

    if isinstance(error, ConsoleError):
        say_error(str(error))
        return True
    mark = secrets.token_hex(4)
    log.error("a page could not be drawn", mark=mark, exc_info=error)
    st.error(
        f"This part of the page could not be drawn: an error of the console, in its log under {mark}. "
        "No job is touched by it. Load the page again; if that does not help, restart the console. Training goes on "
        "meanwhile, unless a worker dies: then the others wait for the console. What jobs report is kept."
    )
    return True


class StreamlitLogin:
    """Streamlit's own login (st.login), for the guard in front of it; implements app.security.access.Login.

    Streamlit's pages can't ask who somebody is before their WebSocket is open, and all data flows through that. So the
    guard itself sends people to Streamlit's login, and reads the cookie that it signs.
    """

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        from streamlit.web.server.starlette.starlette_server_config import USER_COOKIE_NAME
        from streamlit.web.server.starlette.starlette_websocket import _get_signed_cookie_with_chunks

        if USER_COOKIE_NAME not in cookies:
            return {}
        signed = _get_signed_cookie_with_chunks(dict(cookies), USER_COOKIE_NAME)
        claims = json.loads(signed) if signed else {}
        return claims if isinstance(claims, dict) and claims.get("is_logged_in") is True else {}

    def start(self, provider: str) -> str:
        from streamlit.auth_util import encode_provider_token

        return f"{LOGIN_STREAMLIT}?{urlencode({'provider': encode_provider_token(provider or 'default')})}"


# -- the OpenAPI document -----------------------------------------------------------------------

_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}

_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "With the same key, the same request is done once and answered alike, for a day.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS, "pattern": "^[ -~]+$"},
}


def install_document(api: FastAPI) -> None:
    generated = api.openapi

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _put_right(generated())
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]


def _put_right(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method == "post" and keeps_keys(path):
                operation.setdefault("parameters", []).append(_KEY)
            for parameter in operation.get("parameters", []):
                parameter["schema"] = _not_null(parameter["schema"])
            for status, answer in operation["responses"].items():
                if status[0] in "45":
                    answer["content"] = dict(_PROBLEM)  # FastAPI adds application/json
    # Schemas of FastAPI's own validation errors, which this API does not answer with.
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    _plain_pairs(document)
    return document


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a header or query parameter without null: such a parameter is left out instead."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        return {**{key: value for key, value in schema.items() if key != "anyOf"}, **options[0]}
    return {**schema, "anyOf": options} if options else schema


def _plain_pairs(node: Any) -> None:
    """Writes arrays with a fixed number of equal items in a way that tools for OpenAPI 3.0 know, too, and says of
    objects with workers as keys that they have no others."""
    if isinstance(node, dict):
        first = node.get("prefixItems")
        if isinstance(first, list) and first and all(item == first[0] for item in first):
            del node["prefixItems"]
            node["items"] = first[0]
        if "patternProperties" in node:  # other keys are refused
            node.setdefault("additionalProperties", False)
        for value in node.values():
            _plain_pairs(value)
    elif isinstance(node, list):
        for value in node:
            _plain_pairs(value)


METHODS = ("get", "post", "put", "delete")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def page(document: dict[str, Any], base: str) -> str:
    """Returns the OpenAPI document as an HTML page. base: the path that the document's paths are below."""
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                groups.setdefault(operation["tags"][0], []).append(_operation(base + path, method, operation))
    links = " ".join(f'<a href="#{escape(tag)}">{escape(tag)}</a>' for tag in sorted(groups))
    parts = [f'<h2 id="{escape(tag)}">{escape(tag)}</h2>{"".join(groups[tag])}' for tag in sorted(groups)]
    schemas = document["components"]["schemas"]
    messages = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    about = escape(document["info"]["description"])
    return _PAGE.format(
        about=about, links=links, operations="".join(parts), messages=messages, document=f"{base}/openapi.json"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        _row(p["name"], p["in"], _type(p["schema"]), p.get("description", "") + (" (needed)" if p["required"] else ""))
        for p in operation.get("parameters", [])
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(_row("body", media_type, _type(content.get("schema", {})), ""))
    for status, answer in operation["responses"].items():
        for media_type, content in (answer.get("content") or {"": {}}).items():
            kind = _type(content.get("schema") or content.get("itemSchema", {}))
            rows.append(_row(status, media_type, kind, answer.get("description", "")))
    text = escape(operation.get("description", "")).replace("\n\n", "<br>")
    return (
        f"<details><summary><code><b>{method.upper()}</b> {escape(path)}</code></summary>"
        f"<div>{text}</div><table>{''.join(rows)}</table></details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", [])
    rows = [
        _row(field, "needed" if field in needed else "", _type(kind), kind.get("description", ""))
        for field, kind in schema.get("properties", {}).items()
    ]
    rows = rows or [_row("", "", _type(schema), "")]
    text = escape(schema.get("description", "")).replace("\n\n", "<br>")
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<div>{text}</div><table>{''.join(rows)}</table></details>"
    )


def _row(name: str, where: str, kind: str, text: str) -> str:
    """kind: HTML already."""
    return f"<tr><td><code>{escape(name)}</code><td>{escape(where)}<td>{kind}<td>{escape(text)}</tr>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(option) for option in schema[key])
    if "enum" in schema or "const" in schema:
        return escape(", ".join(map(repr, schema.get("enum", [schema.get("const")]))))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = {"minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "maxLength": "at most {} characters"}
    said = [text.format(schema[key]) for key, text in limits.items() if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *said]))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>OpenReCycle: API</title><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ cursor: pointer; padding: .25rem 0; overflow-wrap: anywhere }}
details {{ border-bottom: 1px solid #8a949e55 }} details > div {{ padding: .25rem 1rem }}
table {{ display: block; overflow-x: auto; border-spacing: 1rem .25rem; font-size: .9rem }}
td {{ vertical-align: top }} nav a {{ margin-right: 1rem }}
</style></head><body><main><h1>OpenReCycle: API</h1><p>{about}
The same for programs: <a href="{document}">openapi.json</a>.</p><nav>{links} <a href="#messages">messages</a></nav>
{operations}<h2 id="messages">messages</h2>{messages}</main></body></html>
"""


# -- `openrecycle serve` ------------------------------------------------------------------------


def create_api(console: ConsoleService) -> FastAPI:
    api = FastAPI(
        title="OpenReCycle",
        version="1",
        description="Jobs, their workers, and the plans they run. Errors are problem details (RFC 9457).",
        # FastAPI's own pages fetch scripts from elsewhere; the document itself is at /api/v1/openapi.json.
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(known_query)],
        responses={
            "4XX": {"model": ProblemDetails, "description": "It can't be done as asked; `detail` says why."},
            "5XX": {"model": ProblemDetails, "description": "The console or its database failed; 503: try again."},
        },
    )
    api.state.console = console
    api.router.route_class = ReadBeside
    problems.install(api)
    install_document(api)
    api.include_router(agents.router(console))
    api.include_router(jobs.router(console))
    api.include_router(jobs.histories_router(console))
    api.include_router(jobs.operator_router(console))
    api.include_router(plans.router(console))
    api.include_router(plans.profiles_router(console))
    api.include_router(jobs.measured_router(console))
    api.include_router(jobs.observed_router(console))
    api.include_router(plans.exports_router(console))
    api.include_router(plans.catalogs_router(console))
    api.include_router(access.router(console))
    return api


def create_routes(console: ConsoleService) -> list[BaseRoute]:
    api = create_api(console)
    usual = Mount(API, NamedRoutes(Idempotency(api, IdempotentRequests(console.database))))

    async def healthz(request: Request) -> Response:
        """Answers 200 if none of the console's threads stands still. With 503 the process should be restarted."""
        if why := ", ".join(filter(None, (console.stuck(), runner.stuck()))):
            return problems.problem(503, "stuck", f"these threads of the console stand still: {why}", problems.AGAIN)
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """Answers 200 if the database answers too."""
        try:
            await in_thread(console.ready)
        except ConsoleError as error:
            return problems.answered(error)
        return JSONResponse({"status": "ready"})

    async def docs(request: Request) -> Response:
        return Response(page(api.openapi(), API), 200, {"Content-Security-Policy": POLICY}, "text/html")

    async def metrics(request: Request) -> Response:
        """Answers with the metrics for Prometheus."""
        text, media_type = await in_thread(console.metrics.text, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": media_type})

    return [
        _Whole("/healthz", healthz),
        _Whole("/readyz", readyz),
        _Whole("/metrics", metrics),
        _Whole(f"{API}/docs", docs),
        usual,
        _Nothing(),
    ]


class _Whole(Route):
    """A route that answers every method on its path: those that it does not take with the API's usual 405."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, below = super().matches(scope)
        return (Match.FULL if match is Match.PARTIAL else match), below

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = self.methods or set()
        if scope["method"] in methods:
            await super().handle(scope, receive, send)
            return
        refused = HTTPException(405, headers={"Allow": ", ".join(methods)})
        await problems.http_problem(Request(scope), refused)(scope, receive, send)


class _Nothing(BaseRoute):
    """Answers 404 for every other path below /api. Without it, Streamlit would answer with its page and 200. Paths with
    line breaks are included, which no pattern of Starlette's matches."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ours = scope["type"] == "http" and (scope["path"] + "/").startswith("/api/")
        return (Match.FULL if ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await problems.http_problem(Request(scope), HTTPException(404))(scope, receive, send)


HERE = Path(__file__).resolve().parent
UI_SCRIPT = HERE / "ui" / "main.py"

# Seconds from a signal to the end of the process, even if something in it hangs; an orderly end takes less.
END_SECONDS = 20.0
# Seconds for open requests to end after a signal; long-polls end at once.
GRACE = 1


def create_app(host: ConsoleHost, settings: Settings, standby: Access) -> Starlette:
    """Makes the whole application. Its caller starts and closes the host. standby: the Access for requests while this
    console does not lead."""
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] = _no_lifespan
    pages: ASGIApp | None = None
    if not settings.api_only:
        from streamlit.file_util import get_static_dir

        streamlit = streamlit_app(settings)
        quiet = BUSY_SECONDS if _trains(host.console) else CALM_SECONDS
        preload = Preload(warm_up, {"simulate": lambda: _prepare_simulations(host.console)}, quiet=quiet)
        static = Path(get_static_dir())
        files = StaticFiles(streamlit, static)
        lifespan, pages = streamlit.lifespan(), PageBase(files, static, preload.page_asked_for)
        preload.start()

    def leading(console: ConsoleService) -> ASGIApp:
        return _application(console, settings, pages)

    def guarded(app: ASGIApp) -> ASGIApp:
        return HostGuard(AccessGuard(BodyLimit(app), access=standby), allowed=_allowed_hosts(settings))

    whole = Starlette(lifespan=lifespan)
    whole.router.default = Gate(host, leading, guarded, pages)  # a Mount takes no path with a line break
    return whole


def _application(console: ConsoleService, settings: Settings, pages: ASGIApp | None) -> Starlette:
    """Makes the application that is served while `console` leads."""
    routes: list[BaseRoute] = create_routes(console)
    routes.append(Route("/{path:path}", _no_pages) if pages is None else Mount("/", pages))
    middleware = [
        Middleware(Metering, metrics=console.metrics),
        Middleware(HostGuard, allowed=_allowed_hosts(settings)),
        Middleware(AccessGuard, access=console.security.access),
        Middleware(BodyLimit),
    ]
    return Starlette(routes=routes, middleware=middleware)


def make_console(settings: Settings, database: Database, loop_watch: EventLoopWatch) -> ConsoleService:
    """Makes a console, not yet started. Its access rules are set here, before the first request: pages that were open
    while another console led use it at once."""
    console = ConsoleService(
        Store(database),
        failure_timeouts=settings.failure_timeouts,
        tolerance=settings.tolerance,
        keep=settings.keep,
        loop_watch=loop_watch,
    )
    console.security.access = Access(settings.token, console.security.tokens, settings.oidc, _sign_in(settings))
    return console


def serve(settings: Settings, *, on_ready: Callable[[Settings], None] | None = None) -> None:
    """Runs the console until SIGTERM or SIGINT. on_ready: called once, in the event loop, when requests are taken.

    Raises SettingsError or DatabaseError before anything is served.
    """
    listener = bind(settings.host, settings.port)
    settings = replace(settings, port=listener.getsockname()[1])
    configure_logging()
    tune_process()
    house_keeping = GarbageCollection()
    house_keeping.start()
    access = Access(settings.token, None, settings.oidc, _sign_in(settings))
    loop_watch = EventLoopWatch()
    loop_watch.expect()

    def make(database: Database) -> ConsoleService:
        return make_console(settings, database, loop_watch)

    def standby_tokens(tokens: Tokens) -> None:
        access.tokens = tokens

    host: ConsoleHost | None = None
    try:
        host = make_host(settings, make, standby_tokens)
        try:
            host.start()
        except ConsoleError as error:
            raise SettingsError(f"the console can't start: {error.detail}") from None
        set_host(host)
        app = create_app(host, settings, access)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=connections(settings.connections_per_address or None, settings.is_proxy),
            ws="websockets-sansio",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # Longer than any agent's pause between two requests: if a connection closes just as
            # the next request is sent, the console seems to be down.
            timeout_keep_alive=90,
            timeout_graceful_shutdown=GRACE,
            forwarded_allow_ips=list(settings.proxies),
        )

        def ready() -> None:
            loop_watch.start()
            _ready(settings, host, on_ready)

        _run(_Server(config, host, ready), listener)
    finally:
        if host is not None:
            host.close()
        set_host(None)
        house_keeping.close()
        listener.close()


def end_within(seconds: float) -> None:
    """Ends this process after this time if it still runs, since a thread that hangs would keep it for ever."""

    def end() -> None:
        log.error("the console did not end in order; its process is ended", seconds=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises SettingsError if the port is taken or the address is not this machine's."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"--host: got {host!r}, expected an address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(16_384)  # after a restart all agents connect at once; the system may allow fewer
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"--port: {port} is taken on {host}; stop what listens there, or name another port (0: any free one)"
            ) from None
        why = error.strerror or str(error)
        raise SettingsError(f"--host {host} --port {port} can't be listened on: {why}") from None
    return listener


class _Server(uvicorn.Server):
    """Calls `ready` when requests are taken, and ends long-polls before it waits for requests to end."""

    def __init__(self, config: uvicorn.Config, host: ConsoleHost, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._host = host
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        end_within(END_SECONDS)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._host.stop_waiting()
        await super().shutdown(sockets)


def _run(server: _Server, listener: socket.socket) -> None:
    def already_handled(number: int, frame: object) -> None:
        """Does nothing: uvicorn raises the signal again once it has stopped."""

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, already_handled)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        server.run(sockets=[listener])


def _ready(settings: Settings, host: ConsoleHost, on_ready: Callable[[Settings], None] | None) -> None:
    what = f"API only, at {API}" if settings.api_only else f"API at {API}"
    role = "" if host.console is not None else f"; standby: {host.status.reason}"
    print(
        f"OpenReCycle console: {settings.address} ({what}; database {host.shown_url}{role}). Ctrl-C stops it.",
        flush=True,
    )
    if on_ready is not None:
        on_ready(settings)


def streamlit_app(settings: Settings) -> Any:
    """Makes the pages' application, and sets the options that Streamlit runs it with."""
    import streamlit as st
    from streamlit import config
    from streamlit.web import bootstrap

    # App.run() would set these options, but the console runs the server itself, for a graceful stop and its own routes.
    # Streamlit looks for .streamlit/config.toml beside this path.
    config._main_script_path = str(HERE / "__main__.py")
    bootstrap.load_config_options(
        {
            "server.address": settings.host,
            "server.port": settings.port,
            "server.headless": True,
            "server.fileWatcherType": "none",
            "server.maxUploadSize": PLAN_MIB,
            # It would search all of the console's memory after each refresh of each viewer's page. The console
            # makes these rounds itself (app.runtime.patches).
            "runner.postScriptGC": False,
            "browser.gatherUsageStats": False,
            "browser.serverAddress": settings.host if settings.loopback else None,
            "client.toolbarMode": "minimal",
            "client.showErrorDetails": "none",
            "secrets.files": [str(settings.oidc.file)] if settings.oidc else [],
        }
    )
    return st.App(str(UI_SCRIPT), on_script_error=page_failed)


def _prepare_simulations(console: ConsoleService | None) -> None:
    if console is not None:
        console.plans.simulations.prepare()


def _trains(console: ConsoleService | None) -> bool:
    return console is not None and any(not job.state.over for job in console.jobs.live())


def _sign_in(settings: Settings) -> Login | None:
    return None if settings.oidc is None else StreamlitLogin()


def _allowed_hosts(settings: Settings) -> tuple[str, ...]:
    """Returns the host names that requests may use; (): any. On loopback they are limited to its own names and those of
    the settings, so that a foreign page can't reach the console under its own name. Elsewhere they are limited only if
    the settings have names."""
    own = ("localhost", "127.0.0.1", "[::1]") if settings.loopback or settings.names else ()
    return own + settings.names


async def _no_pages(request: Request) -> Response:
    said = f"got {request.url.path!r}; this console serves its API only, below {API}"
    return problems.answered(ConsoleError(404, "not_found", said, field="path"))


@asynccontextmanager
async def _no_lifespan(app: object) -> AsyncIterator[None]:
    yield
