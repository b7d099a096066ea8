"""In front of the application: the console's routes while it leads, and who leads while it does not.

A standby answers the API with 503 and never passes a request on or redirects it. A client that has
several addresses asks the next one, and so does a proxy that asks `/readyz`; a redirect would lead
clients to an address that they may not reach, and without their token, which HTTP clients rightly keep
from other hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.app.console.service import Console
from openrecycle.app.leadership.watch import LeaderStatus
from openrecycle.app.runtime.notify import Topic
from openrecycle.app.runtime.problems import problem

STANDBY = "standby"
"""The problem's code."""
RETRY_AFTER = "1"
_RESTARTS = 1012
"""Of a WebSocket: the service restarts, connect again."""


class Host(Protocol):
    @property
    def console(self) -> Console | None: ...

    @property
    def status(self) -> LeaderStatus: ...

    def on_lost(self, callback: Callable[[], None]) -> None: ...


class Gate:
    """host: has the console, while it leads. leading: makes the application of a console. guarded: puts its
    guards around what is answered while there is none. pages: what a browser gets then, also through the
    application's lifespan; None: nothing but the API is served.

    A page that is open when the lead is lost is disconnected: it connects again by itself, and is told.
    """

    def __init__(
        self,
        host: Host,
        leading: Callable[[Console], ASGIApp],
        guarded: Callable[[ASGIApp], ASGIApp],
        pages: ASGIApp | None,
    ) -> None:
        self._host, self._leading, self._pages = host, leading, pages
        self._standby = guarded(self._stand_by)
        self._made: tuple[Console, ASGIApp] | None = None
        self._losses = 0
        self._lost = Topic()
        host.on_lost(self._disconnect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        console = self._host.console
        if console is None:
            await self._standby(scope, receive, send)
            return
        if self._made is None or self._made[0] is not console:
            self._made = console, self._leading(console)
        if scope["type"] == "websocket":
            await self._connected(self._made[1], scope, receive, send)
        else:
            await self._made[1](scope, receive, send)

    async def _stand_by(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "http" and path == "/healthz":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif self._pages is not None and not (path in ("/readyz", "/metrics", "/api") or path.startswith("/api/")):
            await self._pages(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _RESTARTS})
        else:
            await self.refusal()(scope, receive, send)

    def refusal(self) -> Response:
        return problem(503, STANDBY, self._host.status.sentence, {"Retry-After": RETRY_AFTER})

    def _disconnect(self) -> None:
        self._losses += 1
        self._lost.publish()

    async def _connected(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        before = self._losses
        waiting = self._lost.wait_for(lambda: True if self._losses != before else None, float("inf"))
        lost: asyncio.Future[Any] = asyncio.ensure_future(waiting)
        take: asyncio.Future[Any] | None = None

        async def until_lost() -> Message:
            nonlocal take
            take = take or asyncio.ensure_future(receive())  # type: ignore[arg-type]
            await asyncio.wait({take, lost}, return_when=asyncio.FIRST_COMPLETED)
            if take.done():
                message: Message = take.result()
                take = None
                return message
            with suppress(RuntimeError):  # it was closed from the other side
                await send({"type": "websocket.close", "code": _RESTARTS})
            return {"type": "websocket.disconnect", "code": _RESTARTS}

        try:
            await app(scope, until_lost, send)
        finally:
            lost.cancel()
            if take is not None:
                take.cancel()
