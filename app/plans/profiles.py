"""The profiles that go by name: those that are shipped with the planner, and those that people keep."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.db import profiles as rows
from openrecycle.db.session import Database
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import JobDoc, StageDoc, first_problem, read_model
from openrecycle.planner.profiles import Profile, load_profile, shipped

# What a profile may be called: it stands in addresses.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}$"
# Longer documents are no profiles: one of 4,096 stages has some 600 kB.
MAX_DOCUMENT = 1 << 20
MOST = 1_000

T = TypeVar("T", bound=StageDoc)


class ProfileInfo(BaseModel):
    """source: `shipped` ones come with the planner and never change. kind: `measured` by the agent's profiler, or a
    `job` document. stages: that it is good for; null: any number up to `layers`, those of the model. saved_by,
    created_at, updated_at: who has saved it last, and POSIX seconds; "" and null of one that is shipped."""

    name: str
    source: Literal["shipped", "saved"]
    kind: Literal["measured", "job"]
    about: str
    stages: int | None
    layers: int | None
    time_unit: str
    saved_by: str = ""
    created_at: float | None = None
    updated_at: float | None = None


@dataclass(frozen=True)
class SavedProfile:
    """What is kept under a name. saved_by: who did so last. digest: of the document, so that a link can tell whether
    it is still that one."""

    name: str
    document: Profile | JobDoc
    saved_by: str = ""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.document.model_dump_json().encode()).hexdigest()[:12]

    @property
    def stages(self) -> int | None:
        """That it is good for; None: any number that its layers can be cut into."""
        return _summary(self.document)["stages"]  # type: ignore[no-any-return]


class NamedProfiles:
    """One per console (`console.plans.profiles`). Thread-safe. Its methods raise ConsoleError."""

    def __init__(self, database: Database) -> None:
        self._rows = rows.Profiles(database)

    def list(self) -> list[ProfileInfo]:
        """By name."""
        with storing():
            saved = [ProfileInfo(source="saved", **row) for row in self._rows.all()]
        return sorted([*map(_shipped_line, shipped()), *saved], key=lambda line: line.name)

    def get(self, name: str) -> tuple[ProfileInfo, Profile | JobDoc]:
        """Raises ConsoleError (404)."""
        if name in shipped():
            return _shipped_line(name), _shipped_document(name)
        with storing():
            found = self._rows.get(name)
        if found is None:
            raise unknown_profile(name)
        return ProfileInfo(source="saved", **found[0]), _read(found[1])

    def kept(self, name: str) -> SavedProfile:
        """One that people keep. Raises ConsoleError (404)."""
        line, document = self.get(name)
        return SavedProfile(name, document, line.saved_by)

    def put(self, name: str, document: Profile | JobDoc, actor: str) -> bool:
        """Keeps it in the place of what had the name before; says whether it is new.

        Raises ConsoleError: 409 for the name of one that is shipped, 422 for a document that makes no job.
        """
        text, by = self._checked(name, document), _actor(actor)
        with storing():
            return self._rows.put(name, text, _summary(document), by)

    def put_over(self, name: str, document: Profile | JobDoc, actor: str, *, updated_at: float | None) -> None:
        """Keeps it in the place of the one that was saved at that time, which somebody has seen and would replace;
        None: they saw that the name was free.

        Raises ConsoleError as `put` does, and 409 where it is no longer so.
        """
        text, by = self._checked(name, document), _actor(actor)
        with storing():
            if self._rows.put_over(name, text, _summary(document), by, updated_at=updated_at):
                return
            now = self._rows.get(name)
        if now is None:
            raise ConsoleError(409, "gone", f"name: {name!r} was deleted meanwhile; save it again to keep this one")
        raise ConsoleError(409, "taken", f"name: {name!r} is taken: {now[0]['saved_by']} has saved one")

    def _checked(self, name: str, document: Profile | JobDoc) -> str:
        """The document's text."""
        if not re.fullmatch(NAME, name):
            expected = "1 to 80 letters, digits, _ . + or -, a letter or digit first"
            raise ConsoleError(422, "invalid", f"name: got {name[:100]!r}, expected {expected}")
        if name in shipped():
            raise ConsoleError(409, "shipped", f"profile: {name!r} comes with the planner; choose another name")
        try:
            job_of(document)
        except PlannerError as error:
            raise ConsoleError(422, "invalid", str(error)) from None
        text = document.model_dump_json()
        if len(text) > MAX_DOCUMENT:
            detail = f"profile: got a document of {len(text):,} bytes, expected at most {MAX_DOCUMENT:,}"
            raise ConsoleError(422, "invalid", detail)
        with storing():
            known = [row["name"] for row in self._rows.all()]
        if name not in known and len(known) >= MOST:
            raise ConsoleError(409, "too_many", f"profile: {MOST:,} are kept already; delete one that is of no use")
        return text

    def delete(self, name: str) -> None:
        """Jobs and plans that were made with it keep what they have of it. Raises ConsoleError (404, 409)."""
        if name in shipped():
            raise ConsoleError(409, "shipped", f"profile: {name!r} comes with the planner, and stays")
        with storing():
            gone = self._rows.delete(name)
        if not gone:
            raise unknown_profile(name)

    def job(
        self, name: str, pipelines: int | None = None, stages: int | None = None, micro_batches: int | None = None
    ) -> Job:
        """The job of that profile on a grid; sizes that are None are as the profile has them.

        Raises ConsoleError (404; 422 where it has no such job).
        """
        document = self.get(name)[1]
        try:
            return job_of(document, pipelines, stages, micro_batches)
        except PlannerError as error:
            why = str(error).removeprefix("--")
            raise ConsoleError(422, "invalid", f"profile {name!r}: {why}") from None


