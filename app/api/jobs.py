"""Routes of a job, for people, dashboards and operators.

They give its state, history, measured iterations and the lines that its workers print; export and delete whole
jobs; and take the operators' commands.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import AliasPath, BaseModel, ConfigDict, Field, StrictBool
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from openrecycle.agent.coordination.membership import CHOICE_TIMEOUT, LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT, Mode
from openrecycle.agent.messages.protocol import (
    ClockReading,
    LogLine,
    LogLines,
    MeasuredOps,
    ValidationReport,
    WorkerName,
    clock_name,
)
from openrecycle.app.api.models import (
    Actor,
    After,
    EventInfo,
    Events,
    GenerationInfo,
    Generations,
    IterationInfo,
    Iterations,
    JobDetail,
    JobsPage,
    Most,
    PlanInfo,
    PlansPage,
    ReadBeside,
    ReportOutcome,
    Wait,
    Workers,
    document_of,
    page,
)
from openrecycle.app.console.operators import Choice
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.console.view import summary
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.throughput import RECENT
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.app.observing.recorder import Series
from openrecycle.app.plans.service import Replan
from openrecycle.app.plans.solving import MAX_SECONDS
from openrecycle.app.runtime.errors import named
from openrecycle.app.runtime.runner import answer_in_thread, in_thread
from openrecycle.app.security.access import caller_of
from openrecycle.db.heartbeats import Level
from openrecycle.db.store import Record
from openrecycle.planner.plans.plan import INTEGER, Plan

# -- what people and dashboards read of a job ---------------------------------------------------

Limit = Annotated[int, Query(ge=1, le=5000)]
PACKED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["jobs"])

    @api.get("", response_model=JobsPage)
    async def jobs(after: After = None, limit: Most = None) -> Response:
        """Newest first."""
        # There may be thousands of jobs, so the answer is written in a thread.
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
        job = await console.jobs.find_beside(job_id)
        await job.topic.wait_for(lambda: job.feed.last > after or None, wait)
        return Events(
            events=[EventInfo(**row) for row in await in_thread(console.queries.events, job_id, after, limit)]
        )

    @api.get("/{job_id}/iterations")
    async def iterations(
        job_id: str, after: Annotated[int, Query(ge=-1, le=2**53)] = -1, limit: Limit = 1000
    ) -> Iterations:
        """Iterations with a number > after, oldest first."""
        return Iterations(
            iterations=[
                IterationInfo(**row) for row in await in_thread(console.queries.iterations, job_id, after, limit)
            ]
        )

    @api.get("/{job_id}/generations", response_model=Generations)
    async def generations(
        job_id: str, after: Annotated[int, Query(ge=0, le=2**53)] = 0, limit: Limit = 1000
    ) -> Response:
        """Generations with a number > after, oldest first: read on with `after` = the last one's until there are
        none. Of a job of thousands of workers there are fewer at once than the limit."""
        return await answer_in_thread(_generations, console, job_id, after, limit)

    @api.get("/{job_id}/plans")
    async def plans(job_id: str, after: After = None, limit: Most = None) -> PlansPage:
        """Fewest failures first."""
        made = await in_thread(console.queries.job_plans, job_id)
        rows, following = page(f"plans of {job_id}", made, _place_of_plan, after, limit)
        return PlansPage(plans=[PlanInfo(**row) for row in rows], next=following)

    @api.get("/{job_id}/plans/{fingerprint}", response_model=dict[str, Any], responses=PACKED)
    async def plan(job_id: str, fingerprint: str, packed: bool = False) -> Response:
        """The Plan document. packed: the bytes that launchers read (planner.plans.packed) instead."""
        if packed:
            data = await in_thread(console.queries.packed_plan, job_id, fingerprint)
            return Response(data, media_type="application/octet-stream")
        return await document_of(console.queries.job_plan, job_id, fingerprint)

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


def _jobs(console: ConsoleService, after: str | None, limit: int | None) -> bytes:
    rows, following = page("jobs", console.queries.list_jobs(), lambda job: (-job.created_at, job.job_id), after, limit)
    return orjson.dumps({"jobs": rows, "next": following})


def _workers(console: ConsoleService, job_id: str) -> Workers:
    return Workers(workers=list(console.queries.view(job_id, 1, 1).workers))


def _generations(console: ConsoleService, job_id: str, after: int, limit: int) -> Generations:
    return Generations(generations=[GenerationInfo(**row) for row in console.queries.generations(job_id, after, limit)])


def _place_of_plan(row: Record) -> tuple[float, str, float, str]:
    return float(len(row["failed"])), ".".join(row["failed"]), row["created_at"], row["fingerprint"]


def _detail(console: ConsoleService, job_id: str) -> JobDetail:
    job = console.jobs.find(job_id)
    view = console.queries.view(job_id, RECENT, 1, workers=False)
    return JobDetail(
        **vars(summary(job, view.sentence)),
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


Watch = Annotated[bool, Query(description="have the job measured again soon")]


class MeasuredInfo(BaseModel):
    """period_ms: median time from commit to commit of the iterations around it. planned_ms: the plan's
    period. over_plan: the first / the second - 1. uncertainty_ms: by how much workers of different
    hosts may be shifted against each other. plan: the ops as they ran, in milliseconds."""

    model_config = ConfigDict(from_attributes=True)

    iteration: int
    generation: int
    at: float
    uncertainty_ms: float
    planned_fingerprint: Annotated[str, Field(validation_alias=AliasPath("planned", "fingerprint"))]
    period_ms: float | None
    planned_ms: float | None
    over_plan: float | None
    plan: Plan


def measured_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(tags=["measured"], route_class=ReadBeside)

    @api.get("/clock", tags=["agents"])
    async def clock() -> ClockReading:
        """This process's monotonic clock, for agents on other hosts to compare theirs with."""
        return ClockReading(name=clock_name(), microseconds=time.monotonic_ns() // 1000)

    @api.post("/jobs/{job_id}/measured", tags=["agents"])
    async def post_measured(job_id: str, message: MeasuredOps) -> ReportOutcome:
        """One worker's part of the iteration that heartbeats asked for."""
        job = await console.jobs.find_beside(job_id)
        return ReportOutcome(reason=await in_thread(console.measuring.take, job, message))

    @api.get("/jobs/{job_id}/measured", response_model=MeasuredInfo, responses={204: {}})
    async def measured(job_id: str, watch: Watch = False) -> Response:
        """The newest measured iteration; 204 while there is none."""
        found = await in_thread(_newest, console, job_id, watch)
        if found is None:
            return Response(status_code=204)
        return await answer_in_thread(MeasuredInfo.model_validate, found)

    return api


def _newest(console: ConsoleService, job_id: str, watch: bool) -> MeasuredIteration | None:
    return console.measuring.iteration(console.jobs.find(job_id), watch=watch)


Moment = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="POSIX seconds")]
TEN_MINUTES = 600.0
Seq = Annotated[int, Field(ge=1, le=2**53), INTEGER]


