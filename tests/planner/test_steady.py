"""The period of an order: as planned when ops take what was planned, and longer by as much as must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from problems import problems

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.schedule import Schedule, steady_period
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples, refuses


def made(problem: Problem) -> Schedule:
    return make_plan(problem, solver="list", look_ahead=False).schedule()


@examples(60)
@given(problems())
def test_an_order_is_no_slower_than_its_plan(problem: Problem) -> None:
    """The plan's times are one way to run its order, again and again; workers that wait for nothing but
    their inputs are as quick. And no stage can do its work in less time than that takes."""
    schedule = made(problem)
    period = steady_period(schedule)
    assert period <= schedule.period + 1e-9
    busiest = max((schedule.busy(worker) for worker in schedule.ops), default=0)
    assert period >= busiest - 1e-9


@examples(40)
@given(problems())
def test_ops_twice_as_long_make_twice_the_period(problem: Problem) -> None:
    job = problem.job
    schedule = made(problem)

    def twice(p: StageProfile) -> StageProfile:
        times = ("forward", "input_backward", "weight_backward", "optimizer")
        doubled = {name: 2 * getattr(p, name) for name in times}
        return replace(p, **doubled, reductions=tuple(2 * r for r in p.reductions))

    slow = replace(
        job,
        profiles=tuple(map(twice, job.profiles)),
        transfers=tuple(2 * t for t in job.transfers),
        backward_transfers=tuple(2 * t for t in job.backward_transfers),
        speeds=tuple((w, s) for w, s in job.speeds if s == 0.5),
    )
    plain = replace(job, speeds=slow.speeds)
    ratio = slow.ticks_per_unit / plain.ticks_per_unit
    assert steady_period(schedule, slow) == pytest.approx(2 * ratio * steady_period(schedule, plain))


@pytest.mark.parametrize(("memory", "expected"), [("uniform", 21), ("none", 19)])
def test_the_worked_example(memory: str, expected: int) -> None:
    problem = Problem(Job(3, 4, 6), memory=MemoryLimit(memory))
    assert steady_period(made(problem)) <= expected
    assert steady_period(made(Problem(Job(3, 4, 6), technique=Technique.FAULT_FREE))) <= 27


def test_a_slow_worker_slows_its_pipeline() -> None:
    job = Job(2, 3, 6)
    schedule = made(Problem(job))
    slow = replace(job, speeds=((Worker(1, 1), 0.5),))
    # It has 6 micro-batches of 6 slots each, and gives none of them away.
    assert steady_period(schedule, slow) >= 36
    better = make_plan(Problem(slow), solver="list", look_ahead=False)
    assert better.metrics.period < steady_period(schedule, slow)


def test_an_order_that_can_not_be_run_is_refused() -> None:
    schedule = made(Problem(Job(1, 1, 2)))
    worker = Worker(0, 0)
    mixed = Schedule(schedule.problem, {worker: tuple(reversed(schedule.ops[worker][:-1])) + schedule.ops[worker][-1:]})
    with refuses("plan"):
        steady_period(mixed)
