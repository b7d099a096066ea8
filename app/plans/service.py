"""The plans of running jobs, and `PlansService`, which holds all that the console does with plans.

JobPlanner makes plans ahead of failures, and at once when one is missing. Drifting has a new plan made when workers
turn out slower than they were planned for: heartbeats bring every worker's mean op times, and planner.layers.drift
finds from them which workers are slow, and their speeds. Later failures are planned with these speeds, too. Replanning
plans a job again for the workers that are out now, when an operator asks for it. `use_plan` puts a user's own plan in
force.

A new plan comes into force only if it is worth a new generation (`compare_plans`); the event feed says what was decided
and why.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.generations import out
from openrecycle.agent.coordination.membership import Note, UsePlan
from openrecycle.agent.messages.protocol import OpKind
from openrecycle.app.catalogs.contents import MOST, CatalogRequest, PlansNeeded, needed
from openrecycle.app.catalogs.service import KEPT_OPS, Catalogs, info_of
from openrecycle.app.jobs.job_plans import LARGE_OPS
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.files import Uploads
from openrecycle.app.plans.library import Library, PlanCache
from openrecycle.app.plans.profiles import NamedProfiles
from openrecycle.app.plans.simulations import Simulations
from openrecycle.app.plans.solving import (
    Making,
    PlanAsked,
    Point,
    Solve,
    Solves,
    plan_maker,
)
from openrecycle.app.runtime.errors import ConsoleError, invalid, named, passing, storing, unavailable
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.runtime.task_queue import AHEAD, URGENT, Done
from openrecycle.db.access import audit_row
from openrecycle.db.store import Store
from openrecycle.planner.catalogs.catalog_build import LISTED
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import canonical_pattern
from openrecycle.planner.jobs.job import SECONDS, Job, MemoryLimit, Worker
from openrecycle.planner.jobs.words import counts, grid, names, percent
from openrecycle.planner.layers.drift import Drift, DriftLimits, DriftState, Ratios, assumed, drifted, forget, observe
from openrecycle.planner.plans.packed import CatalogQuestion, plan_name
from openrecycle.planner.plans.plan import Plan, job_doc
from openrecycle.planner.plans.schedule import steady_period

log = structlog.get_logger()

# Plans of more ops than this are not simulated with other op times.
MOST_OPS = 20_000
# Periods that differ by less than this share count as equal.
ROUNDING = 1e-9


@dataclass(frozen=True)
class PlanComparison:
    """Whether another plan should replace the one in force. reason: in words, with the numbers."""

    better: bool
    reason: str


def gain(now: Plan, other: Plan, job: Job) -> float:
    """Returns how much longer the order of ops in `now` takes than that in `other`, with the op times of `job`: 0.05
    means 5 %.

    Both plans are for the same workers. Raises InputError for an order that can't run.
    """
    first, second = (job.with_partition(p.partition) if p.partition else job for p in (now, other))
    return steady_period(now.schedule(), first) / steady_period(other.schedule(), second) - 1


def compare_plans(now: Plan, other: Plan, job: Job, iterations: int) -> PlanComparison:
    """Decides whether plan `other` should replace `now`, with so many iterations left.

    It should if it saves more than the one iteration that a new generation costs. Both are for the same workers of
    `job`.
    """
    asked = job_doc(job)
    unit = job.time_unit
    if other.fingerprint == now.fingerprint:
        return PlanComparison(False, f"the search found the same plan again{_proof(now)}")
    if now.job == asked and other.job == asked:
        gained = now.metrics.period / other.metrics.period - 1
        periods = f"{other.metrics.period:.6g} {unit} against {now.metrics.period:.6g} {unit}"
    elif other.op_count > MOST_OPS:
        return PlanComparison(True, "it is for the op times that were measured, and the one before is not")
    else:
        try:
            gained = gain(now, other, job)
        except PlannerError as error:
            return PlanComparison(False, f"the two can't be compared: {error}")
        periods = "at the op times that were measured"
    if gained <= ROUNDING:
        return PlanComparison(False, f"the new one is no shorter ({periods}){_proof(other)}")
    saved = gained / (1 + gained)
    words = f"{percent(saved, 2)} of an iteration ({periods})"
    if saved * iterations <= 1:
        left = f"{iterations} iterations" if iterations != 1 else "iteration"
        why = f"over the {left} left, that is no more than the one iteration that a change costs"
        return PlanComparison(False, f"the new one saves {words}; {why}")
    return PlanComparison(True, f"it saves {words}")


def _proof(plan: Plan) -> str:
    metrics = plan.metrics
    return (
        "; it is proven optimal" if metrics.gap <= 0 else f"; no plan can be more than {percent(metrics.gap, 2)} better"
    )


# The most ops that a job's plans made ahead may have in memory, at about 800 bytes each. If there would be more, the
# plans stay in the catalog until they are needed.
HELD_OPS = 400_000
# With more living workers than this, failures beyond the tolerance are planned only when they have happened.
NEXT_WORKERS = 512


class JobPlanner:
    """Provides the plans of all jobs: from the catalogs, or else made in one child process.

    tolerance: up to how many failures are planned for from the start. on_made: called with each plan that the child
    makes. plans_ahead: where False, plans are made only once they are needed; tests set it.
    """

    def __init__(self, tolerance: int, catalogs: Catalogs, on_made: Callable[[Plan], None] = lambda plan: None) -> None:
        self._tolerance = tolerance
        self.held_ops, self.plans_ahead = HELD_OPS, True
        self._catalogs = catalogs
        self._maker = plan_maker(on_made=on_made)
        self._seldom = Seldom()
        # One thread for all jobs: a hundred threads would keep the interpreter from the requests of agents.
        self._packing = ThreadPoolExecutor(1, "planning-ready")
        # By job id, the fingerprint of its catalog: with the names of the plans that are made ahead for the job; and if
        # it could not be filled because enough others were.
        self._filling: dict[str, tuple[str, frozenset[str]]] = {}
        self._crowded_out: dict[str, str] = {}

    def start(self) -> None:
        self._maker.start()

    def close(self) -> None:
        self._packing.shutdown(cancel_futures=True)
        self._maker.close()

    def cancel(self, job: LiveJob) -> None:
        """Ends all planning for `job`."""
        self._maker.cancel(job.job_id)
        self._stop_filling(job)
        job.plans.want_none_ahead()

    def make_ahead(self, job: LiveJob) -> None:
        """Has plans made: the fault-free one first, then one for each pattern of one failure, then of two, and so
        on."""
        if not self.plans_ahead:
            return
        self._stop_filling(job)
        found = needed(job.plans.question, self._tolerance)
        patterns = found.patterns[:MOST]  # any others are planned by the list scheduler when they happen
        job.plans.want_none_ahead()
        if job.plans.ops * len(patterns) <= self.held_ops:
            self._submit(job, patterns)
        elif _lasts(job):
            self._fill(job, found)

    def consider(self, job: LiveJob) -> None:
        """Has plans made ahead if that failed because enough catalogs were being filled, and those for the next failure
        packed; called once per tick."""
        if job.state.current is not None and not job.state.over and job.plans.begins_packing(job.state.generation):
            self._packing.submit(self._make_ready, job, job.state.generation)
        catalog = self._crowded_out.get(job.job_id)
        if catalog is not None and self._catalogs.has_room(catalog):
            self.make_ahead(job)

    def make_next(self, job: LiveJob) -> None:
        """Has a plan made for every worker that may fail next, also when that goes beyond the tolerance."""
        generation = job.state.current
        if not self.plans_ahead:
            return
        if not job.plans.ahead.wanted and not job.state.over:
            self.make_ahead(job)  # the partition has changed, so the plans made ahead are gone
        if generation is None or len(generation.failed) < self._tolerance or len(generation.living) > NEXT_WORKERS:
            return
        failed = {Worker.parse(name) for name in generation.failed}
        living = [Worker.parse(name) for name in generation.living]
        peers = Counter(worker.stage for worker in living)
        patterns = {canonical_pattern({*failed, w}, job.plans.job)[0]: None for w in living if peers[w.stage] > 1}
        missing = [pattern for pattern in patterns if pattern not in job.plans.ahead.patterns]
        if job.plans.ops * len(missing) <= self.held_ops:
            self._submit(job, missing)

    def make_now(self, job: LiveJob, failed: tuple[str, ...]) -> None:
        """Finds or makes the plan for a failure that has happened and has no plan at hand. It is looked up first; if it
        has to be made, it comes before all others."""
        asked = job.plans.job

        def done(plan: Plan | None, why: str) -> None:
            if job.plans.job is not asked:
                job.plans.give_up()  # the workers' speeds have changed meanwhile; the plan is asked for again
                return
            try:
                job.plans.plan_made(failed, plan, why)
            except ConsoleError as error:
                text = "a plan could not be put in force; it is tried again"
                self._seldom.warn(text, reason=error.detail, job=job.job_id)

        def take_fitted(origin: str, plan: Plan | None, why: str) -> None:
            if plan is not None:
                done(plan, origin)
                return
            log.warning("a stored plan is not used", job=job.job_id, reason=why)
            self.make(job, failed, done)

        def look_up() -> None:
            workers = [Worker.parse(name) for name in failed]
            found: tuple[Plan, str] | None = None
            if job.plans.catalog.has(workers):
                found = job.plans.catalog.plan_for(workers)
            elif job.plans.ops <= LARGE_OPS:
                found = self._catalogs.find(job.plans.question, workers)
            elif located := self._catalogs.located(job.plans.question, failed):
                fitted = partial(take_fitted, located.origin)
                self._maker.submit(job.job_id, located, fitted, priority=URGENT, makes=False)
                return
            if found is not None and not job.plans.is_for(found[0], failed):
                found = None
            if found is None:
                self.make(job, failed, done)
                return
            done(*found)

        def look_up_or_make() -> None:
            try:
                look_up()
            except Exception as error:  # all workers wait for the plan, stored or not
                self._seldom.failed("a stored plan could not be looked up; it is made anew", error, job=job.job_id)
                self.make(job, failed, done)

        threading.Thread(target=look_up_or_make, name="planning-look-up", daemon=True).start()

    def make(
        self, job: LiveJob, failed: Iterable[str], done: Done[Plan], *, other: Job | None = None, ahead: bool = False
    ) -> None:
        """Has a plan made, and calls `done` with it. other: the job with other speeds, if it is to be planned with
        these. ahead: nobody waits for the plan."""
        asked = _asked(job, other or job.plans.job, failed, solver="list")
        self._maker.submit(job.job_id, asked, done, priority=AHEAD if ahead else URGENT)

    def replan(self, job: LiveJob, other: Job, plan: Plan) -> None:
        """Gives `job` other speeds from now on, for which `plan` was made; the plans ahead are made anew."""
        job.plans.plan_with(job.plans.nominal if other == job.plans.nominal else other, plan)
        self.make_ahead(job)

    def take(self, job: LiveJob, names: Iterable[str]) -> None:
        """Notes that plans with these names have come into the job's catalog, and takes small ones into memory."""
        if job.job_id in self._filling:
            job.plans.filled(len(self._filling[job.job_id][1] & self._catalogs.names(job.plans.question)))
        elif job.plans.ops <= KEPT_OPS:
            stored = self._catalogs.stored_of(job.plans.question)
            for name in names:
                job.plans.file_plan(stored.plan(name))

    def _make_ready(self, job: LiveJob, generation: int) -> None:
        current = job.state.current
        if current is None or job.state.over or job.state.generation != generation:
            return  # while it waited for its turn
        try:
            job.plans.make_ready(current.failed)
        except Exception:
            log.exception("plans for the next failure could not be packed", job=job.job_id)

    def _fill(self, job: LiveJob, needed: PlansNeeded) -> None:
        """Has the job's catalog filled for up to the tolerance of failures, or fewer, so that the patterns can be
        listed."""
        tolerances = range(needed.tolerance, -1, -1)
        listed = ((t, needed.listed(t, LISTED)) for t in tolerances)
        tolerance, patterns = next((t, found) for t, found in listed if found is not None)
        question, names = job.plans.question, frozenset(map(plan_name, patterns))
        request = CatalogRequest(question, tolerance)
        entry = self._filling[job.job_id] = info_of(question).fingerprint, names
        made = 0
        try:
            made = len(names & self._catalogs.names(question))
            job.plans.filled(made, len(names))
            if made < len(names):
                self._catalogs.fill(request)
        except ConsoleError as error:
            job.plans.filled(made, made)
            if error.status == 409:
                self._crowded_out[job.job_id] = entry[0]
            log.warning("no plans ahead; they are made when they are needed", job=job.job_id, reason=error.detail)
        if job.state.over or job.deleted:  # meanwhile, in a thread that may have found nothing to stop yet
            self._filling[job.job_id] = entry
            self.cancel(job)

    def _stop_filling(self, job: LiveJob) -> None:
        self._crowded_out.pop(job.job_id, None)
        fingerprint, _ = self._filling.pop(job.job_id, ("", frozenset()))
        filling = self._catalogs.filling(fingerprint)
        if filling is not None and filling.running and all(fingerprint != f for f, _ in self._filling.values()):
            self._catalogs.cancel(fingerprint)

    def _submit(self, job: LiveJob, patterns: Sequence[frozenset[Worker]]) -> None:
        asked = job.plans.job

        def done(plan: Plan | None, why: str) -> None:
            if job.plans.job is not asked:
                return  # the workers' speeds have changed meanwhile
            try:
                if plan is None:
                    log.warning("no plan ahead", job=job.job_id, reason=why)
                else:
                    job.plans.file_plan(plan)
                    if _lasts(job):
                        self._catalogs.keep(job.plans.question, plan)
            except (ConsoleError, SQLAlchemyError) as error:
                self._unfiled(job, error)
            finally:
                job.plans.made_ahead(asked)  # counted last: whoever sees the count also finds the plan

        missing = job.plans.want_ahead(patterns)
        stored = self._stored(job, missing)
        if stored:
            given = (job, asked, stored, done)
            threading.Thread(target=self._file, args=given, name="planning-stored", daemon=True).start()
        for pattern in missing:
            if pattern not in stored:
                self.make(job, map(str, sorted(pattern)), done, ahead=True)

    def _stored(self, job: LiveJob, patterns: Sequence[frozenset[Worker]]) -> list[frozenset[Worker]]:
        """Returns those patterns for which a catalog has a plan."""
        try:
            names = self._catalogs.names(job.plans.question)
        except ConsoleError as error:
            log.warning("the catalogs can't be read; plans are made anew", job=job.job_id, reason=error.detail)
            return []
        return [pattern for pattern in patterns if plan_name(pattern) in names]

    def _file(self, job: LiveJob, asked: Job, patterns: Sequence[frozenset[Worker]], done: Done[Plan]) -> None:
        """Takes plans from the catalogs into the job's memory. Large ones are only counted, and stay where they are
        until they are needed."""
        for pattern in patterns:
            if job.plans.ops > KEPT_OPS:
                job.plans.made_ahead(asked)
                continue
            found = self._catalogs.find(job.plans.question, pattern)
            if found is None:  # damaged
                self.make(job, map(str, sorted(pattern)), done, ahead=True)
                continue
            try:
                job.plans.file_plan(found[0])
            except SQLAlchemyError as error:
                self._unfiled(job, error)
            job.plans.made_ahead(asked)

    def _unfiled(self, job: LiveJob, error: ConsoleError | SQLAlchemyError) -> None:
        """Logs that a plan could not be stored; seldom, since there may be hundreds."""
        text = "plans made ahead could not be stored; they are used until the console ends"
        if refused := passing(error):
            self._seldom.warn(text, reason=refused.detail, job=job.job_id)
        else:
            self._seldom.failed(text, error, job=job.job_id)


