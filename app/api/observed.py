"""What workers write, what became of their steps, and what operators have taken note of."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from openrecycle.agent.messages.protocol import LogLine, LogLines, ValidationReport
from openrecycle.app.api.models import Actor, ReportOutcome
from openrecycle.app.api.parsing import ReadBeside
from openrecycle.app.console.service import Console
from openrecycle.app.console.worker_history import worker_history
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread
from openrecycle.db.heartbeats import Level
from openrecycle.planner.plans.plan import INTEGER

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


class MetricSamples(BaseModel):
    """One entry per sample; null where no heartbeat of it brought this metric."""

    low: list[float | None]
    mean: list[float | None]
    high: list[float | None]


class SeriesInfo(BaseModel):
    """Samples of `step` seconds each, one entry per sample in every list; a step without a heartbeat has none.

    at: POSIX seconds of their begin. beats: heartbeats in it. iteration, phase: of the last one. metrics: F, I,
    W, B, O in milliseconds, resident_bytes, silence_seconds; those that were reported.
    """

    step: int
    at: list[int]
    beats: list[int]
    iteration: list[int]
    phase: list[str]
    metrics: dict[str, MetricSamples]


class WorkerHistory(BaseModel):
    """states: oldest first. log: its newest lines, oldest first; kept in memory only. series: what its
    heartbeats brought."""

    worker: str
    series: SeriesInfo
    states: list[StateInfo]
    op_milliseconds: dict[Literal["F", "I", "W", "B", "O"], float]
    log: list[LogLine]


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["jobs"], route_class=ReadBeside)

    @api.post("/{job_id}/logs", status_code=204, tags=["agents"])
    async def logs(job_id: str, message: LogLines) -> None:
        """Lines that a worker process has written since its last post."""
        console.observing.logs.take(console.job(job_id), message)

    @api.post("/{job_id}/validations", status_code=204, tags=["agents"])
    async def validation(job_id: str, message: ValidationReport) -> None:
        await in_thread(console.observing.feed.take_validation, console.job(job_id), message)

    @api.post("/{job_id}/events/acknowledge", tags=["operator"])
    async def acknowledge(job_id: str, message: Acknowledged, x_actor: Actor = "API") -> ReportOutcome:
        new = await in_thread(console.observing.feed.acknowledge, console.job(job_id), message.seqs, x_actor)
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
        return await in_thread(_history, console, console.job(job_id), worker, *asked)

    return api


def _history(
    console: Console, job: LiveJob, worker: str, since: float, until: float, step: Level | None
) -> WorkerHistory:
    if worker not in job.state.members:
        raise ConsoleError(404, "unknown_worker", f"worker: got {worker!r}, expected one of the job's grid")
    series = asdict(worker_history(console, job.job_id, worker, since, until, step))
    series.pop("worker")
    return WorkerHistory(
        worker=worker,
        series=SeriesInfo(**series),
        states=[StateInfo(**row) for row in console.observing.observations.states(job.job_id, worker)],
        op_milliseconds=job.op_times.smoothed(worker),  # type: ignore[arg-type]
        log=list(console.observing.logs.lines(job.job_id, worker)),
    )
