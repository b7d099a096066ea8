"""References to plans, as links have them, and how each is resolved to a plan and its name for people (`PlanSources`).

job:<job>:<fingerprint>       a plan of a job; `in-force` for the one that it runs now
saved:<fingerprint>           a plan of the library
measured:<job>[:<iteration>]  an iteration of the job as it ran; without a number, the newest one that was measured
catalog:<catalog>:<plan>      a plan made ahead, by its catalog's fingerprint and its name there
made:<technique>:<memory>:<job>[:<failed>]
                              a plan of a job's grid that is made when it is asked for; failed: W1_2+W0_0
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.jobs.live_job import LiveJob, PlanRun
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.app.plans.files import Export
from openrecycle.app.plans.library import Library, PlanCache
from openrecycle.app.plans.solving import Making
from openrecycle.app.runtime.errors import ConsoleError, invalid, plain, storing, unknown_plan
from openrecycle.db.store import Record, Store
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import MemoryLimit, Technique, Worker
from openrecycle.planner.jobs.words import capital, counts
from openrecycle.planner.plans.plan import Plan, job_doc

IN_FORCE = "in-force"
EXPECTED = (
    "job:<job>:<fingerprint>, saved:<fingerprint>, measured:<job>[:<iteration>], catalog:<catalog>:<plan> or "
    "made:<technique>:<memory>:<job>[:<W1_2>]"
)
_WORD = re.compile(r"[0-9A-Za-z_-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")


@dataclass(frozen=True)
class OfJob:
    """A plan of a job. fingerprint: IN_FORCE for the plan that the job runs now, whichever that is."""

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
    """An iteration as it ran. iteration: None for the newest one, whichever that is."""

    job_id: str
    iteration: int | None = None

    def __str__(self) -> str:
        return f"measured:{self.job_id}" + ("" if self.iteration is None else f":{self.iteration}")


@dataclass(frozen=True)
class OfCatalog:
    """A plan of a catalog. fingerprint: the catalog's. name: the plan's name in it (planner.plans.packed.plan_name)."""

    fingerprint: str
    name: str

    def __str__(self) -> str:
        return f"catalog:{self.fingerprint}:{self.name}"


@dataclass(frozen=True)
class PlanToMake:
    """A plan that is made for a job's grid and a technique."""

    technique: Technique
    memory: str
    job_id: str
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"made:{self.technique}:{self.memory}:{self.job_id}"
        return text + (":" + "+".join(self.failed) if self.failed else "")


Reference = OfJob | Saved | MeasuredReference | OfCatalog | PlanToMake


def job_of(reference: Reference) -> str | None:
    """Returns the id of the job that the plan belongs to or is made for; None: of no job."""
    match reference:
        case OfJob(job_id) | MeasuredReference(job_id) | PlanToMake(job_id=job_id):
            return job_id
    return None


def parse_reference(text: str, *, field: str = "plan") -> Reference:
    """Parses a reference, without a look whether such a plan exists. Raises InputError if `text` is not one."""
    kind, _, rest = text.strip().partition(":")
    parts = rest.split(":")
    if kind == "made" and 3 <= len(parts) <= 4:
        memory = MemoryLimit.parse(parts[1], field=field).text
        failed = [Worker.parse(name, field=field) for name in parts[3].split("+")] if len(parts) == 4 else []
        if _WORD.fullmatch(parts[2]):
            names = tuple(map(str, sorted(set(failed))))
            return PlanToMake(Technique.of(parts[0], field=field), memory, parts[2], names)
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


TECHNIQUES = {
    Technique.FAULT_FREE: "Fault-free 1F1B",
    Technique.ADAPTIVE: "Adaptive pipelining",
    Technique.DECOUPLED: "Adaptive + decoupled backward",
    Technique.STAGGERED: "Adaptive + decoupled + staggered",
}


NOT_KEPT = "not_kept"


