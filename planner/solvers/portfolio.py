"""`make_plan`: the one way to a plan. List scheduler first, then the rest within the time given."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache

from planner.baseline import reference_period
from planner.errors import InputError
from planner.job import Job, MemoryLimit, Problem, Technique
from planner.plan import MetricsDoc, Plan, SolverDoc
from planner.schedule import Schedule
from planner.solvers.base import Cancelled, ProgressCallback, Solution, Solver
from planner.solvers.list_scheduler import ListScheduler

SOLVERS = ("auto", "list", "cp-sat", "milp")


def make_plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    on_progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> Plan:
    """Solves `problem` and puts the result, its bound and its references in a Plan.

    solver: `list` only the list scheduler; `cp-sat`, `milp` the list scheduler's schedule
    improved by that solver; `auto` the list scheduler, then CP-SAT when the gap is still open.
    time_limit: seconds. Raises InputError and InfeasibleError.
    """
    if solver not in SOLVERS:
        raise InputError("--solver", solver, "one of " + ", ".join(SOLVERS))
    if not time_limit > 0:
        raise InputError("--time-limit", time_limit, "a number of seconds above 0")
    begin = time.perf_counter()
    solution = ListScheduler().solve(problem, time_limit=time_limit, on_progress=on_progress, cancelled=cancelled)
    if solver != "list" and not solution.optimal:
        left = time_limit - (time.perf_counter() - begin)
        if cancelled and cancelled():
            solution = replace(solution, message="stopped; this is the list scheduler's plan")
        elif left <= 0:
            solution = replace(solution, message="the time limit left none for exact solving; list scheduler's plan")
        else:
            exact = _exact(solver)
            if exact is None:
                solution = replace(solution, message="OR-Tools is not installed here; list scheduler's plan")
            else:
                found = exact.solve(
                    problem,
                    time_limit=left,
                    warm_start=solution.schedule,
                    on_progress=on_progress,
                    cancelled=cancelled,
                )
                solution = _better(solution, found)
    return plan_of(solution, seconds=time.perf_counter() - begin)


def plan_of(solution: Solution, *, seconds: float) -> Plan:
    """The Plan document of a solution: metrics, references, solver."""
    schedule = solution.schedule
    job = schedule.problem.job
    reference = reference_period(job)
    best = _best_fault_free(schedule)
    bound = min(solution.bound, schedule.period)
    metrics = MetricsDoc(
        makespan=job.units(schedule.makespan),
        period=job.units(schedule.period),
        lower_bound=job.units(bound),
        gap=schedule.period / bound - 1,
        bubble_fraction=schedule.bubble_fraction,
        slowdown_vs_1f1b=schedule.period / reference - 1,
        slowdown_vs_best=schedule.period / best - 1,
        peak_activations={str(w): n for w, n in sorted(schedule.peak_activations.items())},
    )
    document = SolverDoc(
        name=solution.solver,
        status="optimal" if solution.optimal else "feasible",
        seconds=round(seconds, 6),
        message=solution.message,
    )
    return Plan.of(schedule, metrics=metrics, solver=document)


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


def _better(first: Solution, second: Solution) -> Solution:
    """The shorter schedule with the higher of the two bounds; the later solver keeps the name."""
    schedule = second.schedule if second.schedule.period <= first.schedule.period else first.schedule
    return replace(second, schedule=schedule, bound=max(first.bound, second.bound))


def _best_fault_free(schedule: Schedule) -> int:
    """Ticks of our best plan for the same job without failures, by the list scheduler."""
    problem = schedule.problem
    if not problem.failed:
        return schedule.period
    return _fault_free_period(problem.job, problem.technique, problem.memory)


@lru_cache(maxsize=64)
def _fault_free_period(job: Job, technique: Technique, memory: MemoryLimit) -> int:
    # Pipelines without failures are independent of each other: one stands for all.
    alone = Problem(replace(job, pipelines=1), technique=technique, memory=memory)
    return ListScheduler().solve(alone, time_limit=float("inf")).schedule.period