def _lasts(job: LiveJob) -> bool:
    """Says whether the job's plans are worth keeping in a catalog. Plans for measured speeds or for moved layers are
    not: speeds pass, and layers move back."""
    return job.plans.job is job.plans.nominal and job.plans.job.at_home is job.plans.job


def _asked(job: LiveJob, planned: Job, failed: Iterable[str], **search: Any) -> PlanAsked:
    """Asks for a plan of `job`, with the speeds and layers of `planned`. search: how to look for it."""
    return PlanAsked(
        job=job_doc(planned),
        failed=tuple(failed),
        technique=job.plans.catalog.technique,
        memory=job.plans.catalog.memory.text,
        partition=planned.partition,
        **search,
    )


LIMITS = DriftLimits()
# A plan that is quicker by less than this is not worth the iteration that a new generation costs.
LEAST_GAIN = 0.03
# Plans of more ops than this are not simulated with other op times: the new plan is taken.
MOST_DRIFT_OPS = 60_000
# A round of op times closes after this many heartbeat intervals, without the workers that have not reported.
TIMEOUT = 2.5


def worth_changing(gained: float | None, wanted: Job) -> PlanComparison:
    """Decides whether a plan for the speeds of `wanted` should replace the one in force. gained: how much longer the
    one in force takes at these speeds; None: not known."""
    made = f"a plan for {_speeds(wanted)}"
    if gained is None:
        return PlanComparison(True, made)
    saved = 1 - 1 / (1 + gained)
    if gained < LEAST_GAIN:
        less = percent(max(0.0, saved))
        return PlanComparison(False, f"by one for {_speeds(wanted)} an iteration would take {less} less")
    return PlanComparison(True, f"{made}: an iteration takes {percent(saved, 0)} less than by the plan before")


