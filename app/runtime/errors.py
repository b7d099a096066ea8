"""The errors of the console (`ConsoleError`), and the reading of JSON from outside within bounds (`bounded`).

`str(error)` is one sentence with the field, the value, and what was expected. Child processes use this file too, so it
imports no web framework.

Other threads can't run while JSON is parsed and pydantic validates. A document can have millions of faults, each of
which pydantic puts into words: two megabytes once delayed every heartbeat by a minute, and took gigabytes. So documents
have limits here (objects and lists, fields), and messages give up on a list at its first wrong entry (fail_fast).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from openrecycle.agent.messages.protocol import UNKNOWN_PLAN
from openrecycle.agent.messages.protocol import ConsoleError as ConsoleError
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.plan import DuplicateKey, refuse_duplicates

if TYPE_CHECKING:
    from pydantic import ValidationError
    from sqlalchemy.exc import SQLAlchemyError

# Drivers say one of these if a database can't be reached any more.
_GONE = re.compile(
    r"connection (failed|refused|timeout|is closed|is lost|reset)|closed the connection|shutting down|"
    r"terminating connection|starting up|in recovery"
)


invalid = ConsoleError.invalid


class SettingsError(Exception):
    """Raised when the console can't start with its settings. `str(error)` is one sentence for the user."""


def unknown_job(job_id: str) -> ConsoleError:
    return ConsoleError(404, "unknown_job", f"got {job_id!r}, expected the id of a job of this console", field="job")


def unknown_worker(name: str) -> ConsoleError:
    return ConsoleError(404, "unknown_worker", f"got {name!r}, expected one of the job's grid", field="worker")


def unavailable(error: SQLAlchemyError) -> ConsoleError:
    """Makes the ConsoleError for an error of the database, with the reason in words if the database gave one. Its
    status is 503 (try again), or 422 for something that the database can never store."""
    from sqlalchemy.exc import DataError

    from openrecycle.db.session import FileGone, LogGone, WriteFenced

    if isinstance(error, DataError):
        return ConsoleError(422, "invalid", "a text has a NUL character, or a number is larger than what can be stored")
    if isinstance(error, LogGone):
        detail = "the -wal file beside the database was moved, deleted or replaced: put it back, or stop the console "
        detail += "with Ctrl-C and start it again; until then nothing is stored"
        return ConsoleError(503, "database_gone", detail)
    if isinstance(error, FileGone):
        detail = "the file of the database was moved, deleted or replaced: nothing can be stored until it is back, "
        return ConsoleError(503, "database_gone", detail + "and not all can be read")
    said = str(getattr(error, "orig", None) or "").strip().splitlines()
    text = said[0].lower() if said else ""
    if getattr(getattr(error, "orig", None), "sqlstate", None) == "53100" or "disk is full" in text:
        detail = "the disk of the database is full: nothing can be stored until there is room; then try again"
        return ConsoleError(503, "disk_full", detail)
    if "disk i/o error" in text:
        detail = "the disk of the database can't be written (it may be full, or fail); try again once it can"
        return ConsoleError(503, "disk_fails", detail)
    if "readonly" in text or "read-only" in text:
        return ConsoleError(503, "read_only", "the database can't be written: it is read-only; try again once it can")
    if isinstance(error, WriteFenced):
        return ConsoleError(503, "unavailable", "this console can store nothing while it does not lead; try again")
    why = "it is busy" if "locked" in text else "it does not answer" if _GONE.search(text) else type(error).__name__
    return ConsoleError(503, "unavailable", f"the database can't take this now ({why}); try again")


def passing(error: Exception) -> ConsoleError | None:
    """Returns the ConsoleError for an error that may pass: the database fails, or the console refuses something.
    Returns None for a fault of the console's own code, which is to be logged in full, also if it came as a
    ConsoleError."""
    from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError, TimeoutError

    from openrecycle.db.session import FileGone, WriteFenced

    origin = error.__cause__ if isinstance(error, ConsoleError) else error
    may_pass = OperationalError, InterfaceError, InternalError, TimeoutError, WriteFenced, FileGone
    if isinstance(origin, SQLAlchemyError) and not isinstance(origin, may_pass):
        return None
    if isinstance(error, ConsoleError):
        return error
    return unavailable(error) if isinstance(error, SQLAlchemyError) else None


def unknown_plan(fingerprint: str) -> ConsoleError:
    return ConsoleError(404, UNKNOWN_PLAN, f"got {fingerprint!r}, expected the fingerprint of a plan", field="plan")


def damaged_plan(name: str, error: PlannerError) -> ConsoleError:
    """Makes the ConsoleError for a plan that is stored and can't be read."""
    return ConsoleError(404, UNKNOWN_PLAN, f"got {name!r}; {error}", field="plan")


def refused(code: str, detail: str) -> ConsoleError:
    """Makes the ConsoleError for an event that the coordinator refuses."""
    return ConsoleError({"unknown_worker": 404, "invalid": 422}.get(code, 409), code, detail)


@contextmanager
def storing() -> Iterator[None]:
    """Turns an error of the database into a ConsoleError (503)."""
    from sqlalchemy.exc import SQLAlchemyError  # 11 MiB of the server that children are forked from

    try:
        yield
    except SQLAlchemyError as error:
        raise unavailable(error) from error


def system_fails(error: OSError) -> ConsoleError:
    """Makes the ConsoleError for a machine that is short of processes, open files, memory or disk."""
    why = error.strerror or str(error) or type(error).__name__
    return ConsoleError(503, "unavailable", f"the console's machine can't do this now ({why}); try again")


