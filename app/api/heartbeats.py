"""Many heartbeats of a job in one request: for launchers that report for the workers of a node."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import Heartbeat
from app.console import Console
from app.errors import ConsoleError

MOST = 8_192


class Heartbeats(BaseModel):
    model_config = ConfigDict(extra="forbid")

    heartbeats: Annotated[list[Heartbeat], Field(min_length=1, max_length=MOST)]


class Refused(BaseModel):
    """index: in the request, from 0. code, detail: as in the problem that it alone would have been answered."""

    index: int
    worker: str
    code: str
    detail: str


class HeartbeatsReply(BaseModel):
    """epoch, measure: as in the answer to a single one. taken: how many counted; the others are in refused."""

    epoch: int
    measure: int | None
    taken: int
    refused: list[Refused]


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/jobs", tags=["agents"])

    @api.post("/{job_id}/heartbeats/batch")
    async def heartbeats(job_id: str, message: Heartbeats) -> HeartbeatsReply:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken."""
        job, refused = console.job(job_id), []
        for index, beat in enumerate(message.heartbeats):
            try:
                console.heartbeat(job_id, beat)
            except ConsoleError as error:
                refused.append(Refused(index=index, worker=beat.worker, code=error.code, detail=error.detail))
        return HeartbeatsReply(
            epoch=job.state.epoch,
            measure=console.measuring.wanted(job_id),
            taken=len(message.heartbeats) - len(refused),
            refused=refused,
        )

    return api
