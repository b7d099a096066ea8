"""The CP-SAT solver on the worked example, and as a Solver: warm start, progress, cancel, limits."""

from __future__ import annotations

import time

import pytest

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageRoom, Technique, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers import cp_sat
from openrecycle.planner.solvers.base import Run, SolverProgress
from openrecycle.planner.solvers.cp_sat import CpSatSolver, ScheduleModel, run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.routing import OpKey, Reduction
from tests.conftest import at_length
from tests.golden import golden

JOB = Job.uniform(3, 4, 6)
FAILED = frozenset({Worker(1, 2)})


def worked_example(technique: str, memory: str, failed: frozenset[Worker] = FAILED) -> Problem:
    return Problem(JOB, failed, Technique(technique), MemoryLimit.parse(memory))


def serial(problem: Problem) -> Schedule:
    """One micro-batch after the other: valid under every memory limit, and as slow as can be."""
    reduction = Reduction.of(problem)
    job = problem.job
    stages = range(job.stages)
    count = job.pipelines * job.micro_batches
    starts: dict[OpKey, int] = {}
    clock = 0
    for index in range(count):
        for s in stages:
            starts["F", index, s] = clock
            clock += job.ticks[s].forward + (job.transfer_ticks[s] if s + 1 < job.stages else 0)
        for s in reversed(stages):
            starts["I", index, s] = clock
            starts["W", index, s] = clock + job.ticks[s].input_backward
            clock += job.ticks[s].backward + (job.transfer_ticks[s - 1] if s else 0)
    return Reduction(problem, reduction.routes, (tuple(range(count)),), {}).schedule(starts)


@pytest.mark.parametrize(
    ("technique", "memory", "failed", "period"),
    [
        ("adaptive", "1f1b", FAILED, 36),
        at_length("adaptive", "3", FAILED, 35),
        at_length("adaptive", "4", FAILED, 33),
        ("adaptive", "none", FAILED, 33),
        at_length("decoupled", "none", FAILED, 29),
        ("staggered", "none", FAILED, 27),
        ("staggered", "1f1b", FAILED, 32),
        ("staggered", "uniform", frozenset(), 21),
        at_length("staggered", "none", frozenset(), 19),
    ],
)
def test_worked_example_is_proven_optimal(technique: str, memory: str, failed: frozenset[Worker], period: int) -> None:
    problem = worked_example(technique, memory, failed)
    # From the slowest schedule there is, so that nothing of it is the list scheduler's.
    solution = CpSatSolver().solve(problem, Run(120), warm_start=serial(problem))
    assert check(solution.schedule) == []
    assert solution.schedule.period == period
    assert solution.optimal and solution.bound == period


@pytest.mark.parametrize(("limits", "period"), [((4, 3, 3, 1), 34), ((3, 3, 3, 3), 35)])
def test_three_in_flight_on_the_peers_only_or_everywhere(limits: tuple[int, ...], period: int) -> None:
    """34 holds where only the failed stage's peers are limited to 3; `--memory 3` limits stage 0 too."""
    problem = worked_example("adaptive", "none")
    problem.__dict__["room"] = [StageRoom(limit, 1, 1) for limit in limits]
    reduction = Reduction.of(problem)
    outcome = run(ScheduleModel(reduction, 0, 60).model, time_limit=60, workers=2, seed=0)
    assert outcome.proven and outcome.objective == period


def test_the_incumbent_never_grows_and_the_bound_never_falls() -> None:
    problem = worked_example("staggered", "1f1b")
    seen: list[SolverProgress] = []
    start = serial(problem)
    solution = CpSatSolver().solve(problem, Run(60, on_progress=seen.append), warm_start=start)
    assert seen[0].incumbent == start.period and seen[-1].incumbent == solution.schedule.period
    assert [p.bound for p in seen] == sorted(p.bound for p in seen)
    incumbents = [p.incumbent for p in seen]
    assert incumbents == sorted(incumbents, reverse=True)
    assert all(p.bound <= p.incumbent and p.solver == "cp-sat" for p in seen)
    assert [p.elapsed for p in seen] == sorted(p.elapsed for p in seen)


