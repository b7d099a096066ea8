"""Which plans are made for a job, and when: ahead of failures, and at once when one is missing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.catalogs.contents import MOST, CatalogRequest, PlansNeeded
from openrecycle.app.catalogs.service import KEPT_OPS, Catalogs, info_of
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.making import LookUpRequest, PlanRequest, plan_maker
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.patches import LARGE_OPS, building
from openrecycle.app.runtime.task_queue import AHEAD, URGENT, Done
from openrecycle.planner.catalogs.catalog_build import LISTED
from openrecycle.planner.catalogs.catalog_store import plan_name
from openrecycle.planner.jobs.failures import canonical_pattern
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import Plan, job_doc

log = structlog.get_logger()

# Ops of all plans that a job holds in memory, of about 800 bytes each. Where more are made ahead, they
# stay in the catalog until they are needed.
HELD_OPS = 400_000
# In a grid above this, whatever fails beyond the tolerance is planned when it has failed.
NEXT_WORKERS = 512


class JobPlanner:
    """Plans of all jobs come out of the catalogs, and else out of one child process.

    tolerance: failures planned for from the start. on_made: called with each plan that the child makes.
    """

    def __init__(self, tolerance: int, catalogs: Catalogs, on_made: Callable[[Plan], None] = lambda plan: None) -> None:
        self._tolerance = tolerance
        self._catalogs = catalogs
        self._maker = plan_maker(on_made=on_made)
        self._filling: dict[str, tuple[str, frozenset[str]]] = {}  # job -> its catalog, the names made ahead

    def start(self) -> None:
        self._maker.start()

    def close(self) -> None:
        self._maker.close()

    def cancel(self, job: LiveJob) -> None:
        """Nothing more is planned for `job`."""
        self._maker.cancel(job.job_id)
        self._stop_filling(job)
        job.plans_to_make = job.planned_ahead = 0

    def make_ahead(self, job: LiveJob) -> None:
        """The fault-free plan first, then one for each failure pattern, one failure after another. Returns at once:
        which patterns a large grid has is worked out elsewhere."""
        self._stop_filling(job)
        asked = job.job
        job.plans_to_make, job.planned_ahead = 1, 0  # the fault-free one, until it is known how many there are

        def take(needed: PlansNeeded | None, why: str) -> None:
            if job.job is not asked or job.state.over:
                return  # its workers' speeds have changed since
            job.plans_to_make = 0
            if needed is None:
                log.warning("only the fault-free plan is made ahead", job=job.job_id, reason=why)
                self._submit(job, [frozenset()])
                return
            patterns = needed.patterns[:MOST]  # the list scheduler serves the rest when they happen
            if job.ops * len(patterns) <= HELD_OPS:
                self._submit(job, patterns)
            elif _lasts(job):
                self._fill(job, needed)

        self._catalogs.needed(job.question, self._tolerance, take)

    def make_next(self, job: LiveJob) -> None:
        """Beyond the tolerance too, whatever worker fails next finds its plan made."""
        generation = job.state.current
        if not job.plans_to_make and not job.state.over:
            self.make_ahead(job)  # its layers are cut otherwise since
        if generation is None or len(generation.failed) < self._tolerance or len(generation.living) > NEXT_WORKERS:
            return
        failed = {Worker.parse(name) for name in generation.failed}
        living = [Worker.parse(name) for name in generation.living]
        peers = Counter(worker.stage for worker in living)
        patterns = {canonical_pattern({*failed, w}, job.job)[0]: None for w in living if peers[w.stage] > 1}
        missing = [pattern for pattern in patterns if pattern not in job.patterns_asked]
        if job.ops * len(missing) <= HELD_OPS:
            self._submit(job, missing)

    def make_now(self, job: LiveJob, failed: tuple[str, ...]) -> None:
        """A failure came for which no plan is at hand: it is looked up, else made before all others."""
        asked = job.job

        def done(plan: Plan | None, why: str) -> None:
            if job.job is asked:
                job.plan_made(failed, plan, why)
            else:
                job.asked_for = None  # its workers' speeds have changed since; it is asked for again

        def take_fitted(origin: str, plan: Plan | None, why: str) -> None:
            if plan is not None:
                done(plan, origin)
                return
            log.warning("a stored plan is not used", job=job.job_id, reason=why)
            self._maker.submit(_request(job, failed), done, priority=URGENT)

        def look_up() -> None:
            workers = [Worker.parse(name) for name in failed]
            found: tuple[Plan, str] | None = None
            with building(job.ops):
                if job.catalog.has(workers):
                    found = job.catalog.plan_for(workers)
                elif job.ops <= LARGE_OPS:
                    found = self._catalogs.find(job.question, workers)
                elif located := self._catalogs.located(job.question, failed):
                    fitted = partial(take_fitted, located.origin)
                    request = LookUpRequest(job.job_id, located.info, failed, located.name, located.stored)
                    self._maker.submit(request, fitted, priority=URGENT)
                    return
                if found is not None and not job.is_for(found[0], failed):
                    found = None
            if found is None:
                self._maker.submit(_request(job, failed), done, priority=URGENT)
                return
            try:
                job.plan_made(failed, *found)
            except ConsoleError as error:
                log.warning("a plan could not be put in force; it is tried again", job=job.job_id, reason=error.detail)

        threading.Thread(target=look_up, name="planning-look-up", daemon=True).start()

    def make_for(self, job: LiveJob, other: Job, failed: tuple[str, ...], done: Done[Plan]) -> None:
        """A plan for `job` as it would be with other speeds; calls `done` with it."""
        request = _request(job, failed, other)
        self._maker.submit(request, done, priority=URGENT)

    def replan(self, job: LiveJob, other: Job, plan: Plan) -> None:
        """`job` has other speeds from now on, and `plan` is one for them: the others are made ahead anew."""
        job.plan_with(job.nominal if other == job.nominal else other, plan)
        self.make_ahead(job)

    def take(self, job: LiveJob, names: Iterable[str]) -> None:
        """Plans with these names have come into the catalog of the job's question."""
        if job.job_id in self._filling:
            job.planned_ahead = len(self._filling[job.job_id][1] & self._catalogs.names(job.question))
        elif job.ops <= KEPT_OPS:
            stored = self._catalogs.stored_of(job.question)
            for name in names:
                job.file_plan(stored.plan(name))

    def _fill(self, job: LiveJob, needed: PlansNeeded) -> None:
        """Has the catalog filled for as many failures as have few enough patterns, up to the tolerance."""
        tolerances = range(needed.tolerance, -1, -1)
        listed = ((t, needed.listed(t, LISTED)) for t in tolerances)
        tolerance, patterns = next((t, found) for t, found in listed if found is not None)
        question, names = job.question, frozenset(map(plan_name, patterns))
        request = CatalogRequest(
            job=job_doc(job.job), technique=question.technique, memory=question.memory.text, tolerance=tolerance
        )
        entry = self._filling[job.job_id] = info_of(question).fingerprint, names
        job.plans_to_make = len(names)
        try:
            job.planned_ahead = len(names & self._catalogs.names(question))
            if job.planned_ahead < job.plans_to_make:
                self._catalogs.fill(request)
        except ConsoleError as error:
            job.plans_to_make = job.planned_ahead
            log.warning("no plans ahead; they are made when they are needed", job=job.job_id, reason=error.detail)
        if job.state.over:  # since it was asked, in another thread: whoever ended it may have found nothing to stop
            self._filling[job.job_id] = entry
            self.cancel(job)

    def _stop_filling(self, job: LiveJob) -> None:
        fingerprint, _ = self._filling.pop(job.job_id, ("", frozenset()))
        filling = self._catalogs.filling(fingerprint)
        if filling is not None and filling.running and all(fingerprint != f for f, _ in self._filling.values()):
            self._catalogs.cancel(fingerprint)

    def _submit(self, job: LiveJob, patterns: Sequence[frozenset[Worker]]) -> None:
        asked = job.job

        def done(plan: Plan | None, why: str) -> None:
            if job.job is not asked:
                return  # its workers' speeds have changed since
            try:
                if plan is None:
                    log.warning("no plan ahead", job=job.job_id, reason=why)
                else:
                    job.file_plan(plan)
                    if _lasts(job):
                        self._catalogs.keep(job.question, plan)
            finally:
                if job.job is asked:
                    job.planned_ahead += 1  # whoever sees that finds the plan

        missing = [pattern for pattern in patterns if job.catalog.find(pattern) is None]
        job.patterns_asked.update(patterns)
        job.plans_to_make += len(patterns)
        job.planned_ahead += len(patterns) - len(missing)
        stored = self._stored(job, missing)
        if stored:
            threading.Thread(target=self._file, args=(job, stored, done), name="planning-stored", daemon=True).start()
        for pattern in missing:
            if pattern not in stored:
                self._maker.submit(_request(job, map(str, sorted(pattern))), done, priority=AHEAD)

    def _stored(self, job: LiveJob, patterns: Sequence[frozenset[Worker]]) -> list[frozenset[Worker]]:
        """Those that a catalog has a plan for."""
        try:
            names = self._catalogs.names(job.question)
        except ConsoleError as error:
            log.warning("the catalogs can't be read; plans are made anew", job=job.job_id, reason=error.detail)
            return []
        return [pattern for pattern in patterns if plan_name(pattern) in names]

    def _file(self, job: LiveJob, patterns: Sequence[frozenset[Worker]], done: Done[Plan]) -> None:
        """Large plans stay where they are until they are needed."""
        for pattern in patterns:
            if job.ops > KEPT_OPS:
                job.planned_ahead += 1
                continue
            found = self._catalogs.find(job.question, pattern)
            if found is None:  # damaged
                self._maker.submit(_request(job, map(str, sorted(pattern))), done, priority=AHEAD)
                continue
            try:
                job.file_plan(found[0])
            except SQLAlchemyError as error:
                log.warning("a plan ahead could not be filed", job=job.job_id, reason=type(error).__name__)
            job.planned_ahead += 1


def _lasts(job: LiveJob) -> bool:
    """Are its plans worth keeping with those of other jobs? Speeds that were found pass, and layers move back."""
    return job.job is job.nominal and job.job.at_home is job.job


def _request(job: LiveJob, failed: Iterable[str], other: Job | None = None) -> PlanRequest:
    """other: the job as it would be with other speeds."""
    asked = other or job.job
    return PlanRequest(
        job.job_id, job_doc(asked), tuple(failed), job.spec.technique, job.spec.memory, partition=asked.partition
    )
