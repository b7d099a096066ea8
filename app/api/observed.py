"""What workers write, what became of their steps, and what operators have taken note of."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import LogLine, LogLines, VerdictReport
from app.api.models import Outcome
from app.api.runner import in_thread
from app.console import Console
from app.errors import ConsoleError
from app.live import LiveJob

Actor = Annotated[str, Header(max_length=80, alias="X-Actor")]
Seq = Annotated[int, Field(ge=1, le=2**53)]


class Acknowledged(BaseModel):
    """seqs: of the events that somebody has taken note of."""

    model_config = ConfigDict(extra="forbid")

    seqs: Annotated[list[Seq], Field(max_length=1000)]


class StateInfo(BaseModel):
    """The worker came into `state` at this time (POSIX seconds)."""

    state: str
    at: float


class WorkerHistory(BaseModel):
    """states: oldest first. log: its newest lines, oldest first; kept in memory only."""

    worker: str
    states: list[StateInfo]
    op_milliseconds: dict[Literal["F", "I", "W", "B", "O"], float]
    log: list[LogLine]


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["jobs"])

    @api.post("/{job_id}/logs", status_code=204, tags=["agents"])
    async def logs(job_id: str, message: LogLines) -> None:
        """Lines that a worker process has written since its last post."""
        console.logs.take(console.job(job_id), message)

    @api.post("/{job_id}/verdicts", status_code=204, tags=["agents"])
    async def verdict(job_id: str, message: VerdictReport) -> None:
        await in_thread(console.feed.take_verdict, console.job(job_id), message)

    @api.post("/{job_id}/events/acknowledge", tags=["operator"])
    async def acknowledge(job_id: str, message: Acknowledged, x_actor: Actor = "API") -> Outcome:
        new = await in_thread(console.feed.acknowledge, console.job(job_id), message.seqs, x_actor)
        return Outcome(reason=f"{new} event{'' if new == 1 else 's'} acknowledged that nobody had acknowledged before")

    @api.get("/{job_id}/workers/{worker}/history")
    async def history(job_id: str, worker: str) -> WorkerHistory:
        """A worker's states so far, its smoothed op times, and the newest lines it has written."""
        return await in_thread(_history, console, console.job(job_id), worker)

    return api


def _history(console: Console, job: LiveJob, worker: str) -> WorkerHistory:
    if worker not in job.state.members:
        raise ConsoleError(404, "unknown_worker", f"worker: got {worker!r}, expected one of the job's grid")
    return WorkerHistory(
        worker=worker,
        states=[StateInfo(**row) for row in console.observations.states(job.job_id, worker)],
        op_milliseconds=job.op_times.smoothed(worker),  # type: ignore[arg-type]
        log=list(console.logs.lines(job.job_id, worker)),
    )
