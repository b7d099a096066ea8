"""Turns every error of the API into problem details (RFC 9457), with one sentence that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from openrecycle.agent.messages.protocol import ProblemDetails
from openrecycle.app.runtime.errors import ConsoleError, malformed, system_fails

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
AGAIN = {"Retry-After": "1"}

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CODES = {400: "invalid", 401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def problem(
    status: int, code: str, detail: str, headers: Mapping[str, str] | None = None, *, field: str = ""
) -> Response:
    body = ProblemDetails(title=HTTPStatus(status).phrase, status=status, code=code, detail=detail, field=field)
    return Response(body.model_dump_json(), status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


def answered(error: ConsoleError, headers: Mapping[str, str] | None = None) -> Response:
    """headers: in place of those that say when to try again, where that may help."""
    again = headers or (AGAIN if error.status in (429, 503) else None)
    return problem(error.status, error.code, error.detail, again, field=error.field)


def install(app: FastAPI) -> None:
    """Makes `app` answer every error this way."""

    @app.exception_handler(ConsoleError)
    async def _console(request: Request, error: ConsoleError) -> Response:
        return answered(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return answered(malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return http_problem(request, error)

    @app.exception_handler(OSError)
    async def _system(request: Request, error: OSError) -> Response:
        log.error("the system failed the API", path=request.url.path, exc_info=error)
        return answered(system_fails(error))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> Response:
        log.exception("the API failed", path=request.url.path, exc_info=error)
        return problem(500, "internal", "the console failed on this request; its log says why")


def http_problem(request: Request, error: HTTPException) -> Response:
    detail = str(error.detail)
    if error.status_code == 404:
        said = f"got {request.url.path!r}, expected one of the API's; see /api/v1/openapi.json"
        return answered(ConsoleError(404, _CODES[404], said, field="path"), error.headers)
    if error.status_code == 405:
        allowed = _methods(request, error)
        said = f"got {request.method}, expected one that {request.url.path} takes: {allowed}"
        refused = ConsoleError(405, _CODES[405], said, field="method")
        return answered(refused, {**(error.headers or {}), "Allow": allowed})
    return problem(error.status_code, _CODES.get(error.status_code, "refused"), detail, error.headers)


def _methods(request: Request, error: HTTPException) -> str:
    """Returns all methods that the path takes. Starlette's error names only those of the first route with that path."""
    found = {method.strip() for method in (error.headers or {}).get("Allow", "").split(",")} - {""}
    app = request.scope.get("app")
    routes = app.routes if isinstance(app, FastAPI) else ()
    for method in _METHODS:
        asked = {**request.scope, "method": method}
        if any(route.matches(asked)[0] is Match.FULL for route in routes):
            found.add(method)
    return ", ".join(sorted(found))
