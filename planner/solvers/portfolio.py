"""`make_plan`: every plan is made here. The list scheduler comes first, then other solvers within the time given.

The plans are not checked here. The code that stores a plan checks it (planner.check.checked), so that the check does
not delay a recovery.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import failures_per_stage, with_one_more
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Worker
from openrecycle.planner.plans.baseline import REFERENCES, reference_period, reference_schedule
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.plan import MetricsDoc, Plan, SolverDoc
from openrecycle.planner.solvers.base import Cancelled, ChosenLayout, ProgressCallback, Run, Solution, Solver
from openrecycle.planner.solvers.list_scheduler import SELECTIVE_ITEMS, ListScheduler, best_fault_free, tries
from openrecycle.planner.solvers.local_search import COMPILED_SECONDS, Rearranger, Tuner, rearrangeable

SOLVERS = ("auto", "list", "cp-sat", "milp")
# Problems of at most SMALL ops give CP-SAT most of the time, those of more than LARGE the local search.
SMALL, LARGE = 800, 4_000
# Beyond so many ops, where workers have failed, CP-SAT would not even begin to search within the time.
HUGE = 100_000
# How many plans for more failures `of_more_failures` looks at: as many as have LOOK_EFFORT ops in all, but no fewer and
# no more than these limits. With another solver the looks get only LOOK_SHARE of the time.
LOOK_EFFORT, FEWEST_LOOKS, LOOKS, LOOK_SHARE = 5_000_000, 2, 100, 0.25


def make_plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    on_progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
    look_ahead: bool = True,
    layout: ChosenLayout | None = None,
) -> Plan:
    """Solves `problem` and makes a Plan of the result, with its bound and its references; see `best_solution`.

    layout: the layout that `problem` was cut and staffed by, if one was chosen: the plan then carries its bound.
    """
    run = Run(time_limit, cancelled, on_progress)
    solution = best_solution(problem, run, solver=solver, look_ahead=look_ahead)
    if layout is not None:
        solution = of_layout(solution, layout)
    return plan_of(solution, seconds=run.elapsed)


def of_layout(solution: Solution, layout: ChosenLayout) -> Solution:
    """Replace the bound by that over all layouts that `layout` was chosen from."""
    if layout.over == "schedules":
        return solution
    return replace(solution, bound=layout.bound.ticks, over=layout.over)


def check_effort(solver: str, time_limit: float) -> None:
    """Raises InputError unless the solver exists and the time limit is above 0."""
    if solver not in SOLVERS:
        raise InputError("--solver", solver, "one of " + ", ".join(SOLVERS))
    if not time_limit > 0:
        raise InputError("--time-limit", time_limit, "a number of seconds above 0")


def best_solution(
    problem: Problem, run: Run | None = None, *, solver: str = "auto", look_ahead: bool = True
) -> Solution:
    """Return the best schedule found within the run.

    solver: `list` only the list scheduler; `cp-sat`, `milp` the list scheduler's schedule
    improved by that solver; `auto` the list scheduler and, while the gap is open, local search
    over its settings and over windows of the order, then CP-SAT.
    look_ahead: also try plans that the list scheduler makes for more failures (`of_more_failures`), whatever the
    solver; False where a plan is needed at once. Raises InputError and InfeasibleError.
    """
    run = run or Run()
    check_effort(solver, run.time_limit)
    solution = ListScheduler().solve(problem, run)
    if look_ahead and not solution.optimal:
        share = 1.0 if solver == "list" else LOOK_SHARE
        solution = of_more_failures(solution, run.part(share * run.time_limit - run.elapsed))
    for find, share in _steps(solver, problem, run.time_limit):
        if solution.optimal:
            break
        if run.over:
            why = "stopped" if run.stopped else "the time limit is reached"
            solution = replace(solution, message=f"{why}; this is the best plan of {solution.solver}")
            break
        step = find()
        if step is None:
            solution = replace(solution, message=f"OR-Tools is not installed here; best plan of {solution.solver}")
            break
        found = step.solve(problem, run.part(run.left * share), warm_start=solution.schedule)
        solution = _better(solution, found)
    return solution


def of_more_failures(solution: Solution, run: Run) -> Solution:
    """Try the list scheduler's plans for more failures, and take one if it is shorter: it serves for these too.

    While they may be shorter, plans for one failure more are made, those of the lowest bounds first; then for one more
    failure than those, from the shortest plan on, so that a plan which is found for a set of failures is also found for
    each of its subsets. The number of looks depends on the job alone; only the end of the run can cut it short.
    """
    problem = solution.schedule.problem
    if not problem.failed:
        return solution
    looks = _looks(problem.job)
    seen: set[frozenset[Worker]] = {problem.failed}
    # Sets of failures to go on from, with the period of their plan and a serial number.
    waiting: list[tuple[int, int, frozenset[Worker]]] = [(solution.schedule.period, 0, problem.failed)]
    while waiting:
        _, _, start = heappop(waiting)
        more = [replace(problem, failed=failed) for failed in _one_more(start, problem.job) if failed not in seen]
        for wider in sorted(more, key=period_bound):
            if solution.optimal or not looks or run.over:
                return solution
            if period_bound(wider) >= solution.schedule.period:
                break
            looks -= 1
            seen.add(wider.failed)
            other = ListScheduler().solve(wider, run.quiet()).schedule.for_fewer(problem)
            heappush(waiting, (other.period, len(seen), wider.failed))
            if other.period < solution.schedule.period:
                solution = replace(solution, schedule=other)
    return solution


def _looks(job: Job) -> int:
    """Return how many plans for more failures are made at most."""
    return min(LOOKS, max(FEWEST_LOOKS, LOOK_EFFORT // (job.ops * tries(job.ops))))


def _one_more(failed: frozenset[Worker], job: Job) -> Iterator[frozenset[Worker]]:
    """Yield `failed` with one more worker; on large grids only workers of the pipeline with most failures."""
    if job.pipelines * job.stages * job.micro_batches <= SELECTIVE_ITEMS:
        yield from with_one_more(failed, job)
        return
    counts, per_pipeline = failures_per_stage(failed, job), Counter(worker.pipeline for worker in failed)
    worst = max(per_pipeline, key=lambda p: (per_pipeline[p], -p))
    for stage, count in enumerate(counts):
        if count < job.pipelines - 1 and Worker(worst, stage) not in failed:
            yield failed | {Worker(worst, stage)}


def plan_of(solution: Solution, *, seconds: float) -> Plan:
    """Make the Plan document of a solution: metrics, references, solver."""
    return Plan.of(solution.schedule, metrics=metrics_of(solution), solver=solver_of(solution, seconds=seconds))


def metrics_of(solution: Solution) -> MetricsDoc:
    """Compute the numbers of the schedule, its bound, and the comparisons with the references."""
    schedule = solution.schedule
    job = schedule.problem.job
    # A plan around failures is also a plan without them, so it may be shorter than the baseline.
    best = min(best_fault_free(job, schedule.problem.memory).period, schedule.period)
    bound = min(solution.bound, schedule.period)
    return MetricsDoc.of(schedule, bound=bound, reference=reference_period(job.at_home), best=best, over=solution.over)


def solver_of(solution: Solution, *, seconds: float) -> SolverDoc:
    """Return the name of the solver, its time, and whether the schedule is proven optimal."""
    return SolverDoc(
        name=solution.solver,
        status="optimal" if solution.optimal else "feasible",
        seconds=round(seconds, 6),
        message=solution.message,
    )


def _exact(name: str) -> Solver | None:
    """Import an exact solver only when it is needed: agents plan with the list scheduler and lack OR-Tools.

    Returns None for `auto` where OR-Tools is missing; raises InputError where the user named the solver.
    """
    try:
        if name == "milp":
            from openrecycle.planner.solvers.milp import MilpSolver

            return MilpSolver()
        from openrecycle.planner.solvers.cp_sat import CpSatSolver

        return CpSatSolver()
    except ImportError as error:
        if name == "auto":
            return None
        raise InputError("--solver", name, f"list, as OR-Tools can't be loaded here ({error})") from None


Step = tuple[Callable[[], Solver | None], float]


def _steps(solver: str, problem: Problem, time_limit: float) -> list[Step]:
    """Return the solvers that follow the list scheduler, each with its share of the time left.

    The larger the grid, the less CP-SAT gains and the more the searches over settings and over windows gain. Without
    failures CP-SAT solves one pipeline, so the size of the grid does not matter.
    """
    if solver == "list" or not problem.technique.reroutes:
        return []
    if solver != "auto":
        return [(lambda: _exact(solver), 1.0)]
    ops = problem.job.ops
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
    """Return the shorter schedule with the higher of the two bounds, under the name of the solver that made it so."""
    bound = max(first.bound, second.bound)
    if second.schedule.period < first.schedule.period:
        return replace(second, bound=bound)
    name = second.solver if bound > first.bound else first.solver
    return replace(first, bound=bound, solver=name, message=second.message)


def reference_plan(job: Job, name: str) -> Plan:
    """Make a plan of a published fault-free schedule (see planner.plans.baseline).

    name: 1f1b, gpipe, zb-h1 or zb-h2. Raises InputError.
    """
    if name not in REFERENCES:
        raise InputError("--reference", name, "one of " + ", ".join(REFERENCES))
    begin = time.perf_counter()
    published = REFERENCES[name]
    problem = Problem(job, technique=published.technique, memory=MemoryLimit(published.memory(job)))
    schedule = reference_schedule(problem, name)
    seconds = time.perf_counter() - begin
    return plan_of(Solution(schedule, period_bound(problem), name, seconds), seconds=seconds)
