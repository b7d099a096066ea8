"""The guards around an application that answers everything."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from openrecycle.app.security.access import Access
from openrecycle.app.security.guard import AccessGuard

TOKEN = "correct horse battery"
JOB = "0123456789ab"


async def answer(request: Request) -> Response:
    return PlainTextResponse(f"{request.url.path} {len(await request.body())}")


async def headers(request: Request) -> Response:
    return JSONResponse(dict(request.headers))


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


INNER = Starlette(
    routes=[
        Route("/headers", headers),
        WebSocketRoute("/_stcore/stream", echo),
        Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
)


def client(app: ASGIApp, base: str = "http://localhost:8501", address: str = "127.0.0.1") -> TestClient:
    return TestClient(app, base_url=base, follow_redirects=False, client=(address, 50000))


def guarded(access: Access | None = None, address: str = "127.0.0.1") -> TestClient:
    return client(AccessGuard(INNER, access or Access(TOKEN)), address=address)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
