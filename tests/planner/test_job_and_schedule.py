from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import (
    MOST_ACTIVATIONS,
    Job,
    MemoryLimit,
    Problem,
    StageProfile,
    Technique,
    Worker,
    parse_durations,
)
from openrecycle.planner.plans.baseline import one_forward_one_backward
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples, refuses
from tests.golden import golden
from tests.planner.problems import problems


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (True, 1, 1), (1.5, 1, 1), (1, 1, "2")])
def test_sizes_that_are_none(sizes: tuple[int, int, int]) -> None:
    for make in (Job, Job.uniform):
        with pytest.raises(InputError):
            make(*sizes)


def test_absurd_sizes_are_refused_before_memory_is_taken() -> None:
    for sizes in [(1, 10**9, 1), (10**12, 1, 1), (1, 1, 10**15), (10**4, 10**4, 10**4)]:
        with pytest.raises(InputError, match="at most 4,000,000 ops"):
            Job.uniform(*sizes)


def test_an_iteration_of_more_ticks_than_are_counted_is_refused() -> None:
    """Its plan could be made, and would be no valid one."""
    long = {"F": 1e9, "I": 1e9, "W": 1e9}
    assert Job.uniform(1, 1, 1000, durations={**long, "O": 1}).ticks_per_unit == 1
    with pytest.raises(InputError, match=r"at most 2\.25e"):
        Job.uniform(1, 1, 1000, durations={**long, "O": 0.000001})
    with pytest.raises(InputError, match=r"at most 2\.25e"):
        Job.uniform(1, 1, 1_000_000, durations=long)
    with pytest.raises(InputError, match=r"at most 2\.25e"):
        Job.uniform(3, 4, 6, durations={"F": 1e9, "I": 0.000001, "W": 1e9, "transfer": 0.3})


@examples(90)
@given(st.lists(st.integers(1, 10**13), min_size=3, max_size=3))
def test_a_document_says_exactly_which_ticks_it_means(ticks: list[int]) -> None:
    """Of the longest jobs that there may be."""
    f, i, w = (n / 10**6 for n in ticks)
    problem = Problem(
        Job.uniform(2, 2, 18, durations={"F": f, "I": i, "W": w, "O": 0.000001}), frozenset({Worker(0, 1)})
    )
    made = make_plan(problem, solver="list", look_ahead=False)
    assert check(Plan.from_json(made.to_json())) == []


def test_ticks_are_exact_for_decimal_fractions() -> None:
    job = Job.uniform(1, 2, 1, durations={"F": 0.1, "I": 1.25, "W": 3, "transfer": 0.001})
    assert job.ticks_per_unit == 1000
    assert job.ticks[0][:3] == (100, 1250, 3000)
    assert job.transfer_ticks == (1,)
    assert (job.units(1250), job.units(3000)) == (1.25, 3)


def test_profiles_and_transfers_must_match_the_grid() -> None:
    with refuses("profiles", 2):
        Job(1, 3, 1, profiles=(StageProfile(),) * 2)
    with refuses("transfers", 1):
        Job(1, 3, 1, transfers=(1.0,))
    with pytest.raises(InputError, match=r"profiles\[1\].forward"):
        Job(1, 2, 1, profiles=(StageProfile(), StageProfile(forward=float("nan"))))


def test_durations_text() -> None:
    assert parse_durations(" F=2, W=0.5 ") == {"F": 2, "W": 0.5}
    assert parse_durations("") == {}


def test_memory_limits_by_stage() -> None:
    job = Job.uniform(2, 4, 6)
    assert MemoryLimit.parse(" 1F1B ").limits(job) == (4, 3, 2, 1)
    assert MemoryLimit.parse("uniform").limits(job) == (4, 4, 4, 4)
    assert MemoryLimit.parse("7").limits(job) == (7, 7, 7, 7)
    assert MemoryLimit.parse("none").limits(job) == (None,) * 4
    assert MemoryLimit.parse(str(MOST_ACTIVATIONS)).limits(job) == (MOST_ACTIVATIONS,) * 4
    for text in ("0", "-1", "1.5", "", "many", "²", str(MOST_ACTIVATIONS + 1)):
        with pytest.raises(InputError):
            MemoryLimit.parse(text)


