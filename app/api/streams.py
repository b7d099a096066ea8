"""Server-sent events for scripts and dashboards: a job's events and a solve's progress, as they come.

Each message has its position as `id`; a client that comes back with it in Last-Event-ID misses nothing. When nothing
more can come, the stream ends, and a client that comes back gets 204. FastAPI sends a comment now and then, so that no
proxy takes a silent connection for a dead one.
"""

# No `from __future__ import annotations` here: FastAPI could not resolve names of the router's own functions in text.

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from openrecycle.app.api.models import EventInfo, solve_info
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.solving import Solve
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.security.access import STILL

# Seconds after which a silent stream looks whether its token was revoked or its session is over, and then ends.
LOOK_AGAIN = 15.0
AT_ONCE = 500

After = Annotated[int, Query(ge=0, le=2**53, description="the last id that is known; Last-Event-ID goes before it")]
LastEventId = Annotated[str | None, Header(max_length=20, pattern="^[0-9]{1,16}$")]
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A stream of server-sent events."},
    204: {"description": "Nothing more will come."},
}


async def _known(after: After = 0, last_event_id: LastEventId = None) -> int:
    """Returns the last id that the client knows."""
    return after if last_event_id is None else int(last_event_id)


async def _still(request: Request) -> Callable[[], bool]:
    """Returns a function that says whether the client may still listen: its token is valid, and its session lasts."""
    still: Callable[[], bool] = request.scope.get(STILL, lambda: True)
    return still


Known = Annotated[int, Depends(_known)]
Still = Annotated[Callable[[], bool], Depends(_still)]


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter(default_response_class=EventSourceResponse)

    # These are dependencies, since a refusal or 204 must be answered before the stream begins.
    async def followed_job(job_id: str, known: Known) -> LiveJob:
        job = await console.jobs.find_beside(job_id)
        if job.state.over and job.feed.last <= known:
            raise HTTPException(204)
        return job

    async def followed_solve(solve_id: str, known: Known, last_event_id: LastEventId = None) -> Solve:
        solve = console.plans.solves.get(solve_id)
        if solve.over and last_event_id is not None and len(solve.points) <= known:
            raise HTTPException(204)
        return solve

    @api.get("/jobs/{job_id}/events/stream", tags=["jobs"], responses=RESPONSES)
    async def events(
        job: Annotated[LiveJob, Depends(followed_job)], known: Known, still: Still
    ) -> AsyncIterator[ServerSentEvent]:
        """The event feed from `after` on, each event (as in GET .../events) as soon as it is stored."""
        yield ServerSentEvent(retry=2000)
        while still() and not job.topic.closed:
            try:
                rows = await in_thread(console.queries.events, job.job_id, known, AT_ONCE)
            except ConsoleError:
                return  # the database does not answer; the client comes back
            for row in rows:
                known = row["seq"]
                yield ServerSentEvent(id=str(known), data=EventInfo(**row))
            if job.state.over and job.feed.last <= known:
                return
            await job.topic.wait_for(lambda seen=known: job.feed.last > seen or None, LOOK_AGAIN)  # type: ignore[misc]

    @api.get("/solves/{solve_id}/stream", tags=["plans"], responses=RESPONSES)
    async def progress(
        solve: Annotated[Solve, Depends(followed_solve)], known: Known, still: Still
    ) -> AsyncIterator[ServerSentEvent]:
        """How far it is, as GET .../solves/{solve_id} says it, whenever that changes; ends when it is over."""
        yield ServerSentEvent(retry=2000)
        version = -1
        while still() and not solve.topic.closed:
            if solve.version > version:
                version, info = solve.version, solve_info(solve, known)
                known = max(known, len(solve.points))
                yield ServerSentEvent(id=str(known), data=info)
                if info.state in ("done", "failed"):
                    return
            await solve.topic.wait_for(lambda seen=version: solve.version > seen or None, LOOK_AGAIN)  # type: ignore[misc]

    return api