@dataclass
class _Watch:
    """What is known of the speeds in one job.

    ratios: compares measured with planned op times. wanted: the job with the speeds that were found. workers: by name.
    generation, living: the newest generation and its workers. round: the ratios reported so far in this round; began:
    its start (monotonic). incarnations: the processes that the ratios are of. asked: the job and failed workers that a
    plan is being made for. held: a better plan waits because the plan in force is frozen.
    """

    ratios: Ratios
    wanted: Job
    workers: Mapping[str, Worker]
    generation: int = 0
    living: frozenset[Worker] = frozenset()
    state: DriftState = field(default_factory=DriftState)
    round: dict[Worker, float] = field(default_factory=dict)
    began: float = 0.0
    incarnations: dict[Worker, str] = field(default_factory=dict)
    asked: tuple[Job, tuple[str, ...]] | None = None
    held: bool = False


class Drifting:
    """Watches the speeds of the workers of all jobs, and has plans made for them.

    plan: finds a plan by its fingerprint, and may raise SQLAlchemyError. heartbeat: seconds.
    """

    def __init__(
        self,
        planning: JobPlanner,
        plan: Callable[[str], Plan | None],
        heartbeat: float,
        *,
        limits: DriftLimits = LIMITS,
    ) -> None:
        self._planning, self._plan = planning, plan
        self._heartbeat, self._limits = heartbeat, limits
        self._of: dict[str, _Watch] = {}

    def consider(self, job: LiveJob) -> None:
        """Takes the op times that came in since the last call. Only one thread may call this.

        Raises ConsoleError when its lines of the event feed can't be stored.
        """
        if job.state.over:
            self._of.pop(job.job_id, None)
            return
        try:
            watch = self._of.get(job.job_id)
            if watch is None:
                watch = self._of[job.job_id] = self._begin(job)
        except SQLAlchemyError as error:
            log.warning("speeds wait for the database", job=job.job_id, reason=str(unavailable(error)))
            return
        reports, failed, current = job.measurements.op_times.take(), out(job.state), job.state.current
        if failed is None or current is None:
            watch.round.clear()  # op times in a recovery are not the usual ones
            return
        if watch.ratios.job is not job.plans.nominal:  # the partition changed, and with it the op times of the stages
            watch.ratios, watch.round = Ratios(job.plans.nominal), {}
            watch.wanted = drifted(job.plans.nominal, watch.state)
        if watch.generation != current.number:
            watch.generation, watch.living = current.number, frozenset(map(Worker.parse, current.living))
        for name, (incarnation, milliseconds) in reports.items():
            self._take(watch, watch.workers[name], incarnation, milliseconds)
        late = time.monotonic() - watch.began > TIMEOUT * self._heartbeat
        if watch.round and (len(watch.round) == len(watch.living) or late):
            drift = observe(job.plans.nominal, watch.state, watch.round, self._limits)
            watch.state, watch.round = drift.state, {}
            self._tell(job, drift)
            factors = {w: track.assumed for w, track in watch.state.workers.items() if track.assumed > 1}
            job.measurements.found_slow({str(w): factor for w, factor in factors.items() if w in watch.living})
            watch.wanted = drifted(job.plans.nominal, watch.state)
        self._plan_anew(job, watch, failed)

    def _begin(self, job: LiveJob) -> _Watch:
        """Begins to watch a job. After a restart of the console, it starts with the speeds that the plan in force was
        made for."""
        workers = {name: Worker.parse(name) for name in job.state.members}
        watch, current = _Watch(Ratios(job.plans.nominal), job.plans.nominal, workers), job.state.current
        plan = self._plan(current.plan_fingerprint) if current else None
        if plan is not None:
            planned = plan.job.job()
            if planned != job.plans.nominal and replace(planned, speeds=job.plans.nominal.speeds) == job.plans.nominal:
                watch.state = assumed(job.plans.nominal, planned)
                watch.wanted = drifted(job.plans.nominal, watch.state)
        return watch

    def _take(self, watch: _Watch, worker: Worker, incarnation: str, milliseconds: Mapping[OpKind, float]) -> None:
        if watch.incarnations.setdefault(worker, incarnation) != incarnation:
            # It is another process, perhaps on another machine.
            watch.incarnations[worker] = incarnation
            watch.state = forget(watch.state, [worker])
            watch.round.pop(worker, None)
        took = watch.ratios.of(worker, milliseconds)
        if took is not None and worker in watch.living:
            watch.began = watch.began if watch.round else time.monotonic()
            watch.round[worker] = took

    def _tell(self, job: LiveJob, drift: Drift) -> None:
        whose = "the others', measured by the profile" if job.plans.job.time_unit in SECONDS else "its peers'"
        notes = []
        for worker, (before, factor) in sorted(drift.changed.items()):
            text, severity = f"{worker} is as fast as the others again", "info"
            if factor > 1:
                word = "slow" if before <= 1 else "slower" if factor > before else "still slow, but less so"
                text, severity = f"{worker} is {word}: its ops take {factor:.2f} times {whose}", "warning"
            elif factor < 1:
                text = f"{worker} is fast: its ops take {factor:.2f} times {whose}"
            notes.append(Note(severity, "worker", text, str(worker)))  # type: ignore[arg-type]
        if drift.scale == 1:
            notes.append(Note("info", "worker", "ops take what the profile says again"))
        elif drift.scale is not None:
            text = (
                f"all workers' ops take {drift.scale:.3g} times what the profile says: the plans are as good as "
                f"before, and an iteration takes {drift.scale:.3g} times as long as they say"
            )
            notes.append(Note("info" if drift.scale < 1 else "warning", "worker", text))
        if notes:
            job.record(*notes)

    # -- plans --------------------------------------------------------------------------------

    def _plan_anew(self, job: LiveJob, watch: _Watch, failed: tuple[str, ...]) -> None:
        """Has a plan made if the measured speeds differ from those that the job is planned with."""
        wanted = watch.wanted
        thawed = watch.held and not job.state.frozen_by
        if wanted == job.plans.job and not thawed:
            watch.asked = None
        elif thawed or watch.asked != (wanted, failed):
            watch.asked, watch.held = (wanted, failed), False

            def done(plan: Plan | None, why: str) -> None:
                self._made(job, watch, wanted, failed, plan, why)

            self._planning.make(job, failed, done, other=wanted)

    def _made(
        self, job: LiveJob, watch: _Watch, wanted: Job, failed: tuple[str, ...], plan: Plan | None, why: str
    ) -> None:
        """Takes the plan for the measured speeds; runs in the planning's own thread."""
        if plan is None:
            log.warning("no plan for the speeds measured", job=job.job_id, reason=why)
            return
        found = worth_changing(self._gain(job, wanted, plan), wanted)
        self._planning.replan(job, wanted, plan)
        if not found.better:
            job.record(Note("info", "plan", f"the plan in force stays: {found.reason}"))
            return
        if job.state.frozen_by:
            watch.held = True
            job.record(Note("info", "plan", f"{found.reason}; it waits: {job.state.frozen_by} has frozen the plan"))
            return
        try:
            job.apply(UsePlan(plan.fingerprint, failed, "", found.reason), plan=plan)
        except ConsoleError as error:
            # A recovery came first, and is planned with these speeds.
            log.info("the plan for the speeds measured comes too late", job=job.job_id, reason=error.detail)

    def _gain(self, job: LiveJob, wanted: Job, plan: Plan) -> float | None:
        """Returns how much longer the plan in force takes than `plan`, both at the measured speeds; None: not known."""
        current = job.state.current
        if current is None or job.plans.ops > MOST_DRIFT_OPS:
            return None
        try:
            now = self._plan(current.plan_fingerprint)
            if now is None or now.failed != plan.failed:
                return None
            return gain(now, plan, wanted)
        except (PlannerError, SQLAlchemyError) as error:
            log.warning("the plan in force can't be compared", job=job.job_id, reason=str(error))
            return None


