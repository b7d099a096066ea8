"""Makes a catalog: decides what to plan ahead, plans in parallel, and can be resumed.

Where all failure patterns can be listed each gets a plan. Larger grids get one plan per failure *count*, for the
distribution over stages that costs least. Migrations lead any failures to that distribution (planner.layers.migration);
failures with equal counts per stage do not even need migrations.

`work` plans some targets, in any process or on any machine. An engine runs it, in this process or in others.
`fill` hands out the targets and stores the results.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from openrecycle.forking import end_with_parent
from openrecycle.planner.catalogs.catalog import PlanStore, StoredCatalog, create_folder, headers_of
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import by_stage, canonical_pattern, patterns, workers_in
from openrecycle.planner.jobs.job import Job, Over, Problem, Worker
from openrecycle.planner.layers.migration import Counts, best_distributions, models
from openrecycle.planner.layers.partition import Layout, bound_over, lay_out
from openrecycle.planner.plans.bounds import Bound, period_bound
from openrecycle.planner.plans.packed import (
    CatalogQuestion,
    Effort,
    Header,
    decode_header,
    pack,
    plan_name,
    unpack,
    with_effort,
)
from openrecycle.planner.plans.plan import PROVERS, Plan, PlanError
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Cancelled, Run, Solution
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import best_solution, metrics_of, of_layout, solver_of

# -- planning some targets of a catalog, in any process or on any machine ------------------------

# From so many ops on, alternatives are compared by a quick try and not solved in full.
LARGE = 50_000
# On such grids a better distribution than the neighbour's plan is looked for only at every TRIED-th count.
TRIED = 4

Blobs = list[tuple[str, bytes]]
Rows = tuple[tuple[int, ...], ...]  # by stage, the pipelines whose worker is dead


@dataclass(frozen=True)
class Target:
    """One plan to make: for the one of the `alternatives` that has the shortest plan."""

    failures: int
    alternatives: tuple[Rows, ...]


@dataclass(frozen=True)
class Task:
    """Targets of one question, for one process. Plain data, so that it can be sent to other processes."""

    question: CatalogQuestion
    effort: Effort
    targets: tuple[Target, ...]
    nested: bool


def work(task: Task) -> Blobs:
    """Plan the targets of one task; return (name, stored plan) of each.

    It begins with the largest count: if the failures are `nested`, a plan for more failures also serves for fewer.
    Where it is as short as the bound for fewer failures allows, nothing needs solving.
    """
    question, effort, over = task.question, task.effort, task.question.over
    large = question.job.ops >= LARGE
    reusable: ReusablePlan | None = None
    solved = False
    out: list[tuple[str, bytes]] = []
    for target in sorted(task.targets, key=lambda t: -t.failures):
        problems = [question.problem(workers_in(rows)) for rows in target.alternatives]
        taken = (
            next(filter(None, (reusable.for_fewer(p) for p in problems)), None) if reusable and task.nested else None
        )
        if taken is not None:
            problems = [p for p in problems if bound_over(p, over) < taken.period]
        if large and (taken or len(problems) > 1):
            # If the last count needed no plan of its own, one is tried only at every few counts.
            worth_trying = taken is None or solved or target.failures % TRIED == 0
            problems = _promising(problems, taken) if worth_trying else []
        solved = bool(problems)
        if problems:
            begin = time.perf_counter()
            limit = effort.time_limit or float("inf")
            ahead = effort.solver != "list"  # for plans of the list scheduler, `_inherit` does this at the end
            layouts = [_laid_out(problem, over) for problem in problems]
            solutions = [
                of_layout(best_solution(layout.problem, Run(limit), solver=effort.solver, look_ahead=ahead), layout)
                for layout in layouts
            ]
            best = min(solutions, key=lambda s: (s.schedule.period, s.bound))
            seconds = time.perf_counter() - begin
            if taken is None or best.schedule.period <= taken.period:
                name, blob, reusable = _stored(best, seconds, effort)
                out.append((name, blob))
                continue
        assert taken is not None
        reusable = taken
        out.append(taken.stored(bound_over(taken.schedule.problem, over), effort, over))
    return out


def _laid_out(problem: Problem, over: Over) -> Layout:
    if over == "schedules":  # (only one layout is possible, so its period is not needed)
        return Layout(problem, Bound(0, ""), over, 0, 0, (), "")
    return lay_out(problem.job, problem.failed, technique=problem.technique, memory=problem.memory, over=over)


@dataclass(frozen=True)
class ReusablePlan:
    """A plan that may serve for fewer failures too. made_for: the number of failures it was made for."""

    schedule: Schedule
    made_for: int
    solver: str

    @property
    def period(self) -> int:
        return self.schedule.period

    def for_fewer(self, problem: Problem) -> ReusablePlan | None:
        """Returns the same ops for `problem`, if its failures are a subset of this plan's: extra workers stay idle."""
        own = self.schedule.problem
        if not problem.failed < own.failed:
            return None
        if problem.job.layers:  # the plan keeps its partition
            problem = replace(problem, job=problem.job.with_partition(own.job.partition))
        return replace(self, schedule=self.schedule.for_fewer(problem))

    def stored(self, bound: int, effort: Effort, over: Over) -> tuple[str, bytes]:
        problem = self.schedule.problem
        if self.solver not in PROVERS:  # it may not claim a bound that another solver has proven
            bound = min(bound, period_bound(problem))
        message = f"the plan for {self.made_for} failures, which serves for {len(problem.failed)} as well"
        solution = Solution(self.schedule, bound, self.solver, 0.0, message, over)
        return plan_name(problem.failed), _encoded(solution, effort)


