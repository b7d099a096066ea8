"""The plans of one job: those made ahead, those that it waits for, and those that are made at once when needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import structlog

from openrecycle.agent.coordination.membership import PlanReady, PlanRefused
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.db.store import Store
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.packed import CatalogQuestion, packed, unpack_named
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

# A missing plan of up to this many ops is made by the thread that needs it, in a few milliseconds.
INLINE_OPS = 1_500
# One of more ops takes longer even to look up and to rename.
LARGE_OPS = 20_000

LookUp = Callable[[CatalogQuestion, frozenset[Worker]], tuple[Plan, str] | None]


def stored_plan(store: Store, fingerprint: str) -> Plan | None:
    """Reads a plan from the database.

    Returns None if there is no such plan. Raises PlanError for one that is damaged, and SQLAlchemyError.
    """
    data = store.plan(fingerprint)
    return None if data is None else unpack_named(data, fingerprint)


@dataclass(frozen=True)
class Ahead:
    """How many plans for failures that may come are made, and how many are wanted. patterns: the failure patterns that
    were asked for, in canonical form. ready_for: the generation for whose next failure they are packed."""

    made: int = 0
    wanted: int = 0
    patterns: frozenset[frozenset[Worker]] = frozenset()
    ready_for: int = 0


class JobPlans:
    """The plans of one job; a part of its LiveJob. Thread-safe.

    Anybody may read these fields; only the methods change them. `nominal`: the job, with its layers cut as for the
    generation in force or the one that is to open. `job`: the same, with the measured speeds of its workers. `catalog`:
    its plans. `ahead`: how many were made ahead. `asked_for`: the failed workers of the plan that is being made
    elsewhere, or None.

    lock: the LiveJob's. look_up: finds a plan made ahead that is kept elsewhere, and says where it is from. answer:
    takes a PlanReady with its plan, or a PlanRefused with None; raises ConsoleError. stored: called after a plan was
    stored.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        store: Store,
        lock: threading.RLock,
        look_up: LookUp,
        answer: Callable[[PlanReady | PlanRefused, Plan | None], object],
        stored: Callable[[], None],
    ) -> None:
        self.nominal = self.job = spec.job()
        self.catalog = Catalog(self.job, Technique(spec.technique), MemoryLimit.parse(spec.memory, field="memory"))
        self.ahead = Ahead()
        self.asked_for: tuple[str, ...] | None = None
        self._job_id, self._store, self._lock = job_id, store, lock
        self._look_up, self._answer, self._stored = look_up, answer, stored
        self.inline_ops = INLINE_OPS
        self._over = False

    def cut(self, partition: tuple[int, ...]) -> None:
        """Plans for this partition (layers per stage) from now on; (): the partition stays as it is."""
        with self._lock:
            if not partition or partition == self.nominal.partition:
                return
            before = self.nominal
            self.nominal = before.with_partition(partition)
            self.job = self.nominal if self.job is before else self.job.with_partition(partition)
            self.catalog = self.catalog.at(partition)
            self.ahead = Ahead()

    def take_plan(self, plan: Plan) -> None:
        """Keeps a plan for the failures and the partition that it is for. Raises InputError for another job's plan."""
        if not self._over:
            self.catalog.at(plan.partition).add(plan)

    def in_memory(self, fingerprint: str, failed: Iterable[str]) -> Plan | None:
        """Returns the plan without these workers, if it is here and is this one."""
        with self._lock:
            plan = self.catalog.find(_workers(failed))
        return plan if plan is not None and plan.fingerprint == fingerprint else None

    def let_go(self) -> None:
        """Frees the memory of a job that is over: from now on its plans are in the database alone."""
        with self._lock:
            self._over = True
            self.catalog = Catalog(self.job, self.catalog.technique, self.catalog.memory)

    @property
    def question(self) -> CatalogQuestion:
        """What all plans of the job have in common."""
        return CatalogQuestion(self.job, self.catalog.technique, self.catalog.memory)

    @property
    def ops(self) -> int:
        """The number of ops in one plan, without the optimizer steps."""
        return self.job.ops

    def plan_made(self, failed: tuple[str, ...], made: Plan | None, why: str) -> None:
        """Takes the answer to LiveJob's `want_plan`. why: where the plan is from, or why none exists."""
        try:
            if made is None:
                self._answer(PlanRefused(failed, why), None)
                return
            with self._lock:
                self.take_plan(made)
                plan = self.catalog.find(_workers(failed))
                if plan is None or (plan is not made and not self.is_for(plan, failed)):
                    plan = made
                self._answer(PlanReady(failed, plan.fingerprint, why or f"made now ({plan.solver.name})"), plan)
        finally:
            self.give_up()

    def asks_for(self, failed: tuple[str, ...]) -> None:
        """Notes that the plan without these workers is being made elsewhere."""
        self.asked_for = failed

    def give_up(self) -> None:
        """Notes that nobody makes the plan that was asked for any more. While it is missing, it is asked for again."""
        self.asked_for = None

    # -- plans made ahead ---------------------------------------------------------------------

    def want_none_ahead(self) -> None:
        """Sets the counts back to 0, because no plans are made ahead any more or because all are made anew."""
        with self._lock:
            self.ahead = Ahead(patterns=self.ahead.patterns)

    def want_ahead(self, patterns: Collection[frozenset[Worker]]) -> list[frozenset[Worker]]:
        """Adds failure patterns to those for which plans are wanted; returns those that have no plan yet."""
        missing = [pattern for pattern in patterns if self.catalog.find(pattern) is None]
        with self._lock:
            before = self.ahead
            made = before.made + len(patterns) - len(missing)
            self.ahead = Ahead(made, before.wanted + len(patterns), before.patterns | {*patterns})
        return missing

    def made_ahead(self, asked: Job) -> None:
        """Counts one more plan that is made, or can't be made. asked: the job that it is for; if the job is planned
        differently by now, the plan does not count."""
        with self._lock:
            if self.job is asked:
                self.ahead = replace(self.ahead, made=self.ahead.made + 1)

    def filled(self, made: int, wanted: int | None = None) -> None:
        """Notes how many plans the catalog that is made ahead has by now. wanted: None leaves that number as it is."""
        with self._lock:
            self.ahead = replace(self.ahead, made=made, wanted=self.ahead.wanted if wanted is None else wanted)

    def begins_packing(self, generation: int) -> bool:
        """Says whether the plans for the next failure are to be packed, once for each generation: when all plans ahead
        are made. Then the failure's plan is stored some milliseconds sooner."""
        with self._lock:
            ahead = self.ahead
            if not 0 < ahead.wanted <= ahead.made or ahead.ready_for == generation or self.ops > LARGE_OPS:
                return False
            self.ahead = replace(ahead, ready_for=generation)
            return True

    def make_ready(self, failed: Iterable[str]) -> None:
        """Packs the plans for one failure more than `failed`, in up to some tenths of a second."""
        self.catalog.make_ready(_workers(failed))

    # -- plans that are needed now ------------------------------------------------------------

    def is_for(self, plan: Plan, failed: tuple[str, ...]) -> bool:
        """Says whether a plan from memory or the database goes without exactly these workers, at this partition.

        Its schedule was checked when it was made. A plan that does not fit is an error of the console's, and is not
        used.
        """
        cut = plan.partition == self.nominal.partition
        if cut and sorted(plan.failed) == sorted(failed):
            return True
        why = f"it goes without {', '.join(plan.failed) or 'nobody'}" if cut else f"its partition is {plan.partition}"
        log.error("a plan is not used", job=self._job_id, plan=plan.fingerprint, failed=failed, reason=why)
        return False

    def plan_with(self, job: Job, plan: Plan) -> None:
        """Plans for `job` from now on, which differs from the one before in its workers' speeds.

        plan: the first plan for it. All earlier plans are dropped.
        """
        with self._lock:
            catalog = Catalog(job, self.catalog.technique, self.catalog.memory)
            catalog.add(plan)
            self.job, self.catalog = job, catalog
            self.ahead = Ahead()

    def file_plan(self, plan: Plan) -> None:
        """Keeps and stores a plan that was made ahead, unless the speeds that it is for have changed since."""
        with self._lock:
            if plan.job.speeds != {str(worker): speed for worker, speed in self.job.speeds}:
                return
            self.take_plan(plan)
        if self._store.put_plan(self._job_id, plan.fingerprint, packed(plan), plan.failed, True):
            self._stored()

    def plan_now(self, failed: tuple[str, ...]) -> tuple[PlanReady | PlanRefused, Plan | None] | None:
        """Returns the plan, with its answer for the coordinator, if it is here or can be made in milliseconds.

        Returns None if it has to be found or made elsewhere: it is too large, or the one that is here does not fit.
        """
        workers = _workers(failed)
        small = self.ops <= self.inline_ops
        try:
            missing = not self.catalog.has(workers)
            if (missing and not small) or self.ops > LARGE_OPS:
                return None
            found = self._look_up(self.question, workers) if missing else None
            plan, origin = found or self.catalog.plan_for(workers)
            if missing and not found:
                checked(plan)
            if not self.is_for(plan, failed):
                return None
        except PlannerError as error:
            return PlanRefused(failed, str(error)), None
        except Exception as error:
            # The survivors wait for an answer: a refusal, which halts the job and says why, is better than none.
            log.exception("the planner failed", job=self._job_id, failed=failed)
            why = f"the planner failed ({type(error).__name__}); the console's log says more"
            return PlanRefused(failed, why), None
        self.take_plan(plan)
        return PlanReady(failed, plan.fingerprint, origin), plan


def _workers(names: Iterable[str]) -> frozenset[Worker]:
    return frozenset(Worker.parse(name) for name in names)
