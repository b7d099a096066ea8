"""Many heartbeats of a job in one request: for launchers that report for the workers of a node."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from openrecycle.agent.protocol import Heartbeat
from openrecycle.app.api.parsing import ReadBeside, beside
from openrecycle.app.console import Console
from openrecycle.app.errors import ConsoleError
from openrecycle.app.live import LiveJob

MOST = 8_192


class Heartbeats(BaseModel):
    model_config = ConfigDict(extra="forbid")

    heartbeats: Annotated[list[Heartbeat], Field(min_length=1, max_length=MOST, fail_fast=True)]


class Refused(BaseModel):
    """index: in the request, from 0. code, detail: as in the problem that it alone would have been answered."""

    index: int
    worker: str
    code: str
    detail: str


class HeartbeatsReply(BaseModel):
    """generation, measure: as in the answer to a single one. taken: how many counted; the others are in refused."""

    generation: int
    measure: int | None
    taken: int
    refused: list[Refused]


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["agents"], route_class=ReadBeside)

    @api.post("/{job_id}/heartbeats/batch", response_model=HeartbeatsReply)
    async def heartbeats(job_id: str, message: Heartbeats) -> Response:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken."""
        job = console.job(job_id)
        return Response(await beside(_take, console, job, message.heartbeats), media_type="application/json")

    return api


def _take(console: Console, job: LiveJob, beats: list[Heartbeat]) -> str:
    refused = []
    for index, beat in enumerate(beats):
        try:
            job.heard(beat)
        except ConsoleError as error:
            refused.append(Refused(index=index, worker=beat.worker, code=error.code, detail=error.detail))
    return HeartbeatsReply(
        generation=job.state.generation,
        measure=console.measuring.wanted(job.job_id),
        taken=len(beats) - len(refused),
        refused=refused,
    ).model_dump_json()
