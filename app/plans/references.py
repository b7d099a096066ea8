"""What a link names a plan by, and what stands behind the name.

job:<job>:<fingerprint>       a plan of a job; `in-force` for the one it runs now
saved:<fingerprint>           a plan of the library
measured:<job>[:<iteration>]  an iteration of the job as it ran; the newest one that was measured
catalog:<catalog>:<plan>      a plan made ahead, by its catalog's fingerprint and its name there
made:<technique>:<memory>:<grid>[:<failed>]
                              one made on the spot; grid: a job's id, or 3x4x6 (slots of one tick);
                              failed: W1_2+W0_0
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import MAX_OPS, Job, MemoryLimit, Technique, Worker

IN_FORCE = "in-force"
EXPECTED = (
    "job:<job>:<fingerprint>, saved:<fingerprint>, measured:<job>[:<iteration>], catalog:<catalog>:<plan> or "
    "made:<technique>:<memory>:<job or 3x4x6>[:<W1_2>]"
)
_WORD = re.compile(r"[0-9A-Za-z_-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
_GRID = re.compile(r"([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,5})")


@dataclass(frozen=True)
class OfJob:
    """fingerprint: IN_FORCE for the plan that the job runs now, whichever that is."""

    job_id: str
    fingerprint: str = IN_FORCE

    def __str__(self) -> str:
        return f"job:{self.job_id}:{self.fingerprint}"


@dataclass(frozen=True)
class Saved:
    fingerprint: str

    def __str__(self) -> str:
        return f"saved:{self.fingerprint}"


@dataclass(frozen=True)
class MeasuredReference:
    """iteration: None for the newest one, whichever that is."""

    job_id: str
    iteration: int | None = None

    def __str__(self) -> str:
        return f"measured:{self.job_id}" + ("" if self.iteration is None else f":{self.iteration}")


@dataclass(frozen=True)
class OfCatalog:
    """fingerprint: the catalog's. name: the plan's in it (planner.catalogs.catalog_store.plan_name)."""

    fingerprint: str
    name: str

    def __str__(self) -> str:
        return f"catalog:{self.fingerprint}:{self.name}"


@dataclass(frozen=True)
class Made:
    """A plan by technique. grid: a job's id, or `3x4x6` (pipelines, stages, micro-batches)."""

    technique: Technique
    memory: str
    grid: str
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"made:{self.technique}:{self.memory}:{self.grid}"
        return text + (":" + "+".join(self.failed) if self.failed else "")

    @property
    def of_slots(self) -> Job | None:
        """The job of a grid given by its sizes; None for that of a job. Raises InputError."""
        found = _GRID.fullmatch(self.grid)
        if found is None:
            return None
        pipelines, stages, micro_batches = map(int, found.groups())
        if 4 * pipelines * stages * micro_batches > MAX_OPS:
            raise InputError("grid", self.grid, f"at most {MAX_OPS:,} ops")
        return Job.uniform(pipelines, stages, micro_batches)


Reference = OfJob | Saved | MeasuredReference | OfCatalog | Made


def job_of(reference: Reference) -> str | None:
    """The id of the job whose plan it is, or for whose grid it is made; None: of no job."""
    match reference:
        case OfJob(job_id) | MeasuredReference(job_id):
            return job_id
        case Made():
            return None if reference.of_slots else reference.grid
    return None


def parse_reference(text: str, *, field: str = "plan") -> Reference:
    """Raises InputError unless `text` is a reference; whether anything stands behind it is not looked at."""
    kind, _, rest = text.strip().partition(":")
    parts = rest.split(":")
    if kind == "made" and 3 <= len(parts) <= 4:
        memory = MemoryLimit.parse(parts[1], field=field).text
        failed = [Worker.parse(name, field=field) for name in parts[3].split("+")] if len(parts) == 4 else []
        if _WORD.fullmatch(parts[2]):
            names = tuple(map(str, sorted(set(failed))))
            made = Made(Technique.of(parts[0], field=field), memory, parts[2], names)
            _ = made.of_slots  # refuses absurd sizes
            return made
    elif all(map(_WORD.fullmatch, parts)):
        match kind, parts:
            case "job", [job_id, fingerprint]:
                return OfJob(job_id, fingerprint)
            case "saved", [fingerprint]:
                return Saved(fingerprint)
            case "measured", [job_id]:
                return MeasuredReference(job_id)
            case "measured", [job_id, iteration] if _NUMBER.fullmatch(iteration):
                return MeasuredReference(job_id, int(iteration))
            case "catalog", [fingerprint, name]:
                return OfCatalog(fingerprint, name)
    raise InputError(field, text, EXPECTED)