def _speeds(job: Job) -> str:
    """Returns the speeds in words, such as `W1_2 at speed 0.5`, for three workers at most and the number of others."""
    if not job.speeds:
        return "workers that are all alike"
    shown = ", ".join(f"{worker} at speed {speed:g}" for worker, speed in job.speeds[:3])
    return shown + (f" and {len(job.speeds) - 3} more" if len(job.speeds) > 3 else "")


# planning: not made yet. adopted: in force. kept: the plan before stays. failed: there is no plan.
Outcome = Literal["planning", "adopted", "kept", "failed"]


@dataclass(frozen=True)
class Replan:
    """An operator's request for a new plan. failed: the workers that were out. outcome: planning; adopted: it is in
    force; kept: the plan before stays; failed: none was made. reason: why. at: POSIX seconds of the request,
    then of its end. elapsed: seconds of solving. best, bound: of the period, in the job's time unit."""

    actor: str
    solver: str
    seconds: float
    failed: tuple[str, ...]
    at: float
    outcome: Outcome = "planning"
    reason: str = ""
    elapsed: float = 0.0
    best: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class _Running:
    replan: Replan
    job: Job
    solve: Solve


class Replanning:
    """Plans jobs again when operators ask for it; remembers the newest request of each job. One per console. A console
    that restarts forgets requests.

    find: a job by its id; raises ConsoleError. plan: a stored plan by its fingerprint, as `PlanCache.get`. keep: puts a
    plan into the job's catalog.
    """

    def __init__(
        self,
        find: Callable[[str], LiveJob],
        plan: Callable[[str], Plan | None],
        solves: Solves,
        keep: Callable[[LiveJob, Plan], None],
    ) -> None:
        self._find, self._plan, self._solves, self._keep = find, plan, solves, keep
        self._running: WeakKeyDictionary[LiveJob, _Running] = WeakKeyDictionary()
        self._ended: WeakKeyDictionary[LiveJob, Replan] = WeakKeyDictionary()

    def start(self, job_id: str, solver: str, seconds: float, actor: str) -> str:
        """Starts planning a job again. seconds: the solver's limit. Returns the line for the event feed. Raises
        ConsoleError if nothing is planned."""
        job = self._find(job_id)
        failed = self._ready(job)
        planned = job.plans.job
        try:
            over = "schedules" if job.spec.relayout == "never" else "partitions"
            asked = _asked(job, planned, failed, solver=solver, time_limit=seconds, over=over)
            asked.check()
        except InputError as error:
            raise invalid(error) from None
        except PlannerError as error:
            raise ConsoleError(409, "no_plan", str(error)) from None
        except ValueError:
            raise ConsoleError(
                422, "invalid", f"got {seconds!r}, expected above 0, at most 3600", field="seconds"
            ) from None
        with job.lock:
            self._ready(job)  # it may have ended meanwhile, and then nobody would look at the search any more
            if self.status(job_id, planning=True):
                raise ConsoleError(409, "planning", "the job is being planned again already; stop that first")
            running = _Running(Replan(actor, solver, seconds, failed, time.time()), planned, self._solves.start(asked))
            text = f"{actor} asked for a new plan{_without(failed)} ({solver}, at most {seconds:g} s)"
            audit = audit_row(actor, "replan", solver, detail=f"{seconds:g}")
            try:
                job.record(Note("warning", "operator", text), audit=audit)
            except ConsoleError:
                self._give_up(running)
                raise
            self._running[job] = running
        return text

    def stop(self, job_id: str) -> str:
        """Ends the search with its best plan so far. Raises ConsoleError."""
        running = self._running.get(self._find(job_id))
        if running is None:
            raise ConsoleError(409, "not_planning", "the job is not being planned again")
        self._solves.stop(running.solve.id)
        return "the best plan so far counts"

    def cancel(self, job: LiveJob) -> None:
        """Ends the search for a job that is over or deleted, since few may run at a time."""
        if (running := self._running.get(job)) is not None:
            self._give_up(running)

    def status(self, job_id: str, *, planning: bool = False) -> Replan | None:
        """Returns the newest request, or None if there is none. planning: only one that still runs. Raises
        ConsoleError."""
        job = self._find(job_id)
        running = self._running.get(job)
        if running is None:
            return None if planning else self._ended.get(job)
        last = next((p for p in reversed(running.solve.points) if p.incumbent is not None), None)
        last = last or Point(0.0, None, 0.0, "")
        bound = last.bound if last.bound > 0 else None
        return replace(running.replan, elapsed=running.solve.elapsed, best=last.incumbent, bound=bound)

    def consider(self, job: LiveJob) -> None:
        """Decides on a plan that has been made; called at each tick. Raises ConsoleError if the decision can't be
        stored; the next call tries again."""
        running = self._running.get(job)
        if running is None or not (running.solve.over or job.state.over):
            return
        if job.state.over:
            self.cancel(job)
        outcome, reason = self._decide(job, running)
        replan = running.replan
        if outcome != "adopted" and not job.state.over:
            lead = "the plan in force stays" if outcome == "kept" else "no new plan was made"
            job.record(Note("info" if outcome == "kept" else "warning", "plan", f"{lead}: {reason}"))
        ended = replace(replan, outcome=outcome, reason=reason, at=time.time(), elapsed=running.solve.elapsed)
        self._ended[job] = ended
        del self._running[job]

    # -- details ----------------------------------------------------------------------------

    def _give_up(self, running: _Running) -> None:
        """Ends a search, unless it is also another's: equal jobs, and a person who asks the same, share one."""
        if not running.solve.shared:
            with suppress(ConsoleError):  # it has ended, and is not kept
                self._solves.stop(running.solve.id)

    def _ready(self, job: LiveJob) -> tuple[str, ...]:
        """Returns the workers that the job trains without. Raises ConsoleError if it can't take another plan now."""
        state = job.state
        if state.over:
            raise ConsoleError(409, "job_over", f"the job is {state.over}")
        if state.frozen_by:
            raise ConsoleError(409, "frozen", f"{state.frozen_by} has frozen the plan; unfreeze it first")
        failed = out(state)
        if failed is None:
            raise ConsoleError(409, "recovering", "the job does not train yet, or recovers; try again when it trains")
        return failed

    def _decide(self, job: LiveJob, running: _Running) -> tuple[Outcome, str]:
        replan, plan, state = running.replan, running.solve.plan, job.state
        if state.over:
            return "kept", f"the job is {state.over}"
        if plan is None:
            return "failed", running.solve.error or "the search left none"
        if job.plans.job != running.job:
            return "kept", "the speeds that the new one is for have changed since"
        with storing():
            job.plans.file_plan(plan)
        self._keep(job, plan)
        current = state.current
        if current is None or out(state) != replan.failed:
            now = _without(current.failed if current else ()) or " with all workers"
            return "kept", (
                f"the new one is for a job{_without(replan.failed) or ' with all workers'}; by now it trains{now}, or "
                "recovers. It is used when it fits again"
            )
        with storing():
            before = self._plan(current.plan_fingerprint)
        if before is None:
            return "kept", "what is stored of it is damaged, so the new one can't be compared with it"
        found = compare_plans(before, plan, job.plans.job, job.spec.iterations - state.committed)
        if not found.better:
            return "kept", found.reason
        reason = f"{replan.actor} planned again ({plan.solver.name}): {found.reason}"
        try:
            job.apply(UsePlan(plan.fingerprint, replan.failed, replan.actor, reason, plan.partition), plan=plan)
        except ConsoleError as error:
            if error.status >= 500:
                raise
            return "kept", error.detail
        return "adopted", found.reason


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""


