"""The MILP as a Solver: sizes it refuses, time limit, cancel."""

from __future__ import annotations

import itertools

import pytest

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, StageRoom, Technique, Worker
from openrecycle.planner.solvers.base import Run, SolverProgress
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.milp import MilpSolver, StepModel, small_room, solve_apart
from openrecycle.planner.solvers.routing import routes_of
from tests.conftest import refuses
from tests.golden import golden

pytestmark = pytest.mark.processes


def hard() -> Problem:
    """Small enough to be taken, and no matter of seconds."""
    return Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)}), Technique.STAGGERED, MemoryLimit("uniform"))


def test_refuses_what_it_could_not_solve_and_says_what_to_use() -> None:
    problem = Problem(Job.uniform(8, 8, 16), frozenset({Worker(1, 2)}))
    with refuses("--solver", "milp"):
        MilpSolver().solve(problem, Run(60), warm_start=ListScheduler().solve(problem).schedule)


def test_the_time_limit_holds_and_keeps_the_warm_start() -> None:
    warm = ListScheduler().solve(hard()).schedule
    solution = MilpSolver().solve(hard(), Run(1), warm_start=warm)
    assert solution.schedule.period <= warm.period and check(solution.schedule) == []
    assert solution.message == golden("time-limit-reached-before-the")


def test_cancel_is_heeded_soon() -> None:
    """Otherwise pytest's own limit ends it."""
    warm = ListScheduler().solve(hard()).schedule
    solution = MilpSolver().solve(hard(), Run(600, cancelled=lambda: True), warm_start=warm)
    assert solution.schedule is warm and solution.message == golden("stopped-before-the-milp-was")


def test_reports_progress_and_a_bound_for_all_routings() -> None:
    problem = Problem(Job.uniform(2, 3, 3), frozenset({Worker(0, 1)}), Technique.ADAPTIVE, MemoryLimit("1f1b"))
    seen: list[SolverProgress] = []
    warm = ListScheduler().solve(problem).schedule
    solution = MilpSolver().solve(problem, Run(60, on_progress=seen.append), warm_start=warm)
    assert (solution.schedule.period, seen[-1].incumbent, seen[-1].solver) == (24, 24, "milp")
    assert solution.bound == 23 and solution.message.startswith(golden("no-better-schedule-exists-for"))


def test_that_nothing_is_as_short_is_a_proof() -> None:
    problem = Problem(Job.uniform(2, 3, 3), technique=Technique.ADAPTIVE, memory=MemoryLimit("1f1b"))
    found = ListScheduler().solve(problem)
    assert found.optimal
    outcome = solve_apart(StepModel(problem, routes_of(found.schedule), found.bound - 1).model, 60, None)
    assert outcome.proven and not outcome.values


def test_what_takes_no_time_lies_inside_no_other_op() -> None:
    """As an I of no load would."""
    job = Job(2, 1, 2, profiles=(StageProfile(3, 0, 2),))
    problem = Problem(job, frozenset({Worker(1, 0)}), Technique.DECOUPLED, MemoryLimit("none"))
    model = StepModel(problem, routes_of(ListScheduler().solve(problem).schedule), 20)
    schedule = model.read(solve_apart(model.model, 60, None).values)
    assert check(schedule) == [] and schedule.period == 20


@pytest.mark.parametrize(
    ("room", "small"),
    [
        ((12, 3, 1), True),
        ((0, 0, 0), True),  # there is no limit
        ((80_000_000_000, 20_000_000_000, 9_876_543_210), True),
        ((80_000_000_000, 0, 9_876_543_210), True),
        ((16 << 56, (2 << 56) + 1, 1 << 56), True),  # eight I's need eight bytes more
        ((75_076_709_343, 9_384_588_668, 6_256_392_445), False),
    ],
)
def test_bytes_are_counted_in_small_numbers_where_those_say_the_same(room: tuple[int, int, int], small: bool) -> None:
    found = small_room(StageRoom(*room), 16)
    assert (found is not None) == small
    for ahead, kept in itertools.product(range(17), repeat=2) if found else ():
        fits = ahead * room[1] + kept * room[2] <= room[0]
        assert ahead + kept > 16 or fits == (ahead * found.need + kept * found.keep <= found.capacity)
