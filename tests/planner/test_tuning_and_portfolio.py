from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.solvers.base import Run, SolverProgress
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.local_search import Tuner
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden
from tests.planner.problems import problems

UNEVEN = Problem(
    Job(4, 6, 12, profiles=tuple(StageProfile(1 + s % 3 / 10, 1.1, 0.9) for s in range(6))),
    frozenset({Worker(1, 2), Worker(3, 4)}),
    Technique.STAGGERED,
    MemoryLimit("uniform"),
)


@examples(25)
@given(problems())
def test_tuned_schedules_are_valid_and_never_worse_than_the_rules(problem: Problem) -> None:
    first = ListScheduler().solve(problem).schedule
    tuned = Tuner().solve(problem, Run(0.05), warm_start=first)
    assert tuned.bound <= tuned.schedule.period <= first.period
    assert check(tuned.schedule) == []


def test_tuning_improves_on_an_uneven_grid_and_says_so() -> None:
    """What it finds in its first 400 changes; the clock is kept out of the test."""
    first = ListScheduler().solve(UNEVEN).schedule
    seen: list[SolverProgress] = []
    polls = iter(range(500))
    tuned = Tuner().solve(
        UNEVEN, Run(120, cancelled=lambda: next(polls) > 470, on_progress=seen.append), warm_start=first
    )
    assert tuned.schedule.period < first.period
    assert seen[-1].incumbent == tuned.schedule.period
    incumbents = [p.incumbent for p in seen]
    assert incumbents == sorted(incumbents, key=lambda i: -(i or 0))


def test_tuning_can_be_cancelled() -> None:
    first = ListScheduler().solve(UNEVEN).schedule
    solution = Tuner().solve(UNEVEN, Run(600, cancelled=lambda: True), warm_start=first)
    assert check(solution.schedule) == [] and solution.schedule.period <= first.period


def test_a_short_time_limit_gives_the_list_plan_and_says_so() -> None:
    plan = make_plan(UNEVEN, time_limit=1e-6)
    assert plan.solver.name == "list"
    assert golden("the-time-limit-is-reached") in plan.solver.message
    assert check(plan) == []


def test_cancelled_from_the_start_still_gives_a_plan() -> None:
    plan = make_plan(UNEVEN, time_limit=60, cancelled=lambda: True)
    assert "stopped" in plan.solver.message
    assert check(plan) == []


def test_auto_is_never_worse_than_list_and_keeps_the_time_limit() -> None:
    first = make_plan(UNEVEN, solver="list", look_ahead=False)
    plan = make_plan(UNEVEN, time_limit=1)
    assert plan.metrics.period <= first.metrics.period
    assert check(plan) == []


def test_slowdowns_are_against_the_named_references() -> None:
    problem = Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)}), Technique.DECOUPLED, MemoryLimit("none"))
    metrics = make_plan(problem, solver="list", look_ahead=False).metrics
    assert metrics.slowdown_vs_1f1b == pytest.approx(29 / 27 - 1)
    healthy = make_plan(
        Problem(problem.job, technique=Technique.DECOUPLED, memory=problem.memory), solver="list", look_ahead=False
    )
    # Of all techniques, not of the plan's own: staggered it is 19 slots.
    assert metrics.slowdown_vs_best == pytest.approx(29 / 19 - 1)
    assert healthy.metrics.slowdown_vs_best == pytest.approx(healthy.metrics.period / 19 - 1)
    best = make_plan(
        replace(problem, failed=frozenset(), technique=Technique.STAGGERED), solver="list", look_ahead=False
    ).metrics
    assert (best.period, best.slowdown_vs_best) == (19, 0)


@pytest.mark.parametrize(("solver", "limit"), [("oracle", 1.0), ("list", 0.0), ("list", -1.0), ("list", float("nan"))])
def test_bad_arguments(solver: str, limit: float) -> None:
    with pytest.raises(InputError):
        make_plan(UNEVEN, solver=solver, time_limit=limit)


def test_one_pipeline_stands_for_all_in_the_fault_free_reference() -> None:
    """Without failures pipelines don't meet, so their number can't change the period."""
    noise = random.Random(7)
    for _ in range(10):
        profiles = tuple(StageProfile(1, noise.choice((0, 1, 2)), 1, noise.choice((0, 1))) for _ in range(3))
        periods = {
            ListScheduler().solve(Problem(Job(pipelines, 3, 5, profiles=profiles))).schedule.period
            for pipelines in (1, 2, 5)
        }
        assert len(periods) == 1


def test_without_failures_one_pipeline_is_searched_for_all() -> None:
    """The same number of tries, so the same plan, whatever the number of pipelines."""
    profiles = tuple(StageProfile(scale, scale, scale) for scale in (1, 1.2, 0.8, 1.2, 1, 0.9))
    periods = []
    for pipelines in (1, 5):
        problem = Problem(Job(pipelines, 6, 12, profiles=profiles))
        polls = iter(range(1000))
        first = ListScheduler().solve(problem).schedule
        tuned = Tuner().solve(problem, Run(120, cancelled=lambda polls=polls: next(polls) > 900), warm_start=first)
        assert check(tuned.schedule) == []
        assert tuned.schedule.problem == problem
        periods.append(tuned.schedule.period)
        assert tuned.schedule.period < first.period
    assert periods[0] == periods[1]
