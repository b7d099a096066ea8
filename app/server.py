"""`openrecycle serve`: Streamlit pages and REST API in one process, on one port.

A Starlette application carries both: the routes of the API first (FastAPI below /api/v1, health at the root),
Streamlit's for everything else, the guards of app.security around all of it. Where several consoles share a database,
it is there while this one leads (app.leadership).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

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
from openrecycle.app.api import access, agents, catalogs, document, jobs, operator, plans, streams
from openrecycle.app.api.connection import connections
from openrecycle.app.api.document import POLICY, page
from openrecycle.app.api.idempotency import Idempotency
from openrecycle.app.api.parsing import ReadBeside, known_query
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.leadership.host import ConsoleHost, Gate, make_host, set_host
from openrecycle.app.observing.metrics import Metering, NamedRoutes
from openrecycle.app.runtime import problems, runner
from openrecycle.app.runtime.errors import PLAN_MIB, ConsoleError, SettingsError
from openrecycle.app.runtime.patches import GarbageCollection, PageBase, StaticFiles, tune_process
from openrecycle.app.runtime.problems import problem
from openrecycle.app.runtime.processes import configure_logging
from openrecycle.app.runtime.runner import EventLoopWatch, in_thread
from openrecycle.app.runtime.settings import Settings
from openrecycle.app.security.access import Access, Tokens
from openrecycle.app.security.guard import AccessGuard, BodyLimit, HostGuard
from openrecycle.app.security.sign_in import Login
from openrecycle.app.ui.hooks import BUSY_SECONDS, CALM_SECONDS, Preload
from openrecycle.db.idempotency import IdempotentRequests
from openrecycle.db.session import Database
from openrecycle.db.store import Store

log = structlog.get_logger()


def create_api(console: ConsoleService) -> FastAPI:
    api = FastAPI(
        title="OpenReCycle",
        version="1",
        description="Jobs, their workers, and the plans they run. Errors are problem details (RFC 9457).",
        # Their pages fetch scripts from elsewhere; the document itself is at /api/v1/openapi.json.
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
    document.install(api)
    api.include_router(agents.router(console))
    api.include_router(streams.router(console))
    api.include_router(jobs.router(console))
    api.include_router(jobs.histories_router(console))
    api.include_router(operator.router(console))
    api.include_router(plans.router(console))
    api.include_router(plans.profiles_router(console))
    api.include_router(jobs.measured_router(console))
    api.include_router(jobs.observed_router(console))
    api.include_router(plans.exports_router(console))
    api.include_router(catalogs.router(console))
    api.include_router(access.router(console))
    return api


def create_routes(console: ConsoleService) -> list[BaseRoute]:
    api = create_api(console)
    usual = Mount(API, NamedRoutes(Idempotency(api, IdempotentRequests(console.database))))

    async def healthz(request: Request) -> Response:
        """The process serves requests, and none of its threads stands still: else it is to be started again."""
        if why := ", ".join(filter(None, (console.stuck(), runner.stuck()))):
            return problems.problem(503, "stuck", f"these threads of the console stand still: {why}", problems.AGAIN)
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """The database answers too."""
        try:
            await in_thread(console.ready)
        except ConsoleError as error:
            return problems.refusal(error)
        return JSONResponse({"status": "ready"})

    async def docs(request: Request) -> Response:
        return Response(page(api.openapi(), API), 200, {"Content-Security-Policy": POLICY}, "text/html")

    async def metrics(request: Request) -> Response:
        """For Prometheus."""
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
    """A path with all its methods: what it does not take is refused as anywhere else in the API."""

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
    """Every other path below /api, those with line breaks too, which no pattern of Starlette's matches. Without
    it, Streamlit would answer with its page and 200."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ours = scope["type"] == "http" and (scope["path"] + "/").startswith("/api/")
        return (Match.FULL if ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await problems.http_problem(Request(scope), HTTPException(404))(scope, receive, send)


HERE = Path(__file__).resolve().parent
UI_SCRIPT = HERE / "ui" / "main.py"

# Seconds from a signal to the end of the process, whatever stands still in it: all that ends in order takes less.
END_SECONDS = 20.0
# Seconds for open requests to end after a signal; long-polls are sent home at once.
GRACE = 1


def create_app(host: ConsoleHost, settings: Settings, standby: Access) -> Starlette:
    """The whole application. The host is started and closed by its caller. standby: who may ask a console
    that does not lead."""
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] = _no_lifespan
    pages: ASGIApp | None = None
    if not settings.api_only:
        streamlit = _streamlit(settings)
        quiet = BUSY_SECONDS if _trains(host.console) else CALM_SECONDS
        preload = Preload(_warm_up, {"simulate": lambda: _prepare_simulations(host.console)}, quiet=quiet)
        static = _static()
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
    """What is served while `console` leads."""
    console.security.access = Access(settings.token, console.security.tokens, settings.oidc, _sign_in(settings))
    routes: list[BaseRoute] = create_routes(console)
    routes.append(Route("/{path:path}", _no_pages) if pages is None else Mount("/", pages))
    middleware = [
        Middleware(Metering, metrics=console.metrics),
        Middleware(HostGuard, allowed=_allowed_hosts(settings)),
        Middleware(AccessGuard, access=console.security.access),
        Middleware(BodyLimit),
    ]
    return Starlette(routes=routes, middleware=middleware)


