"""Chains of ops: they follow the data, and a critical path accounts for every tick of the period."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.jobs.failures import parse_failed
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique
from openrecycle.planner.plans.schedule import Schedule, critical_path, micro_batch_path, waited
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples

TECHNIQUES = ["adaptive", "decoupled", "staggered"]


def schedule_of(job: Job, failed: tuple[str, ...] = (), technique: str = "staggered", memory: str = "none") -> Schedule:
    problem = Problem(job, parse_failed(failed, job), Technique.of(technique), MemoryLimit.parse(memory))
    return make_plan(problem, solver="list", look_ahead=False).schedule()


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    pipelines, stages = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    times = st.integers(1, 4)
    profiles = tuple(
        StageProfile(draw(times), draw(times), draw(times), draw(st.integers(0, 2))) for _ in range(stages)
    )
    transfers = tuple(draw(st.integers(0, 2)) for _ in range(stages - 1))
    job = Job(pipelines, stages, draw(st.integers(1, 5)), profiles=profiles, transfers=transfers)
    failed = tuple(draw(st.sets(st.sampled_from([f"W1_{s}" for s in range(stages)]), max_size=2)))
    return schedule_of(job, failed, draw(st.sampled_from(TECHNIQUES)), draw(st.sampled_from(["none", "uniform"])))


@examples(60)
@given(schedule=schedules())
def test_a_critical_path_is_unbroken_and_ends_where_the_period_does(schedule: Schedule) -> None:
    path = critical_path(schedule)
    ops = [link.op for link in path]
    lags = {*schedule.problem.job.transfer_ticks, *schedule.problem.job.backward_transfer_ticks, 0}
    for before, link in pairwise(path):
        lag = link.op.start - link.waited - before.op.end
        assert link.waited >= 0 and lag in lags, "a link starts where its cause lets it go"
        assert lag == 0 or abs(before.op.stage - link.op.stage) == 1
    assert ops[-1].kind == "O"
    if not schedule.problem.technique.staggers:
        assert ops[-1].end == schedule.makespan + schedule.problem.longest_optimizer + min(o.start for o in ops)
    else:
        stage = ops[-1].stage
        first = min(ops[0].start for w, ops in schedule.ops.items() if w.stage == stage)
        assert ops[-1].end - first == schedule.period
    if schedule.problem.memory.text == "none":
        # Whatever begins a chain waited for nothing at all.
        assert ops[0].kind == "F" and ops[0].stage == 0


@examples(60)
@given(schedule=schedules(), data=st.data())
def test_a_micro_batch_goes_down_and_comes_back(schedule: Schedule, data: st.DataObject) -> None:
    job = schedule.problem.job
    home = data.draw(st.integers(0, job.pipelines - 1)), data.draw(st.integers(0, job.micro_batches - 1))
    path = micro_batch_path(schedule, *home)
    assert {(op.pipeline, op.micro_batch) for op in path} == {home}
    assert [op.stage for op in path if op.kind == "F"] == list(range(job.stages))
    assert [op.stage for op in path if op.kind in "IB"] == list(range(job.stages))[::-1]
    assert sum(op.kind in "WB" for op in path) == job.stages


def test_the_papers_fault_free_path_runs_through_the_whole_iteration() -> None:
    path = critical_path(schedule_of(Job.uniform(3, 4, 6), technique="adaptive"))
    assert path[0].op.start == 0 and path[-1].op.end == 27 and waited(path) == 0


def test_no_such_micro_batch() -> None:
    schedule = schedule_of(Job.uniform(2, 2, 2))
    assert micro_batch_path(schedule, 0, 2) == ()


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_rerouted_ops_are_on_the_path_of_their_micro_batch(technique: str) -> None:
    path = micro_batch_path(schedule_of(Job.uniform(3, 4, 6), ("W1_2",), technique), 1, 0)
    assert {op.stage for op in path if op.rerouted} == {2}
