"""What happens, as it happens: server-sent events for people's scripts and dashboards.

A stream says where it is in each message's `id`; a client that comes back with it in Last-Event-ID misses
nothing. When nothing more can come the stream ends, and whoever comes back is told so with 204.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from openrecycle.app.api.models import EventInfo, solve_info
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.solving import Solve
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.security.callers import STILL

# Seconds after which a comment shows that the connection lives; proxies close silent ones after a minute.
KEEP_ALIVE = 15.0
AT_ONCE = 500

After = Annotated[int, Query(ge=0, le=2**53, description="the last id that is known; Last-Event-ID goes before it")]
LastEventId = Annotated[str | None, Header(max_length=20, pattern="^[0-9]{1,16}$")]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream of server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "Nothing more will come."},
}


class EventStream(StreamingResponse):
    media_type = "text/event-stream"

    # FastAPI reads the status off the signature.
    def __init__(self, request: Request, messages: AsyncIterator[str], status_code: int = 200) -> None:
        # nginx would keep messages back until it has some kilobytes.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_while_valid(request, messages), status_code, headers)


async def _while_valid(request: Request, messages: AsyncIterator[str]) -> AsyncIterator[str]:
    """Until the token is revoked or the session ends of whoever listens; that is seen with the next message."""
    still: Callable[[], bool] = request.scope.get(STILL, lambda: True)
    async for text in messages:
        if not still():
            return
        yield text


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter()

    @api.get("/jobs/{job_id}/events/stream", tags=["jobs"], response_class=EventStream, responses=STREAM)
    async def events(request: Request, job_id: str, after: After = 0, last_event_id: LastEventId = None) -> Response:
        """The event feed from `after` on, each event (as in GET .../events) as soon as it is stored."""
        job = console.jobs.find(job_id)
        known = after if last_event_id is None else int(last_event_id)
        if job.state.over and job.feed.last <= known:
            return Response(status_code=204)
        return EventStream(request, _events(console, job, known))

    @api.get("/solves/{solve_id}/stream", tags=["plans"], response_class=EventStream, responses=STREAM)
    async def progress(
        request: Request, solve_id: str, after: After = 0, last_event_id: LastEventId = None
    ) -> Response:
        """How far it is, as GET .../solves/{solve_id} says it, whenever that changes; ends when it is over."""
        solve = console.plans.solves.get(solve_id)
        known = after if last_event_id is None else int(last_event_id)
        if solve.over and last_event_id is not None and len(solve.points) <= known:
            return Response(status_code=204)
        return EventStream(request, _progress(solve, known))

    return api


def message(number: int, document: str) -> str:
    """document: JSON on one line."""
    return f"id: {number}\ndata: {document}\n\n"


async def _events(console: ConsoleService, job: LiveJob, known: int) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    while not job.topic.closed:
        try:
            rows = await in_thread(console.queries.events, job.job_id, known, AT_ONCE)
        except ConsoleError:
            return  # the database does not answer; the client comes back
        for row in rows:
            known = row["seq"]
            yield message(known, EventInfo(**row).model_dump_json())
        if len(rows) == AT_ONCE:
            continue
        if job.state.over and job.feed.last <= known:
            return
        if not await job.topic.wait_for(lambda seen=known: job.feed.last > seen or None, KEEP_ALIVE):  # type: ignore[misc]
            yield ": nothing new\n\n"


async def _progress(solve: Solve, known: int) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    while not solve.topic.closed:
        version, info = solve.version, solve_info(solve, known)
        known = max(known, len(solve.points))
        yield message(known, info.model_dump_json())
        if info.state in ("done", "failed"):
            return
        while not solve.topic.closed:
            if await solve.topic.wait_for(lambda seen=version: solve.version > seen or None, KEEP_ALIVE):  # type: ignore[misc]
                break
            yield ": nothing new\n\n"
