"""Routes for saved plans, solves (plans that are being made), plans as files, profiles, and catalogs, which are filled
in the background and exported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi import Request as HttpRequest
from pydantic import AliasPath, BaseModel, ConfigDict, Discriminator, Field, Tag

from openrecycle.agent.messages.protocol import Memory
from openrecycle.app.api.models import (
    Actor,
    After,
    Most,
    ProfileName,
    ReadBeside,
    ReportOutcome,
    SolveInfo,
    document_of,
    is_json,
    page,
    solve_info,
)
from openrecycle.app.catalogs.contents import MAX_TOLERANCE, CatalogReport, CatalogRequest, CatalogSummary
from openrecycle.app.catalogs.service import exported, info_of
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.files import (
    BUNDLE,
    BUNDLE_TYPE,
    LARGE,
    MOST_WAITING,
    PlanToSave,
    ReadPlan,
    offer_named,
    render,
)
from openrecycle.app.plans.profiles import NAME, ProfileInfo
from openrecycle.app.plans.service import use_plan
from openrecycle.app.plans.solving import (
    MigrationsAsked,
    MigrationsSettings,
    PlanAsked,
    PlanSettings,
    Request,
    Solve,
)
from openrecycle.app.plans.sources import OfJob, Reference, Saved, Source
from openrecycle.app.runtime.errors import ConsoleError, invalid
from openrecycle.app.runtime.runner import exporting, in_thread
from openrecycle.app.security.access import ACTOR, actor_of
from openrecycle.planner.export import EXPORTERS
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import INTEGER, JobDoc, Plan, job_doc
from openrecycle.planner.profiles import Profile

# -- plans --------------------------------------------------------------------------------------


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


class SavedPlansPage(BaseModel):
    """next: `after` of the next page; null: there is none."""

    plans: list[SavedPlan]
    next: str | None = None


class PlanToUse(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fingerprint: Annotated[str, Field(max_length=64)]


class SavedPlanReply(BaseModel):
    fingerprint: str


class SolveList(BaseModel):
    """next: `after` of the next page; null: there is none."""

    solves: list[SolveInfo]
    next: str | None = None


Size = Annotated[int, Field(ge=1, le=2**31), INTEGER]


class _WhoseJob(BaseModel):
    job: JobDoc | None = None
    profile_name: ProfileName | None = None
    pipelines: Size | None = None
    stages: Size | None = None
    micro_batches: Size | None = None


class PlanWanted(_WhoseJob, PlanSettings):
    """job: a whole one; or profile_name: of a profile (GET /profiles), and pipelines, stages, micro_batches, which are
    the profile's own where they are not given. time_limit: seconds."""

    kind: Literal["plan"]
    memory: Memory = "uniform"
    solver: Literal["auto", "list", "cp-sat", "milp"] = "auto"


