"""The body of a request, for whoever comes after the one that has read it."""

from __future__ import annotations

from starlette.types import Message, Receive


def replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the whole body first, and then what else there is to receive."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
