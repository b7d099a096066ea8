"""How a guard says no, to a request or to a WebSocket that wants to open."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# Of a WebSocket that is closed because its caller may not (or no longer) have it open.
CLOSED = 4401


async def refuse(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    if scope["type"] == "websocket":
        # Before `accept` this is an HTTP 403.
        await send({"type": "websocket.close", "code": CLOSED})
        return
    await response(scope, receive, send)
