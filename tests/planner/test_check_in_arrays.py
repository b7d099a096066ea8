"""A plan in arrays is checked as its document is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans import plan_arrays
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.plan_arrays import Columns, columns_of
from openrecycle.planner.portfolio import best_solution, checked_plan_of, make_plan, metrics_of, solver_of
from tests.conftest import examples
from tests.golden import golden

TIMES = {"F": 4, "I": 3.5, "W": 3, "O": 2, "transfer": 1}
ALIKE = Job.uniform(3, 4, 6, durations=TIMES)
UNLIKE = replace(ALIKE, speeds=((Worker(1, 2), 0.8), (Worker(2, 0), 1.25)))
PROFILE = StageProfile(
    4,
    3,
    2,
    1,
    activation_bytes=30,
    weight_backward_bytes=10,
    weight_bytes=100,
    optimizer_bytes=200,
    reductions=(1, 2, 3),
)
WEIGHED = replace(ALIKE, profiles=(PROFILE,) * 4, capacity_bytes=(500,) * 4)
FAILED = frozenset({Worker(1, 1), Worker(0, 3)})
PROBLEMS = [
    Problem(ALIKE, FAILED, Technique.STAGGERED, MemoryLimit("uniform")),
    Problem(ALIKE, FAILED, Technique.DECOUPLED, MemoryLimit("1f1b")),
    Problem(ALIKE, FAILED, Technique.ADAPTIVE, MemoryLimit("none")),
    Problem(ALIKE, frozenset(), Technique.FAULT_FREE, MemoryLimit("1f1b")),
    Problem(UNLIKE, FAILED, Technique.STAGGERED, MemoryLimit("uniform")),
    Problem(WEIGHED, FAILED, Technique.STAGGERED, MemoryLimit("bytes")),
]


@cache
def solved(problem: Problem) -> Plan:
    solution = best_solution(problem, solver="list", look_ahead=False)
    columns = Columns.of(solution.schedule)
    metrics = metrics_of(replace(solution, schedule=columns.summary()))
    return columns.plan(metrics, solver_of(solution, seconds=0.0))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.technique}-{p.memory.text}")
def test_what_solvers_make_is_valid(problem: Problem) -> None:
    assert check(solved(problem)) == []
    assert check(solved(problem).model_copy()) == []


@examples(300)
@given(st.sampled_from(PROBLEMS), st.data())
def test_the_same_is_found_in_arrays_and_in_the_document(problem: Problem, data: st.DataObject) -> None:
    """One number of a valid plan is another one."""
    plan = solved(problem)
    name = data.draw(st.sampled_from(["route", "starts", "split", "durations", "step"]))
    changed = getattr(columns_of(plan), name).copy()
    at = data.draw(st.integers(0, changed.size - 1))
    by = data.draw(st.sampled_from([-40, -3, -1, 1, 3, 40]))
    limit = {"route": problem.job.pipelines, "split": 2}.get(name)
    changed.flat[at] = (changed.flat[at] + by) % limit if limit else changed.flat[at] + by
    columns = replace(columns_of(plan), **{name: changed})
    other = columns.plan(plan.metrics, plan.solver)
    assert list(map(str, check(other))) == list(map(str, check(other.model_copy()))), (name, at, by)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("period", 1.0, "metrics.period is 1.0"),
        ("makespan", 1.0, "metrics.makespan is 1.0"),
        ("bubble_fraction", 0.9, "metrics.bubble_fraction is 0.9"),
        ("lower_bound", 1e9, "metrics.lower_bound 1000000000.0 is above"),
        ("peak_activations", {}, "metrics.peak_activations of W0_0"),
    ],
)
def test_numbers_that_are_not_those_of_the_ops(field: str, value: object, said: str) -> None:
    plan = solved(PROBLEMS[0])
    metrics = plan.metrics.model_copy(update={field: value})
    other = columns_of(plan).plan(metrics, plan.solver)
    other.__dict__["metrics"] = metrics  # of_columns counts the activations itself
    assert any(str(found).startswith(said) for found in check(other))


def test_a_plan_that_breaks_a_rule_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Columns.of

    def late(schedule: object) -> Columns:
        columns = of(schedule)  # type: ignore[arg-type]
        starts = columns.starts.copy()
        starts[0, 0, np.argmin(starts[0, 0])] += 1
        return replace(columns, starts=starts)

    monkeypatch.setattr(plan_arrays.Columns, "of", late)
    monkeypatch.setattr(plan_arrays, "SMALL_OPS", 10)
    with pytest.raises(PlannerError, match=golden("the-plan-of-list-is")):
        make_plan(PROBLEMS[0], solver="list", form=checked_plan_of)