class Acknowledged(BaseModel):
    """seqs: of the events that somebody has taken note of."""

    model_config = ConfigDict(extra="forbid")

    seqs: Annotated[list[Seq], Field(max_length=1000, fail_fast=True)]


class StateInfo(BaseModel):
    """The worker came into `state` at this time (POSIX seconds)."""

    state: str
    at: float


class WorkerHistory(BaseModel):
    """states: oldest first. log: its newest lines, oldest first; kept in memory only. series: what its
    heartbeats brought."""

    worker: str
    series: Series
    states: list[StateInfo]
    op_milliseconds: dict[Literal["F", "I", "W", "B", "O"], float]
    log: list[LogLine]


def observed_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["jobs"], route_class=ReadBeside)

    @api.post("/{job_id}/logs", status_code=204, tags=["agents"])
    async def logs(job_id: str, message: LogLines) -> None:
        """Lines that a worker process has written since its last post."""
        await console.jobs.find_beside(job_id)
        console.reports.printed(job_id, message)

    @api.post("/{job_id}/validations", status_code=204, tags=["agents"])
    async def validation(job_id: str, message: ValidationReport) -> None:
        await in_thread(console.reports.validated, job_id, message)

    @api.post("/{job_id}/events/acknowledge", tags=["operator"])
    async def acknowledge(job_id: str, message: Acknowledged, x_actor: Actor = "API") -> ReportOutcome:
        new = await in_thread(console.operators.acknowledge, job_id, message.seqs, x_actor)
        return ReportOutcome(
            reason=f"{new} event{'' if new == 1 else 's'} acknowledged that nobody had acknowledged before"
        )

    @api.get("/{job_id}/workers/{worker}/history")
    async def history(
        job_id: str,
        worker: str,
        since: Moment = None,
        until: Moment = None,
        step: Annotated[Literal["second", "minute", "hour"] | None, Query()] = None,
    ) -> WorkerHistory:
        """A worker's states so far, its smoothed op times, the newest lines it has written, and what its
        heartbeats brought between two times: without them, in the last ten minutes. Without a step it is the
        shortest that is kept for so long and makes 3,000 samples at most."""
        end = time.time() + 1 if until is None else until
        asked = end - TEN_MINUTES if since is None else since, end, Level[step.upper()] if step else None
        return await in_thread(_history, console, await console.jobs.find_beside(job_id), worker, *asked)

    return api