def large() -> Problem:
    return Problem(Job.uniform(8, 8, 16), frozenset({Worker(0, 1), Worker(3, 4), Worker(3, 5)}))


def test_cancel_is_heeded_soon_and_keeps_the_best() -> None:
    problem = large()
    warm = serial(problem)
    begin = time.monotonic()
    # It would take 600 s: pytest's own limit is less.
    solution = CpSatSolver().solve(problem, Run(600, cancelled=lambda: time.monotonic() - begin > 0.2), warm_start=warm)
    assert solution.schedule.period <= warm.period and "stopped" in solution.message


def test_cancelled_before_the_start() -> None:
    problem = large()
    warm = serial(problem)
    solution = CpSatSolver().solve(problem, Run(600, cancelled=lambda: True), warm_start=warm)
    assert solution.schedule is warm and "stopped" in solution.message


def test_the_time_limit_holds() -> None:
    solution = CpSatSolver().solve(large(), Run(0.5), warm_start=ListScheduler().solve(large()).schedule)
    assert solution.schedule.period >= solution.bound >= period_bound(large())
    assert solution.optimal or "time limit" in solution.message


def test_slices_improve_a_schedule_that_is_too_large_for_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Job.uniform(3, 4, 8), FAILED, Technique.STAGGERED, MemoryLimit("uniform"))
    warm = ListScheduler().solve(problem).schedule
    slow = serial(problem)
    monkeypatch.setattr(cp_sat, "SHARED_OPS", 0)
    seen: list[SolverProgress] = []
    solution = CpSatSolver().solve(
        problem,
        Run(
            120,
            cancelled=lambda: len({p.incumbent for p in seen}) > 2,
            on_progress=seen.append,
        ),
        warm_start=slow,
    )
    assert check(solution.schedule) == []
    # Once by starting its ops as early as their order allows, and once by a slice.
    assert len({p.incumbent for p in seen}) > 2 and solution.schedule.period < slow.period
    assert CpSatSolver().solve(problem, Run(1), warm_start=warm).schedule.period <= warm.period


def test_a_proof_for_one_routing_is_not_sold_as_more() -> None:
    """Two guests on one peer where another peer has room: optimal so, and improvable."""
    problem = Problem(Job.uniform(3, 2, 2), frozenset({Worker(0, 1)}), Technique.ADAPTIVE, MemoryLimit("none"))
    routes = ((0, 0, 1, 1, 2, 2), (1, 1, 1, 1, 2, 2))
    reduction = Reduction.of(problem, routes)
    outcome = run((model := ScheduleModel(reduction, 0, 60)).model, time_limit=30, workers=1, seed=0)
    lopsided = reduction.schedule(model.read(outcome.solver))
    assert check(lopsided) == []

    kept = CpSatSolver(free_routes=False).solve(problem, Run(30), warm_start=lopsided)
    assert kept.schedule.period == lopsided.period > kept.bound
    assert golden("for-this-routing") in kept.message and not kept.optimal

    freed = CpSatSolver().solve(problem, Run(30), warm_start=lopsided)
    assert freed.schedule.period < lopsided.period and freed.optimal and check(freed.schedule) == []


def test_times_too_long_for_cp_sat_leave_the_plan_that_was_given() -> None:
    durations = {"F": 1e8, "I": 1e8, "W": 100_000_000.000001}
    problem = Problem(Job.uniform(1, 2, 2, durations=durations), memory=MemoryLimit("none"))
    given = serial(problem)
    found = CpSatSolver().solve(problem, Run(60), warm_start=given)
    assert found.schedule is given and found.message and found.bound == period_bound(problem) < given.period
