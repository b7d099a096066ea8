"""Makes a catalog: what to plan ahead, in parallel, resumable.

Where all failure patterns can be listed each gets a plan. Larger grids get one plan per failure
*count*, for the distribution over stages that costs least: any failures can be led there by
migrations (planner.layers.migration), and failures with equal counts per stage need not even those.

`work` plans some targets, in whichever process or on whichever machine; an engine runs it, in this process or in
others; `CatalogBuild` gives them out and stores what comes back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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

# -- plans some targets of a catalog, in whichever process or on whichever machine --------------

# Ops from which alternatives are compared by a quick try, not solved in full.
LARGE = 50_000
# Of such grids every TRIED-th count tries other places for its failures than its neighbour's.
TRIED = 4

Blobs = list[tuple[str, bytes]]
Rows = tuple[tuple[int, ...], ...]  # by stage, the pipelines whose worker is dead


@dataclass(frozen=True)
class Target:
    """One plan to make: for whichever of the `alternatives` comes out shortest."""

    failures: int
    alternatives: tuple[Rows, ...]


@dataclass(frozen=True)
class Task:
    """Targets of one question, for one process. Plain data: it goes to other processes as it is."""

    question: CatalogQuestion
    effort: Effort
    targets: tuple[Target, ...]
    nested: bool


def work(task: Task) -> Blobs:
    """Plans the targets of one task: (name, stored plan) of each.

    From the largest count down: with `nested` failures a plan for more serves for fewer, and where
    it is as short as the bound allows for fewer, nothing needs solving.
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
            # What its neighbour did without is tried at every few counts only.
            worth_trying = taken is None or solved or target.failures % TRIED == 0
            problems = _promising(problems, taken) if worth_trying else []
        solved = bool(problems)
        if problems:
            begin = time.perf_counter()
            limit = effort.time_limit or float("inf")
            ahead = effort.solver != "list"  # its plans are compared with each other in the end
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
    if over == "schedules":  # (nothing is planned to compare it)
        return Layout(problem, Bound(0, ""), over, 0, 0, (), "")
    return lay_out(problem.job, problem.failed, technique=problem.technique, memory=problem.memory, over=over)


@dataclass(frozen=True)
class ReusablePlan:
    """A plan that may serve for fewer failures too. made_for: how many it was made for; solver: by whom."""

    schedule: Schedule
    made_for: int
    solver: str

    @property
    def period(self) -> int:
        return self.schedule.period

    def for_fewer(self, problem: Problem) -> ReusablePlan | None:
        """The same ops, when the failures of `problem` are among its own: whoever lives after all stays idle."""
        own = self.schedule.problem
        if not problem.failed < own.failed:
            return None
        if problem.job.layers:  # its partition goes with it
            problem = replace(problem, job=problem.job.with_partition(own.job.partition))
        return replace(self, schedule=self.schedule.for_fewer(problem))

    def stored(self, bound: int, effort: Effort, over: Over) -> tuple[str, bytes]:
        problem = self.schedule.problem
        if self.solver not in PROVERS:  # a bound that another solver has proven is not this one's to claim
            bound = min(bound, period_bound(problem))
        message = f"the plan for {self.made_for} failures, which serves for {len(problem.failed)} as well"
        solution = Solution(self.schedule, bound, self.solver, 0.0, message, over)
        return plan_name(problem.failed), _encoded(solution, effort)


def _stored(solution: Solution, seconds: float, effort: Effort) -> tuple[str, bytes, ReusablePlan]:
    """Name and stored form of a solution."""
    schedule, failed = solution.schedule, solution.schedule.problem.failed
    blob = _encoded(replace(solution, seconds=seconds), effort)
    return plan_name(failed), blob, ReusablePlan(schedule, len(failed), solution.solver)


def _encoded(solution: Solution, effort: Effort) -> bytes:
    metrics, solver = metrics_of(solution), solver_of(solution, seconds=solution.seconds)
    # Nobody asks for its fingerprint, which takes as long as all else, before it is found in the catalog.
    return pack(checked(Plan.of(solution.schedule, metrics=metrics, solver=solver, fingerprint="")), effort)


def _promising(problems: Sequence[Problem], taken: ReusablePlan | None) -> list[Problem]:
    """The one that comes out shortest under the list scheduler's first rule, when that beats `taken`.

    All rules for all alternatives would take several times as long on grids of this size, for
    little: between rules periods differ by less than a percent.
    """
    best: Problem | None = None
    shortest = taken.period if taken else None
    for problem in problems:
        period = ListScheduler().solve(problem, Run(0)).schedule.period
        if shortest is None or period < shortest:
            best, shortest = problem, period
    return [] if best is None else [best]


# -- where the plans of a catalog are made ------------------------------------------------------

# Seconds after which a wait for the next result looks whether it is to stop.
POLL = 0.2


class Engine(Protocol):
    """Runs tasks and yields what each made, in any order.

    Once `cancelled` is true no further task is begun; those under way are waited for.
    """

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]: ...


class InlineEngine:
    """One after the other in this process."""

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]:
        for task in tasks:
            if cancelled and cancelled():
                return
            yield work(task)


