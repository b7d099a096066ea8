"""Catalogs: what is planned ahead, filling them in the background, and taking them away."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from openrecycle.agent.messages.protocol import Memory
from openrecycle.app.api.models import Actor, ProfileName
from openrecycle.app.api.parsing import After, Most, ReadBeside, page
from openrecycle.app.catalogs.contents import MAX_TOLERANCE, CatalogReport, CatalogRequest, CatalogSummary, CountLine
from openrecycle.app.catalogs.service import Filling, exported, info_of
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import exporting, in_thread
from openrecycle.planner.catalogs.catalog import CatalogInfo
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import JobDoc, job_doc

Fingerprint = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
PlanName = Annotated[str, Path(pattern="^[0-9]{6}-[0-9a-f]{24}$")]
Tolerance = Annotated[int, Query(ge=0, le=MAX_TOLERANCE)]


class CatalogAsked(CatalogRequest):
    """job_id: of a job of this console, whose question is taken instead of the one given here. profile_name: of a
    profile (GET /profiles) that is taken in the place of the durations, on the grid that is given."""

    technique: Technique = Technique.STAGGERED
    memory: Memory = "uniform"
    solver: Literal["auto", "list", "cp-sat", "milp"] = "list"
    job_id: Annotated[str, Field(max_length=64)] | None = None
    profile_name: ProfileName | None = None


class FillingInfo(BaseModel):
    """done of total: plans that are there. planned: made by this filling. why: it failed."""

    fingerprint: str
    state: Literal["running", "done", "cancelled", "failed"]
    done: int
    total: int
    planned: int
    tolerance: int
    solver: str
    seconds: float
    why: str


class CatalogLine(BaseModel):
    """current: made by this version of the planner. created_at: POSIX seconds."""

    fingerprint: str
    pipelines: int
    stages: int
    micro_batches: int
    technique: str
    memory: str
    plans: int
    failures: int
    bytes: int
    created_at: float
    planner_version: str
    current: bool


class PlanLineInfo(BaseModel):
    name: str
    failed: list[str]
    period: float
    bound: float
    gap: float
    optimal: bool
    peak: int | None
    solver: str


class CountInfo(BaseModel):
    """plans: the longest period first. linear: the period if throughput fell as workers do."""

    failures: int
    wanted: int
    there: int
    linear: float | None
    plans: list[PlanLineInfo]


class CatalogDetail(BaseModel):
    """covered: up to how many failures nothing is missing. reference: the period of fault-free 1F1B; null while
    nothing is stored."""

    fingerprint: str
    job: JobDoc
    technique: str
    memory: str
    tolerance: int
    by_pattern: bool
    wanted: int
    there: int
    covered: int | None
    reference: float | None
    lines: list[CountInfo]


class CatalogLines(BaseModel):
    """next: `after` of the next page; null: there is none."""

    catalogs: list[CatalogLine]
    next: str | None = None


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter(tags=["catalogs"], route_class=ReadBeside)
    catalogs = console.catalogs

    def report(question: CatalogQuestion, tolerance: int, fingerprint: str | None = None) -> Response:
        detail = _detail(catalogs.report(question, tolerance, fingerprint))
        return Response(detail.model_dump_json(), media_type="application/json")

    def stored_report(fingerprint: str, tolerance: int) -> Response:
        return report(catalogs.stored(fingerprint).question, tolerance, fingerprint)

    @api.get("/catalogs")
    async def listed(after: After = None, limit: Most = None) -> CatalogLines:
        """Newest first."""
        found = await in_thread(catalogs.list)
        found.sort(key=_place)
        rows, following = page("catalogs", found, _place, after, limit)
        return CatalogLines(catalogs=[_line(row) for row in rows], next=following)

    @api.post("/catalogs", status_code=202)
    async def fill(asked: CatalogAsked, x_actor: Actor = "API") -> FillingInfo:
        """Plans what is missing, in the background. The same request again is the same filling while it runs."""
        made = await in_thread(catalogs.fill, await in_thread(_request, console, asked))
        await in_thread(console.security.audit.record, x_actor, "fill catalog", made.fingerprint)
        return _filling(made)

    @api.get("/catalogs/{fingerprint}", response_model=CatalogDetail)
    async def catalog(fingerprint: Fingerprint, tolerance: Tolerance | None = None) -> Response:
        """tolerance: by default the console's own."""
        wanted = console.tolerance if tolerance is None else tolerance
        return await in_thread(stored_report, fingerprint, wanted)

    @api.delete("/catalogs/{fingerprint}", status_code=204, tags=["operator"])
    async def delete(fingerprint: Fingerprint, x_actor: Actor = "API") -> None:
        await in_thread(catalogs.delete, fingerprint)
        await in_thread(console.security.audit.record, x_actor, "delete catalog", fingerprint)

    @api.get("/catalogs/{fingerprint}/filling")
    async def filling(fingerprint: Fingerprint) -> FillingInfo:
        """The newest filling since the console started."""
        found = catalogs.filling(fingerprint)
        if found is None:
            raise ConsoleError(404, "not_filling", f"catalog: got {fingerprint!r}, expected one that has been filled")
        return _filling(found)

    @api.delete("/catalogs/{fingerprint}/filling", status_code=202)
    async def cancel(fingerprint: Fingerprint, x_actor: Actor = "API") -> FillingInfo:
        """What it has made is kept; the same request goes on from there."""
        await in_thread(catalogs.cancel, fingerprint)
        await in_thread(console.security.audit.record, x_actor, "cancel filling", fingerprint)
        return await filling(fingerprint)

    @api.get("/catalogs/{fingerprint}/plans/{name}", response_model=dict[str, Any])
    async def plan(fingerprint: Fingerprint, name: PlanName) -> Response:
        """The Plan document."""
        made = await in_thread(catalogs.plan, fingerprint, name)
        return Response(await in_thread(made.to_json), media_type="application/json")

    @api.get("/catalogs/{fingerprint}/export", response_class=Response)
    async def export(fingerprint: Fingerprint, format: Literal["json", "stored"] = "json") -> Response:
        """A zip file: a document per plan, or the folder that the command line keeps and goes on from."""
        data = await exporting(exported, catalogs, fingerprint, format)
        named = {"Content-Disposition": f'attachment; filename="catalog-{fingerprint[:12]}.{format}.zip"'}
        return Response(data, media_type="application/zip", headers=named)

    @api.get("/jobs/{job_id}/catalog", response_model=CatalogDetail)
    async def of_job(job_id: str, tolerance: Tolerance | None = None) -> Response:
        """That of the job's question, though nothing may be stored of it yet."""
        job = await console.jobs.find_beside(job_id)
        wanted = console.tolerance if tolerance is None else tolerance
        return await in_thread(report, job.plans.question, wanted)

    return api


