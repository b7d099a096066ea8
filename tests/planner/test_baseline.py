from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.baseline import one_forward_one_backward, reference_period, reference_schedule
from tests.conftest import examples
from tests.golden import golden
from tests.planner.problems import jobs


def fault_free(job: Job, memory: str = "1f1b") -> Problem:
    return Problem(job, technique=Technique.FAULT_FREE, memory=MemoryLimit(memory))


def test_worked_example() -> None:
    schedule = one_forward_one_backward(fault_free(Job.uniform(3, 4, 6)))
    assert schedule.period == 27
    assert [schedule.peak_activations[Worker(0, s)] for s in range(4)] == [4, 3, 2, 1]
    with_optimizer = one_forward_one_backward(fault_free(Job.uniform(3, 4, 6, durations={"O": 3})))
    assert with_optimizer.period == 30
    assert with_optimizer.makespan == 27


@given(st.integers(1, 6), st.integers(1, 12))
def test_closed_form_of_equal_times(stages: int, extra: int) -> None:
    micro_batches = stages + extra
    assert reference_period(Job.uniform(2, stages, micro_batches)) == 3 * (micro_batches + stages - 1)
    plain = fault_free(Job.uniform(2, stages, micro_batches), "none")
    assert reference_schedule(plain, "gpipe").period == 3 * (micro_batches + stages - 1)


def test_gpipe_holds_every_micro_batch() -> None:
    assert set(reference_schedule(fault_free(Job.uniform(1, 3, 5), "none"), "gpipe").peak_activations.values()) == {5}


def test_uneven_stages_and_transfers_by_hand() -> None:
    """2 stages, 1 micro-batch: F 2, transfer 1, F 3, B 4, transfer 1, B 5 = 16; longest O 2."""
    job = Job(1, 2, 1, profiles=(StageProfile(2, 3, 2, 2), StageProfile(3, 2, 2, 1)), transfers=(1.0,))
    assert reference_period(job) == 18


def test_a_limit_below_1f1b_is_refused_with_what_would_do() -> None:
    with pytest.raises(InfeasibleError, match=golden("1f1b-holds-4-activations-on")):
        one_forward_one_backward(fault_free(Job.uniform(3, 4, 6), "3"))


@given(st.integers(1, 6), st.integers(0, 8))
def test_zero_bubble_schedules_reach_their_closed_forms(stages: int, extra: int) -> None:
    """F = I = W = 1 and enough micro-batches: ZB-H1 leaves stages - 1 idle slots, ZB-H2 none."""
    micro_batches = 2 * stages + extra
    job = Job.uniform(2, stages, micro_batches)

    def staggered(limit: int) -> Problem:
        return Problem(job, technique=Technique.STAGGERED, memory=MemoryLimit(str(limit)))

    h1, h2 = reference_schedule(staggered(stages), "zb-h1"), reference_schedule(staggered(2 * stages - 1), "zb-h2")
    assert check(h1) == check(h2) == []
    assert h1.period == 3 * micro_batches + stages - 1
    assert h2.period == 3 * micro_batches


@examples(40)
@given(jobs())
def test_zero_bubble_schedules_are_valid_for_any_times(job: Job) -> None:
    problem = Problem(job, technique=Technique.DECOUPLED, memory=MemoryLimit(str(2 * job.stages - 1)))
    assert check(reference_schedule(problem, "zb-h1")) == []
    assert check(reference_schedule(problem, "zb-h2")) == []
