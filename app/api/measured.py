"""Measured iterations: workers post what they recorded, people read the newest one."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from openrecycle.agent.messages.protocol import ClockReading, MeasuredOps, clock_name
from openrecycle.app.api.models import ReportOutcome
from openrecycle.app.api.parsing import ReadBeside
from openrecycle.app.console.measured import MeasuredIteration, measured_iteration
from openrecycle.app.console.service import Console
from openrecycle.app.runtime.runner import answer_in_thread, in_thread
from openrecycle.planner.plans.plan import Plan

Watch = Annotated[bool, Query(description="have the job measured again soon")]


class MeasuredInfo(BaseModel):
    """period_ms: median time from commit to commit of the iterations around it. planned_ms: the plan's
    period. over_plan: the first / the second - 1. uncertainty_ms: by how much workers of different
    hosts may be shifted against each other. plan: the ops as they ran, in milliseconds."""

    iteration: int
    generation: int
    at: float
    uncertainty_ms: float
    planned_fingerprint: str
    period_ms: float | None
    planned_ms: float | None
    over_plan: float | None
    plan: Plan


def router(console: Console) -> APIRouter:
    api = APIRouter(tags=["measured"], route_class=ReadBeside)

    @api.get("/clock", tags=["agents"])
    async def clock() -> ClockReading:
        """This process's monotonic clock, for agents on other hosts to compare theirs with."""
        return ClockReading(name=clock_name(), microseconds=time.monotonic_ns() // 1000)

    @api.post("/jobs/{job_id}/measured", tags=["agents"])
    async def post_measured(job_id: str, message: MeasuredOps) -> ReportOutcome:
        """One worker's part of the iteration that heartbeats asked for."""
        return ReportOutcome(reason=await in_thread(console.observing.measuring.take, console.job(job_id), message))

    @api.get("/jobs/{job_id}/measured", response_model=MeasuredInfo, responses={204: {}})
    async def measured(job_id: str, watch: Watch = False) -> Response:
        """The newest measured iteration; 204 while there is none."""
        found = await in_thread(_newest, console, job_id, watch)
        return Response(status_code=204) if found is None else await answer_in_thread(_info, found)

    return api


def _newest(console: Console, job_id: str, watch: bool) -> MeasuredIteration | None:
    return measured_iteration(console, job_id, watch=watch)


def _info(found: MeasuredIteration) -> MeasuredInfo:
    return MeasuredInfo(
        iteration=found.iteration,
        generation=found.generation,
        at=found.at,
        uncertainty_ms=found.uncertainty_ms,
        planned_fingerprint=found.planned.fingerprint,
        period_ms=found.period_ms,
        planned_ms=found.planned_ms,
        over_plan=found.over_plan,
        plan=found.plan,
    )
