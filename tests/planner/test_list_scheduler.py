from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run, SolverProgress
from openrecycle.planner.solvers.list_scheduler import EVERY, ORDERS, ListScheduler, Rule, Table
from openrecycle.planner.solvers.local_search import rearrangeable
from tests.conftest import examples
from tests.planner.problems import problems


def worked(technique: str, memory: str, *, fail: bool = True) -> Problem:
    failed = frozenset({Worker(1, 2)}) if fail else frozenset()
    return Problem(Job.uniform(3, 4, 6), failed, Technique(technique), MemoryLimit(memory))


@pytest.mark.parametrize(
    ("technique", "memory", "fail", "period"),
    [
        ("fault-free", "1f1b", False, 27),
        ("adaptive", "1f1b", True, 36),
        ("adaptive", "none", True, 33),
        ("decoupled", "none", True, 29),
        ("staggered", "none", True, 27),
        ("staggered", "uniform", False, 21),
        ("staggered", "none", False, 19),
    ],
)
def test_worked_example_is_solved_to_its_proven_optimum(technique: str, memory: str, fail: bool, period: int) -> None:
    solution = ListScheduler().solve(worked(technique, memory, fail=fail))
    assert solution.schedule.period == period
    assert solution.optimal


def test_optimizer_slots_of_the_papers_figure() -> None:
    """O = 3 as drawn: slots 28-30, 29-31, 30-32, 31-33 at the latest, period 30."""
    job = Job.uniform(3, 4, 6, durations={"O": 3})
    problem = Problem(job, frozenset({Worker(1, 2)}), Technique.STAGGERED, MemoryLimit("none"))
    schedule = ListScheduler().solve(problem).schedule
    assert schedule.period == 30
    assert all(ops[-1].end <= 30 + worker.stage for worker, ops in schedule.ops.items())


@pytest.mark.parametrize("technique", ["adaptive", "decoupled", "staggered"])
def test_a_limit_of_one_activation_is_survived(technique: str) -> None:
    schedule = ListScheduler().solve(worked(technique, "1")).schedule
    assert set(schedule.peak_activations.values()) == {1}


@examples(100)
@given(problems())
def test_equal_problems_get_equal_schedules(problem: Problem) -> None:
    """Agents plan on their own and must agree; so neither clock nor chance may decide."""
    again = Problem(problem.job, frozenset(set(problem.failed)), problem.technique, problem.memory)
    assert ListScheduler().solve(problem).schedule.ops == ListScheduler().solve(again).schedule.ops


@examples(100)
@given(problems(memories=["uniform", "none"]))
def test_without_failures_never_worse_than_1f1b(problem: Problem) -> None:
    healthy = Problem(problem.job, technique=problem.technique, memory=problem.memory)
    assert ListScheduler().solve(healthy).schedule.period <= reference_period(problem.job)


def test_progress_falls_and_cancel_keeps_the_first_schedule() -> None:
    seen: list[SolverProgress] = []
    problem = worked("adaptive", "1f1b")
    ListScheduler().solve(problem, Run(on_progress=seen.append))
    incumbents = [p.incumbent for p in seen]
    assert incumbents == sorted(set(incumbents), key=incumbents.index)
    assert all(p.bound == 36 for p in seen)
    stopped = ListScheduler().solve(problem, Run(cancelled=lambda: True))
    assert stopped.schedule.period >= 36


def test_a_large_grid() -> None:
    """16 x 16 x 64 with 5 % failed: within 5 % of the bound."""
    workers = list(Job.uniform(16, 16, 64).workers())
    problem = Problem(Job.uniform(16, 16, 64), frozenset(workers[7::20]), Technique.STAGGERED, MemoryLimit("uniform"))
    solution = ListScheduler().solve(problem)
    assert solution.schedule.period <= 1.05 * solution.bound


@examples(40)
@given(problems())
def test_the_period_known_ahead_is_that_of_the_ops(problem: Problem) -> None:
    schedule = ListScheduler().solve(problem).schedule
    from_ops = Schedule(problem, dict(schedule.ops))
    assert (schedule.period, schedule.makespan) == (from_ops.period, from_ops.makespan)
    assert list(schedule.ops) == problem.living_workers()
    assert schedule.ops == Schedule.build(problem, schedule.compute_ops()).ops


@examples(25)
@given(problems())
def test_compiled_and_plain_give_the_same_schedule(problem: Problem) -> None:
    pytest.importorskip("numba")
    plain = ListScheduler(compiled=False).solve(problem).schedule
    assert ListScheduler(compiled=True).solve(problem).schedule.ops == plain.ops


def test_times_too_long_for_machine_words_are_still_exact() -> None:
    """Where they are added up, and where what a wait spares is multiplied."""
    times = {"F": 9_999_999.999999, "I": 1e7, "W": 0.000001}
    problem = Problem(Job.uniform(2, 2, 20, durations=times), frozenset({Worker(0, 1)}))
    assert not rearrangeable(problem) and not Table(problem, compiled=True).compiled
    assert check(ListScheduler(compiled=True).solve(problem).schedule) == []


@examples(150)
@given(problems(), st.sampled_from(EVERY), st.sampled_from(("all", "peers", "none")), st.sampled_from((*ORDERS, 7)))
def test_every_rule_gives_a_valid_schedule(problem: Problem, rule: Rule, split: str, order: str | int) -> None:
    rule = replace(rule, split=split if problem.technique.splits else "none", order=order)
    table = Table(problem, compiled=False)
    bound = period_bound(problem)
    result = table.run(rule.settings(problem, bound))
    assert check(table.schedule(result)) == []
    assert result.period >= bound


def test_in_step_orders_are_optimal_where_the_event_loop_alone_is_not() -> None:
    """F:I:W of 1:1.1:0.9, no failures, uniform memory: 8 x 8 x 16 closes its gap."""
    problem = Problem(Job.uniform(8, 8, 16, durations={"I": 1.1, "W": 0.9}))
    assert ListScheduler().solve(problem).optimal