def test_problem_needs_living_peers_and_a_grid_that_has_the_failed() -> None:
    job = Job.uniform(2, 3, 2)
    with pytest.raises(InfeasibleError, match=golden("stage-1-has-no-living-peer-bring")):
        Problem(job, frozenset({Worker(0, 1), Worker(1, 1)}))
    with pytest.raises(InputError, match="W2_0"):
        Problem(job, frozenset({Worker(2, 0)}))


@pytest.mark.parametrize("text", ["W1_2", "W0_0", "W999999_0"])
def test_worker_names_round_trip(text: str) -> None:
    assert str(Worker.parse(text)) == text


def by_hand(technique: Technique) -> Schedule:
    """2 stages, 1 pipeline, 1 micro-batch, O = 2 and 1: F F I W, then stage 0's I W."""
    job = Job(1, 2, 1, profiles=(StageProfile(1, 1, 1, 2), StageProfile(1, 1, 1, 1)))
    a, b = Worker(0, 0), Worker(0, 1)
    return Schedule.build(
        Problem(job, technique=technique, memory=MemoryLimit("none")),
        [
            Op("F", 0, 0, 0, a, 0, 1),
            Op("F", 0, 0, 1, b, 1, 1),
            Op("I", 0, 0, 1, b, 2, 1),
            Op("W", 0, 0, 1, b, 3, 1),
            Op("I", 0, 0, 0, a, 3, 1),
            Op("W", 0, 0, 0, a, 4, 1),
        ],
    )


def test_every_number_by_hand() -> None:
    barrier = by_hand(Technique.DECOUPLED)
    assert (barrier.makespan, barrier.period) == (5, 7)
    assert [ops[-1].start for ops in barrier.ops.values()] == [5, 5]
    staggered = by_hand(Technique.STAGGERED)
    assert staggered.makespan == 5
    assert staggered.period == 7  # stage 0: 0..5 and O 2; stage 1: 1..4 and O 1 = 4
    assert [ops[-1].start for ops in staggered.ops.values()] == [5, 4]
    assert staggered.busy(Worker(0, 0)) == 5
    assert staggered.worker_bubble_fraction(Worker(0, 0)) == pytest.approx(1 - 5 / 7)
    assert staggered.bubble_fraction == pytest.approx(1 - 9 / 14)
    assert staggered.held_activations(Worker(0, 0)) == [(0, 1), (5, 0)]
    assert staggered.peak_activations == {Worker(0, 0): 1, Worker(0, 1): 1}
    assert str(staggered.ops[Worker(0, 1)][0]) == "F0.0@W0_1"


@examples(100)
@given(problems())
def test_relations_between_the_numbers(problem: Problem) -> None:
    schedule = ListScheduler().solve(problem).schedule
    assert schedule.period <= schedule.makespan + problem.longest_optimizer
    assert 0 <= schedule.bubble_fraction < 1
    assert max(map(schedule.busy, schedule.ops)) <= schedule.period
    for worker in schedule.ops:
        _, limit = problem.most_held[worker.stage]
        assert limit is None or schedule.peak_activations[worker] <= limit
        assert all(held >= 0 for _, held in schedule.held_activations(worker))


@given(st.integers(1, 5), st.integers(1, 8))
def test_1f1b_bubble_fraction_is_the_textbook_one(stages: int, micro_batches: int) -> None:
    problem = Problem(Job.uniform(1, stages, micro_batches), technique=Technique.FAULT_FREE)
    expected = (stages - 1) / (micro_batches + stages - 1)
    if micro_batches >= stages:
        assert one_forward_one_backward(problem).bubble_fraction == pytest.approx(expected)


@pytest.mark.parametrize("unit", ["a\x00b\x1b[31m", "\u202e", "\x9b", "x" * 21])
def test_a_time_unit_is_printed_on_terminals(unit: str) -> None:
    with pytest.raises(InputError, match="time_unit"):
        Job(1, 1, 1, time_unit=unit)