class MigrationsWanted(_WhoseJob, MigrationsSettings):
    """job, or profile_name and the sizes of the grid: as for a plan. state_bytes: of weights and optimizer of every
    stage; null: what the profile says. bandwidth: bytes per second of a copy. heals_in: seconds until the failed
    workers are back; null: they don't come back."""

    kind: Literal["migrations"]
    memory: Memory = "uniform"


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter(route_class=ReadBeside)

    @api.get("/plans", tags=["plans"])
    async def saved(after: After = None, limit: Most = None) -> SavedPlansPage:
        """Newest first."""
        rows, following = page("plans", await in_thread(console.plans.library.saved), _place_of_plan, after, limit)
        return SavedPlansPage(plans=[SavedPlan(**row) for row in rows], next=following)

    uploads = APIRouter(route_class=ReadElsewhere)

    @uploads.post("/plans", status_code=201, tags=["plans"])
    async def save(message: PlanToSave, x_actor: Actor = "API") -> SavedPlanReply:
        """Keeps a plan under a name; one that is kept already takes the new name."""
        fingerprint = await in_thread(_save, console, message)
        await in_thread(console.security.audit.record, x_actor, "save plan", fingerprint, detail=message.name)
        return SavedPlanReply(fingerprint=fingerprint)

    api.include_router(uploads)

    @api.get("/plans/{fingerprint}", response_model=dict[str, Any], tags=["plans"])
    async def plan(fingerprint: str) -> Response:
        """The Plan document."""
        return await document_of(console.plans.library.saved_plan, fingerprint)

    @api.delete("/plans/{fingerprint}", status_code=204, tags=["plans"])
    async def forget(fingerprint: str, x_actor: Actor = "API") -> None:
        """Jobs that have the plan keep it."""
        await in_thread(console.plans.library.forget, fingerprint)
        await in_thread(console.security.audit.record, x_actor, "forget plan", fingerprint)

    @api.put("/jobs/{job_id}/plan", tags=["operator"])
    async def use(job_id: str, message: PlanToUse, x_actor: Actor = "API") -> ReportOutcome:
        """Puts a saved plan in force, with the same workers: it must be for the job's grid, profile and failures."""
        plan = await in_thread(console.plans.library.saved_plan, message.fingerprint)
        return ReportOutcome(reason=await in_thread(lambda: use_plan(console.jobs.find(job_id), plan, x_actor)))

    @api.get("/solves", tags=["plans"])
    async def solves(after: After = None, limit: Most = None) -> SolveList:
        """In the order in which they were asked for, without their points."""
        rows, following = page(
            "solves", console.plans.solves.all(), lambda solve: (solve.asked, solve.id), after, limit
        )
        return SolveList(solves=[solve_info(solve, len(solve.points)) for solve in rows], next=following)

    @api.post("/solves", status_code=202, tags=["plans"])
    async def start(
        message: Annotated[PlanWanted | MigrationsWanted, Field(discriminator="kind")],
        response: Response,
        x_actor: Actor = "API",
    ) -> SolveInfo:
        """Begins to make a plan, or to look for migrations, in a process of its own; equal requests share one."""
        solve = await in_thread(_start, console, message)
        await in_thread(console.security.audit.record, x_actor, "start solve", solve.id, detail=message.kind)
        response.headers["Location"] = f"solves/{solve.id}"
        return solve_info(solve, 0)

    @api.get("/solves/{solve_id}", tags=["plans"])
    async def progress(solve_id: str, after: Annotated[int, Query(ge=0, le=10**6)] = 0) -> SolveInfo:
        """How far it is. after: how many points are known already."""
        return solve_info(console.plans.solves.get(solve_id), after)

    @api.get("/solves/{solve_id}/plan", response_model=dict[str, Any], tags=["plans"])
    async def made(solve_id: str) -> Response:
        """The Plan document, once it is there."""
        return await document_of(_plan_of, console, solve_id)

    @api.post("/solves/{solve_id}/stop", status_code=202, tags=["plans"])
    async def stop(solve_id: str, x_actor: Actor = "API") -> SolveInfo:
        """Has it end with the best plan so far."""
        stopped = await in_thread(console.plans.solves.stop, solve_id)
        await in_thread(console.security.audit.record, x_actor, "stop solve", solve_id)
        return solve_info(stopped, 0)

    return api


def _start(console: ConsoleService, message: PlanWanted | MigrationsWanted) -> Solve:
    job, own = _job_of(console, message), set(_WhoseJob.model_fields)
    settings = {name: getattr(message, name) for name in type(message).model_fields if name not in own}
    kind: type[Request] = PlanAsked if isinstance(message, PlanWanted) else MigrationsAsked
    asked = kind(job=job, **settings)
    try:
        asked.check()
    except PlannerError as error:
        raise invalid(error) from None
    return console.plans.solves.start(asked)


def _job_of(console: ConsoleService, asked: _WhoseJob) -> JobDoc:
    sizes = asked.pipelines, asked.stages, asked.micro_batches
    if (asked.job is None) == (asked.profile_name is None):
        raise ConsoleError(422, "invalid", "expected one of them", field="job, profile_name")
    if asked.profile_name is not None:
        return job_doc(console.plans.profiles.job(asked.profile_name, *sizes))
    if any(size is not None for size in sizes):
        said = "expected none of them beside job, which has its own"
        raise ConsoleError(422, "invalid", said, field="pipelines, stages, micro_batches")
    assert asked.job is not None
    return asked.job