def _stored(solution: Solution, seconds: float, effort: Effort) -> tuple[str, bytes, ReusablePlan]:
    """Return name and stored form of a solution, and the plan for use with fewer failures."""
    schedule, failed = solution.schedule, solution.schedule.problem.failed
    blob = _encoded(replace(solution, seconds=seconds), effort)
    return plan_name(failed), blob, ReusablePlan(schedule, len(failed), solution.solver)


def _encoded(solution: Solution, effort: Effort) -> bytes:
    metrics, solver = metrics_of(solution), solver_of(solution, seconds=solution.seconds)
    # The fingerprint takes as long as all else, and is not needed before the plan is found in the catalog.
    return pack(checked(Plan.of(solution.schedule, metrics=metrics, solver=solver, fingerprint="")), effort)


def _promising(problems: Sequence[Problem], taken: ReusablePlan | None) -> list[Problem]:
    """Return the problem with the shortest plan under the list scheduler's first rule, if it beats `taken`.

    On grids of this size all rules for all alternatives would take several times as long and gain little: between
    rules, periods differ by less than a percent.
    """
    best: Problem | None = None
    shortest = taken.period if taken else None
    for problem in problems:
        period = ListScheduler().solve(problem, Run(0)).schedule.period
        if shortest is None or period < shortest:
            best, shortest = problem, period
    return [] if best is None else [best]


# -- engines: where the plans of a catalog are made -----------------------------------------------

# Seconds between two checks for cancellation while waiting for a result.
POLL = 0.2


class Engine(Protocol):
    """Runs tasks and yields the results of each, in any order.

    Once `cancelled` is true no further task begins; those that run are waited for.
    """

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]: ...


class InlineEngine:
    """Runs one task after the other in this process."""

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]:
        for task in tasks:
            if cancelled and cancelled():
                return
            yield work(task)


class LocalEngine:
    """Runs tasks in `jobs` processes on this machine. Raises PlannerError when one of them dies.

    They are spawned, 0.4 s each, and not forked from the server of openrecycle.forking. So they have the process group,
    the niceness and the memory limit of their parent, which is a console's child or a command line, and end with it.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]:
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
            with _no_ctrl_c():
                pending: set[Future[Blobs]] = {pool.submit(work, task) for task in islice(tasks, self._jobs + 1)}
            while pending:
                done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                stop = bool(cancelled and cancelled())
                if stop:
                    pending = {future for future in pending if not future.cancel()}
                for future in done:
                    with _alive():
                        blobs = future.result()
                    yield blobs
                    if not stop:
                        with _alive(), _no_ctrl_c():
                            pending |= {pool.submit(work, task) for task in islice(tasks, 1)}


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise PlannerError(
            "a planning process died, perhaps for lack of memory; what was planned is kept, "
            "and the same command goes on from there (fewer --jobs need less memory)"
        ) from None


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Processes that are started inside never see SIGINT, not even before `_prepare`, since they inherit the
    mask. A SIGINT that arrives meanwhile reaches this thread at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_engine(jobs: int | None) -> Engine:
    """Make an engine. jobs: number of processes, by default one per core. Raises InputError."""
    count = os.cpu_count() or 1 if jobs is None else jobs
    if not 1 <= count <= 1024:
        raise InputError("--jobs", count, "a number of processes from 1 to 1024")
    return InlineEngine() if count == 1 else LocalEngine(count)


def _prepare() -> None:
    """Prepares a new process: only the parent reacts to Ctrl-C, and the process ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(partial(os._exit, 1))


# -- making a catalog -----------------------------------------------------------------------------

