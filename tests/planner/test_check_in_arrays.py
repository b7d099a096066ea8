"""A plan is checked alike, whether it was made here or came as a document or packed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check, checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.packed import pack, unpack
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import OpsByWorker, Schedule
from openrecycle.planner.solvers.portfolio import best_solution, make_plan, plan_of
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
    return make_plan(problem, solver="list", look_ahead=False)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.technique}-{p.memory.text}")
def test_what_solvers_make_is_valid(problem: Problem) -> None:
    plan = solved(problem)
    assert check(plan) == check(plan.schedule()) == []
    assert check(Plan.from_json(plan.to_json())) == check(unpack(pack(plan))) == []


@examples(300)
@given(st.sampled_from(PROBLEMS), st.data())
def test_the_same_is_found_however_the_ops_came(problem: Problem, data: st.DataObject) -> None:
    """One number of a valid plan is another one."""
    plan = solved(problem)
    name = data.draw(st.sampled_from(["kind", "pipeline", "micro_batch", "stage", "start", "duration"]))
    arrays = plan.schedule().arrays
    changed = getattr(arrays, name).copy()
    at = data.draw(st.integers(0, changed.size - 1))
    by = data.draw(st.sampled_from([-40, -3, -1, 1, 3, 40]))
    if name in ("start", "duration"):
        changed[at] = max(0, changed[at] + by)
    else:
        changed[at] = (changed[at] + by) % {"kind": 5}.get(name, 6)
    workers = list(plan.schedule().ops)
    schedule = Schedule(problem, OpsByWorker(workers, lambda: replace(arrays, **{name: changed})))
    found = list(map(str, check(schedule)))
    assert list(map(str, check(Schedule(problem, dict(schedule.ops))))) == found, (name, at, by)
    other = Plan.of(schedule, metrics=plan.metrics, solver=plan.solver)
    said = list(map(str, check(other)))
    assert list(map(str, check(Plan.from_json(other.to_json())))) == said, (name, at, by)
    assert list(map(str, check(unpack(pack(other))))) == said, (name, at, by)
    assert not found or said[-len(found) :] == found


@pytest.mark.parametrize(
    ("field", "value"),
    [("period", 1.0), ("makespan", 1.0), ("bubble_fraction", 0.9), ("lower_bound", 1e9), ("peak_activations", {})],
)
def test_numbers_that_are_not_those_of_the_ops(field: str, value: object) -> None:
    plan = solved(PROBLEMS[0])
    other = Plan.of(plan.schedule(), metrics=plan.metrics.model_copy(update={field: value}), solver=plan.solver)
    assert any(found.rule == f"metrics.{field}" for found in check(other))
    assert unpack(pack(other)) == other


def test_a_plan_that_breaks_a_rule_is_not_taken() -> None:
    made = best_solution(PROBLEMS[0], solver="list", look_ahead=False)
    arrays = made.schedule.arrays
    start = arrays.start.copy()
    start[0] += 1
    late = Schedule(PROBLEMS[0], OpsByWorker(made.schedule.ops, lambda: replace(arrays, start=start)))
    with pytest.raises(PlannerError, match=golden("the-plan-of-list-is")):
        checked(plan_of(replace(made, schedule=late), seconds=0.0))
    good = plan_of(made, seconds=0.0)
    assert checked(good) is good
