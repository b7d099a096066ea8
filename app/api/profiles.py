"""Profiles that go by name: kept here once, and named where jobs and plans are asked for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Discriminator, Tag

from openrecycle.app.api.models import Actor
from openrecycle.app.api.paging import After, Most, page
from openrecycle.app.api.parsing import ReadBeside
from openrecycle.app.console.service import Console
from openrecycle.app.plans.profiles import NAME, ProfileInfo
from openrecycle.app.runtime.runner import in_thread
from openrecycle.planner.plans.plan import JobDoc, job_doc
from openrecycle.planner.profiles import Profile

InPath = Annotated[str, Path(pattern=NAME)]


def _kind(document: Any) -> str:
    """Anything that is no measured profile is refused as a job, with what a job lacks."""
    if isinstance(document, Profile) or (isinstance(document, dict) and "profile_version" in document):
        return "measured"
    return "job"


# What `openrecycle profile` writes, or the document of a job.
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


def router(console: Console) -> APIRouter:
    api = APIRouter(prefix="/profiles", tags=["profiles"], route_class=ReadBeside)
    profiles = console.plans.profiles

    @api.get("")
    async def listed(after: After = None, limit: Most = None) -> ProfileList:
        """By name."""
        lines, following = page("profiles", await in_thread(profiles.list), lambda line: (line.name,), after, limit)
        return ProfileList(profiles=list(lines), next=following)

    @api.get("/{name}")
    async def profile(name: InPath) -> ProfileDetail:
        return await in_thread(_detail, console, name)

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


def _detail(console: Console, name: str) -> ProfileDetail:
    line, document = console.plans.profiles.get(name)
    return ProfileDetail(**line.model_dump(), document=document, job=job_doc(console.plans.profiles.job(name)))