# With at most so many patterns each gets its own plan.
LISTED = 500
# How many targets one task has by default.
CHUNK = 16


class WritablePlanStore(PlanStore, Protocol):
    """A PlanStore that also takes new plans, one by one as they are made."""

    def put(self, name: str, blob: bytes) -> None: ...

    def alone(self) -> AbstractContextManager[None]:
        """Keeps out other processes that may put plans here, while this one compares a plan with the stored one."""


@dataclass(frozen=True)
class Filled:
    """planned: plans made now. kept: those that were there. total: all. finished: whether it ran to its end."""

    planned: int
    kept: int
    total: int
    finished: bool


@dataclass(frozen=True)
class BuildReport(Filled):
    """The outcome of `build_catalog`, with the catalog."""

    catalog: StoredCatalog
    seconds: float


def build_catalog(
    question: CatalogQuestion,
    tolerance: int,
    root: Path,
    *,
    engine: Engine,
    effort: Effort,
    per: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Cancelled | None = None,
) -> BuildReport:
    """Make the plans that are missing in a folder under `root`; damaged plans count as missing.

    per: `pattern`, `count`, or `auto`. on_progress gets (plans that are there, plans in all).
    Once `cancelled` is true no further task begins, and what is done is kept. Raises InputError.
    """
    begin = time.perf_counter()
    wanted = targets(question, tolerance, per)
    catalog, folder = create_folder(root, question)
    filled = fill(question, wanted, folder, engine=engine, effort=effort, on_progress=on_progress, cancelled=cancelled)
    seconds = time.perf_counter() - begin
    return BuildReport(**vars(filled), catalog=StoredCatalog(catalog.info, folder), seconds=seconds)


def fill(
    question: CatalogQuestion,
    wanted: Sequence[Target],
    keeper: WritablePlanStore,
    *,
    engine: Engine,
    effort: Effort,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Cancelled | None = None,
) -> Filled:
    """Make those of the `wanted` plans (see `targets`) that `keeper` lacks; see `build_catalog`."""
    there = _there(question, keeper, effort)
    missing = [t for t in wanted if not any(plan_name(workers_in(a)) in there for a in t.alternatives)]
    done = len(wanted) - len(missing)
    planned = 0
    if on_progress:
        on_progress(done, len(wanted))
    for blobs in engine.run(_tasks(question, missing, effort), cancelled):
        for name, blob in blobs:
            _keep(question, keeper, name, blob)
            planned += 1
        if on_progress:
            on_progress(done + planned, len(wanted))
    finished = planned == len(missing)
    if finished:
        _inherit(question, keeper)
    return Filled(planned, done, len(wanted), finished)


# -- what to plan ----------------------------------------------------------------------------


def most_failures(question: CatalogQuestion) -> int:
    """Return the most failures that a plan can be for."""
    return question.job.stages * (question.job.pipelines - 1) if question.technique.reroutes else 0


def targets(question: CatalogQuestion, tolerance: int, per: str = "auto") -> list[Target]:
    """Return the plans of a catalog for up to `tolerance` failures. Raises InputError."""
    job = question.job
    most = most_failures(question)
    if not 0 <= tolerance <= most:
        why = "each stage needs a living worker" if question.technique.reroutes else "fault-free plans take no failure"
        raise InputError("--tolerance", tolerance, f"a number of failures from 0 to {most}, as {why}")
    if per not in ("auto", "pattern", "count"):
        raise InputError("--per", per, "auto, pattern or count")
    listed = listed_patterns(job, tolerance, per)
    if listed is not None:
        return [Target(len(p), (by_stage(p, job),)) for p in listed]
    if job.speeds:
        raise InputError("--tolerance", tolerance, "fewer failures: workers of unlike speed need a plan per pattern")
    return _by_count(question, tolerance)


def listed_patterns(job: Job, tolerance: int, per: str = "auto") -> list[frozenset[Worker]] | None:
    """Return the failure patterns, if each gets its own plan; None if a plan is made per failure count."""
    if per == "count":
        return None
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    listed = list(every if per == "pattern" else islice(every, LISTED + 1))
    return listed if per == "pattern" or len(listed) <= LISTED else None


def _by_count(question: CatalogQuestion, tolerance: int) -> list[Target]:
    """Return one target per count: the best distributions by each period model.

    The failures of all stages are in the same pipelines. That makes shorter plans (measured: up to 3 % on 64 x 32),
    and a plan for a count then serves for every smaller count as well.
    """
    ranked = models(question.job, question.technique, question.memory)
    found: list[list[Counts]] = [list(best_distributions(model, tolerance)) for model in ranked]
    out = []
    for count in range(tolerance + 1):
        options = dict.fromkeys(f[count] for f in found if count < len(f))
        out.append(Target(count, tuple(tuple(tuple(range(n)) for n in counts) for counts in options)))
    return out


