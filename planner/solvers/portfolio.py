"""`make_plan`: the one way to a plan. List scheduler first, then the rest within the time given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from planner.baseline import reference_period
from planner.bounds import period_bound
from planner.errors import InputError
from planner.failures import with_one_more
from planner.fault_free import best_fault_free
from planner.job import Problem
from planner.plan import MetricsDoc, Plan, SolverDoc
from planner.solvers.base import Cancelled, ProgressCallback, Solution, Solver
from planner.solvers.list_scheduler import SELECTIVE_ITEMS, ListScheduler
from planner.solvers.rearranger import Rearranger, rearrangeable
from planner.solvers.tuning import COMPILED_SECONDS, Tuner

SOLVERS = ("auto", "list", "cp-sat", "milp")
# Ops up to which CP-SAT has most of the time, and beyond which the local search has.
SMALL, LARGE = 800, 4_000
# Beyond so many ops, where pipelines differ, CP-SAT has not begun when its time is over.
HUGE = 100_000
# Part of the time in which plans for more failures are looked at.
SUPERSETS = 0.1


class PlanForm(Protocol):
    def __call__(self, solution: Solution, *, seconds: float) -> Plan: ...


def make_plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    on_progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
    form: PlanForm | None = None,
) -> Plan:
    """Solves `problem` and puts the result, its bound and its references in a Plan; see `best_solution`.

    form: what makes a Plan of a solution that took `seconds`; None: `plan_of`.
    """
    begin = time.perf_counter()
    solution = best_solution(
        problem, solver=solver, time_limit=time_limit, on_progress=on_progress, cancelled=cancelled
    )
    return (form or plan_of)(solution, seconds=time.perf_counter() - begin)


def best_solution(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    on_progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> Solution:
    """The best schedule found within the time.

    solver: `list` only the list scheduler; `cp-sat`, `milp` the list scheduler's schedule
    improved by that solver; `auto` the list scheduler and, while the gap is open, local search
    over its settings and over windows of the order, then CP-SAT.
    time_limit: seconds. Raises InputError and InfeasibleError.
    """
    if solver not in SOLVERS:
        raise InputError("--solver", solver, "one of " + ", ".join(SOLVERS))
    if not time_limit > 0:
        raise InputError("--time-limit", time_limit, "a number of seconds above 0")
    begin = time.perf_counter()

    def left() -> float:
        return time_limit - (time.perf_counter() - begin)

    solution = ListScheduler().solve(problem, time_limit=time_limit, on_progress=on_progress, cancelled=cancelled)
    if solver != "list" and not solution.optimal:
        solution = of_more_failures(solution, until=begin + SUPERSETS * time_limit, cancelled=cancelled)
    for find, share in _steps(solver, problem, time_limit):
        if solution.optimal:
            break
        if (cancelled and cancelled()) or left() <= 0:
            why = "stopped" if left() > 0 else "the time limit is reached"
            solution = replace(solution, message=f"{why}; this is the best plan of {solution.solver}")
            break
        step = find()
        if step is None:
            solution = replace(solution, message=f"OR-Tools is not installed here; best plan of {solution.solver}")
            break
        found = step.solve(
            problem,
            time_limit=left() * share,
            warm_start=solution.schedule,
            on_progress=on_progress,
            cancelled=cancelled,
        )
        solution = _better(solution, found)
    return solution


def of_more_failures(solution: Solution, *, until: float, cancelled: Cancelled | None = None) -> Solution:
    """The plan for one failure more, which is one for these too, where it is shorter."""
    problem = solution.schedule.problem
    job = problem.job
    if not problem.failed or job.pipelines * job.stages * job.micro_batches > SELECTIVE_ITEMS:
        return solution
    for failed in with_one_more(problem.failed, job):
        if solution.optimal or time.perf_counter() > until or (cancelled and cancelled()):
            break
        more = replace(problem, failed=failed)
        if period_bound(more) >= solution.schedule.period:
            continue
        left = until - time.perf_counter()
        other = ListScheduler().solve(more, time_limit=left, cancelled=cancelled).schedule.for_fewer(problem)
        if other.period < solution.schedule.period:
            solution = replace(solution, schedule=other)
    return solution


def plan_of(solution: Solution, *, seconds: float) -> Plan:
    """The Plan document of a solution: metrics, references, solver."""
    return Plan.of(solution.schedule, metrics=metrics_of(solution), solver=solver_of(solution, seconds=seconds))


def metrics_of(solution: Solution) -> MetricsDoc:
    """The numbers of the schedule, its bound, and what it is compared with."""
    schedule = solution.schedule
    job = schedule.problem.job
    reference = reference_period(job)
    # A plan around failures is one without them too, so it may show the baseline to be loose.
    best = min(best_fault_free(job, schedule.problem.memory).period, schedule.period)
    bound = min(solution.bound, schedule.period)
    return MetricsDoc(
        makespan=job.units(schedule.makespan),
        period=job.units(schedule.period),
        lower_bound=job.units(bound),
        gap=schedule.period / bound - 1,
        bubble_fraction=schedule.bubble_fraction,
        slowdown_vs_1f1b=schedule.period / reference - 1,
        slowdown_vs_best=schedule.period / best - 1,
        peak_activations={str(w): n for w, n in sorted(schedule.peak_activations.items())},
    )


def solver_of(solution: Solution, *, seconds: float) -> SolverDoc:
    """Who made the schedule, in how long, and whether it is proven optimal."""
    return SolverDoc(
        name=solution.solver,
        status="optimal" if solution.optimal else "feasible",
        seconds=round(seconds, 6),
        message=solution.message,
    )


def _exact(name: str) -> Solver | None:
    """Imported only when asked for: agents plan with the list scheduler and lack OR-Tools.

    None: `auto` where OR-Tools is missing. Raises InputError when it was asked for by name.
    """
    try:
        if name == "milp":
            from planner.solvers.milp import MilpSolver

            return MilpSolver()
        from planner.solvers.cp_sat import CpSatSolver

        return CpSatSolver()
    except ImportError as error:
        if name == "auto":
            return None
        raise InputError("--solver", name, f"list, as OR-Tools can't be loaded here ({error})") from None


Step = tuple[Callable[[], Solver | None], float]


def _steps(solver: str, problem: Problem, time_limit: float) -> list[Step]:
    """What follows the list scheduler, each with its share of the time left.

    The larger the grid, the less CP-SAT can do for it and the more the searches over settings and over
    windows do. Without failures CP-SAT solves for one pipeline of a grid of any size.
    """
    if solver == "list":
        return []
    if solver != "auto":
        return [(lambda: _exact(solver), 1.0)]
    job = problem.job
    ops = 3 * job.pipelines * job.stages * job.micro_batches
    exact: Step = (lambda: _exact(solver), 1.0)
    huge = bool(problem.failed) and ops > HUGE
    if ops <= SMALL:
        return [(Tuner, 0.05), exact]
    if not rearrangeable(problem) or time_limit < COMPILED_SECONDS:
        return [(Tuner, 1.0)] if huge else [(Tuner, 0.5 if ops <= LARGE else 0.8), exact]
    if huge:
        return [(Rearranger, 1.0)]
    return [(Tuner, 0.1), (Rearranger, 0.5 if ops <= LARGE else 0.85), exact]


def _better(first: Solution, second: Solution) -> Solution:
    """The shorter schedule, and whose it is, with the higher of the two bounds."""
    bound = max(first.bound, second.bound)
    if second.schedule.period < first.schedule.period:
        return replace(second, bound=bound)
    name = second.solver if bound > first.bound else first.solver
    return replace(first, bound=bound, solver=name, message=second.message)