def _request(console: ConsoleService, asked: CatalogAsked) -> CatalogRequest:
    values = asked.model_dump(exclude={"job_id", "profile_name"})
    if asked.profile_name is not None:
        if asked.job_id is not None or asked.job is not None or asked.durations:
            detail = "profile_name: got it beside job_id, job or durations, expected one of them"
            raise ConsoleError(422, "invalid", detail)
        job = console.plans.profiles.job(asked.profile_name, asked.pipelines, asked.stages, asked.micro_batches)
        values["job"] = job_doc(job).model_dump()
    if asked.job_id is not None:
        question = console.jobs.find(asked.job_id).plans.question
        doc = job_doc(question.job).model_dump()
        values |= {"job": doc, "technique": question.technique.value, "memory": question.memory.text}
    request = CatalogRequest.model_validate(values)
    try:
        CatalogInfo.of(request.question)
    except PlannerError as error:
        raise ConsoleError(422, "invalid", str(error)) from None
    return request


def _place(catalog: CatalogSummary) -> tuple[float, str]:
    return -catalog.created_at, catalog.fingerprint


def _filling(made: Filling) -> FillingInfo:
    return FillingInfo(
        fingerprint=made.fingerprint,
        state=made.state,  # type: ignore[arg-type]
        done=made.done,
        total=made.total,
        planned=made.planned,
        tolerance=made.request.tolerance,
        solver=made.request.solver,
        seconds=made.elapsed,
        why=made.why,
    )


def _line(found: CatalogSummary) -> CatalogLine:
    info = found.info
    return CatalogLine(
        fingerprint=found.fingerprint,
        pipelines=info.job.pipelines,
        stages=info.job.stages,
        micro_batches=info.job.micro_batches,
        technique=info.technique.value,
        memory=info.memory,
        plans=found.plans,
        failures=found.failures,
        bytes=found.bytes,
        created_at=found.created_at,
        planner_version=info.planner_version,
        current=found.current,
    )


def _detail(found: CatalogReport) -> CatalogDetail:
    question = found.question
    return CatalogDetail(
        fingerprint=found.fingerprint,
        job=info_of(question).job,
        technique=question.technique.value,
        memory=question.memory.text,
        tolerance=found.tolerance,
        by_pattern=found.by_pattern,
        wanted=found.wanted,
        there=found.there,
        covered=found.covered,
        reference=found.reference,
        lines=[_count(line) for line in found.lines],
    )


def _count(line: CountLine) -> CountInfo:
    plans = [
        PlanLineInfo(
            name=plan.name,
            failed=list(plan.failed()),
            period=plan.period,
            bound=plan.bound,
            gap=plan.gap,
            optimal=plan.optimal,
            peak=plan.peak,
            solver=plan.solver,
        )
        for plan in line.plans
    ]
    return CountInfo(failures=line.failures, wanted=line.wanted, there=line.there, linear=line.linear, plans=plans)