def _there(question: CatalogQuestion, folder: PlanStore, effort: Effort) -> set[str]:
    """Return the plans that need not be made again: undamaged, and optimal or made with as much effort."""
    headers = headers_of(folder)
    return {name for name, h in headers.items() if question.fits(h.partition) and _enough(h, effort)}


def _keep(question: CatalogQuestion, folder: WritablePlanStore, name: str, blob: bytes) -> bytes:
    """Puts a plan, unless the stored one is as good. Returns what is stored now."""
    with folder.alone():
        better = _better(question, folder, name, blob)
        folder.put(name, better)
    return better


def _better(question: CatalogQuestion, folder: PlanStore, name: str, blob: bytes) -> bytes:
    """Choose between a new plan and the stored one, which another solver may have made with more effort."""
    try:
        before = folder.get(name)
        kept = decode_header(before, source=name) if before is not None else None
    except PlanError:
        return blob
    new = decode_header(blob, source=name)
    if before is None or kept is None or not question.fits(kept.partition) or new.merit > kept.merit:
        return blob
    return with_effort(before, new.effort)


def _enough(header: Header, effort: Effort) -> bool:
    if header.solver.status == "optimal" or header.effort == effort:
        return True
    if effort.solver == "list":
        return True
    return header.effort.solver == effort.solver and (header.effort.time_limit or 0) >= (effort.time_limit or 0)


def _tasks(question: CatalogQuestion, missing: Sequence[Target], effort: Effort) -> Iterator[Task]:
    question = replace(question, job=question.job.at_home)
    nested = len({t.failures for t in missing}) == len(missing)
    for chunk in _chunks(question, missing, effort, nested):
        yield Task(question, effort, tuple(chunk), nested)


def _chunks(
    question: CatalogQuestion, missing: Sequence[Target], effort: Effort, nested: bool
) -> Iterator[Sequence[Target]]:
    """Group the targets: few enough in each group to share them out and to stop soon.

    With equally many failures on every stage a plan is at its best, and it serves for all counts down to
    the next such count. So where there are many counts, the largest of each group is such a count.
    """
    stages = question.job.stages
    if nested and effort.solver == "list" and len(missing) >= 4 * stages:
        yield from (list(g) for _, g in groupby(missing, key=lambda t: -(-t.failures // stages)))
        return
    size = CHUNK if effort.solver == "list" else 1
    yield from (missing[begin : begin + size] for begin in range(0, len(missing), size))


# -- neighbouring counts ---------------------------------------------------------------------


def _inherit(question: CatalogQuestion, folder: WritablePlanStore) -> None:
    """Do across all tasks what `work` does within one, also where each pattern has its own plan.

    A plan is replaced by the plan for a pattern with one failure more, with its pipelines renamed, where that is
    shorter (though an all-reduce among more peers may take longer). It begins with the most failures, so that this
    holds for any number of further failures. Then no plan of the catalog is longer than one for more failures.
    """
    job = question.job
    headers = {name: header for name, header in headers_of(folder).items() if question.fits(header.partition)}
    names: dict[int, list[str]] = {}
    for name, header in headers.items():
        names.setdefault(header.failures, []).append(name)
    for count in sorted(names, reverse=True):
        for name in names[count]:
            longest = max((headers[fewer].metrics.period for fewer in names.get(count - 1, [])), default=0)
            if headers[name].metrics.period >= longest:
                continue
            for worker in sorted(headers[name].workers):
                failed = headers[name].workers - {worker}
                pattern, places = canonical_pattern(failed, job)
                kept = headers.get(plan_name(pattern))
                if kept is None or kept.metrics.period <= headers[name].metrics.period:
                    continue
                blob = folder.get(name)
                assert blob is not None
                more = unpack(blob, question, hashed=False).schedule()
                made = ReusablePlan(more, count, headers[name].solver.name).for_fewer(question.problem(failed))
                if not made:
                    continue
                if list(places) != sorted(places):
                    same = [range(job.pipelines)] * job.stages
                    made = replace(made, schedule=made.schedule.renamed(places, same))
                bound = round(kept.metrics.lower_bound * job.ticks_per_unit)
                if made.period < round(kept.metrics.period * job.ticks_per_unit):
                    stored, blob = made.stored(bound, kept.effort, question.over)
                    headers[stored] = decode_header(_keep(question, folder, stored, blob), source=stored)
