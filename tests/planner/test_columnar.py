"""Plans that stay in columns say and are what their documents are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import decode_header, pack, unpack
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.plans.plan_arrays import ColumnarSchedule
from openrecycle.planner.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden
from tests.planner.problems import problems

JOB = Job.uniform(3, 4, 6)


def example() -> Plan:
    return make_plan(Problem(JOB, frozenset({Worker(1, 2)})), solver="list", look_ahead=False)


@examples(60)
@given(problems())
def test_a_schedule_in_columns_is_that_of_the_document(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    columnar = unpack(pack(plan))
    assert columnar.in_arrays
    by_ops, by_columns = plan.schedule(), columnar.schedule()
    assert isinstance(by_columns, ColumnarSchedule)
    for name in (
        "period",
        "makespan",
        "end",
        "ends",
        "bubble_fraction",
        "peak_activations",
        "rerouted_forwards",
        "helpers",
        "op_counts",
    ):
        assert getattr(by_columns, name) == getattr(by_ops, name), name
    assert [by_columns.busy(w) for w in by_ops.ops] == [by_ops.busy(w) for w in by_ops.ops]
    assert columnar.op_count == sum(map(len, by_ops.ops.values()))
    assert columnar.rerouted() == {str(w): n for w, n in by_ops.rerouted_forwards.items()}
    for worker, ops in by_ops.ops.items():
        starts, ends, kinds = by_columns.arrays(worker)
        assert (starts.tolist(), ends.tolist(), kinds) == (
            [op.start for op in ops],
            [op.end for op in ops],
            [op.kind for op in ops],
        )
    assert dict(by_columns.ops) == dict(by_ops.ops)
    assert columnar.to_json() == plan.to_json()
    assert columnar == plan
    assert plan == columnar


def test_the_ops_of_arrays_are_those_of_the_document() -> None:
    plan = example()
    columnar = unpack(pack(plan))
    assert columnar.schedule().period == plan.schedule().period
    assert columnar.workers == plan.workers
    assert list(columnar.workers) == list(plan.workers)
    assert columnar.model_dump_json() == plan.model_dump_json() == plan.to_json()
    for name, ops in plan.workers.items():
        assert name in columnar.workers
        assert tuple(columnar.workers[name]) == tuple(ops)
        assert ops[-1].kind == "O" and ops[-1].micro_batch is None
        assert ops[:-1] == tuple(ops)[:-1]
    assert "W1_2" not in columnar.workers
    with pytest.raises(KeyError):
        columnar.workers["W1_2"]
    assert columnar.compute_fingerprint() == columnar.fingerprint == plan.fingerprint


def test_a_copy_that_differs_is_read_off_its_own_fields() -> None:
    columnar = unpack(pack(example()))
    fewer = {name: ops for name, ops in columnar.workers.items() if name != "W0_0"}
    copy = columnar.model_copy(update={"workers": fewer})
    assert not copy.in_arrays
    assert Worker(0, 0) not in copy.schedule().ops
    assert copy != columnar


def test_what_arrays_cannot_hold_is_packed_as_its_document() -> None:
    plan = example()
    changed = plan.model_copy(update={"workers": {**plan.workers, "W0_0": plan.workers["W0_0"][1:]}})
    data = pack(changed)
    assert decode_header(data).form == "json"
    assert not unpack(data).in_arrays
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
def test_bytes_are_counted_alike_by_ops_by_columns_and_by_the_check(
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
    by_ops, by_columns = plan.schedule(), unpack(pack(plan)).schedule()
    assert by_ops.counts_bytes == bool(activation or for_weights or fixed)
    assert by_columns.peak_bytes == by_ops.peak_bytes
    most = max(by_ops.peak_bytes.values())
    assert overfull(plan, most) == set()
    if most > fixed + max(activation, for_weights):  # else there is no such problem
        full = {str(w) for w, n in by_ops.peak_bytes.items() if n == most}
        assert overfull(plan, most - 1) == full


def overfull(plan: Plan, capacity: int) -> set[str]:
    """The workers that hold more than that, as planner.check sees it."""
    job = plan.job.model_copy(update={"capacity_bytes": capacity or 0})
    found = check(plan.model_copy(update={"job": job, "memory": "bytes"}))
    return {v.sentence.split(" ")[0] for v in found if " bytes of " in v.sentence}
