"""What stands behind a reference: the plan, and what people call it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from openrecycle.app.console.measured import MeasuredIteration, measured_iteration
from openrecycle.app.console.service import Console
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.exporting import Export
from openrecycle.app.plans.making import TIME_LIMIT, PlanQuestion
from openrecycle.app.plans.references import IN_FORCE, Made, MeasuredReference, OfCatalog, OfJob, Reference, Saved
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.workers.states import RoleState
from openrecycle.db.store import Record
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.plan import Plan, job_doc

TECHNIQUES = {
    Technique.FAULT_FREE: "Fault-free 1F1B",
    Technique.ADAPTIVE: "Adaptive pipelining",
    Technique.DECOUPLED: "Adaptive + decoupled backward",
    Technique.STAGGERED: "Adaptive + decoupled + staggered",
}


NOT_KEPT = "not_kept"


@dataclass(frozen=True)
class Source:
    """name: the plan's, for people. job_id: of the job that it belongs to, if it does.

    measured: the iteration that `plan` was read off, where it is one that ran. out: of a plan that its job runs now,
    why each worker that it goes without is out; {}: nobody knows.
    """

    reference: Reference
    name: str
    plan: Plan
    job_id: str | None = None
    measured: MeasuredIteration | None = None
    out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingPlan:
    """What is not there yet. words: what it waits for."""

    reference: Reference
    name: str
    words: str


def find(console: Console, reference: Reference) -> Source | PendingPlan:
    """Raises ConsoleError when nothing stands behind it, or no such plan can be made."""
    match reference:
        case OfJob():
            return _of_job(console, reference)
        case Made():
            return _made(console, reference)
        case Saved(fingerprint):
            return Source(reference, _saved_name(console, fingerprint), console.plans.library.saved_plan(fingerprint))
        case OfCatalog(fingerprint, plan_name):
            plan = console.catalogs.plan(fingerprint, plan_name)
            return Source(reference, f"Catalog {fingerprint[:8]}: {without(plan.failed)}", plan)
        case MeasuredReference():
            return _measured(console, reference)


def export_of(console: Console, source: Source) -> Export:
    """What there is to export of it: with the spec and the plans of its job, where it has one."""
    if source.job_id is None:
        return Export(source.plan, source.name)
    job = console.job(source.job_id)
    return Export(source.plan, source.name, job.spec, partial(job_catalog, console, job), job.job_id)


def job_catalog(console: Console, job: LiveJob) -> Catalog:
    """The job's plans. Those of a job that ended before the console started are in the database alone."""
    if len(job.catalog):
        return job.catalog
    catalog = Catalog(job.catalog.job, job.catalog.technique, job.catalog.memory)
    for record in console.job_plans(job.job_id):
        with suppress(InputError):  # of another job's profile, before it was measured anew
            catalog.add(console.plan(record["fingerprint"]))
    return catalog


def names(console: Console, job_id: str, clock: Callable[[float], str] | None = None) -> dict[str, str]:
    """Every plan of a job by its reference: the one in force first, then fewest failures first.

    Where several are for the same workers, it is said what tells them apart. clock: POSIX seconds as the
    reader's time of day.
    """
    job = console.job(job_id)
    out = {}
    if (run := job.plan_run) is not None:
        failed = run.failed
        words = f"{run.words[0].upper()}{run.words[1:]}, generation {run.generation}"
        out[str(OfJob(job_id))] = f"{words}: {without(failed, job.worker_states().why_out(failed))}"
    records = sorted(console.job_plans(job_id), key=lambda r: (len(r["failed"]), r["failed"], r["created_at"]))
    alike = Counter(tuple(record["failed"]) for record in records)
    ran = console.generations_by_plan(job_id) if any(n > 1 for n in alike.values()) else {}
    for record in records:
        name = without(record["failed"])
        if alike[tuple(record["failed"])] > 1:
            name += _apart(console, record, ran.get(record["fingerprint"], []), clock)
        out[str(OfJob(job_id, record["fingerprint"]))] = name
    return out


def _apart(console: Console, record: Record, generations: list[int], clock: Callable[[float], str] | None) -> str:
    """` · staggered · 880 ms · generations 2 and 5 · made 14:03:27`."""
    plan = console.plan(record["fingerprint"])
    words = [plan.technique.value, f"{plan.metrics.period:,.6g} {plan.job.time_unit}"]
    if plan.job.speeds:
        words.append("for other speeds")
    if generations:
        lead = "generation " if len(generations) == 1 else "generations … " if len(generations) > 3 else "generations "
        words.append(lead + ", ".join(map(str, generations[-3:])))
    else:
        words.append("not used")
    words.append(f"made {clock(record['created_at'])}" if clock else record["fingerprint"][:8])
    return "".join(f" · {word}" for word in words)


