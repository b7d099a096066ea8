"""Ops in arrays: what is read off them, what they look like, and that they come back from wherever they were sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import decode_header, pack, unpack
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden
from tests.planner.problems import problems

JOB = Job.uniform(3, 4, 6)


def example() -> Plan:
    return make_plan(Problem(JOB, frozenset({Worker(1, 2)})), solver="list", look_ahead=False)


def held(schedule: Schedule, worker: Worker) -> list[int]:
    """Activations that it holds after each tick at which something changes."""
    changes = Counter[int]()
    for op in schedule.ops[worker]:
        changes[op.start] += op.kind == "F"
        changes[op.end] -= op.kind in "WB"
    return list(accumulate(changes[tick] for tick in sorted(changes)))


@examples(60)
@given(problems())
def test_numbers_read_off_arrays_are_those_of_the_ops(problem: Problem) -> None:
    """The definitions of planner.plans.schedule, op by op."""
    schedule = make_plan(problem, solver="list", look_ahead=False).schedule()
    ops, compute = schedule.ops, list(schedule.compute_ops())
    longest = {s: max(ops[w][-1].duration for w in ops if w.stage == s) for s in range(problem.job.stages)}
    firsts, lasts = ({s: f(at(op) for op in compute if op.stage == s) for s in longest} for f, at in BY_STAGE)
    makespan = max(op.end for op in compute) - min(op.start for op in compute)
    assert schedule.makespan == makespan
    assert schedule.end == max(op.end for row in ops.values() for op in row)
    assert schedule.ends == {w: row[-1].end for w, row in ops.items()}
    if problem.technique.staggers:
        assert schedule.period == max(lasts[s] + longest[s] - firsts[s] for s in longest)
    else:
        assert schedule.period == makespan + max(longest.values())
    busy = {w: sum(op.duration for op in row) for w, row in ops.items()}
    assert {w: schedule.busy(w) for w in ops} == busy
    assert schedule.bubble_fraction == 1 - sum(busy.values()) / (len(ops) * schedule.period)
    assert schedule.op_counts == {w: len(row) for w, row in ops.items()}
    moved = {w: sum(op.kind == "F" and op.pipeline != w.pipeline for op in row) for w, row in ops.items()}
    assert schedule.rerouted_forwards == moved
    assert schedule.helpers == {w for w, count in moved.items() if count}
    assert schedule.peak_activations == {w: max([0, *held(schedule, w)]) for w in ops}
    assert all(schedule.held_activations(w)[-1:] in ([], [(row[-2].end, 0)]) for w, row in ops.items() if row[:-1])


BY_STAGE = ((min, attrgetter("start")), (max, attrgetter("end")))


@examples(60)
@given(problems())
def test_what_comes_packed_is_what_was_packed(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    assert decode_header(pack(plan)).form == "columns"
    there, read = unpack(pack(plan)), Plan.from_json(plan.to_json())
    for other in (there, read):
        assert other == plan
        assert plan == other
        assert other.to_json() == other.model_dump_json() == plan.to_json()
        assert other.compute_fingerprint() == other.fingerprint == plan.fingerprint
        assert list(other.workers) == list(plan.workers)
        assert other.schedule().ops == plan.schedule().ops
        assert other.op_count == sum(map(len, plan.schedule().ops.values()))


def test_ops_are_there_for_whoever_looks_at_them() -> None:
    plan = example()
    for name, ops in plan.workers.items():
        assert name in plan.workers
        assert ops[-1].kind == "O" and ops[-1].micro_batch is None
        assert [(op.kind, op.start) for op in ops] == [
            (op.kind, op.start) for op in plan.schedule().ops[Worker.parse(name)]
        ]
    assert "W1_2" not in plan.workers
    with pytest.raises(KeyError):
        plan.workers["W1_2"]


def test_a_copy_that_differs_is_read_off_its_own_fields() -> None:
    plan = unpack(pack(example()))
    fewer = {name: ops for name, ops in plan.workers.items() if name != "W0_0"}
    copy = plan.model_copy(update={"workers": fewer})
    assert Worker(0, 0) not in copy.schedule().ops
    assert copy != plan
    assert plan.model_copy(update={"failed": ()}).schedule().problem.failed == frozenset()


def test_a_plan_with_an_op_less_is_packed_as_its_document() -> None:
    plan = example()
    changed = plan.model_copy(update={"workers": {**plan.workers, "W0_0": plan.workers["W0_0"][1:]}})
    data = pack(changed)
    assert decode_header(data).form == "json"
    assert unpack(data) == changed


@pytest.mark.parametrize("spoil", [lambda d: b"", lambda d: d[:3], lambda d: d[:-1], lambda d: d[:9] + b"x" + d[10:]])
def test_what_is_damaged_is_refused(spoil: object) -> None:
    data = pack(
        make_plan(Problem(JOB, frozenset(), Technique.STAGGERED, MemoryLimit("none")), solver="list", look_ahead=False)
    )
    with pytest.raises(PlanError, match=golden("a-plan-of-w")):
        unpack(spoil(data), source="a plan of W")  # type: ignore[operator]


@examples(60)
@given(problems(), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_bytes_are_counted_by_the_schedule_as_by_the_check(
    problem: Problem, activation: int, for_weights: int, fixed: int
) -> None:
    profiles = tuple(
        replace(
            p, activation_bytes=activation, weight_backward_bytes=for_weights, weight_bytes=fixed, optimizer_bytes=0
        )
        for p in problem.job.profiles
    )
    problem = replace(problem, job=replace(problem.job, profiles=profiles))
    plan = make_plan(problem, solver="list", look_ahead=False)
    schedule = plan.schedule()
    assert schedule.counts_bytes == bool(activation or for_weights or fixed)
    assert schedule.peak_bytes == {w: max(held for _, held in schedule.held_bytes(w)) for w in schedule.ops}
    assert schedule.over_capacity == {}  # no capacity is said
    most = max(schedule.peak_bytes.values())
    assert overfull(plan, most) == over_capacity(schedule, most) == set()
    if most > fixed + max(activation, for_weights):  # else there is no such problem
        full = {str(w) for w, n in schedule.peak_bytes.items() if n == most}
        assert overfull(plan, most - 1) == over_capacity(schedule, most - 1) == full


def over_capacity(schedule: Schedule, capacity: int) -> set[str]:
    job = replace(schedule.problem.job, capacity_bytes=(max(1, capacity),) * schedule.problem.job.stages)
    over = Schedule(replace(schedule.problem, job=job), schedule.ops).over_capacity
    assert all(held == schedule.peak_bytes[worker] for worker, held in over.items())
    return set(map(str, over))


def overfull(plan: Plan, capacity: int) -> set[str]:
    """The workers that hold more than that, as planner.check sees it."""
    problem = plan.problem()
    job = replace(problem.job, capacity_bytes=(max(1, capacity),) * problem.job.stages)
    try:
        problem = replace(problem, job=job, memory=MemoryLimit("bytes"))
    except InfeasibleError:  # not even one micro-batch has room
        return set()
    found = check(Schedule(problem, plan.schedule().ops))
    return {v.sentence.split(" ")[0] for v in found if v.rule == "memory"}
