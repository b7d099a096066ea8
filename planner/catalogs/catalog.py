"""Plans made ahead: one per failure pattern, so that recovery needs only a look-up; in memory and on disk.

Pipelines are interchangeable, so a plan for a pattern serves every failure set that differs from
it only in which pipeline is called which: `Catalog.find` renames the pipelines of the stored plan.

On disk a plan is found without reading any other plan (`StoredCatalog`):

    DIR/<fingerprint>/catalog.json       the question that the plans answer (`CatalogInfo`)
    DIR/<fingerprint>/<name>.plan        one plan each (planner.plans.packed)

Files appear whole or not at all. A plan's name begins with its number of failures; the rest is a hash of the failed
workers, so that the plan of a failure set is found without a search.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field, ValidationError

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import canonical_pattern, failures_per_stage, inverse, parse_workers, patterns
from openrecycle.planner.jobs.job import Job, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.plans.packed import (
    CatalogQuestion,
    Effort,
    Header,
    RequestedPlan,
    decode_header,
    merit,
    name_prefix,
    pack,
    packed,
    plan_name,
    unpack,
)
from openrecycle.planner.plans.plan import INTEGER, Plan, PlanError, first_problem, job_doc, read_model, read_whole
from openrecycle.planner.solvers.portfolio import make_plan

# -- plans made ahead ---------------------------------------------------------------------------

# At most so many patterns per failure count are planned ahead; for others the list scheduler plans at once.
MAX_PATTERNS = 10_000


KEPT_OPS = 200_000
"""Renamed plans are kept up to so many ops: about the plans for each single failure of 64 workers."""


class Catalog:
    """Plans of one job, technique and memory limit, by failure pattern."""

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit) -> None:
        self.job = job
        self.technique = technique
        self.memory = memory
        # Plans as they came, with the place of each of their pipelines in the pattern: renaming a plan of 2,048
        # workers takes seconds, and most plans are found for the very failures that they were made for.
        self._plans: dict[frozenset[Worker], tuple[Plan, tuple[int, ...]]] = {}
        self._renamed: dict[frozenset[Worker], tuple[Plan, Plan]] = {}
        """The plans found last, by the failures asked for: each as it is stored, and renamed."""
        self._elsewhere: dict[tuple[int, ...], Catalog] = {job.partition: self}

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The stored plans, each for its pattern, in the order in which their patterns were first added."""
        held = list(self._plans.values())  # at once: plans come in from other threads
        return tuple(plan.renamed(places) for plan, places in held)

    def patterns(self, tolerance: int) -> list[list[frozenset[Worker]]]:
        """Returns for each failure count 0..tolerance the canonical failure sets that leave every stage a
        living peer, at most MAX_PATTERNS per count. Raises InputError for a negative tolerance.
        """
        if tolerance < 0:
            raise InputError("tolerance", tolerance, "a number of failures of at least 0")
        if not self.technique.reroutes:
            tolerance = 0
        return [list(islice(patterns(self.job, count), MAX_PATTERNS)) for count in range(tolerance + 1)]

    def problem(self, failed: Iterable[Worker]) -> Problem:
        """Makes the Problem. Raises InputError or InfeasibleError when `failed` can't be planned for."""
        return Problem(self.job, frozenset(failed), self.technique, self.memory)

    def add(self, plan: Plan) -> None:
        """Keeps `plan` for its pattern, unless one as short and with as high a bound is kept already. A plan with
        another partition goes to the catalog of that partition (`at`).

        Raises InputError for a plan of another job, technique or memory limit.
        """
        for field, value, expected in (
            ("plan.job", plan.job, job_doc(self.job)),
            ("plan.technique", plan.technique, self.technique),
            ("plan.memory", plan.memory, self.memory.text),
        ):
            if value != expected:
                raise InputError(field, str(value), f"that of the catalog, {expected}")
        if plan.partition and plan.partition != self.job.partition:
            self.at(plan.partition).add(plan)
            return
        pattern, places = canonical_pattern(parse_workers(plan.failed), self.job)
        kept = self._plans.get(pattern)
        if kept is None or merit(plan.metrics) > merit(kept[0].metrics):
            self._plans[pattern] = plan, tuple(places)

    def find(self, failed: Iterable[Worker]) -> Plan | None:
        """Returns the stored plan with its pipelines renamed to fit exactly `failed`; None if none is stored."""
        failed = frozenset(failed)
        pattern, wanted = canonical_pattern(failed, self.job)
        found = self._plans.get(pattern)
        if found is None:
            return None
        plan, places = found
        before = self._renamed.get(failed)
        if before is not None and before[0] is plan:
            return before[1]
        names = inverse(wanted)
        renamed = plan.renamed([names[place] for place in places])
        if renamed is not plan:
            if before is not None:
                self._renamed.pop(failed, None)
            # Another thread may have renamed it meanwhile, and packed it: then there is one for both.
            renamed = self._renamed.setdefault(failed, (plan, renamed))[1]
            for other in list(self._renamed)[: -max(1, KEPT_OPS // max(1, plan.op_count))]:
                self._renamed.pop(other, None)
        return renamed

    def make_ready(self, failed: Collection[Worker]) -> None:
        """Renames and packs the stored plans for one failure more than `failed`, as far as they can be kept. When such
        a failure happens, its plan is found and sent some milliseconds sooner. Can be called from any thread."""
        room = KEPT_OPS
        for worker in self.job.workers():
            stored = self._plans.get(canonical_pattern([*failed, worker], self.job)[0])
            if worker in failed or stored is None:
                continue
            if (room := room - stored[0].op_count) < 0:
                return
            if (plan := self.find([*failed, worker])) is not None:
                packed(plan)

    def at(self, partition: tuple[int, ...]) -> Catalog:
        """Returns the catalog of the same job with this partition; (): this one. Raises InputError."""
        if not partition or not self.job.layers:
            return self
        if partition not in self._elsewhere:
            other = Catalog(self.job.with_partition(partition), self.technique, self.memory)
            other._elsewhere = self._elsewhere
            self._elsewhere[partition] = other
        return self._elsewhere[partition]

    def has(self, failed: Iterable[Worker]) -> bool:
        """Is a plan stored for such failures?"""
        return canonical_pattern(failed, self.job)[0] in self._plans

    def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
        """Returns a plan for `failed` at once, and in words where it comes from.

        It is looked up or, if it is not stored, made by the list scheduler. Raises InfeasibleError when a stage has
        no living peer, InputError for a worker that is not of the grid.
        """
        problem = self.problem(failed)
        count = len(problem.failed)
        what = f"{count} failed worker{'' if count == 1 else 's'}" if count else "the full grid"
        plan = self.find(problem.failed)
        if plan is not None:
            return plan, f"from the catalog: planned ahead for {what} ({plan.solver.name}, {_gap(plan)})"
        plan = make_plan(problem, solver="list", look_ahead=False)
        return plan, f"no plan was made ahead for {what}: the list scheduler made one now ({_gap(plan)})"

    def packed(self) -> dict[str, bytes]:
        """Returns the stored plans by name, packed as in a catalog's folder."""
        return {
            plan_name(frozenset(parse_workers(plan.failed))): pack(plan, Effort(solver=plan.solver.name.split(" ")[0]))
            for plan in self.plans
        }


def _gap(plan: Plan) -> str:
    if plan.solver.status == "optimal":
        return "proven optimal"
    return f"at most {percent(plan.metrics.gap)} above the best"


# -- catalogs on disk, and the search for one plan ------------------------------------------------

INFO = "catalog.json"
SUFFIX = ".plan"
# Writing a file takes far less time, so an older unfinished file is left from a run that was killed.
KILLED_SECONDS = 3600.0
_NAME = re.compile(r"[0-9]{6,}-[0-9a-f]{24}")  # as `plan_name` makes it


class CatalogInfo(RequestedPlan):
    """The question that all plans of a catalog answer, and the planner that answered it."""

    format: Annotated[Literal[1], INTEGER] = 1
    planner_version: str
    over: Annotated[Over, Field(exclude_if=lambda value: value == "schedules")] = "schedules"

    @classmethod
    def of(cls, question: CatalogQuestion) -> CatalogInfo:
        return cls(
            planner_version=PLANNER_VERSION,
            job=job_doc(question.job),
            technique=question.technique,
            memory=question.memory.text,
            over=question.over,
        )

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = INFO) -> CatalogInfo:
        """Raises PlanError naming the first field that is wrong."""
        try:
            return read_model(cls, text)
        except ValidationError as error:
            raise PlanError(f"{source} does not describe a catalog: {first_problem(error)}") from None

    @property
    def question(self) -> CatalogQuestion:
        return replace(super().question, over=self.over)

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class PlanStore(Protocol):
    """A place where stored plans are: a folder, or a database."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> bytes | None: ...


def headers_of(store: PlanStore) -> dict[str, Header]:
    """Return the headers by name. Damaged plans are left out, as if they were not there."""
    out = {}
    for name in store.names():
        with suppress(PlanError):
            if (blob := store.get(name)) is not None:
                out[name] = decode_header(blob, source=name)
    return out


class FolderBlobs:
    """The plans of one catalog's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        found = (p.name.removesuffix(SUFFIX) for p in self.path.glob(f"*{SUFFIX}"))
        return sorted(filter(_NAME.fullmatch, found))  # a person may keep other files there

    def get(self, name: str) -> bytes | None:
        try:
            return (self.path / f"{name}{SUFFIX}").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PlanError(f"{self.path / name}{SUFFIX} can't be read: {error.strerror or error}") from None

    def put(self, name: str, blob: bytes) -> None:
        write_whole(self.path / f"{name}{SUFFIX}", blob)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with _writable(self.path):
            handle = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


class MappedBlobs:
    """Plans that are in memory, such as those read from a database."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self._blobs = dict(blobs)

    def names(self) -> list[str]:
        return sorted(self._blobs)

    def get(self, name: str) -> bytes | None:
        return self._blobs.get(name)

    def put(self, name: str, blob: bytes) -> None:
        self._blobs[name] = blob

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


class Fitting(NamedTuple):
    """A stored plan that fits some failures. exact: it is for these very failures, up to the names of pipelines;
    otherwise for as many on each stage. reason: the same in words."""

    name: str
    exact: bool

    @property
    def reason(self) -> str:
        return "planned ahead for " + ("these failures" if self.exact else "as many failures on each stage")


@dataclass(frozen=True)
class Found:
    """A plan for the failures asked for, and in words where it comes from."""

    plan: Plan
    reason: str


class StoredCatalog:
    """Reads a catalog. Headers are cached, plans are not. headers: those that have been read already."""

    def __init__(self, info: CatalogInfo, blobs: PlanStore, *, headers: Mapping[str, Header] | None = None) -> None:
        self.info = info
        self.blobs = blobs
        self._headers: dict[str, Header] = dict(headers or {})

    @cached_property
    def question(self) -> CatalogQuestion:
        return self.info.question

    def __len__(self) -> int:
        return len(self.blobs.names())

    def header(self, name: str) -> Header:
        """Returns a plan's header. Raises PlanError when the plan is missing or damaged."""
        if name not in self._headers:
            self._headers[name] = decode_header(self._blob(name), source=name)
        return self._headers[name]

    def headers(self) -> dict[str, Header]:
        """Reads all headers anew, by name. Damaged plans are left out, as if they were not there."""
        return headers_of(self.blobs)

    def plan(self, name: str) -> Plan:
        """Returns one stored plan as it was put in. Raises PlanError."""
        return unpack(self._blob(name), self.question, source=name)

    def _blob(self, name: str) -> bytes:
        blob = self.blobs.get(name)
        if blob is None:
            raise PlanError(f"the catalog has no plan {name}")
        return blob

    def fitting(self, failed: Iterable[Worker]) -> Fitting | None:
        """Returns the name of the plan that `find` would use, and why it fits, without reading the plan: that of the
        same failures up to the names of pipelines or, without it, one with as many failures on each stage. Raises
        InputError for a worker that is not of the grid."""
        job = self.question.job
        dead = frozenset(job.check_worker(w, field="failed") for w in failed)
        pattern, permutation = canonical_pattern(dead, job)
        own = plan_name(pattern)
        if own in self.blobs.names() and self._reads(own) and self._is_of(own, dead, inverse(permutation)):
            return Fitting(own, exact=True)
        same = [] if job.speeds else self._with_same_counts(dead)
        return Fitting(same[0], exact=False) if same else None

    def find(self, failed: Iterable[Worker]) -> Found | None:
        """Returns the plan of `fitting`, renamed to fit exactly `failed`; None if no stored plan fits. Raises
        InputError."""
        dead = frozenset(failed)
        if (fitting := self.fitting(dead)) is None:
            return None
        if not fitting.exact:
            return Found(self._with_counts(fitting.name, dead), fitting.reason)
        names = inverse(canonical_pattern(dead, self.question.job)[1])
        plan = unpack(self._blob(fitting.name), self.question, source=fitting.name, hashed=False)
        return Found(plan.renamed(names), fitting.reason)

    def _is_of(self, name: str, dead: frozenset[Worker], names: Sequence[int]) -> bool:
        """Is it a plan for the pattern of `dead`?"""
        return frozenset(Worker(names[w.pipeline], w.stage) for w in self.header(name).workers) == dead

    def _for_as_many(self, failures: int) -> list[str]:
        """Returns the plans for so many failures. Damaged plans are left out, as if they were not there."""
        prefix = name_prefix(failures)
        return [name for name in self.blobs.names() if name.startswith(prefix) and self._reads(name)]

    def _reads(self, name: str) -> bool:
        try:
            self.header(name)
        except PlanError:
            return False
        return True

    def _with_same_counts(self, dead: frozenset[Worker]) -> list[str]:
        """Returns the plans with as many failures on each stage as `dead`, the shortest first."""
        counts = failures_per_stage(dead, self.question.job)
        fitting = [n for n in self._for_as_many(len(dead)) if self.header(n).counts == counts]
        return sorted(fitting, key=lambda n: (self.header(n).metrics.period, n))

    def _with_counts(self, name: str, dead: frozenset[Worker]) -> Plan:
        """Returns the plan with its workers renamed on each stage, so that exactly `dead` are left out."""
        job = self.question.job
        plan = unpack(self._blob(name), self.question, source=name, hashed=False)
        replaced = parse_workers(plan.failed)
        # Pipelines are matched by their number of failures, the most first, so that few workers swap parts.
        to_pattern = canonical_pattern(replaced, job)[1]
        from_pattern = inverse(canonical_pattern(dead, job)[1])
        names = [from_pattern[p] for p in to_pattern]
        planned = {Worker(names[w.pipeline], w.stage) for w in replaced}
        return plan.renamed(names, [_swap(job, stage, planned, dead) for stage in range(job.stages)])


def create_folder(root: Path, question: CatalogQuestion) -> tuple[StoredCatalog, FolderBlobs]:
    """Return the catalog of `question` under `root`; create it if it is not there. Raises InputError, PlanError."""
    info = CatalogInfo.of(question)
    path = root / info.fingerprint
    with _writable(root):
        path.mkdir(parents=True, exist_ok=True)
        for part in path.glob("*.part"):
            with suppress(FileNotFoundError):  # another process has just completed it
                if part.stat().st_mtime < time.time() - KILLED_SECONDS:
                    part.unlink()
    if not (path / INFO).exists():
        write_whole(path / INFO, (info.model_dump_json(indent=1) + "\n").encode())
    blobs = FolderBlobs(path)
    return StoredCatalog(info, blobs), blobs


def folder_files(info: CatalogInfo, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files of a catalog's folder by their path below the folder of all catalogs. blobs: packed plans."""
    files = {INFO: (info.model_dump_json(indent=1) + "\n").encode()}
    files |= {f"{name}{SUFFIX}": blobs[name] for name in sorted(blobs)}
    return {f"{info.fingerprint}/{name}": data for name, data in files.items()}


def open_folder(path: Path) -> StoredCatalog:
    """Return a catalog by its own folder, whichever planner version made it. Raises PlanError when there is none."""
    try:
        text = read_whole(path / INFO)
    except OSError as error:
        raise PlanError(f"{path / INFO} can't be read: {error.strerror or error}") from None
    info = CatalogInfo.from_json(text, source=str(path / INFO))
    info.question  # noqa: B018 -- raises for a job that is not valid
    return StoredCatalog(info, FolderBlobs(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: neither a reader nor the next run sees half a file. Raises InputError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with _writable(path.parent):
        try:
            part.write_bytes(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError("--out", str(path), f"a folder that can be written ({error.strerror or error})") from None


def _swap(job: Job, stage: int, planned: set[Worker], dead: frozenset[Worker]) -> list[int]:
    """By pipeline: the pipeline whose worker plays its part on `stage` when `dead` fail instead of `planned`."""
    out = list(range(job.pipelines))
    here = {w.pipeline for w in planned if w.stage == stage}
    gone = {w.pipeline for w in dead if w.stage == stage}
    for idle, missing in zip(sorted(here - gone), sorted(gone - here), strict=True):
        out[missing], out[idle] = idle, missing
    return out


# To be raised when the same question may get another plan, or when stored catalogs change their format.
PLANNER_VERSION = "3"