def measured_name(console: Console, job_id: str) -> dict[str, str]:
    """The job's measured iteration, unless it can't get one any more."""
    if console.job(job_id).state.over and measured_iteration(console, job_id) is None:
        return {}
    return {str(MeasuredReference(job_id)): "As it ran: the newest measured iteration"}


def saved_names(console: Console) -> dict[str, str]:
    """Every plan of the library by its reference, newest first."""
    return {str(Saved(row["fingerprint"])): f"Saved: {row['name']}" for row in console.plans.library.saved()}


def techniques(job_id: str, failed: tuple[str, ...], memory: str) -> Iterator[Made]:
    """What a job could run under, one technique after another, with these workers lost."""
    for technique in Technique:
        lost = failed if technique.reroutes else ()
        yield Made(technique, "1f1b" if technique is Technique.FAULT_FREE else memory, job_id, lost)


def made_name(made: Made) -> str:
    words = TECHNIQUES[made.technique]
    return f"{words}, {without(made.failed)}, memory {made.memory}" if made.technique.reroutes else words


def without(failed: Sequence[str], why: Mapping[str, str] | None = None) -> str:
    """`fault-free`, or `without W1_2 and W0_0 (moved to W1_0)`. why: of those that are out now, where that is known;
    of a failure, nothing more is said."""
    if not failed:
        return "fault-free"
    said = {name: words for name, words in (why or {}).items() if words != RoleState.FAILED}
    shown = [f"{name} ({said[name]})" if name in said else name for name in failed[:4]]
    if len(failed) > 4:
        return f"without {', '.join(shown)} and {len(failed) - 4} more"
    return "without " + " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _of_job(console: Console, reference: OfJob) -> Source:
    job = console.job(reference.job_id)
    worker_states, run = job.worker_states(), job.plan_run
    if reference.fingerprint == IN_FORCE:
        if run is None:
            raise ConsoleError(404, "no_plan", f"job {job.spec.name!r} has no plan in force yet")
        plan = console.plan(run.fingerprint)
    else:
        plan = console.plan(reference.fingerprint)
    if run is None or run.fingerprint != plan.fingerprint:
        return Source(reference, f"{job.spec.name}: {without(plan.failed)}", plan, job.job_id)
    out = worker_states.why_out(plan.failed)
    return Source(reference, f"{job.spec.name} {run.words}: {without(plan.failed, out)}", plan, job.job_id, out=out)


def pinned(source: Source) -> Reference:
    """What stays the same: the plan that is in force now, the iteration that is the newest now."""
    match source.reference:
        case OfJob(job_id):
            return OfJob(job_id, source.plan.fingerprint)
        case MeasuredReference(job_id) if source.measured is not None:
            return MeasuredReference(job_id, source.measured.iteration)
    return source.reference


def _measured(console: Console, reference: MeasuredReference) -> Source | PendingPlan:
    job_id, iteration = reference.job_id, reference.iteration
    job = console.job(job_id)
    found = measured_iteration(console, job_id, iteration, watch=True, keep=True)
    if found is None and iteration is not None:
        raise ConsoleError(404, NOT_KEPT, f"plan: iteration {iteration} of job {job.spec.name!r} is not kept as it ran")
    if found is not None:
        name = f"{job.spec.name}, iteration {found.iteration} as it ran"
        return Source(reference, name, found.plan, job_id, found)
    if job.state.over:
        raise ConsoleError(404, "not_measured", f"no iteration of job {job.spec.name!r} was measured before it ended")
    name = f"{job.spec.name} as it runs"
    return PendingPlan(reference, name, "Waiting for all workers of the job to report one iteration op by op.")


def _saved_name(console: Console, fingerprint: str) -> str:
    found = (row["name"] for row in console.plans.library.saved() if row["fingerprint"] == fingerprint)
    return next(found, fingerprint[:12])


def _made(console: Console, made: Made) -> Source | PendingPlan:
    try:
        job = made.of_slots or console.job(made.grid).job
        answer = console.plans.making.get(PlanQuestion(job_doc(job), made.failed, made.technique, made.memory))
    except PlannerError as error:
        raise ConsoleError(422, "invalid", str(error)) from None
    job_id = None if made.of_slots else made.grid
    if not answer.done:
        seconds = time.monotonic() - answer.asked
        words = f"Planning: {made_name(made)} … {seconds:.0f} s of at most about {TIME_LIMIT:.0f} s."
        return PendingPlan(made, made_name(made), words)
    if answer.plan is None:
        raise ConsoleError(422, "no_plan", answer.why)
    return Source(made, made_name(made), answer.plan, job_id)
