"""Plans as files: the same ones that the pages' export button gives."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from openrecycle.app.console.plan_sources import Source, export_of, find
from openrecycle.app.console.service import Console
from openrecycle.app.plans.exporting import BUNDLE, BUNDLE_TYPE, offer_named, render
from openrecycle.app.plans.references import OfJob, Reference, Saved
from openrecycle.app.runtime.runner import in_thread
from openrecycle.planner.export import EXPORTERS

Format = Annotated[str, Query(json_schema_extra={"enum": [*EXPORTERS, BUNDLE]})]
Pipeline = Annotated[int | None, Query(ge=0, le=2**20)]
_MEDIA_TYPES = sorted({*(entry.media_type for entry in EXPORTERS.values()), BUNDLE_TYPE})
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {name: {} for name in _MEDIA_TYPES}, "description": "The file, of the format's media type."}
}


def router(console: Console) -> APIRouter:
    api = APIRouter(tags=["plans"])

    @api.get("/jobs/{job_id}/plans/{fingerprint}/export", response_class=Response, responses=FILE)
    async def of_job(job_id: str, fingerprint: str, format: Format, pipeline: Pipeline = None) -> Response:
        """chrome-trace, torch-csv, csv, json, yaml, svg, png, or bundle (a zip). fingerprint: `in-force`, too.

        pipeline: this one alone (torch-csv, svg, png). 413: too large; 422: no file of that format.
        """
        return await in_thread(_export, console, OfJob(job_id, fingerprint), format, pipeline)

    @api.get("/plans/{fingerprint}/export", response_class=Response, responses=FILE)
    async def of_library(fingerprint: str, format: Format, pipeline: Pipeline = None) -> Response:
        """The same of a saved plan."""
        return await in_thread(_export, console, Saved(fingerprint), format, pipeline)

    return api


def _export(console: Console, reference: Reference, wanted: str, pipeline: int | None) -> Response:
    source = find(console, reference)
    assert isinstance(source, Source), "plans of jobs and of the library are there or are not"
    export = export_of(console, source)
    offer = offer_named(export.plan, export.name, wanted, export.job_id)
    content = render(export, offer, pipeline)
    headers = {"Content-Disposition": f'attachment; filename="{offer.file_name}"'}
    return Response(content, media_type=offer.media_type, headers=headers)
