"""Requests and answers of routes for which agent.messages.protocol has no message, and how bodies and lists are read.

Larger bodies are read in a thread, since heartbeats wait for the event loop. One thread reads them all, in pieces of a
few milliseconds, and the cost of a wrong body is bounded (app.runtime.errors).

Lists come in pages: `limit` is the most rows of a page, and its `next` is the cursor for the next one. A cursor has the
values by which the list is ordered, not a number of rows, so rows that come and go meanwhile neither repeat nor hide
others.
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
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args

from fastapi import Header, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.view import WorkerView
from openrecycle.app.jobs.states import JobSummary
from openrecycle.app.plans.files import document, is_small
from openrecycle.app.plans.profiles import NAME
from openrecycle.app.plans.solving import Point, Solve, SolveState
from openrecycle.app.runtime.errors import ConsoleError, bounded, malformed, refuse_repeats
from openrecycle.app.runtime.runner import exporting, in_thread
from openrecycle.app.security.access import MAX_ACTOR, actor_of
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.layers.migration import Migrations
from openrecycle.planner.plans.plan import Plan, read_json

# -- what a route takes -------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")

# Shorter bodies are read in the event loop, in a millisecond or two, whatever they contain.
SHORT = 8 * 1024

# Bodies are read one after the other: several at once would take the processor from the event loop.
_reader = ThreadPoolExecutor(1, "bodies")


class ReadBeside(APIRoute):
    """A route whose JSON body is read and checked in a thread, unless it is short. Its answers are the usual ones."""

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
            return await usual(_ParsedRequest(request, body, await beside(read, field, body)))

        return handler


async def known_query(request: Request) -> None:
    """Refuses query parameters that are unknown or come twice; a dependency of every route. Otherwise a misspelt one
    would be ignored in silence. Numbers and booleans must be written as in JSON, as the published schema says. Raises
    ConsoleError (422)."""
    known = dict(_query_parameters(request.scope["route"].dependant))
    seen: set[str] = set()
    for name, value in request.query_params.multi_items():
        if name not in known or name in seen:
            shown = printable(f"{name[:100]}={value[:100]}")
            expected = "it once" if name in seen else f"one of {', '.join(known)}" if known else "no query parameter"
            raise ConsoleError(422, "invalid", f"got {shown!r}, expected {expected}", field="query")
        seen.add(name)
        for kind, (written, expected) in _WRITTEN.items():
            if kind in known[name] and not written.fullmatch(value):
                raise ConsoleError(422, "invalid", f"got {printable(value[:100])!r}, expected {expected}", field=name)


# Stricter than pydantic, which also takes 1_0, +5, 5.0 and a space before a number, and `yes`.
_WRITTEN = {
    bool: (re.compile("true|false"), "true or false"),
    int: (re.compile("-?(0|[1-9][0-9]*)"), "a whole number"),
    float: (re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"), "a number"),
}


def _query_parameters(dependant: Dependant) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the names of a route's query parameters, each with its types."""
    for parameter in dependant.query_params:
        annotation = parameter.field_info.annotation
        yield parameter.alias, get_args(annotation) or (annotation,)
    for other in dependant.dependencies:
        yield from _query_parameters(other)


async def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs work on a body in the one thread for bodies. It must not wait for the database."""
    return await asyncio.get_running_loop().run_in_executor(_reader, partial(function, *args, **kwargs))


def is_json(request: Request) -> bool:
    """Says whether FastAPI takes the body for JSON."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def read(field: Any, body: bytes) -> Any:
    """Parses a body into the message that the route takes. field: FastAPI's, for the type of the route's body. Raises
    ConsoleError (422)."""
    message, errors = field.validate(bounded(body), {}, loc=("body",))
    if errors:
        raise malformed(errors)
    return message


class _ParsedRequest(Request):
    """A request whose body was parsed and checked already; FastAPI takes the message as it is."""

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
    """Returns the rows after a cursor, and the cursor for the next page (None: this page is the last).

    of: the list's name, which its cursors contain. rows: in the list's order. place: returns a row's place, which rises
    strictly from row to row. Raises ConsoleError (422) for a cursor of another list.
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
    return ConsoleError(
        422, "invalid", f"got {cursor[:80]!r}, expected the `next` of a page of this list", field="after"
    )


# -- what the API answers -----------------------------------------------------------------------

# Parameters of several routes: the name of the caller (if no token has one), how long to wait, and a profile's name.
Actor = Annotated[str, Header(max_length=MAX_ACTOR, alias="X-Actor"), BeforeValidator(actor_of)]
Wait = Annotated[float, Query(ge=0, le=60, description="seconds to wait for something new, at most")]
ProfileName = Annotated[str, Field(pattern=NAME)]


async def document_of(find: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Response:
    """Answers with the document of the plan that `find` returns; that of a large one is made as an export is. Raises
    ConsoleError."""
    plan = await in_thread(find, *args, **kwargs)
    made = await (in_thread if is_small(plan) else exporting)(document, plan)
    return Response(made, media_type="application/json")


@dataclass(frozen=True, kw_only=True)
class JobDetail(JobSummary):
    """committed: iterations so far. plan_fingerprint: of the plan that the workers run; plan_state: whether it is
    `in force`, `interim` (until a newcomer has its state), or `last in force` (the job is over). advice: the best
    option without the workers that are out, and why; null if no worker is out, and until it is worked out. ettr:
    productive time / wall time so far;
    goodput: the same weighted with throughput / fault-free throughput. fault_free_samples_per_second: the rate that
    throughput is compared with; fault_free_source: where it is from. waited_seconds: time spent waiting for people so
    far, which is in no other number. partition: layers per stage as the workers hold them, empty if stages can't be
    cut; moving_to: the partition that they will have, while layers move."""

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
    """count: how often it happened, first at `at` and last at `last_at`: events that repeat, such as a worker's
    silence, are one line. Its seq stays the same, and it is not sent again to who knows it."""

    seq: int
    at: float
    severity: Literal["info", "warning", "error"]
    kind: str
    worker: str | None
    text: str
    count: int = 1
    last_at: float


class IterationInfo(BaseModel):
    """loss: null where no micro-batch has one. loss_hex: the exact loss, as a hexadecimal float. skipped:
    micro-batches, numbered over the pipelines, that were left out of the iteration's sums because they gave NaN or
    infinity, or no worker could run their data."""

    iteration: int
    loss: float | None
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
    """interim_plan: the plan that it ran until newcomers had their state, "" if none; interim_failed: the workers that
    this plan goes without. partition: layers per stage of its plan; moved_at: the iteration from which on the workers
    had these layers, null if they had them before or do not have them yet. let_go: workers of the generation before
    that are out but not lost, and whether each stands by (true) or was asked to leave (false); lost: workers of the
    generation before whose process has died or was given up."""

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
