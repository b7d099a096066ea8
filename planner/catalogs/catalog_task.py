"""Plans some targets of a catalog, in whichever process or on whichever machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openrecycle.planner.check import checked
from openrecycle.planner.jobs.job import Over, Problem, Worker
from openrecycle.planner.layers.partition import Layout, bound_over, lay_out
from openrecycle.planner.plans.bounds import Bound, period_bound
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, pack, plan_name
from openrecycle.planner.plans.plan import PROVERS, Plan
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run, Solution
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import best_solution, metrics_of, of_layout, solver_of

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


def workers_of(rows: Rows) -> frozenset[Worker]:
    return frozenset(Worker(p, s) for s, row in enumerate(rows) for p in row)


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
        problems = [question.problem(workers_of(rows)) for rows in target.alternatives]
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