def _history(
    console: ConsoleService, job: LiveJob, worker: str, since: float, until: float, step: Level | None
) -> WorkerHistory:
    series = console.recorder.series(job, worker, since, until, step)
    states = console.queries.states(job.job_id, worker)
    return WorkerHistory(
        worker=worker,
        series=series,
        states=[StateInfo(**row) for row in states],
        op_milliseconds=job.measurements.op_times.smoothed(worker),  # type: ignore[arg-type]
        log=list(job.measurements.logs.lines(worker)),
    )


ZIP: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}, "description": "The file."}}


class PassingFile(FileResponse):
    """An answer with a file that was made for it, and is deleted after it was sent or could not be. It is sent as a
    whole, without ranges, since another request would find another file."""

    def __init__(self, path: Path, media_type: str, filename: str) -> None:
        super().__init__(path, media_type=media_type, filename=filename, headers={"Accept-Ranges": "none"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # To an invalid range Starlette would answer with an error in its own words.
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        try:
            await super().__call__({**scope, "headers": headers}, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)


def histories_router(console: ConsoleService) -> APIRouter:
    api = APIRouter()

    @api.get("/jobs/{job_id}/history.zip", tags=["jobs"], response_class=FileResponse, responses={**ZIP, 409: {}})
    async def export(job_id: str, request: Request) -> FileResponse:
        """All that is stored of the job: JSON lines of each table, its plans, and a manifest with SHA-256 sums. The
        table of the audit log is empty for who may not read that."""
        caller = caller_of(console.security.access, request.headers)
        path = await console.histories.export(job_id, audit=caller.operates)
        return PassingFile(path, "application/zip", f"{job_id}-history.zip")

    @api.delete("/jobs/{job_id}", status_code=202, tags=["operator"], responses={409: {}})
    async def delete(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Deletes a job none of whose workers live, with everything of it; plans that others have are kept."""
        await in_thread(console.histories.delete, job_id, x_actor)
        return ReportOutcome(reason=f"job {job_id} is deleted")

    return api


# -- what operators ask of a job as a whole -----------------------------------------------------


class ChoiceMade(BaseModel):
    """name: of a candidate. failed: the workers that were out in what the operator saw; when others are by
    now, the choice is refused (409)."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=80)]
    failed: Annotated[Annotated[list[WorkerName], Field(fail_fast=True)] | None, Field(max_length=16_384)] = None


class ModeWanted(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mode: Mode
    choice_timeout: Annotated[
        float, Field(strict=True, ge=LEAST_CHOICE_TIMEOUT, le=MOST_CHOICE_TIMEOUT, allow_inf_nan=False)
    ] = CHOICE_TIMEOUT


class FreezeWanted(BaseModel):
    model_config = ConfigDict(extra="forbid")

    frozen: StrictBool


class ReplanWanted(BaseModel):
    """seconds: that it may take at most."""

    model_config = ConfigDict(extra="forbid")

    solver: Literal["auto", "list", "cp-sat", "milp"] = "auto"
    seconds: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 20.0


def operator_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["operator"], route_class=ReadBeside)
    operators = console.operators

    @api.post("/{job_id}/workers/{worker}/drain", status_code=202, responses={409: {}})
    async def drain(job_id: str, worker: str, x_actor: Actor = "API") -> ReportOutcome:
        """Asks this worker to leave when the iteration in hand is done; nothing is run twice for it."""
        return ReportOutcome(reason=await in_thread(operators.drain, job_id, worker, x_actor))

    @api.post("/{job_id}/pause", status_code=202, responses={409: {}})
    async def pause(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Asks all workers to stop before the same iteration, with nothing in flight."""
        return ReportOutcome(reason=await in_thread(operators.pause, job_id, x_actor))

    @api.post("/{job_id}/resume", status_code=202, responses={409: {}})
    async def resume(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Lets a paused job go on."""
        return ReportOutcome(reason=await in_thread(operators.resume, job_id, x_actor))

    @api.get("/{job_id}/choice")
    async def choice(job_id: str) -> Choice:
        """Who decides how the job goes on, and the ways that it can take while workers are out."""
        return await in_thread(operators.choice, job_id)

    @api.post("/{job_id}/choice", responses={409: {}})
    async def choose(job_id: str, body: ChoiceMade, x_actor: Actor = "API") -> ReportOutcome:
        """Takes one of the options: at once when the job waits for it, else at the end of an iteration."""
        failed = None if body.failed is None else tuple(body.failed)
        return ReportOutcome(reason=await in_thread(operators.choose, job_id, body.name, failed, x_actor))

    @api.put("/{job_id}/mode", responses={409: {}})
    async def mode(job_id: str, body: ModeWanted, x_actor: Actor = "API") -> ReportOutcome:
        """Automatic; or manual: when workers are lost, the job waits up to `choice_timeout` seconds for a choice."""
        return ReportOutcome(
            reason=await in_thread(operators.set_mode, job_id, body.mode, body.choice_timeout, x_actor)
        )

    @api.put("/{job_id}/frozen", responses={409: {}})
    async def frozen(job_id: str, body: FreezeWanted, x_actor: Actor = "API") -> ReportOutcome:
        """Has the plan in force stay while its workers do: better plans, and workers that come back, wait until it
        is frozen no more. A failure is handled as ever."""
        return ReportOutcome(reason=await in_thread(operators.freeze, job_id, body.frozen, x_actor))

    @api.post("/{job_id}/baseline", status_code=202, responses={409: {}})
    async def measure_baseline(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Has the fault-free rate, by which throughput and goodput are measured, measured again from the next whole
        iterations on. Until then it stays; the event feed says who asked, and what it was and is."""
        return ReportOutcome(reason=await in_thread(operators.measure_anew, job_id, x_actor))

    @api.post("/{job_id}/replan", status_code=202, responses={409: {}})
    async def replan(job_id: str, body: ReplanWanted, x_actor: Actor = "API") -> ReportOutcome:
        """Plans again for the workers that are out now. The plan is put in force if it is worth a new generation; the
        event feed, and GET here, say why not otherwise."""
        actor = named(x_actor)
        reason = await in_thread(console.plans.replanning.start, job_id, body.solver, body.seconds, actor)
        return ReportOutcome(reason=reason)

    @api.get("/{job_id}/replan")
    async def replan_status(job_id: str) -> Replan | None:
        """What has become of the newest request for a new plan; null: there was none since the console started."""
        return await in_thread(console.plans.replanning.status, job_id)

    @api.post("/{job_id}/replan/stop", status_code=202, responses={409: {}})
    async def stop_replan(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Has the search for a new plan end; its best one so far counts."""
        reason = await in_thread(console.plans.replanning.stop, job_id)
        await in_thread(console.security.audit.record, x_actor, "stop planning again", job_id, job_id=job_id)
        return ReportOutcome(reason=reason)

    return api
