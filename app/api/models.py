"""What routes take and answer, where agent.messages.protocol has no message for it.

Bodies of some size are read beside the event loop: heartbeats wait there. One thread reads them, in pieces of some
milliseconds, and what a wrong body can cost has a bound (app.runtime.errors).

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
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeVar, get_args

from fastapi import Header, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.view import WorkerView
from openrecycle.app.jobs.states import JobSummary
from openrecycle.app.plans.profiles import NAME
from openrecycle.app.plans.solving import Migrations, Point, Solve, SolveState
from openrecycle.app.runtime.errors import ConsoleError, bounded, refuse_repeats, sentence
from openrecycle.app.security.access import MAX_ACTOR, actor_of
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.plan import read_json

# -- what a route takes -------------------------------------------------------------------------

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


# -- what the API answers -----------------------------------------------------------------------

# What requests have in common: who asks (where no token says so), for how long an answer may wait, a profile.
Actor = Annotated[str, Header(max_length=MAX_ACTOR, alias="X-Actor"), BeforeValidator(actor_of)]
Wait = Annotated[float, Query(ge=0, le=60, description="seconds to wait for something new, at most")]
ProfileName = Annotated[str, Field(pattern=NAME)]


@dataclass(frozen=True, kw_only=True)
class JobDetail(JobSummary):
    """committed: iterations so far. plan_fingerprint: of the plan that is run, and plan_state whether it is `in force`,
    `interim` (until a newcomer has its state), `last in force` (the job is over), or `in force soon` (an interim one
    is run that was too large to be sent). advice: which option is best with the workers that are out, and why; null
    when none is, and until it is worked out. ettr: productive time / wall time so far; goodput: the same weighted with
    throughput / fault-free throughput. fault_free_samples_per_second: what throughput is measured by, and
    fault_free_source: where that number is from. waited_seconds: for a person, so far; in no other number.
    partition: layers per stage as the workers hold them, empty where stages can't be cut; moving_to: as they will,
    while layers are on their way."""

    spec: JobSpec
    committed: int
    plan_fingerprint: str | None
    plan_state: str
    planned_ahead: int
    plans_to_make: int
    fault_free_samples_per_second: float | None
    fault_free_source: str | None
    waited_seconds: float
    advice: str | None
    partition: list[int]
    moving_to: list[int]
    ettr: float | None
    goodput: float | None


class EventInfo(BaseModel):
    """count: how often it was said, `at` the first time and `last_at` the last: what the console, or a worker's
    silence, gives cause to say again and again is one line. Its seq stays, and streams do not send it again."""

    seq: int
    at: float
    severity: Literal["info", "warning", "error"]
    kind: str
    worker: str | None
    text: str
    count: int = 1
    last_at: float


class IterationInfo(BaseModel):
    """loss_hex: the loss as a hexadecimal float, exact. skipped: micro-batches, numbered over the pipelines, that are
    in no sum of the iteration: one that gave NaN or infinity, or whose data nobody could run."""

    iteration: int
    loss: float
    loss_hex: str
    seconds: float
    generation: int
    living: int
    committed_at: float
    skipped: list[int] = []


class AcknowledgementInfo(BaseModel):
    worker: str
    incarnation: str
    state: Literal["adopted", "formed", "resumed"]
    iteration: int
    at: float


class GenerationInfo(BaseModel):
    """interim_plan: what it ran until newcomers had their state, "" if nothing; interim_failed: whom that goes
    without. partition: layers per stage that its plan is for; moved_at: the iteration from which on workers had them,
    null where they had them before, or have not got them. let_go: of those that are out since the generation before,
    who is not lost, and whether it stands by or was asked to leave; lost: of the generation before, whose process
    has died or was given up."""

    generation: int
    plan_fingerprint: str
    living: list[str]
    failed: list[str]
    joining: list[str]
    moves: list[tuple[str, str]]
    restore: bool
    reason: str
    opened_at: float
    interim_plan: str = ""
    interim_failed: list[str] = []
    partition: list[int] = []
    moved_at: int | None = None
    let_go: list[tuple[str, bool]] = []
    lost: list[str] = []
    acknowledgements: list[AcknowledgementInfo]


class PlanInfo(BaseModel):
    """ahead: made before its failure happened. The document is at .../plans/{fingerprint}."""

    fingerprint: str
    failed: list[str]
    ahead: bool
    created_at: float


class ReportOutcome(BaseModel):
    """reason: what the coordinator made of the report, in a sentence."""

    reason: str


class JobsPage(BaseModel):
    """next: `after` of the next page; null: there is none."""

    jobs: list[JobSummary]
    next: str | None = None


class Workers(BaseModel):
    workers: list[WorkerView]


class Events(BaseModel):
    events: list[EventInfo]


class Iterations(BaseModel):
    iterations: list[IterationInfo]


class Generations(BaseModel):
    generations: list[GenerationInfo]


class PlansPage(BaseModel):
    """next: `after` of the next page; null: there is none."""

    plans: list[PlanInfo]
    next: str | None = None


class SolveInfo(BaseModel):
    """incumbent, bound: in the job's time unit, null until known. elapsed: seconds of solving. points: from
    `after` on. plan_fingerprint: once it is done; the document is at .../plan."""

    id: str
    kind: str
    state: SolveState
    stopped: bool
    elapsed: float
    incumbent: float | None
    bound: float | None
    points: list[Point]
    plan_fingerprint: str | None
    migrations: Migrations | None
    error: str


def solve_info(solve: Solve, after: int) -> SolveInfo:
    last = solve.points[-1] if solve.points else None
    return SolveInfo(
        id=solve.id,
        kind=solve.request.kind,
        state=solve.state,
        stopped=solve.stopped,
        elapsed=round(solve.elapsed, 3),
        incumbent=last.incumbent if last else None,
        bound=last.bound if last else None,
        points=solve.points[after:],
        plan_fingerprint=solve.plan.fingerprint if solve.plan else None,
        migrations=solve.migrations,
        error=solve.error,
    )
