"""What pydantic has against a message, as one sentence for people. No web framework: child processes use it, too."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from openrecycle.planner.jobs.words import printable

_SHORT = reprlib.Repr()
# More than is shown of any value, and far less than what somebody may send.
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 100, 100, 100
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 20


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """`pipelines: got 0, expected a value greater than or equal to 1; and 2 more`."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    where = printable(".".join(place)[:200]) or "the body"
    shown = _SHORT.repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    kind, message = first["type"], str(first["msg"])
    if kind == "missing":
        text = f"{where}: missing, expected a value"
    elif kind == "extra_forbidden":
        text = f"{where}: got {shown}, expected no field of that name"
    elif kind == "json_invalid":
        text = f"the body is not JSON: {first.get('ctx', {}).get('error', message)}"
    else:
        for start, wording in (("Input should be ", ""), ("String should ", "a string to "), ("Value error, ", "")):
            if message.startswith(start):
                message = wording + message.removeprefix(start)
        text = f"{where}: got {shown}, expected {message}"
    more = len(errors) - 1
    return text + (f"; and {more} more" if more else "")
