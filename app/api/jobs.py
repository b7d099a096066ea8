"""What people and dashboards read of a job, and what an operator may ask for."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query, Request, Response

from openrecycle.app.api.models import (
    Actor,
    EventInfo,
    Events,
    GenerationInfo,
    Generations,
    IterationInfo,
    Iterations,
    JobDetail,
    JobsPage,
    PlanInfo,
    PlansPage,
    ReportOutcome,
    Wait,
    WorkerInfo,
    Workers,
)
from openrecycle.app.api.paging import After, Most, page
from openrecycle.app.console.service import Console
from openrecycle.app.console.view_builder import summary
from openrecycle.app.observing.rates import RECENT
from openrecycle.app.runtime.runner import answer_in_thread, in_thread
from openrecycle.db.store import Record

_DEFLATE = re.compile(r"\bdeflate\b(?! *; *q *= *0(?:\.0*)?(?:,|$))", re.IGNORECASE)
Limit = Annotated[int, Query(ge=1, le=5000)]


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["jobs"])

    @api.get("", response_model=JobsPage)
    async def jobs(after: After = None, limit: Most = None) -> Response:
        """Newest first."""
        # There may be thousands: they are put into words off the event loop.
        return Response(await in_thread(_jobs, console, after, limit), media_type="application/json")

    @api.get("/{job_id}")
    async def job(job_id: str) -> JobDetail:
        return await in_thread(_detail, console, job_id)

    @api.get("/{job_id}/workers", response_model=Workers)
    async def workers(job_id: str) -> Response:
        return await answer_in_thread(_workers, console, job_id)

    @api.get("/{job_id}/events")
    async def events(
        job_id: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0, limit: Limit = 200, wait: Wait = 0
    ) -> Events:
        """Events with seq > after, oldest first: read on with `after` = the last one's seq. With `wait`, as
        soon as there are any; an empty list after `wait` seconds."""
        job = console.job(job_id)
        await job.topic.wait_for(lambda: job.last_event > after or None, wait)
        return Events(events=[EventInfo(**row) for row in await in_thread(console.events, job_id, after, limit)])

    @api.get("/{job_id}/iterations")
    async def iterations(
        job_id: str, after: Annotated[int, Query(ge=-1, le=2**53)] = -1, limit: Limit = 1000
    ) -> Iterations:
        """Iterations with a number > after, oldest first."""
        return Iterations(
            iterations=[IterationInfo(**row) for row in await in_thread(console.iterations, job_id, after, limit)]
        )

    @api.get("/{job_id}/generations", response_model=Generations)
    async def generations(
        job_id: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0, limit: Most = None
    ) -> Response:
        """Generations with a number > after, oldest first: read on with `after` = the last one's. Without a limit,
        all."""
        return await answer_in_thread(_generations, console, job_id, after, limit)

    @api.get("/{job_id}/plans")
    async def plans(job_id: str, after: After = None, limit: Most = None) -> PlansPage:
        """Fewest failures first."""
        made = await in_thread(console.job_plans, job_id)
        rows, following = page(f"plans of {job_id}", made, _place_of_plan, after, limit)
        return PlansPage(plans=[PlanInfo(**row) for row in rows], next=following)

    @api.get("/{job_id}/plans/{fingerprint}", response_model=dict[str, Any], responses={304: {}})
    async def plan(
        job_id: str,
        fingerprint: str,
        request: Request,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        """The Plan document. It never changes: its ETag is the fingerprint. It comes deflated, as it is stored, where
        Accept-Encoding has that."""
        small = _DEFLATE.search(request.headers.get("Accept-Encoding", "")) is not None
        tag = f'"{fingerprint}-deflate"' if small else f'"{fingerprint}"'
        headers = {"ETag": tag, "Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        read = console.deflated_plan if small else console.plan_document
        document = await in_thread(read, job_id, fingerprint)
        if if_none_match and (if_none_match.strip() == "*" or tag in if_none_match):
            return Response(status_code=304, headers=headers)
        if small:
            headers["Content-Encoding"] = "deflate"
        return Response(document, media_type="application/json", headers=headers)

    @api.post("/{job_id}/workers/{worker}/kill", status_code=202, tags=["operator"])
    async def kill(job_id: str, worker: str, x_actor: Actor = "API") -> ReportOutcome:
        """Asks the launcher of a demo job to kill this worker's process."""
        await in_thread(console.operators.kill, job_id, worker, x_actor)
        return ReportOutcome(reason=f"the launcher is asked to kill {worker}")

    @api.post("/{job_id}/workers/{worker}/restart", status_code=202, tags=["operator"])
    async def restart(job_id: str, worker: str, x_actor: Actor = "API") -> ReportOutcome:
        """Asks the launcher to start a new process for this failed worker."""
        await in_thread(console.operators.restart, job_id, worker, x_actor)
        return ReportOutcome(reason=f"the launcher is asked to start {worker} again")

    return api


def _jobs(console: Console, after: str | None, limit: int | None) -> bytes:
    rows, following = page("jobs", console.list_jobs(), lambda job: (-job.created_at, job.job_id), after, limit)
    return orjson.dumps({"jobs": rows, "next": following})


def _workers(console: Console, job_id: str) -> Workers:
    return Workers(workers=[WorkerInfo(**worker._asdict()) for worker in console.view(job_id, 1, 1).workers])


def _generations(console: Console, job_id: str, after: int, limit: int | None) -> Generations:
    return Generations(generations=[GenerationInfo(**row) for row in console.generations(job_id, after, limit)])


def _place_of_plan(row: Record) -> tuple[float, str, float, str]:
    return float(len(row["failed"])), ".".join(row["failed"]), row["created_at"], row["fingerprint"]


def _detail(console: Console, job_id: str) -> JobDetail:
    job = console.job(job_id)
    view = console.view(job_id, RECENT, 1, workers=False)
    line = summary(job, view.sentence)
    return JobDetail(
        **asdict(line),
        spec=view.spec,
        committed=job.state.committed,
        plan_fingerprint=view.plan.fingerprint if view.plan else None,
        plan_state=view.plan_words,
        planned_ahead=view.planned_ahead,
        plans_to_make=view.plans_to_make,
        fault_free_samples_per_second=view.figures.fault_free if view.figures else None,
        fault_free_source=view.figures.baseline.words if view.figures and view.figures.baseline else None,
        waited_seconds=view.figures.waited if view.figures else 0.0,
        advice=view.advice,
        partition=list(view.held),
        moving_to=list(view.coming),
        ettr=view.figures.ettr if view.figures else None,
        goodput=view.figures.goodput if view.figures else None,
    )
