"""Properties of the exact models over random small problems."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import problems

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run
from openrecycle.planner.solvers.cp_sat import (
    CpSatSolver,
    PooledModel,
    RoutingModel,
    ScheduleGraph,
    ScheduleModel,
    SliceModel,
    Slices,
    run,
)
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.routing import Reduction, Routes, assign, routes_of
from tests.conftest import examples

tiny = problems(pipelines=2, stages=2, micro_batches=2, speeds=False)
# Where workers differ in speed little is alike, and proofs take long.
tiny_unlike = problems(pipelines=2, stages=2, micro_batches=2)
small = problems(pipelines=3, stages=3, micro_batches=3, speeds=False) | tiny_unlike
quick = examples(40)


def any_routes(problem: Problem, seed: int) -> Routes:
    """Any living peer runs any micro-batch, its own worker's too."""
    draw = random.Random(seed)
    count = problem.job.pipelines * problem.job.micro_batches
    return tuple(tuple(draw.choice(problem.living_peers(s)) for _ in range(count)) for s in range(problem.job.stages))


def optimum(reduction: Reduction, upper: int) -> Schedule:
    model = ScheduleModel(reduction, 0, upper)
    outcome = run(model.model, time_limit=30, workers=1, seed=0)
    assert outcome.proven and outcome.solved
    schedule = reduction.schedule(model.read(outcome.solver))
    assert schedule.period == outcome.objective
    return schedule


def loose(problem: Problem) -> int:
    """Ticks in which all micro-batches run one after the other."""
    job = problem.job
    once = sum(max(problem.worker_ticks(Worker(p, s)).work for p in problem.living_peers(s)) for s in range(job.stages))
    once += sum(job.transfer_ticks) + sum(job.backward_transfer_ticks)
    return job.pipelines * job.micro_batches * once + problem.longest_optimizer


@quick
@given(small)
def test_valid_no_worse_than_the_warm_start_and_no_better_than_the_bound(problem: Problem) -> None:
    warm = ListScheduler().solve(problem).schedule
    solution = CpSatSolver(workers=1).solve(problem, Run(2), warm_start=warm)
    assert check(solution.schedule) == []
    assert period_bound(problem) <= solution.bound <= solution.schedule.period <= warm.period


@examples(25)
@given(problems(pipelines=3, stages=2, micro_batches=3, speeds=False) | tiny_unlike, st.integers(0, 5))
def test_reductions_lose_nothing(problem: Problem, seed: int) -> None:
    """All micro-batches, no order among them, none copied: the same optimum."""
    routes = any_routes(problem, seed) if seed else assign(problem)
    whole = Reduction(problem, routes, tuple((i,) for i in range(len(routes[0]))), {})
    assume(len(whole.lengths) <= 60)
    reduced = optimum(Reduction.of(problem, routes), loose(problem))
    assert check(reduced) == []
    assert reduced.period == optimum(whole, reduced.period).period


def free(problem: Problem) -> Schedule:
    """The best over all routes."""
    model = RoutingModel(problem, 0, ListScheduler().solve(problem).schedule.period)
    outcome = run(model.model, time_limit=30, workers=1, seed=0)
    assert outcome.proven and outcome.solved
    schedule = model.read(outcome.solver)
    assert check(schedule) == [] and schedule.period == outcome.objective
    return schedule


@pytest.mark.parametrize(
    ("job", "dead", "memory", "optimum"),
    [
        (Job(4, 2, 1, profiles=(StageProfile(2, 1, 1), StageProfile(2, 9, 0))), 2, "1f1b", 17),
        (
            Job(
                2,
                2,
                3,
                profiles=(StageProfile(3, 0, 2, 0), StageProfile(3, 9, 2, 2)),
                transfers=(0.0,),
                backward_transfers=(2.0,),
            ),
            1,
            "none",
            46,
        ),
    ],
)
def test_several_groups_of_late_backwards_may_run_at_once(job: Job, dead: int, memory: str, optimum: int) -> None:
    """Where the I of a stage takes longer than I and W above it, those of several micro-batches of one worker above
    overlap on the peers below."""
    failed = frozenset(Worker(p, 0) for p in range(dead))
    problem = Problem(job, failed, Technique.STAGGERED, MemoryLimit(memory))
    assert period_bound(problem) <= optimum == free(problem).period


@st.composite
def with_a_long_last_backward(draw: st.DrawFn) -> Problem:
    """And fewer workers above it than there."""
    pipelines, stages = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    above = tuple(
        StageProfile(draw(st.integers(1, 3)), *draw(st.sampled_from([(2, 0), (0, 2), (1, 1), (1, 0), (0, 1)])))
        for _ in range(stages - 1)
    )
    last = StageProfile(draw(st.integers(1, 3)), draw(st.integers(5, 9)), draw(st.integers(0, 2)))
    job = Job(pipelines, stages, draw(st.integers(1, 2)), profiles=(*above, last))
    dead = [draw(st.integers(1 if s == 0 else 0, pipelines - 1)) for s in range(stages - 1)]
    failed = frozenset(Worker(p, s) for s, count in enumerate(dead) for p in range(count))
    return Problem(job, failed, Technique.STAGGERED, MemoryLimit("none"))


@examples(300)
@given(with_a_long_last_backward())
def test_the_bound_holds_where_the_last_backward_is_long(problem: Problem) -> None:
    assert period_bound(problem) <= free(problem).period


@quick
@given(small, st.integers(0, 5))
def test_pooled_relaxation_bounds_every_routing(problem: Problem, seed: int) -> None:
    best = optimum(Reduction.of(problem, any_routes(problem, seed)), loose(problem))
    outcome = run(PooledModel(problem, 0, best.period).model, time_limit=30, workers=1, seed=0)
    assert outcome.solved and outcome.bound <= best.period


@quick
@given(tiny, st.integers(0, 5))
def test_free_routes_are_no_worse_than_any_routing(problem: Problem, seed: int) -> None:
    best = optimum(Reduction.of(problem, any_routes(problem, seed)), loose(problem))
    model = RoutingModel(problem, 0, best.period)
    outcome = run(model.model, time_limit=30, workers=1, seed=0)
    assert outcome.proven and outcome.solved
    schedule = model.read(outcome.solver)
    assert check(schedule) == []
    assert period_bound(problem) <= schedule.period == outcome.objective <= best.period
    pooled = run(PooledModel(problem, 0, best.period).model, time_limit=30, workers=1, seed=0)
    assert pooled.bound <= schedule.period


@quick
@given(problems(pipelines=3, stages=4, micro_batches=6), st.integers(0, 9))
def test_slices_keep_a_schedule_valid_and_meet_their_target(problem: Problem, seed: int) -> None:
    warm = ListScheduler().solve(problem).schedule
    reduction = Reduction.of(problem, routes_of(warm))
    frame = ScheduleGraph(reduction, reduction.starts_of(warm))
    assert frame.period <= warm.period
    late = frame.late()
    assert late.period <= frame.period and check(reduction.schedule(late.starts)) == []
    slices = Slices(seed=seed)
    slices.size = 12
    for step in range(4):
        # As it is, its own target can be met; one tick less, perhaps.
        target = late.period - step % 2
        room = late.room(*slices.next(late), target)
        assert room is not None or target < late.period
        if room is None:
            continue
        model = SliceModel(room)
        outcome = run(model.model, time_limit=5, workers=1, seed=seed)
        assert outcome.proven and (outcome.solved or target < late.period)
        if outcome.solved:
            late = model.read(outcome.solver).late()
            schedule = reduction.schedule(late.starts)
            assert check(schedule) == []
            assert schedule.period <= late.period <= target