def serve(settings: Settings, *, on_ready: Callable[[Settings], None] | None = None) -> None:
    """Runs until SIGTERM or SIGINT. on_ready: called once, from the event loop, when requests are taken.

    Raises SettingsError or DatabaseError, before anything is served.
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
        tolerance, keep = settings.tolerance, settings.keep
        return ConsoleService(
            Store(database),
            failure_timeouts=settings.failure_timeouts,
            tolerance=tolerance,
            keep=keep,
            loop_watch=loop_watch,
        )

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
            # Longer than any agent's pause between two requests: a connection that is closed
            # just as the next request leaves looks like a console that is down.
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
    """Ends this process, at the latest then: a thread that hangs would hold it for ever."""

    def end() -> None:
        log.error("the console did not end in order; its process is ended", seconds=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SettingsError when the port is taken or the address is not ours."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"--host: got {host!r}, expected an address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(16_384)  # all agents at once, after a restart; the system may allow fewer
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
        """uvicorn raises the signal again once it has stopped; by then there is nothing left to do."""

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


def _streamlit(settings: Settings) -> Any:
    import streamlit as st
    from streamlit import config
    from streamlit.web import bootstrap

    from openrecycle.app.ui.hooks import page_failed

    # App.run() would set these; we run the server ourselves, for its graceful stop and our own routes. The path is
    # where .streamlit/config.toml is looked for.
    config._main_script_path = str(HERE / "__main__.py")
    bootstrap.load_config_options(
        {
            "server.address": settings.host,
            "server.port": settings.port,
            "server.headless": True,
            "server.fileWatcherType": "none",
            "server.maxUploadSize": PLAN_MIB,
            # It would look through all that the console has, in one piece, after each refresh of each viewer's
            # page (app.runtime.patches); Python's own rounds come when there is something to free.
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


def _warm_up() -> None:
    from openrecycle.app.ui.hooks import warm_up

    warm_up()


def _static() -> Path:
    from streamlit.file_util import get_static_dir

    return Path(get_static_dir())


def _sign_in(settings: Settings) -> Login | None:
    if settings.oidc is None:
        return None
    from openrecycle.app.ui.hooks import StreamlitLogin

    return StreamlitLogin()


def _allowed_hosts(settings: Settings) -> tuple[str, ...]:
    """On loopback the names of loopback and those given only: a foreign page can't reach us under a name
    of its own. Elsewhere any name, unless some are given."""
    own = ("localhost", "127.0.0.1", "[::1]") if settings.loopback or settings.names else ()
    return own + settings.names


async def _no_pages(request: Request) -> Response:
    detail = f"path: got {request.url.path!r}; this console serves its API only, below {API}"
    return problem(404, "not_found", detail)


@asynccontextmanager
async def _no_lifespan(app: object) -> AsyncIterator[None]:
    yield