class LocalEngine:
    """`jobs` processes on this machine. Raises PlannerError when one of them dies.

    Spawned, 0.4 s each, and not forked from the server of openrecycle.forking: so they have the process group, the
    niceness and the limit on memory of whoever plans, which is a console's child or a command line, and end with it.
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
    """Processes that are started inside never see SIGINT, not even before `_prepare`: they inherit the
    mask. This thread gets what came meanwhile at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_engine(jobs: int | None) -> Engine:
    """jobs: processes, by default one per core. Raises InputError."""
    count = os.cpu_count() or 1 if jobs is None else jobs
    if not 1 <= count <= 1024:
        raise InputError("--jobs", count, "a number of processes from 1 to 1024")
    return InlineEngine() if count == 1 else LocalEngine(count)


def _prepare() -> None:
    """In a new process: Ctrl-C is for the parent, and no process outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(partial(os._exit, 1))


# -- makes a catalog ----------------------------------------------------------------------------

# Up to so many patterns each gets its own plan.
LISTED = 500
# Targets that one task plans, where nothing speaks for another number.
CHUNK = 16


class WritablePlanStore(PlanStore, Protocol):
    """Where plans lie that also takes new ones, one by one as they are made."""

    def put(self, name: str, blob: bytes) -> None: ...


@dataclass(frozen=True)
class Filled:
    """planned: made now. kept: there already. total: in all. finished: not stopped before its end."""

    planned: int
    kept: int
    total: int
    finished: bool


@dataclass(frozen=True)
class BuildReport(Filled):
    """With the catalog."""

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
    """Plans what is not there yet into a folder under `root`; a damaged plan counts as not there.

    per: `pattern`, `count`, or `auto`. on_progress gets (plans that are there, plans in all).
    Once `cancelled` is true no further task is begun, and what is done is kept. Raises InputError.
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
    """Plans those of `wanted` (see `targets`) that `keeper` lacks; see `build_catalog`."""
    there = _there(question, keeper, effort)
    missing = [t for t in wanted if not any(plan_name(workers_in(a)) in there for a in t.alternatives)]
    done = len(wanted) - len(missing)
    planned = 0
    if on_progress:
        on_progress(done, len(wanted))
    for blobs in engine.run(_tasks(question, missing, effort), cancelled):
        for name, blob in blobs:
            keeper.put(name, _better(question, keeper, name, blob))
            planned += 1
        if on_progress:
            on_progress(done + planned, len(wanted))
    finished = planned == len(missing)
    if finished:
        _inherit(question, keeper)
    return Filled(planned, done, len(wanted), finished)


# -- what to plan ----------------------------------------------------------------------------


def targets(question: CatalogQuestion, tolerance: int, per: str = "auto") -> list[Target]:
    """Everything that a catalog up to `tolerance` failures holds. Raises InputError."""
    job = question.job
    most = job.stages * (job.pipelines - 1) if question.technique.reroutes else 0
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
    """The failure patterns that get a plan each; None where a plan is made per failure count instead."""
    if per == "count":
        return None
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    listed = list(every if per == "pattern" else islice(every, LISTED + 1))
    return listed if per == "pattern" or len(listed) <= LISTED else None


def _by_count(question: CatalogQuestion, tolerance: int) -> list[Target]:
    """One target per count: the best distributions by each period model.

    The failures of all stages lie in the same pipelines, which makes shorter plans (measured:
    up to 3 % on 64 x 32) and makes the plan of a count one for every smaller count as well.
    """
    ranked = models(question.job, question.technique, question.memory)
    found: list[list[Counts]] = [list(best_distributions(model, tolerance)) for model in ranked]
    out = []
    for count in range(tolerance + 1):
        options = dict.fromkeys(f[count] for f in found if count < len(f))
        out.append(Target(count, tuple(tuple(tuple(range(n)) for n in counts) for counts in options)))
    return out


def _there(question: CatalogQuestion, folder: PlanStore, effort: Effort) -> set[str]:
    """Plans that need not be made again: undamaged, and optimal or made with as much effort."""
    headers = headers_of(folder)
    return {name for name, h in headers.items() if question.fits(h.partition) and _enough(h, effort)}


def _better(question: CatalogQuestion, folder: PlanStore, name: str, blob: bytes) -> bytes:
    """What is kept of a new plan and the one that is there, which another solver may have made with more effort."""
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
    """Targets that go together: few enough to share out and to stop soon.

    With as many failures on every stage a plan is at its best, and serves for all counts down to
    one stage less: so where there are many counts, each chunk ends with such a one.
    """
    stages = question.job.stages
    if nested and effort.solver == "list" and len(missing) >= 4 * stages:
        yield from (list(g) for _, g in groupby(missing, key=lambda t: -(-t.failures // stages)))
        return
    size = CHUNK if effort.solver == "list" else 1
    yield from (missing[begin : begin + size] for begin in range(0, len(missing), size))


# -- neighbouring counts ---------------------------------------------------------------------


def _inherit(question: CatalogQuestion, folder: WritablePlanStore) -> None:
    """What `work` does within a task, across all of them, also where each pattern has a plan.

    A plan is replaced by that of a pattern with one failure more, its pipelines renamed, which is shorter when it
    serves for these (a reduction among more peers may take longer); from the most failures down, so that it holds
    for any number more. No plan of the catalog is beaten by its neighbour then.
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
                    folder.put(stored, blob)
                    headers[stored] = decode_header(blob, source=stored)
