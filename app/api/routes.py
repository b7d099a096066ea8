"""The API as Starlette routes: FastAPI below /api/v1, health at the root."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import Receive, Scope, Send

from openrecycle.agent.messages.protocol import API, ProblemDetails
from openrecycle.app.api import (
    access,
    agents,
    catalogs,
    document,
    exports,
    history,
    jobs,
    measured,
    observed,
    operator,
    plans,
    profiles,
    streams,
)
from openrecycle.app.api.idempotency import Idempotency
from openrecycle.app.api.parsing import ReadBeside, known_query
from openrecycle.app.api.reference import POLICY, page
from openrecycle.app.console.service import Console
from openrecycle.app.metrics.requests import NamedRoutes
from openrecycle.app.runtime import problems, runner
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread
from openrecycle.db.idempotency import IdempotentRequests


def create_api(console: Console) -> FastAPI:
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
    api.include_router(history.router(console))
    api.include_router(operator.router(console))
    api.include_router(plans.router(console))
    api.include_router(profiles.router(console))
    api.include_router(measured.router(console))
    api.include_router(observed.router(console))
    api.include_router(exports.router(console))
    api.include_router(catalogs.router(console))
    api.include_router(access.router(console))
    return api


def create_routes(console: Console) -> list[BaseRoute]:
    api = create_api(console)
    usual = Mount(API, NamedRoutes(Idempotency(api, IdempotentRequests(console.database))))

    async def healthz(request: Request) -> Response:
        """The process serves requests, and none of its threads stands still: else it is to be started again."""
        if why := ", ".join(filter(None, (console.stuck(), runner.stuck()))):
            return problems.problem(503, "stuck", f"these threads of the console stand still: {why}")
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """The database answers too."""
        try:
            await in_thread(console.ready)
        except ConsoleError as error:
            return problems.problem(error.status, error.code, error.detail)
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
