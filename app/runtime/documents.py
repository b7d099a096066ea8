"""JSON documents of others, with a bound on what reading one takes. No web framework: child processes use it, too.

JSON and pydantic let no other thread run, and what is wrong with a document can be millions of things, each of which
pydantic puts into words: two megabytes once kept every heartbeat waiting for a minute, and took gigabytes. So what
takes time has limits here (objects and lists, fields), and the messages give up on a list at its first wrong entry
(fail_fast).
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.plans.plan import DuplicateKey, refuse_duplicates

# Of one body: objects and lists; and fields of all its objects together. A batch of 8,192 heartbeats, and a job of
# 4,096 stages or 16,384 workers, have less.
MOST_CONTAINERS = 65_536
MOST_FIELDS = 131_072
# Of one object: plans and jobs have one for each worker; no other object has nearly as many as are not looked at.
MOST_FIELDS_OF_ONE, FEW_OF_ONE = 16_384, 256
# A plan's document: one of 2,048 workers has 31 MB. And its bodies or files of more than 8 MiB that are held at once.
PLAN_MIB, MOST_LARGE = 128, 2
# With fewer fields in all, none of the objects needs to be looked at.
FEW_FIELDS = 1_000


def bounded(body: bytes, *, containers: int = MOST_CONTAINERS, fields: int = MOST_FIELDS) -> Any:
    """The document. containers, fields: of all, at most.

    Raises ConsoleError (422) for what is none, or holds more than any message does.
    """
    colons = body.count(b":")
    for count, most, what in (
        (body.count(b"{") + body.count(b"["), containers, "objects and lists"),
        (colons, fields, "fields"),
    ):
        if count > most:  # in its texts, too, which hold far fewer
            raise _wrong(f"the body: got {count:,} {what}, expected at most {most:,}")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _wrong(f"the body is not JSON: {error}") from None
    refuse_repeats(body)
    if colons > FEW_FIELDS:
        _check_objects(document)
    return document


def refuse_repeats(body: bytes) -> None:
    """Raises ConsoleError (422) for a field that is in one object twice: programs differ in which one counts. What is
    not JSON is passed over."""
    try:
        refuse_duplicates(body)
    except DuplicateKey as error:
        raise _wrong(f"the body: {error}") from None
    except RecursionError:
        raise _wrong("the body: got lists or objects nested too deeply") from None
    except ValueError:  # no JSON, or a number of thousands of digits
        return


def _check_objects(document: Any) -> None:
    """Raises ConsoleError (422) for one that holds an object with more fields than there are workers, or with many
    that are not named after workers: each would be put into words."""
    left = [("the body", document)]
    while left:
        where, value = left.pop()
        if type(value) is dict:
            if len(value) > MOST_FIELDS_OF_ONE:
                raise _wrong(
                    f"{where}: got an object with {len(value):,} fields, expected at most {MOST_FIELDS_OF_ONE:,}"
                )
            other = next((k for k in value if not _WORKER.fullmatch(k)), None) if len(value) > FEW_OF_ONE else None
            if other is not None:
                raise _wrong(
                    f"{where}: got {other[:80]!r} among {len(value):,} fields, expected workers such as W1_2, "
                    f"or at most {FEW_OF_ONE} fields"
                )
            left += [(name[:80], inner) for name, inner in value.items() if type(inner) in (dict, list)]
        elif type(value) is list:
            left += [(where, inner) for inner in value if type(inner) in (dict, list)]


_WORKER = re.compile(r"W[0-9]{1,6}_[0-9]{1,6}")


def _wrong(detail: str) -> ConsoleError:
    return ConsoleError(422, "invalid", detail)
