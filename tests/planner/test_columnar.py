"""Plans that stay in columns say and are what their documents are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.columnar import ColumnarPlan, ColumnarSchedule, pack, unpack
from planner.job import Job, MemoryLimit, Problem, Technique, Worker
from planner.plan import Plan, PlanError
from planner.solvers.portfolio import make_plan
from tests.planner.problems import problems

JOB = Job.uniform(3, 4, 6)


def packed(plan: Plan) -> bytes:
    data = pack(plan)
    assert data is not None
    return data


def example() -> Plan:
    return make_plan(Problem(JOB, frozenset({Worker(1, 2)})), solver="list")


@settings(max_examples=60)
@given(problems())
def test_a_schedule_in_columns_is_that_of_the_document(problem: Problem) -> None:
    plan = make_plan(problem, solver="list")
    columnar = unpack(packed(plan))
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


def test_documents_are_made_only_when_they_are_asked_for() -> None:
    columnar = unpack(packed(example()))
    assert columnar.schedule().period == example().schedule().period
    assert "workers" not in columnar.__dict__
    assert columnar.workers == example().workers
    assert columnar.compute_fingerprint() == columnar.fingerprint == example().fingerprint


def test_a_copy_that_differs_is_read_off_its_own_fields() -> None:
    columnar = unpack(packed(example()))
    fewer = {name: ops for name, ops in columnar.workers.items() if name != "W0_0"}
    copy = columnar.model_copy(update={"workers": fewer})
    assert not isinstance(copy, ColumnarPlan)
    assert Worker(0, 0) not in copy.schedule().ops
    assert copy != columnar


def test_what_columns_cannot_hold_is_not_packed() -> None:
    plan = example()
    changed = {**plan.workers, "W0_0": plan.workers["W0_0"][1:]}
    assert pack(plan.model_copy(update={"workers": changed})) is None


@pytest.mark.parametrize("spoil", [lambda d: b"", lambda d: d[:3], lambda d: d[:-1], lambda d: d[:9] + b"x" + d[10:]])
def test_what_is_damaged_is_refused(spoil: object) -> None:
    data = packed(make_plan(Problem(JOB, frozenset(), Technique.STAGGERED, MemoryLimit("none")), solver="list"))
    with pytest.raises(PlanError, match="a plan of W"):
        unpack(spoil(data), source="a plan of W")  # type: ignore[operator]


@settings(max_examples=60)
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
    plan = make_plan(problem, solver="list")
    by_ops, by_columns = plan.schedule(), unpack(packed(plan)).schedule()
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