def misfit(job: LiveJob, plan: Plan) -> str:
    """Says why the job can't run `plan` now; "": it can."""
    if job.state.over:
        return f"it has {job.state.over}"
    own, document = job_doc(job.plans.job), plan.job
    if (own.pipelines, own.stages, own.micro_batches) != (
        document.pipelines,
        document.stages,
        document.micro_batches,
    ):
        grids = list(map(grid, (document, own)))
        return f"the plan is for a grid of {grids[0]}, the job's is {grids[1]}"
    if own != document:
        return 'the plan was made for other op times. On Planner, choose the job under "Take over", and plan again'
    current = job.state.current
    if current is None:
        return "its workers have not all registered"
    if sorted(current.failed) != sorted(plan.failed):
        plans, jobs = (
            (f"without {names(lost)}" if lost else "with all workers") for lost in (plan.failed, current.failed)
        )
        return f"the plan is for a job {plans}, and this one trains {jobs}"
    if current.plan_fingerprint == plan.fingerprint:
        return "it is in force already"
    if plan.partition != current.partition and job.spec.relayout == "never":
        return f"its layers per stage are {counts(plan.partition)}, and those of this job stay {counts(job.state.held)}"
    return above_limit(plan, job.spec.memory)


def use_plan(job: LiveJob, plan: Plan, actor: str) -> str:
    """Opens a generation with the same workers and this plan, which was checked when it was made or saved. Returns the
    coordinator's reason.

    Raises ConsoleError (409) that names what does not fit; then nothing has changed.
    """
    if why := misfit(job, plan):
        raise ConsoleError(409, "misfit", f"plan {plan.fingerprint[:8]}: {why}")
    who = named(actor)
    event = UsePlan(plan.fingerprint, plan.failed, who, "", plan.partition)
    return job.apply(event, plan=plan, audit=audit_row(who, "use plan", plan.fingerprint))