@dataclass(frozen=True)
class Source:
    """A reference with its plan. name: for people. job_id: of the job that the plan belongs to, if any.

    measured: the iteration that `plan` was made from, if it is one that ran. out: for a plan that its job runs now, the
    state in words of each worker that it goes without; {}: not known.
    """

    reference: Reference
    name: str
    plan: Plan
    job_id: str | None = None
    measured: MeasuredIteration | None = None
    out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingPlan:
    """A reference whose plan is not there yet. words: what it waits for."""

    reference: Reference
    name: str
    words: str


def techniques(job_id: str, failed: tuple[str, ...], memory: str) -> Iterator[PlanToMake]:
    """Yields a reference for each technique that a job could run with, with these workers lost."""
    for technique in Technique:
        lost = failed if technique.reroutes else ()
        yield PlanToMake(technique, "1f1b" if technique is Technique.FAULT_FREE else memory, job_id, lost)


def made_name(made: PlanToMake) -> str:
    words = TECHNIQUES[made.technique]
    return f"{words}, {without(made.failed)}, memory {made.memory}" if made.technique.reroutes else words


def without(failed: Sequence[str], why: Mapping[str, str] | None = None) -> str:
    """Returns `fault-free`, or such as `without W1_2 and W0_0 (moved to W1_0)`. why: the states of workers in words;
    `failed` is not shown."""
    if not failed:
        return "fault-free"
    said = {name: words for name, words in (why or {}).items() if words != RoleState.FAILED}
    shown = [f"{name} ({said[name]})" if name in said else name for name in failed[:4]]
    if len(failed) > 4:
        return f"without {', '.join(shown)} and {len(failed) - 4} more"
    return "without " + " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def pinned(source: Source) -> Reference:
    """Returns a reference that stays the same: to the plan that is in force now, or to the iteration that is the newest
    now."""
    match source.reference:
        case OfJob(job_id):
            return OfJob(job_id, source.plan.fingerprint)
        case MeasuredReference(job_id) if source.measured is not None:
            return MeasuredReference(job_id, source.measured.iteration)
    return source.reference


MOST = 4


