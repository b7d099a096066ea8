"""Reads request bodies of some size beside the event loop: heartbeats wait there.

One thread does it, in pieces of some milliseconds, and what a wrong body can cost has a bound (app.documents).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from openrecycle.app.documents import bounded, refuse_repeats
from openrecycle.app.errors import ConsoleError
from openrecycle.app.sentences import sentence

P = ParamSpec("P")
T = TypeVar("T")

# Shorter ones take a millisecond or two where they came in, whatever is in them.
SHORT = 8 * 1024

# One body after the other: together they would take the processor from the loop.
_reader = ThreadPoolExecutor(1, "bodies")


class ReadBeside(APIRoute):
    """A route whose JSON body is read and checked in a thread, unless it is short. Answers are the same."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual, field = super().get_route_handler(), self.body_field
        if field is None:
            return usual

        async def handler(request: Request) -> Response:
            body = await request.body()
            if not is_json(request):
                return await usual(request)
            if len(body) <= SHORT:
                refuse_repeats(body)
                return await usual(request)
            return await usual(_Read(request, body, await beside(read, field, body)))

        return handler


async def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For work on a body that needs no database: nothing here waits for one."""
    return await asyncio.get_running_loop().run_in_executor(_reader, partial(function, *args, **kwargs))


def is_json(request: Request) -> bool:
    """Does FastAPI take the body for JSON?"""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


class BodyField(Protocol):
    """What FastAPI has made of the type of a route's body."""

    def validate(
        self, value: Any, values: dict[str, Any], *, loc: tuple[int | str, ...]
    ) -> tuple[Any, list[dict[str, Any]]]: ...


def read(field: BodyField, body: bytes) -> Any:
    """The message that the route takes. Raises ConsoleError (422)."""
    message, errors = field.validate(bounded(body), {}, loc=("body",))
    if errors:
        raise ConsoleError(422, "invalid", sentence(errors))
    return message


class _Read(Request):
    """With the message that its body is: one that has been checked is taken as it is."""

    def __init__(self, request: Request, body: bytes, message: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._message = body, message

    async def json(self) -> Any:
        return self._message
