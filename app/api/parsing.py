"""What a route takes: the query parameters that it knows, and bodies, which are read beside the event loop when they
are of some size: heartbeats wait there. And lists page by page.

One thread reads bodies, in pieces of some milliseconds, and what a wrong body can cost has a bound
(app.runtime.errors).

Of a list, `limit` says how many a page has at most, and its `next` is what the next one goes on after. A place in a
list is what the list is ordered by, not a number of rows: what comes and goes meanwhile neither repeats nor hides the
rest.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, get_args

from fastapi import Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from openrecycle.app.runtime.errors import ConsoleError, bounded, refuse_repeats, sentence
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.plan import read_json

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


async def known_query(request: Request) -> None:
    """A dependency of every route: query parameters that it does not know, or gets twice, are refused as fields of a
    body are. A misspelt one would be left out in silence. Numbers and truths are as JSON writes them, which is what the
    published schema says of them. Raises ConsoleError (422)."""
    known = dict(_query_parameters(request.scope["route"].dependant))
    seen: set[str] = set()
    for name, value in request.query_params.multi_items():
        if name not in known or name in seen:
            shown = printable(f"{name[:100]}={value[:100]}")
            expected = "it once" if name in seen else f"one of {', '.join(known)}" if known else "no query parameter"
            raise ConsoleError(422, "invalid", f"query: got {shown!r}, expected {expected}")
        seen.add(name)
        for kind, (written, expected) in _WRITTEN.items():
            if kind in known[name] and not written.fullmatch(value):
                raise ConsoleError(422, "invalid", f"{name}: got {printable(value[:100])!r}, expected {expected}")


# What pydantic takes for one is more: 1_0, +5, 5.0 and a space before a number, `yes`.
_WRITTEN = {
    bool: (re.compile("true|false"), "true or false"),
    int: (re.compile("-?(0|[1-9][0-9]*)"), "a whole number"),
    float: (re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"), "a number"),
}


def _query_parameters(dependant: Dependant) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Their names, and the types that each may be of."""
    for parameter in dependant.query_params:
        annotation = parameter.field_info.annotation
        yield parameter.alias, get_args(annotation) or (annotation,)
    for other in dependant.dependencies:
        yield from _query_parameters(other)


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


Item = TypeVar("Item")
Place = tuple[float | str, ...]

After = Annotated[
    str | None,
    Query(max_length=400, pattern=r"^[A-Za-z0-9_-]*$", description="the `next` of the page before"),
]
Most = Annotated[int | None, Query(ge=1, le=5000, description="rows of one page; without it, all that follow")]


def page(
    of: str, rows: Sequence[Item], place: Callable[[Item], Place], after: str | None, limit: int | None
) -> tuple[Sequence[Item], str | None]:
    """The rows after a place, and the cursor of the page that follows (None: this one is the last).

    of: the list's name, which its cursors carry. rows: in the list's order. place: rises from row to row, no two the
    same. Raises ConsoleError (422) for a cursor that is none of this list's.
    """
    if after:
        last = _read(of, after)
        if rows and list(map(type, last)) != list(map(type, place(rows[0]))):
            raise _wrong(after)
        rows = [row for row in rows if place(row) > last]
    if limit is None or len(rows) <= limit:
        return rows, None
    rows = rows[:limit]
    return rows, _write(of, place(rows[-1]))


def _write(of: str, place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps([of, *place], separators=(",", ":")).encode()).decode().rstrip("=")


def _read(of: str, cursor: str) -> Place:
    try:
        place = read_json(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except ValueError:
        raise _wrong(cursor) from None
    if not isinstance(place, list) or place[:1] != [of]:
        raise _wrong(cursor)
    if not all(isinstance(part, (float, int, str)) for part in place):
        raise _wrong(cursor)
    return tuple(place[1:])


def _wrong(cursor: str) -> ConsoleError:
    return ConsoleError(422, "invalid", f"after: got {cursor[:80]!r}, expected the `next` of a page of this list")
