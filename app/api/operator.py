"""How a job goes on while workers are out, who decides that, and what else operators ask of it as a whole."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from openrecycle.agent.coordination.membership import CHOICE_TIMEOUT, LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT, Mode
from openrecycle.agent.messages.protocol import WorkerName
from openrecycle.app.api.models import Actor, ReportOutcome
from openrecycle.app.api.parsing import ReadBeside
from openrecycle.app.console.operators import Choice
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.service import Replan
from openrecycle.app.plans.solving import MAX_SECONDS
from openrecycle.app.runtime.errors import named
from openrecycle.app.runtime.runner import in_thread


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


def router(console: ConsoleService) -> APIRouter:
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
        """Takes one of the options: at once when the job waits for it, else at the next boundary."""
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