def _actor(name: str) -> str:
    return name.strip()[:80] or "unknown"


def unknown_profile(name: str) -> ConsoleError:
    return ConsoleError(404, "unknown_profile", f"profile: got {name!r}, expected the name of one; GET .../profiles")


def job_of(
    document: Profile | JobDoc,
    pipelines: int | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
) -> Job:
    """Sizes that are None are the document's own. Raises PlannerError where it has no job of that size."""
    own = document.job if isinstance(document, Profile) else document
    pipelines, micro_batches = pipelines or own.pipelines, micro_batches or own.micro_batches
    stages = own.stages if stages is None else stages
    if isinstance(document, Profile):
        return document.job_for(pipelines, stages, micro_batches)
    if document.layers:
        cut = document if stages == own.stages else of_layers(document, stages)
        return on_grid(cut, pipelines, micro_batches).job()
    if stages != len(document.profiles):
        raise InputError("stages", stages, f"{len(document.profiles)}, as the profile has them")
    return on_grid(document, pipelines, micro_batches).job()


def of_layers(document: JobDoc, stages: int, **changes: Any) -> JobDoc:
    """The same layers, cut as evenly as they can be, with what follows from that left out."""
    derived = {"profiles": (), "transfers": (), "backward_transfers": ()}
    capacity = document.capacity_bytes if isinstance(document.capacity_bytes, int) else ()
    inside = {w: x for w, x in document.speeds.items() if Worker.parse(w).stage < stages}
    new = {"stages": stages, "partition": (), "capacity_bytes": capacity, "speeds": inside}
    return document.model_copy(update=derived | new | changes)


def on_grid(document: JobDoc, pipelines: int, micro_batches: int) -> JobDoc:
    """Reductions of fewer peers and speeds of fewer workers are among those of more."""

    def fewer(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(item.model_copy(update={"reductions": item.reductions[:pipelines]}) for item in items)

    changes: dict[str, Any] = {
        "pipelines": pipelines,
        "micro_batches": micro_batches,
        "profiles": () if document.layers else fewer(document.profiles),
        "transfers": () if document.layers else document.transfers,
        "backward_transfers": () if document.layers else document.backward_transfers,
        "layers": fewer(document.layers),
        "speeds": {w: x for w, x in document.speeds.items() if Worker.parse(w).pipeline < pipelines},
    }
    return document.model_copy(update=changes)


def _read(text: str) -> Profile | JobDoc:
    """What `put` has stored."""
    try:
        if text.startswith('{"profile_version"'):
            return read_model(Profile, text)
        return read_model(JobDoc, text)
    except ValidationError as error:
        raise ConsoleError(422, "invalid", f"the stored profile can't be read: {first_problem(error)}") from None


def _summary(document: Profile | JobDoc) -> dict[str, Any]:
    if isinstance(document, Profile):
        layered = document.cut == "layers"
        return {
            "kind": "measured",
            "about": document.about or document.model,
            "stages": None if layered else len(document.parts),
            "layers": document.layers if layered else None,
            "time_unit": "ms",
        }
    about = f"job of {document.pipelines} x {document.stages} x {document.micro_batches}"
    layers = len(document.layers) or None
    stages = None if layers else document.stages
    return {"kind": "job", "about": about, "stages": stages, "layers": layers, "time_unit": document.time_unit}


@cache
def _shipped_document(name: str) -> Profile:
    return load_profile(name)


@cache
def _shipped_line(name: str) -> ProfileInfo:
    return ProfileInfo(name=name, source="shipped", **_summary(_shipped_document(name)))