def above_limit(plan: Plan, memory: str) -> str:
    """Says which worker would hold more than the job's own memory limit allows; "": none would."""
    planned = plan.problem().job
    limits = MemoryLimit.parse(memory, field="memory").limits(planned, plan.technique)
    for name, held in plan.metrics.peak_activations.items():
        limit = limits[Worker.parse(name).stage]
        if limit is None or held <= limit:
            continue
        if memory != "bytes":
            return f"{name} would hold {held} activations, and the job's memory limit {memory} allows {limit}"
        # In bytes the count of activations is not decisive: more of them may fit, since they do not all take their
        # largest size at the same time.
        for worker, taken in plan.schedule().over_capacity.items():
            return f"{worker} would hold {taken:,} bytes, and has {planned.capacity_bytes[worker.stage]:,}"
        return ""
    return ""


class PlansService:
    """All that a console does with plans. One per console.

    tolerance: plans are made ahead for up to this many failures. heartbeat: seconds. find: a job by its id; raises
    ConsoleError. jobs: the jobs in memory. on_made: called with each plan that a solver made."""

    def __init__(
        self,
        store: Store,
        catalogs: Catalogs,
        *,
        tolerance: int,
        heartbeat: float,
        find: Callable[[str], LiveJob],
        jobs: Callable[[], list[LiveJob]],
        on_made: Callable[[Plan], None],
    ) -> None:
        self._catalogs, self._jobs = catalogs, jobs
        catalogs.on_plans = self._take
        self.cache = PlanCache(store)
        self.ahead = JobPlanner(tolerance, catalogs, on_made)
        self.drifting = Drifting(self.ahead, self.cache.get, heartbeat)
        self.making = Making()
        self.library = Library(store, self.cache)
        self.profiles = NamedProfiles(store.database)
        self.uploads = Uploads()
        self.solves = Solves(on_made=on_made)
        self.simulations = Simulations()
        self.replanning = Replanning(find, self.cache.get, self.solves, self._keep)

    def start(self) -> None:
        self.ahead.start()

    def consider(self, job: LiveJob) -> None:
        """Looks after the plans of a job; called once per tick."""
        self.ahead.consider(job)
        self.drifting.consider(job)
        self.replanning.consider(job)

    def close(self) -> None:
        """Ends the child processes."""
        for service in (self.ahead, self.simulations, self.solves, self.uploads, self.making):
            service.close()

    def _keep(self, job: LiveJob, plan: Plan) -> None:
        """Keeps a plan in the job's catalog, if it is worth keeping."""
        if _lasts(job):
            self._catalogs.keep(job.plans.question, plan)

    def _take(self, question: CatalogQuestion, names: list[str]) -> None:
        """Passes new plans of a catalog to the jobs that run with it, which use them from the next failure on."""
        for job in self._jobs():
            if not job.state.over and job.plans.question == question:
                self.ahead.take(job, names)
