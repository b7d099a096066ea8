"""Plans apart from any job: those that are kept under a name, and those that are being made."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.jobs import Actor
from app.api.models import Outcome
from app.api.runner import in_thread
from app.console import Console
from app.errors import ConsoleError
from app.plans.applying import use_plan
from app.plans.solving import Point, Solve, SolveState
from app.plans.solving_child import Migrations, MigrationsAsked, PlanAsked, Request
from planner.check import check
from planner.errors import PlannerError
from planner.plan import Plan


class SavedPlan(BaseModel):
    """created: POSIX seconds. period, lower_bound: in time_unit. workers: of the grid."""

    fingerprint: str
    name: str
    created: float
    period: float
    lower_bound: float
    gap: float
    time_unit: str
    failed: list[str]
    technique: str
    memory: str
    pipelines: int
    stages: int
    micro_batches: int
    workers: int


class SavedPlans(BaseModel):
    plans: list[SavedPlan]


class PlanToSave(BaseModel):
    """plan: a whole Plan document, which is checked; or solve: the id of one that was made here."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=200)]
    plan: Plan | None = None
    solve: Annotated[str, Field(max_length=64)] | None = None


class PlanToUse(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fingerprint: Annotated[str, Field(max_length=64)]


class Kept(BaseModel):
    fingerprint: str


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


class SolveList(BaseModel):
    solves: list[SolveInfo]


def router(console: Console) -> APIRouter:
    api = APIRouter()

    @api.get("/plans", tags=["plans"])
    async def saved() -> SavedPlans:
        """Newest first."""
        return SavedPlans(plans=[SavedPlan(**row) for row in await in_thread(console.library.saved)])

    @api.post("/plans", status_code=201, tags=["plans"])
    async def save(message: PlanToSave, x_actor: Actor = "API") -> Kept:
        """Keeps a plan under a name; one that is kept already takes the new name."""
        fingerprint = await in_thread(_save, console, message)
        await in_thread(console.audit.record, x_actor, "save plan", fingerprint, detail=message.name)
        return Kept(fingerprint=fingerprint)

    @api.get("/plans/{fingerprint}", response_model=dict[str, Any], tags=["plans"])
    async def plan(fingerprint: str) -> Response:
        """The Plan document."""
        document = await in_thread(console.library.document, fingerprint)
        return Response(document, media_type="application/json")

    @api.delete("/plans/{fingerprint}", status_code=204, tags=["plans"])
    async def forget(fingerprint: str, x_actor: Actor = "API") -> None:
        """Jobs that have the plan keep it."""
        await in_thread(console.library.forget, fingerprint)
        await in_thread(console.audit.record, x_actor, "forget plan", fingerprint)

    @api.put("/jobs/{job_id}/plan", tags=["operator"])
    async def use(job_id: str, message: PlanToUse, x_actor: Actor = "API") -> Outcome:
        """Puts a saved plan in force, with the same workers: it must be for the job's grid, profile and failures."""
        plan = await in_thread(console.library.saved_plan, message.fingerprint)
        return Outcome(reason=await in_thread(use_plan, console, job_id, plan, x_actor))

    @api.get("/solves", tags=["plans"])
    async def solves() -> SolveList:
        """In the order in which they were asked for, without their points."""
        return SolveList(solves=[solve_info(solve, len(solve.points)) for solve in console.solves.all()])

    @api.post("/solves", status_code=202, tags=["plans"])
    async def start(
        message: Annotated[Request, Field(discriminator="kind")], response: Response, x_actor: Actor = "API"
    ) -> SolveInfo:
        """Begins to make a plan, or to look for migrations, in a process of its own; equal requests share one."""
        solve = await in_thread(_start, console, message)
        await in_thread(console.audit.record, x_actor, "start solve", solve.id, detail=message.kind)
        response.headers["Location"] = f"solves/{solve.id}"
        return solve_info(solve, 0)

    @api.get("/solves/{solve_id}", tags=["plans"])
    async def progress(solve_id: str, after: Annotated[int, Query(ge=0, le=10**6)] = 0) -> SolveInfo:
        """How far it is. after: how many points are known already."""
        return solve_info(console.solves.get(solve_id), after)

    @api.get("/solves/{solve_id}/plan", response_model=dict[str, Any], tags=["plans"])
    async def made(solve_id: str) -> Response:
        """The Plan document, once it is there."""
        document = await in_thread(_plan_of(console, solve_id).to_json)
        return Response(document, media_type="application/json")

    @api.post("/solves/{solve_id}/stop", status_code=202, tags=["plans"])
    async def stop(solve_id: str, x_actor: Actor = "API") -> SolveInfo:
        """Has it end with the best plan so far."""
        stopped = await in_thread(console.solves.stop, solve_id)
        await in_thread(console.audit.record, x_actor, "stop solve", solve_id)
        return solve_info(stopped, 0)

    return api


def _start(console: Console, message: PlanAsked | MigrationsAsked) -> Solve:
    try:
        if isinstance(message, PlanAsked):
            message.problem()
        else:
            message.checked_job()
    except PlannerError as error:
        raise ConsoleError(422, "invalid", str(error)) from None
    return console.solves.start(message)


def _save(console: Console, message: PlanToSave) -> str:
    if (message.plan is None) == (message.solve is None):
        raise ConsoleError(422, "invalid", "plan, solve: expected one of them")
    if message.solve is not None:
        return console.library.save(_plan_of(console, message.solve), message.name)
    assert message.plan is not None
    if wrong := check(message.plan):
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConsoleError(422, "invalid", f"plan: {wrong[0]}{more}")
    return console.library.save(message.plan, message.name)


def _plan_of(console: Console, solve_id: str) -> Plan:
    solve = console.solves.get(solve_id)
    if solve.plan is None:
        why = solve.error or ("it made no plan" if solve.over else "it is not done")
        raise ConsoleError(409, "no_plan", f"solve {solve_id}: {why}")
    return solve.plan


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