def plain(text: str) -> str:
    """Replaces NUL, which PostgreSQL does not take, so that no report is refused for its wording."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def named(actor: str) -> str:
    """Returns the name of an actor as the feed and the audit log show it."""
    return plain(actor).strip()[:80] or "unknown"


def first_wrong(error: ValidationError) -> InputError:
    """Returns the first error of a validation as InputError, for a page with room for one."""
    first = error.errors()[0]
    return InputError(".".join(map(str, first["loc"])), first["input"], _expected(str(first["msg"])))


_SHORT = reprlib.Repr()
# More than is shown of any value, and far less than somebody may send.
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 100, 100, 100
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 20


BODY = "the body"
"""The field of an error about a body as a whole."""


def malformed(errors: Sequence[Mapping[str, Any]]) -> ConsoleError:
    """Makes the ConsoleError (422) for errors that pydantic lists, in one sentence: `pipelines: got 0, expected a value
    greater than or equal to 1; and 2 more`."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    where = printable(".".join(place)[:200]) or BODY
    shown = _SHORT.repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    kind, message = first["type"], str(first["msg"])
    if kind == "missing":
        text = "missing, expected a value"
    elif kind == "extra_forbidden":
        text = f"got {shown}, expected no field of that name"
    elif kind == "json_invalid":
        where, text = BODY, f"got no JSON: {first.get('ctx', {}).get('error', message)}"
    elif not place and isinstance(first.get("input"), bytes):  # nobody read it as JSON; curl sends another type
        where, text = "Content-Type", "expected application/json"
    else:
        text = f"got {shown}, expected {_expected(message)}"
    more = len(errors) - 1
    return ConsoleError(422, "invalid", text + (f"; and {more} more" if more else ""), field=where)


def _expected(message: str) -> str:
    """Rewords pydantic's message so that it fits after `expected`."""
    if message.startswith("Input should be a valid dictionary"):
        return "an object"
    for start, wording in (("Input should be ", ""), ("String should ", "a string to "), ("Value error, ", "")):
        if message.startswith(start):
            message = wording + message.removeprefix(start)
    return message


# Limits for one body: its objects and lists, and the fields of all its objects together. A batch of 8,192 heartbeats,
# and a job of 4,096 stages or 16,384 workers, have less.
MOST_CONTAINERS = 65_536
MOST_FIELDS = 131_072
# Limits for the fields of one object. Objects of plans and jobs may have one per worker; all others have fewer than
# FEW_OF_ONE, above which the names of the fields must be workers'.
MOST_FIELDS_OF_ONE, FEW_OF_ONE = 16_384, 256
# The largest document of a plan, in MiB (one of 2,048 workers has 31 MB); and how many bodies or files of more than
# 8 MiB are held at once.
PLAN_MIB, MOST_LARGE = 128, 2
# A body with no more fields than this is not searched for large objects.
FEW_FIELDS = 1_000


def bounded(body: bytes, *, containers: int = MOST_CONTAINERS, fields: int = MOST_FIELDS) -> Any:
    """Parses a JSON body. containers, fields: how many objects and lists, and fields, it may have.

    Raises ConsoleError (422) for a body that is not JSON or is beyond the limits.
    """
    colons = body.count(b":")
    for count, most, what in (
        (body.count(b"{") + body.count(b"["), containers, "objects and lists"),
        (colons, fields, "fields"),
    ):
        if count > most:  # characters inside of texts count too, but there are few
            raise _wrong(f"got {count:,} {what}, expected at most {most:,}")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _wrong(f"got no JSON: {error}") from None
    refuse_repeats(body)
    if colons > FEW_FIELDS:
        _check_objects(document)
    return document


def refuse_repeats(body: bytes) -> None:
    """Raises ConsoleError (422) if an object has a field twice, since programs differ in which one counts. A body that
    is not JSON passes."""
    try:
        refuse_duplicates(body)
    except DuplicateKey as error:
        raise _wrong(str(error)) from None
    except RecursionError:
        raise _wrong("got lists or objects nested too deeply") from None
    except ValueError:  # no JSON, or a number of thousands of digits
        return


def _check_objects(document: Any) -> None:
    """Raises ConsoleError (422) for a document with an object of too many fields, or of many that are not named after
    workers, since pydantic would put each wrong one into words."""
    left = [(BODY, document)]
    while left:
        where, value = left.pop()
        if type(value) is dict:
            if len(value) > MOST_FIELDS_OF_ONE:
                raise _wrong(
                    f"got an object with {len(value):,} fields, expected at most {MOST_FIELDS_OF_ONE:,}", where
                )
            other = next((k for k in value if not _WORKER.fullmatch(k)), None) if len(value) > FEW_OF_ONE else None
            if other is not None:
                raise _wrong(
                    f"got {other[:80]!r} among {len(value):,} fields, expected workers such as W1_2, "
                    f"or at most {FEW_OF_ONE} fields",
                    where,
                )
            left += [(name[:80], inner) for name, inner in value.items() if type(inner) in (dict, list)]
        elif type(value) is list:
            left += [(where, inner) for inner in value if type(inner) in (dict, list)]


_WORKER = re.compile(r"W[0-9]{1,6}_[0-9]{1,6}")


def _wrong(said: str, field: str = BODY) -> ConsoleError:
    return ConsoleError(422, "invalid", said, field=field)
