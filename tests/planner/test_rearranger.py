from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run, SolverProgress
from openrecycle.planner.solvers.list_scheduler import (
    ALWAYS,
    EVERY,
    UNLIMITED,
    ArraySchedule,
    DispatchSettings,
    ListScheduler,
    Table,
)
from openrecycle.planner.solvers.local_search import OpOrders, Rearranger, rearrangeable
from tests.conftest import examples
from tests.planner.problems import problems

SPLITTING = (Technique.DECOUPLED, Technique.STAGGERED)
FAILED = frozenset({Worker(1, 2), Worker(3, 4)})
UNEQUAL = Problem(Job.uniform(4, 6, 12, durations={"F": 1, "I": 1.1, "W": 0.9}), FAILED)


def of_list(problem: Problem) -> tuple[OpOrders, ArraySchedule]:
    table = Table(problem, compiled=False)
    made = table.run(EVERY[0].settings(problem, period_bound(problem)))
    return OpOrders(table, compiled=False), ArraySchedule(table, made)


def manner(problem: Problem, noise: random.Random) -> DispatchSettings:
    stages = problem.job.stages

    def row(*choices: int) -> tuple[int, ...]:
        return tuple(noise.choice(choices) for _ in range(stages))

    return DispatchSettings(
        depth=row(0, 1, 2, 4),
        final=row(0, 0, 1, 3),
        open_limit=row(1, 2, UNLIMITED),
        max_wait=row(0, 100, ALWAYS),
        max_wait_w=row(0, 100, ALWAYS),
        target=period_bound(problem),
    )


@examples(60)
@given(problems(techniques=SPLITTING))
def test_an_order_keeps_the_schedule_it_was_read_from(problem: Problem) -> None:
    """Read from starts and timed again it is valid and no longer; period and rank agree."""
    orders, schedule = of_list(problem)
    order = orders.of(schedule.result)
    again = orders.table.schedule(orders.result(order))
    assert check(again) == []
    assert again.period <= schedule.period
    assert orders.rank(order)[0] == again.period == Schedule(problem, again.ops).period


@examples(80)
@given(problems(techniques=SPLITTING), st.integers(0, 1 << 30), st.booleans())
def test_any_window_dispatched_in_either_direction_leaves_a_valid_schedule(
    problem: Problem, seed: int, backwards: bool
) -> None:
    orders, schedule = of_list(problem)
    noise = random.Random(seed)
    order = orders.of(schedule.result)
    for _ in range(4):
        begin, end = sorted((noise.randrange(len(order) + 1), noise.randrange(len(order) + 1)))
        keys = tuple(np.array([noise.randrange(99) for _ in range(orders.items)]) for _ in range(2))
        made = orders.again(order, begin, end, manner(problem, noise), (keys[0], keys[1]), backwards=backwards)
        if made is None:
            continue
        assert sorted(made) == sorted(order)
        assert (made[:begin] == order[:begin]).all()
        assert (made[end:] == order[end:]).all()
        assert check(orders.table.schedule(orders.result(made))) == []
        order = made
        backwards = not backwards


@pytest.mark.parametrize("backwards", [False, True])
def test_a_whole_iteration_can_be_made_in_either_direction(backwards: bool) -> None:
    """Memory never locks it when nothing is given: see the proof in `dispatch`."""
    for memory in ("uniform", "1f1b", "1", "none"):
        problem = replace(UNEQUAL, memory=MemoryLimit(memory))
        orders, schedule = of_list(problem)
        order = orders.of(schedule.result)
        keys = np.arange(orders.items)
        made = orders.again(order, 0, len(order), manner(problem, random.Random(1)), (keys, keys), backwards=backwards)
        assert made is not None
        assert check(orders.table.schedule(orders.result(made))) == []


@pytest.mark.chaos
def test_machine_code_does_the_same() -> None:
    problem = replace(UNEQUAL, job=Job.uniform(4, 6, 6, durations={"I": 1.1, "transfer": 0.3}))
    orders, schedule = of_list(problem)
    compiled = OpOrders(Table(problem, compiled=True), compiled=True)
    first = order = orders.of(schedule.result)
    noise = random.Random(5)
    keys = np.arange(orders.items)
    for backwards in (True, False):
        how = manner(problem, noise)
        made = orders.again(order, 0, len(order), how, (keys, keys), backwards=backwards)
        twin = compiled.again(order, 0, len(order), how, (keys, keys), backwards=backwards)
        assert made is not None and twin is not None
        assert (made == twin).all()
        assert orders.rank(made) == compiled.rank(made)
        assert [list(row) for row in orders.result(made).starts] == [list(row) for row in compiled.result(made).starts]
        order = made
    assert (order != first).any()


@examples(20)
@given(problems(pipelines=3, stages=3, micro_batches=4))
def test_rearranged_schedules_are_valid_and_never_worse(problem: Problem) -> None:
    first = ListScheduler().solve(problem).schedule
    polls = iter(range(40))
    found = Rearranger(compiled=False).solve(
        problem, Run(60, cancelled=lambda: next(polls, 40) >= 40), warm_start=first
    )
    assert found.bound <= found.schedule.period <= first.period
    assert check(found.schedule) == []


def test_it_shortens_a_plan_of_unequal_op_times_and_says_so() -> None:
    """In 50 windows; the clock is kept out of the test."""
    first = ListScheduler().solve(UNEQUAL).schedule
    seen: list[SolverProgress] = []
    polls = iter(range(100))
    found = Rearranger(compiled=False).solve(
        UNEQUAL, Run(600, cancelled=lambda: next(polls) > 50, on_progress=seen.append), warm_start=first
    )
    assert found.schedule.period < first.period
    assert seen[-1].incumbent == found.schedule.period
    assert check(found.schedule) == []


def test_without_failures_one_pipeline_is_searched_for_all() -> None:
    profiles = tuple(StageProfile(scale, scale, scale) for scale in (1, 1.2, 0.8, 1.2, 1, 0.9))
    problem = Problem(Job(3, 6, 12, profiles=profiles))
    first = ListScheduler().solve(problem).schedule
    polls = iter(range(200))
    found = Rearranger(compiled=False).solve(problem, Run(600, cancelled=lambda: next(polls) > 150), warm_start=first)
    assert check(found.schedule) == []
    assert found.schedule.problem == problem
    assert found.schedule.period < first.period
    alike = {tuple(op.start for op in ops) for w, ops in found.schedule.ops.items() if w.stage == 2}
    assert len(alike) == 1


def test_what_is_not_split_or_cannot_be_compiled_is_left_to_the_list_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rearrangeable(replace(UNEQUAL, technique=Technique.ADAPTIVE))
    monkeypatch.setattr("openrecycle.planner.solvers.local_search.find_spec", lambda _: None)
    assert not rearrangeable(UNEQUAL)
