"""What the console refuses: `str(error)` is one sentence with the field, the value, and what was expected; and JSON
documents of others, with a bound on what reading one takes. No web framework: child processes use it, too.

JSON and pydantic let no other thread run, and what is wrong with a document can be millions of things, each of which
pydantic puts into words: two megabytes once kept every heartbeat waiting for a minute, and took gigabytes. So what
takes time has limits here (objects and lists, fields), and the messages give up on a list at its first wrong entry
(fail_fast).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.plan import DuplicateKey, refuse_duplicates

if TYPE_CHECKING:
    from pydantic import ValidationError
    from sqlalchemy.exc import SQLAlchemyError

# What drivers say of a database that can't be reached any more.
_GONE = re.compile(
    r"connection (failed|refused|timeout|is closed|is lost|reset)|closed the connection|shutting down|"
    r"terminating connection|starting up|in recovery"
)


class ConsoleError(Exception):
    """status: of HTTP (4xx, 503); code: for programs, as in agent.messages.protocol.Problem."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        self.status = status
        self.code = code
        self.detail = detail
        super().__init__(detail)


class SettingsError(Exception):
    """The console can't start as it was asked to. `str(error)` is one sentence for the user."""


def unknown_job(job_id: str) -> ConsoleError:
    return ConsoleError(404, "unknown_job", f"job: got {job_id!r}, expected the id of a job of this console")


def unknown_worker(name: str) -> ConsoleError:
    return ConsoleError(404, "unknown_worker", f"worker: got {name!r}, expected one of the job's grid")


def unavailable(error: SQLAlchemyError) -> ConsoleError:
    """In words, where the database has said what it is. What it can never store is not to be tried again."""
    from sqlalchemy.exc import DataError

    from openrecycle.db.session import FileGone

    if isinstance(error, DataError):
        return ConsoleError(422, "invalid", "a text has a NUL character, or a number is larger than what can be stored")
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
    why = "it is busy" if "locked" in text else "it does not answer" if _GONE.search(text) else type(error).__name__
    return ConsoleError(503, "unavailable", f"the database can't take this now ({why}); try again")


def passing(error: Exception) -> ConsoleError | None:
    """What is said of it, where the database fails or the console refuses something: both may pass. None: it is a
    mistake of ours, of which the log is to say all; also where that was put into words on its way."""
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
    return ConsoleError(404, "unknown_plan", f"plan: got {fingerprint!r}, expected the fingerprint of a plan")


def refused(code: str, detail: str) -> ConsoleError:
    """What the coordinator has against an event."""
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
    """No process, open file or memory is to be had, or no room on a disk."""
    why = error.strerror or str(error) or type(error).__name__
    return ConsoleError(503, "unavailable", f"the console's machine can't do this now ({why}); try again")


@contextmanager
def starting() -> Iterator[None]:
    """Turns the OSError of a process that can't be had into a ConsoleError (503)."""
    try:
        yield
    except TimeoutError:  # it is had, and takes long
        raise
    except OSError as error:
        raise system_fails(error) from error


def plain(text: str) -> str:
    """Without NUL, which PostgreSQL does not take: a report is not refused for its wording."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def named(actor: str) -> str:
    """As the feed and the audit log call who asks."""
    return plain(actor).strip()[:80] or "unknown"


def first_wrong(error: ValidationError) -> InputError:
    """For a page, which has a place for one."""
    first = error.errors()[0]
    return InputError(".".join(map(str, first["loc"])), first["input"], _expected(str(first["msg"])))


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
        text = f"{where}: got {shown}, expected {_expected(message)}"
    more = len(errors) - 1
    return text + (f"; and {more} more" if more else "")


def _expected(message: str) -> str:
    """Of pydantic's message, what comes after `expected`."""
    for start, wording in (("Input should be ", ""), ("String should ", "a string to "), ("Value error, ", "")):
        if message.startswith(start):
            message = wording + message.removeprefix(start)
    return message


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