def _place_of_plan(row: dict[str, Any]) -> tuple[float, str]:
    return -row["created"], row["fingerprint"]


# Uploads that wait for their turn must not take threads from the rest of the API; the last thread refuses further ones.
_uploads = ThreadPoolExecutor(MOST_WAITING + 2, "uploads")


class ReadElsewhere(ReadBeside):
    """The route POST /plans, which has large bodies read in a child process; its answers are the usual ones."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()

        async def handler(request: HttpRequest) -> Response:
            body = await request.body()
            if len(body) <= LARGE or not is_json(request):
                return await usual(request)
            console: ConsoleService = request.app.state.console
            actor = actor_of(request.headers.get(ACTOR, "API"))
            kept = asyncio.get_running_loop().run_in_executor(_uploads, _upload, console, body, actor)
            return Response(await kept, 201, media_type="application/json")

        return handler


def _upload(console: ConsoleService, body: bytes, actor: str) -> str:
    found = console.plans.uploads.read(body)
    saved = console.plans.library.save_read(found) if isinstance(found, ReadPlan) else _save(console, found)
    console.security.audit.record(actor, "save plan", saved, detail=found.name)
    return SavedPlanReply(fingerprint=saved).model_dump_json()


def _save(console: ConsoleService, message: PlanToSave) -> str:
    if wrong := message.wrong:
        raise wrong
    if message.solve is not None:
        return console.plans.library.save(_plan_of(console, message.solve), message.name)
    assert message.plan is not None
    return console.plans.library.save(message.plan, message.name)


def _plan_of(console: ConsoleService, solve_id: str) -> Plan:
    solve = console.plans.solves.get(solve_id)
    if solve.plan is None:
        why = solve.error or ("it made no plan" if solve.over else "it is not done")
        raise ConsoleError(409, "no_plan", f"solve {solve_id}: {why}")
    return solve.plan


Format = Annotated[str, Query(json_schema_extra={"enum": [*EXPORTERS, BUNDLE]})]
Pipeline = Annotated[int | None, Query(ge=0, le=2**20)]
_MEDIA_TYPES = sorted({*(entry.media_type for entry in EXPORTERS.values()), BUNDLE_TYPE})
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {name: {} for name in _MEDIA_TYPES}, "description": "The file, of the format's media type."}
}


def exports_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(tags=["plans"])

    @api.get("/jobs/{job_id}/plans/{fingerprint}/export", response_class=Response, responses=FILE)
    async def of_job(job_id: str, fingerprint: str, format: Format, pipeline: Pipeline = None) -> Response:
        """chrome-trace, torch-csv, csv, json, yaml, svg, png, or bundle (a zip). fingerprint: `in-force`, too.

        pipeline: this one alone (torch-csv, svg, png). 413: too large; 422: no file of that format.
        """
        return await exporting(_export, console, OfJob(job_id, fingerprint), format, pipeline)

    @api.get("/plans/{fingerprint}/export", response_class=Response, responses=FILE)
    async def of_library(fingerprint: str, format: Format, pipeline: Pipeline = None) -> Response:
        """The same of a saved plan."""
        return await exporting(_export, console, Saved(fingerprint), format, pipeline)

    return api


def _export(console: ConsoleService, reference: Reference, wanted: str, pipeline: int | None) -> Response:
    source = console.sources.find(reference)
    assert isinstance(source, Source), "plans of jobs and of the library are there or are not"
    export = console.sources.export_of(source)
    offer = offer_named(export.plan, export.name, wanted, export.job_id)
    content = render(export, offer, pipeline)
    headers = {"Content-Disposition": f'attachment; filename="{offer.file_name}"'}
    return Response(content, media_type=offer.media_type, headers=headers)


InPath = Annotated[str, Path(pattern=NAME)]


def _kind(document: Any) -> str:
    """Says how to read a document. Anything but a measured profile is read as a job, and refused with what it lacks for
    that."""
    if isinstance(document, Profile) or (isinstance(document, dict) and "profile_version" in document):
        return "measured"
    return "job"


# A document that `openrecycle profile` writes, or a job's.
Document = Annotated[
    Annotated[Profile, Tag("measured")] | Annotated[JobDoc, Tag("job")],
    Discriminator(_kind),
]


class ProfileDetail(ProfileInfo):
    """document: as it was saved. job: what it makes of its own grid."""

    document: Profile | JobDoc
    job: JobDoc


class ProfileList(BaseModel):
    """next: `after` of the next page; null: there is none."""

    profiles: list[ProfileInfo]
    next: str | None = None


def profiles_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(prefix="/profiles", tags=["profiles"], route_class=ReadBeside)
    profiles = console.plans.profiles

    @api.get("")
    async def listed(after: After = None, limit: Most = None) -> ProfileList:
        """By name."""
        lines, following = page("profiles", await in_thread(profiles.list), lambda line: (line.name,), after, limit)
        return ProfileList(profiles=list(lines), next=following)

    @api.get("/{name}")
    async def profile(name: InPath) -> ProfileDetail:
        return await in_thread(_profile_detail, console, name)

    @api.put("/{name}", status_code=201, responses={200: {"model": ProfileInfo}, 409: {}})
    async def put(name: InPath, document: Document, response: Response, x_actor: Actor = "API") -> ProfileInfo:
        """Keeps a profile, or a job document's op times, under this name: 201; 200 in the place of one that had it.

        Jobs and plans that were made with the one before keep what they have.
        """
        new = await in_thread(profiles.put, name, document, x_actor)
        await in_thread(console.security.audit.record, x_actor, "save profile", name, detail="" if new else "replaced")
        response.status_code = 201 if new else 200
        return (await in_thread(profiles.get, name))[0]

    @api.delete("/{name}", status_code=204, responses={409: {}})
    async def delete(name: InPath, x_actor: Actor = "API") -> None:
        """Jobs and plans that were made with it keep what they have."""
        await in_thread(profiles.delete, name)
        await in_thread(console.security.audit.record, x_actor, "delete profile", name)

    return api


def _profile_detail(console: ConsoleService, name: str) -> ProfileDetail:
    line, document = console.plans.profiles.get(name)
    return ProfileDetail(**line.model_dump(), document=document, job=job_doc(console.plans.profiles.job(name)))


# -- catalogs -----------------------------------------------------------------------------------

Fingerprint = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
PlanName = Annotated[str, Path(pattern="^[0-9]{6}-[0-9a-f]{24}$")]
Tolerance = Annotated[int, Query(ge=0, le=MAX_TOLERANCE)]


class CatalogAsked(BaseModel):
    """What to plan ahead for a job of this console. solver: `list` takes milliseconds a plan, the others up to
    time_limit seconds."""

    model_config = ConfigDict(extra="forbid")

    job_id: Annotated[str, Field(max_length=64)]
    tolerance: Annotated[int, Field(ge=0, le=MAX_TOLERANCE), INTEGER] = 2
    solver: Literal["auto", "list", "cp-sat", "milp"] = "list"
    time_limit: Annotated[float, Field(strict=True, gt=0, le=600, allow_inf_nan=False)] = 10.0


def _of(*path: str) -> Any:
    """The field is this attribute of the object that is answered with."""
    return Field(validation_alias=AliasPath(*path))


class FillingInfo(BaseModel):
    """done of total: plans that are there. planned: made by this filling. why: it failed, or has failed so many times
    (failures) and is begun again by itself."""

    model_config = ConfigDict(from_attributes=True)

    fingerprint: str
    state: Literal["running", "done", "cancelled", "failed"]
    done: int
    total: int
    planned: int
    tolerance: Annotated[int, _of("request", "tolerance")]
    solver: Annotated[str, _of("request", "solver")]
    seconds: Annotated[float, _of("elapsed")]
    why: str
    failures: int


class CatalogLine(BaseModel):
    """current: made by this version of the planner. created_at: POSIX seconds."""

    model_config = ConfigDict(from_attributes=True)

    fingerprint: str
    pipelines: Annotated[int, _of("info", "job", "pipelines")]
    stages: Annotated[int, _of("info", "job", "stages")]
    micro_batches: Annotated[int, _of("info", "job", "micro_batches")]
    technique: Annotated[str, _of("info", "technique")]
    memory: Annotated[str, _of("info", "memory")]
    plans: int
    failures: int
    bytes: int
    created_at: float
    planner_version: Annotated[str, _of("info", "planner_version")]
    current: bool


class PlanLineInfo(BaseModel):
    model_config = ConfigDict(from_attributes=True)

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

    model_config = ConfigDict(from_attributes=True)

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


def catalogs_router(console: ConsoleService) -> APIRouter:
    api = APIRouter(tags=["catalogs"], route_class=ReadBeside)
    catalogs = console.catalogs

    def report(question: CatalogQuestion, tolerance: int, fingerprint: str | None = None) -> Response:
        detail = _catalog_detail(catalogs.report(question, tolerance, fingerprint))
        return Response(detail.model_dump_json(), media_type="application/json")

    def stored_report(fingerprint: str, tolerance: int) -> Response:
        return report(catalogs.stored(fingerprint).question, tolerance, fingerprint)

    @api.get("/catalogs")
    async def listed(after: After = None, limit: Most = None) -> CatalogLines:
        """Newest first."""
        found = await in_thread(catalogs.list)
        found.sort(key=_place)
        rows, following = page("catalogs", found, _place, after, limit)
        return CatalogLines(catalogs=list(map(CatalogLine.model_validate, rows)), next=following)

    @api.post("/catalogs", status_code=202)
    async def fill(asked: CatalogAsked, x_actor: Actor = "API") -> FillingInfo:
        """Plans what is missing, in the background. The same request again is the same filling while it runs."""
        job = await console.jobs.find_beside(asked.job_id)
        request = CatalogRequest(job.plans.question, asked.tolerance, asked.solver, asked.time_limit)
        made = await in_thread(catalogs.fill, request)
        await in_thread(console.security.audit.record, x_actor, "fill catalog", made.fingerprint)
        return FillingInfo.model_validate(made)

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
            raise ConsoleError(
                404, "not_filling", f"got {fingerprint!r}, expected one that has been filled", field="catalog"
            )
        return FillingInfo.model_validate(found)

    @api.delete("/catalogs/{fingerprint}/filling", status_code=202)
    async def cancel(fingerprint: Fingerprint, x_actor: Actor = "API") -> FillingInfo:
        """What it has made is kept; the same request goes on from there."""
        await in_thread(catalogs.cancel, fingerprint)
        await in_thread(console.security.audit.record, x_actor, "cancel filling", fingerprint)
        return await filling(fingerprint)

    @api.get("/catalogs/{fingerprint}/plans/{name}", response_model=dict[str, Any])
    async def plan(fingerprint: Fingerprint, name: PlanName) -> Response:
        """The Plan document."""
        return await document_of(catalogs.plan, fingerprint, name)

    @api.get("/catalogs/{fingerprint}/export", response_class=Response)
    async def export(fingerprint: Fingerprint) -> Response:
        """A zip file of the folder that the command line keeps and goes on from."""
        data = await exporting(exported, catalogs, fingerprint)
        named = {"Content-Disposition": f'attachment; filename="catalog-{fingerprint[:12]}.zip"'}
        return Response(data, media_type="application/zip", headers=named)

    @api.get("/jobs/{job_id}/catalog", response_model=CatalogDetail)
    async def of_job(job_id: str, tolerance: Tolerance | None = None) -> Response:
        """That of the job's question, though nothing may be stored of it yet."""
        job = await console.jobs.find_beside(job_id)
        wanted = console.tolerance if tolerance is None else tolerance
        return await in_thread(report, job.plans.question, wanted)

    return api


def _place(catalog: CatalogSummary) -> tuple[float, str]:
    return -catalog.created_at, catalog.fingerprint


def _catalog_detail(found: CatalogReport) -> CatalogDetail:
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
        lines=[CountInfo.model_validate(line) for line in found.lines],
    )