class PlanSources:
    """Resolves references to plans. One per console. Its methods raise ConsoleError.

    find: a job by its id; raises ConsoleError. plans: the stored plans. measured: finds an iteration of a job as it ran
    (app.observing.measured_iterations.Measuring.iteration)."""

    def __init__(
        self,
        store: Store,
        *,
        find: Callable[[str], LiveJob],
        plans: PlanCache,
        library: Library,
        making: Making,
        catalogs: Catalogs,
        measured: Callable[..., MeasuredIteration | None],
    ) -> None:
        self._store, self._find, self._measured_iteration = store, find, measured
        self._plans, self._library, self._making, self._catalogs = plans, library, making, catalogs

    def find(self, reference: Reference) -> Source | PendingPlan:
        """Resolves a reference. Raises ConsoleError if there is no such plan, or none can be made."""
        match reference:
            case OfJob():
                return self._of_job(reference)
            case PlanToMake():
                return self._made(reference)
            case Saved(fingerprint):
                return Source(reference, self._saved_name(fingerprint), self._library.saved_plan(fingerprint))
            case OfCatalog(fingerprint, plan_name):
                plan = self._catalogs.plan(fingerprint, plan_name)
                return Source(reference, f"Catalog {fingerprint[:8]}: {without(plan.failed)}", plan)
            case MeasuredReference():
                return self._measured(reference)

    def export_of(self, source: Source) -> Export:
        """Returns what can be exported: the plan, and the spec and plans of its job, if it has one."""
        if source.job_id is None:
            return Export(source.plan, source.name)
        job = self._find(source.job_id)
        return Export(source.plan, source.name, job.spec, partial(self.job_catalog, job), job.job_id)

    def job_catalog(self, job: LiveJob) -> Catalog:
        """Returns the job's plans. They are read from the database if the job has let go of them, as when it is
        over."""
        if len(job.plans.catalog):
            return job.plans.catalog
        catalog = Catalog(job.plans.catalog.job, job.plans.catalog.technique, job.plans.catalog.memory)
        for record in self._job_plans(job.job_id):
            plan = self._read(record)
            with suppress(InputError):  # a plan for other op times, from before the profile was measured anew
                if plan is not None:
                    catalog.add(plan)
        return catalog

    def names(self, job_id: str, clock: Callable[[float], str] | None = None) -> dict[str, str]:
        """Returns the names of all plans of a job by reference: the one in force first, then fewest failures first.

        If several plans are for the same workers, their names say in what they differ. clock: formats POSIX seconds as
        the reader's time of day.
        """
        job = self._find(job_id)
        out = {}
        if (run := job.plan_run) is not None:
            failed = run.failed
            words = f"{capital(run.words)}, generation {run.generation}"
            out[str(OfJob(job_id))] = f"{words}: {without(failed, job.worker_states().why_out(failed))}"
        records = sorted(self._job_plans(job_id), key=lambda r: (len(r["failed"]), r["failed"], r["created_at"]))
        alike = Counter(tuple(record["failed"]) for record in records)
        ran = self.generations_by_plan(job_id) if any(n > 1 for n in alike.values()) else {}
        for record in records:
            name = without(record["failed"])
            if alike[tuple(record["failed"])] > 1:
                name += self._apart(record, ran.get(record["fingerprint"], []), clock)
            out[str(OfJob(job_id, record["fingerprint"]))] = name
        return out

    def measured_name(self, job_id: str) -> dict[str, str]:
        """Returns the name of the job's newest measured iteration by reference; {} if it has none and is over."""
        if self._find(job_id).state.over and self._measured_iteration(self._find(job_id)) is None:
            return {}
        return {str(MeasuredReference(job_id)): "As it ran: the newest measured iteration"}

    def saved_names(self) -> dict[str, str]:
        """Returns the names of all plans of the library by reference, newest first."""
        return {str(Saved(row["fingerprint"])): f"Saved: {row['name']}" for row in self._library.saved()}

    def candidates(self, job_id: str | None, clock: Callable[[float], str] | None = None) -> dict[str, str]:
        """Returns the names of all plans that can be compared, by reference: the job's and the library's.
        clock: as in `names`."""
        out: dict[str, str] = {}
        if job_id is not None:
            job = self._find(job_id)
            out |= self.names(job_id, clock)
            out |= self.measured_name(job_id)
            lost = job.state.current.failed if job.state.current else ()
            out |= {str(made): f"Made now: {made_name(made)}" for made in techniques(job_id, lost, job.spec.memory)}
        return out | self.saved_names()

    def first_choice(self, job_id: str | None) -> list[Reference]:
        """Returns the plans that a page shows first: fault-free 1F1B and the plan in force; [] without such a job."""
        if job_id is None or self._find(job_id).state.current is None:
            return []
        return [PlanToMake(Technique.FAULT_FREE, "1f1b", job_id), OfJob(job_id)]

    def _of_job(self, reference: OfJob) -> Source:
        job = self._find(reference.job_id)
        worker_states, run = job.worker_states(), job.plan_run
        if reference.fingerprint == IN_FORCE:
            if run is None:
                raise ConsoleError(404, "no_plan", f"job {job.spec.name!r} has no plan in force yet")
            plan = self._plans.plan(run.fingerprint)
        else:
            self._check_plan_of(job, reference.fingerprint, run)
            plan = self._plans.plan(reference.fingerprint)
        if run is None or run.fingerprint != plan.fingerprint:
            return Source(reference, f"{job.spec.name}: {without(plan.failed)}", plan, job.job_id)
        out = worker_states.why_out(plan.failed)
        return Source(reference, f"{job.spec.name} {run.words}: {without(plan.failed, out)}", plan, job.job_id, out=out)

    def _check_plan_of(self, job: LiveJob, fingerprint: str, run: PlanRun | None) -> None:
        """Raises ConsoleError (404) for a plan that is not this job's, even if it is stored for other jobs."""
        if run is not None and run.fingerprint == fingerprint:
            return
        with storing():
            if not self._store.is_plan_of(job.job_id, plain(fingerprint)):
                raise unknown_plan(fingerprint)

    def _measured(self, reference: MeasuredReference) -> Source | PendingPlan:
        job_id, iteration = reference.job_id, reference.iteration
        job = self._find(job_id)
        found = self._measured_iteration(job, iteration, watch=True, keep=True)
        if found is None and iteration is not None:
            raise ConsoleError(
                404, NOT_KEPT, f"iteration {iteration} of job {job.spec.name!r} is not kept as it ran", field="plan"
            )
        if found is not None:
            name = f"{job.spec.name}, iteration {found.iteration} as it ran"
            return Source(reference, name, found.plan, job_id, found)
        if job.state.over:
            raise ConsoleError(
                404, "not_measured", f"no iteration of job {job.spec.name!r} was measured before it ended"
            )
        name = f"{job.spec.name} as it runs"
        return PendingPlan(reference, name, "Waiting for all workers of the job to report one iteration op by op.")

    def _saved_name(self, fingerprint: str) -> str:
        found = (row["name"] for row in self._library.saved() if row["fingerprint"] == fingerprint)
        return next(found, fingerprint[:12])

    def _made(self, made: PlanToMake) -> Source | PendingPlan:
        try:
            job = self._find(made.job_id).plans.job
            answer = self._making.get(job_doc(job), made.failed, made.technique, made.memory)
        except PlannerError as error:
            raise invalid(error) from None
        if not answer.done:
            # How long it will take is not known, since others may be made before it.
            words = f"Planning: {made_name(made)} … {time.monotonic() - answer.asked:.0f} s."
            return PendingPlan(made, made_name(made), words)
        if answer.plan is None:
            raise ConsoleError(422, "no_plan", answer.why)
        return Source(made, made_name(made), answer.plan, made.job_id)

    def _apart(self, record: Record, generations: list[int], clock: Callable[[float], str] | None) -> str:
        """Says in what a plan differs, such as ` · staggered · 880 ms · generations 2, 5 · made 14:03:27`."""
        plan = self._read(record)
        if plan is None:
            return f" · {record['fingerprint'][:8]} · damaged"
        words = [plan.technique.value, f"{plan.metrics.period:,.6g} {plan.job.time_unit}"]
        if plan.partition != plan.job.partition:
            words.append(f"layers per stage {counts(plan.partition)}")
        if plan.job.speeds:
            words.append("for other speeds")
        if generations:
            lead = (
                "generation " if len(generations) == 1 else "generations … " if len(generations) > 3 else "generations "
            )
            words.append(lead + ", ".join(map(str, generations[-3:])))
        else:
            words.append("not used")
        words.append(f"made {clock(record['created_at'])}" if clock else record["fingerprint"][:8])
        return "".join(f" · {word}" for word in words)

    def _read(self, record: Record) -> Plan | None:
        """Reads one of a job's plans; None: it is damaged, which must not hide the others."""
        with storing():
            return self._plans.get(record["fingerprint"])

    def _job_plans(self, job_id: str) -> list[Record]:
        with storing():
            return self._store.job_plans(job_id)

    def generations_by_plan(self, job_id: str) -> dict[str, list[int]]:
        """Returns, by a plan's fingerprint, the numbers of the generations in which it was run."""
        with storing():
            rows = self._store.all_generations(job_id)
        found: dict[str, list[int]] = {}
        for row in rows:
            for fingerprint in filter(None, (row["plan_fingerprint"], row["interim_plan"])):
                found.setdefault(fingerprint, []).append(row["generation"])
        return found
