"""Whole jobs: out as a file, in again, and away."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from openrecycle.agent.messages.protocol import Identifier
from openrecycle.app.api.models import Actor, ReportOutcome
from openrecycle.app.console.service import Console
from openrecycle.app.runtime.runner import in_thread

ZIP: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}, "description": "The file."}}
BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ImportedJob(BaseModel):
    """rows: of all tables together. plans: documents, whether they were there before or not."""

    job_id: str
    rows: int
    plans: int


def router(console: Console) -> APIRouter:
    api = APIRouter()

    @api.get("/jobs/{job_id}/history.zip", tags=["jobs"], response_class=FileResponse, responses={**ZIP, 409: {}})
    async def export(job_id: str) -> FileResponse:
        """All that is stored of the job: JSON lines of each table, its plans, and a manifest with SHA-256 sums."""
        path = await console.histories.export(job_id)
        name = f"{job_id}-history.zip"
        return FileResponse(path, media_type="application/zip", filename=name, background=BackgroundTask(path.unlink))

    @api.post(
        "/history/import",
        status_code=201,
        tags=["operator"],
        openapi_extra=BODY,
        responses={409: {}, 413: {}, 422: {}},
    )
    async def take_in(
        request: Request,
        new_id: Annotated[Identifier | None, Query(alias="as", description="its id here, instead of its own")] = None,
        x_actor: Actor = "API",
    ) -> ImportedJob:
        """Imports the job of such a file, all of it or nothing; never over another one (409)."""
        done = await console.histories.take_in(request.stream(), new_id, x_actor)
        return ImportedJob(job_id=done.job_id, rows=done.rows, plans=done.plans)

    @api.delete("/jobs/{job_id}", status_code=202, tags=["operator"], responses={409: {}})
    async def delete(job_id: str, x_actor: Actor = "API") -> ReportOutcome:
        """Deletes a job none of whose workers live, with everything of it; plans that others have are kept."""
        await in_thread(console.histories.delete, job_id, x_actor)
        return ReportOutcome(reason=f"job {job_id} is deleted")

    return api
