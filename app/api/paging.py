"""Lists page by page: `limit` says how many a page has at most, and its `next` is what the next one goes on after.

A place in a list is what the list is ordered by, not a number of rows: what comes and goes meanwhile neither
repeats nor hides the rest.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.plans.plan import read_json

T = TypeVar("T")
Place = tuple[float | str, ...]

After = Annotated[
    str | None,
    Query(max_length=400, pattern=r"^[A-Za-z0-9_-]*$", description="the `next` of the page before"),
]
Most = Annotated[int | None, Query(ge=1, le=5000, description="rows of one page; without it, all that follow")]


def page(
    of: str, rows: Sequence[T], place: Callable[[T], Place], after: str | None, limit: int | None
) -> tuple[Sequence[T], str | None]:
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
