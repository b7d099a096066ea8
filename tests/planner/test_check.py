"""The checker must catch every kind of damage; each test breaks a valid plan in one way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import MOST_VIOLATIONS, check, claim, further
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.baseline import one_forward_one_backward, reference_schedule
from openrecycle.planner.plans.packed import pack, unpack
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.planner.problems import problems

PROBLEM = Problem(
    Job.uniform(3, 4, 6, durations={"O": 2, "transfer": 0.5}),
    frozenset({Worker(1, 2)}),
    Technique.STAGGERED,
    MemoryLimit("uniform"),
)
W0_2 = Worker(0, 2)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return ListScheduler().solve(PROBLEM).schedule


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(PROBLEM, solver="list", look_ahead=False)


def with_row(schedule: Schedule, worker: Worker, change: Callable[[list[Op]], list[Op]]) -> Schedule:
    return Schedule(schedule.problem, {**schedule.ops, worker: tuple(change(list(schedule.ops[worker])))})


def replaced(schedule: Schedule, old: Op, **changes: Any) -> Schedule:
    return with_row(schedule, old.worker, lambda row: [op._replace(**changes) if op == old else op for op in row])


def find(schedule: Schedule, kind: str, worker: Worker, k: int = 0) -> Op:
    return [op for op in schedule.ops[worker] if op.kind == kind][k]


def rules(subject: Schedule | Plan) -> set[str]:
    return {violation.rule for violation in check(subject)}


def broken(subject: Schedule | Plan, rule: str) -> list[tuple[Op, ...]]:
    """The ops of each violation of this rule."""
    return [violation.ops for violation in check(subject) if violation.rule == rule]


@examples(150)
@given(problems())
def test_every_schedule_of_the_list_scheduler_is_valid(problem: Problem) -> None:
    assert check(ListScheduler().solve(problem).schedule) == []


@examples(50)
@given(problems(techniques=[Technique.FAULT_FREE], memories=["none"]))
def test_reference_schedules_are_valid(problem: Problem) -> None:
    assert check(one_forward_one_backward(problem)) == []
    assert check(reference_schedule(problem, "gpipe")) == []


@examples(60)
@given(problems(), st.sampled_from(["list"]))
def test_every_plan_tells_the_truth(problem: Problem, solver: str) -> None:
    plan = make_plan(problem, solver=solver, look_ahead=False)
    assert check(plan) == []
    assert check(Plan.from_json(plan.to_json())) == []


@examples(100)
@given(problems(memories=["1", "2", "uniform"]), st.data())
def test_moving_any_op_into_what_must_precede_it_is_caught(problem: Problem, data: st.DataObject) -> None:
    """A tick before the end of the op before it on its worker, or of the op it depends on."""
    schedule = ListScheduler().solve(problem).schedule
    op = data.draw(st.sampled_from(sorted(o for o in schedule.compute_ops() if o.duration)))
    others = [o for o in schedule.compute_ops() if o.duration and o != op]
    barriers = [o.end for o in others if o.worker == op.worker and o.end <= op.start]
    wires, wires_back = problem.job.transfer_ticks, problem.job.backward_transfer_ticks
    same = [o for o in others if (o.pipeline, o.micro_batch) == (op.pipeline, op.micro_batch)]
    if op.kind == "F":
        barriers += [o.end + wires[o.stage] for o in same if o.kind == "F" and o.stage == op.stage - 1]
    elif op.kind in "IB":
        barriers += [o.end + wires_back[op.stage] for o in same if o.kind in "IB" and o.stage == op.stage + 1]
    if barriers:
        assert check(replaced(schedule, op, start=max(barriers) - 1))


def test_overlap_names_both_ops(schedule: Schedule) -> None:
    first, second = schedule.ops[W0_2][3:5]
    moved = second._replace(start=first.end - 1)
    (violation, *_) = check(replaced(schedule, second, start=moved.start))
    assert (violation.rule, violation.ops) == ("overlap", (first, moved))
    assert f"micro-batch {second.micro_batch} of pipeline {second.pipeline} on W0_2" in str(violation)


def test_the_order_in_which_ops_stand_is_the_one_that_is_run() -> None:
    """Of ops without duration times alone do not say what comes first, and a worker runs them as they stand."""
    job = Job(1, 1, 2, profiles=(StageProfile(2, 0, 1),))
    w = Worker(0, 0)
    runs = ("F", 0, 0, 2), ("I", 0, 2, 0), ("F", 1, 2, 2), ("I", 1, 4, 0), ("W", 1, 4, 1), ("W", 0, 5, 1)
    row = [*(Op(kind, 0, m, 0, w, start, length) for kind, m, start, length in runs), Op("O", 0, -1, 0, w, 6, 0)]
    problem = Problem(job, memory=MemoryLimit("none"))
    assert check(Schedule(problem, {w: tuple(row)})) == []
    for place in (1, 3):  # behind the forward that needs its room; behind the weight gradient that needs it
        other = [*row]
        other[place], other[place + 1] = other[place + 1], other[place]
        (violation,) = check(Schedule(problem, {w: tuple(other)}))
        assert (violation.rule, violation.ops) == ("order", (row[place + 1], row[place]))


def test_a_step_stands_last() -> None:
    job = Job(1, 1, 1, profiles=(StageProfile(1, 1, 0),))
    w = Worker(0, 0)
    rows = (Op("F", 0, 0, 0, w, 0, 1), Op("I", 0, 0, 0, w, 1, 1), Op("O", 0, -1, 0, w, 2, 0), Op("W", 0, 0, 0, w, 2, 0))
    (violation,) = check(Schedule(Problem(job, memory=MemoryLimit("none")), {w: rows}))
    assert (violation.rule, violation.ops) == ("step-last", (rows[-1],))


def test_transfer_is_part_of_precedence(schedule: Schedule) -> None:
    late = find(schedule, "F", Worker(0, 1))
    assert late.start == 15  # F of stage 0 ends at 1 slot = 10 ticks; 5 more for the transfer
    before = next(op for op in schedule.ops[Worker(0, 0)] if op.kind == "F" and op[1:3] == late[1:3])
    assert (before, late._replace(start=14)) in broken(replaced(schedule, late, start=14), "precedence")


def test_backward_before_its_own_forward() -> None:
    problem = Problem(Job.uniform(1, 1, 1), memory=MemoryLimit("none"))
    w = Worker(0, 0)
    rows = {
        w: (Op("I", 0, 0, 0, w, 0, 1), Op("W", 0, 0, 0, w, 1, 1), Op("F", 0, 0, 0, w, 2, 1), Op("O", 0, -1, 0, w, 3, 0))
    }
    (violation,) = check(Schedule(problem, rows))
    assert violation.rule == "precedence" and [op.kind for op in violation.ops] == ["F", "I"]


def test_weight_gradient_before_its_input_gradient(schedule: Schedule) -> None:
    weight = schedule.ops[W0_2][-2]
    assert weight.kind == "W"
    own = next(o for o in schedule.ops[W0_2] if o.kind == "I" and o[1:4] == weight[1:4])

    def swap(row: list[Op]) -> list[Op]:
        starts = {own: weight.start, weight: own.start}
        return sorted((o._replace(start=starts.get(o, o.start)) for o in row), key=lambda o: (o.start, o.end))

    pairs = [tuple(o.kind for o in ops) for ops in broken(with_row(schedule, W0_2, swap), "precedence")]
    assert ("I", "W") in pairs


def test_memory_counts_from_forward_to_weight_gradient() -> None:
    job = Job.uniform(1, 1, 2)
    w = Worker(0, 0)

    def rows(order: str) -> dict[Worker, tuple[Op, ...]]:
        seen: dict[str, int] = {}
        ops = []
        for start, kind in enumerate(order):
            ops.append(Op(kind, 0, seen.get(kind, 0), 0, w, start, 1))
            seen[kind] = seen.get(kind, 0) + 1
        return {w: (*ops, Op("O", 0, -1, 0, w, 6, 0))}

    for limit, order, valid in [("1", "FIWFIW", True), ("1", "FIFWIW", False), ("2", "FIFWIW", True)]:
        found = check(Schedule(Problem(job, memory=MemoryLimit(limit)), rows(order)))
        assert (found == []) == valid
        if not valid:
            assert found[0].rule == "memory" and "may hold 1" in str(found[0])
            assert [op.kind for op in found[0].ops] == ["F", "F"]


def test_missing_and_doubled_ops(schedule: Schedule) -> None:
    weight, forward = find(schedule, "W", W0_2), find(schedule, "F", W0_2)
    for op in (weight, forward):
        without = with_row(schedule, W0_2, lambda row, op=op: [o for o in row if o != op])  # type: ignore[misc]
        (violation,) = [v for v in check(without) if v.rule == "missing-op"]
        assert f"{op.micro_batch} of pipeline {op.pipeline} on stage 2 has no {op.kind}" in str(violation)
    twice = with_row(schedule, W0_2, lambda row: [*row[:-1], weight, row[-1]])
    assert [(v.rule, set(v.ops)) for v in check(twice)] == [("doubled-op", {weight})]


def test_of_a_million_missing_ops_the_first_are_named() -> None:
    """A document of one op may be of as many micro-batches as a job can have."""
    few = {Worker(0, 0): (Op("O", 0, 0, 0, Worker(0, 0), 0, 0),)}
    found = check(Schedule(Problem(Job.uniform(1, 1, 100_000)), few))
    assert len(found) == MOST_VIOLATIONS
    assert further(found) == f"at least {MOST_VIOLATIONS - 1} more"
    assert further(found[:3]) == "2 more" and further(found[:1]) == ""


@pytest.mark.parametrize("grid", [{"micro_batches": 1_300_000}, {"pipelines": 1_300_000}])
def test_a_plan_of_far_too_few_ops_is_refused_at_once(grid: dict[str, int]) -> None:
    plan = make_plan(Problem(Job.uniform(1, 1, 1)), solver="list", look_ahead=False)
    with pytest.raises(PlanError, match="2,600,000"):
        plan.model_copy(update={"job": plan.job.model_copy(update=grid)})


def test_backward_on_another_worker_than_its_forward(schedule: Schedule) -> None:
    other = Worker(2, 2)
    weight = find(schedule, "W", W0_2)
    moved = weight._replace(worker=other, start=10_000)
    without = with_row(schedule, W0_2, lambda row: [o for o in row if o != weight])
    forward = next(op for op in schedule.ops[W0_2] if op.kind == "F" and op[1:4] == weight[1:4])
    assert broken(with_row(without, other, lambda row: [*row, moved]), "other-worker") == [(forward, moved)]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"pipeline": 7}, "outside-grid"),
        ({"micro_batch": 6}, "micro-batch"),
        ({"micro_batch": -1}, "micro-batch"),
        ({"stage": 1}, "row"),
        ({"worker": Worker(2, 2)}, "row"),
        ({"kind": "X"}, "kind"),
        ({"duration": 9}, "duration"),
        ({"start": -5}, "start"),
    ],
    ids=str,
)
def test_a_single_op_that_can_not_be(schedule: Schedule, changes: dict[str, Any], rule: str) -> None:
    op = find(schedule, "F", W0_2)
    assert broken(replaced(schedule, op, **changes), rule) == [(op._replace(**changes),)]


def test_workers_must_be_those_that_live(schedule: Schedule) -> None:
    rows = dict(schedule.ops)
    rows[Worker(1, 2)] = ()
    assert rules(Schedule(PROBLEM, rows)) == {"failed-worker"}
    assert rules(Schedule(PROBLEM, {**schedule.ops, Worker(3, 0): ()})) == {"outside-grid"}
    rows = {w: ops for w, ops in schedule.ops.items() if w != Worker(0, 0)}
    (violation,) = check(Schedule(PROBLEM, rows))
    assert violation.rule == "missing-worker" and str(violation).startswith("W0_0 ")


def test_optimizer_waits_for_the_last_peer(schedule: Schedule) -> None:
    own = schedule.ops[W0_2][-1]
    assert own.kind == "O"
    for start in (own.start - 1, own.start + 1):
        ((last, moved),) = broken(replaced(schedule, own, start=start), "barrier")
        assert (last.end, moved) == (own.start, own._replace(start=start))
    (violation,) = check(with_row(schedule, W0_2, lambda row: row[:-1]))
    assert violation.rule == "missing-op" and str(violation).startswith("W0_2 ")


def test_what_the_technique_forbids(schedule: Schedule) -> None:
    adaptive = Problem(PROBLEM.job, PROBLEM.failed, Technique.ADAPTIVE, PROBLEM.memory)
    assert {op.kind for (op,) in broken(Schedule(adaptive, schedule.ops), "technique")} == {"I", "W"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("makespan", 1),
        ("period", 1),
        ("gap", 0.5),
        ("bubble_fraction", 0.0),
        ("slowdown_vs_1f1b", -0.9),
        ("slowdown_vs_best", 0.0),
        ("slowdown_vs_best", 9.0),
        ("lower_bound", 1_000),
        ("peak_activations", {"W0_0": 1}),
    ],
)
def test_a_plan_that_lies(plan: Plan, field: str, value: object) -> None:
    lying = plan.model_copy(update={"metrics": plan.metrics.model_copy(update={field: value})})
    assert f"metrics.{field}" in rules(lying)


def test_a_plan_with_another_fingerprint_or_status(plan: Plan) -> None:
    assert rules(plan.model_copy(update={"fingerprint": "0" * 32})) == {"fingerprint"}
    (violation,) = check(plan.model_copy(update={"fingerprint": "\x1b[2J"}))
    assert "\x1b" not in str(violation)
    other = {"optimal": "feasible", "feasible": "optimal"}[plan.solver.status]
    solver = plan.solver.model_copy(update={"status": other})
    assert "solver.status" in rules(plan.model_copy(update={"solver": solver}))


OPEN = Problem(
    Job.uniform(4, 4, 8, durations={"F": 1, "I": 1.1, "W": 0.9, "transfer": 0.2}),
    frozenset({Worker(0, 1), Worker(1, 2)}),
    Technique.ADAPTIVE,
    MemoryLimit("1f1b"),
)
"""The list scheduler leaves a gap here."""


def _claiming(solver: str, bound: float | None = None) -> Plan:
    """Its plan with the period, or `bound`, as its bound."""
    plan = make_plan(OPEN, solver="list", look_ahead=False)
    assert plan.metrics.gap > 0
    bound = plan.metrics.period if bound is None else bound
    status = "optimal" if bound == plan.metrics.period else "feasible"
    metrics = plan.metrics.model_copy(update={"lower_bound": bound, "gap": plan.metrics.period / bound - 1})
    return plan.model_copy(
        update={"metrics": metrics, "solver": plan.solver.model_copy(update={"name": solver, "status": status})}
    )


@pytest.mark.parametrize("solver", ["list", "list+tuning", "list+windows", "milp", "zb-h1", "me"])
def test_a_bound_above_the_proven_one_is_invalid(solver: str) -> None:
    proven = make_plan(OPEN, solver="list", look_ahead=False).metrics.lower_bound
    assert check(_claiming(solver, proven)) == []
    for bound in (None, proven + 0.1):
        lying = _claiming(solver, bound)
        assert rules(lying) == {"unproven"}
        assert rules(unpack(pack(lying))) == {"unproven"}


def test_a_bound_of_a_search_is_said_to_be_a_claim() -> None:
    believed = _claiming("cp-sat")
    assert check(believed) == []
    said = claim(believed)
    proven = make_plan(OPEN, solver="list", look_ahead=False).metrics.lower_bound
    assert said is not None and "claimed by cp-sat" in said and said.endswith(f" {proven}")
    assert claim(make_plan(OPEN, solver="list", look_ahead=False)) is None


def test_a_plan_takes_a_finite_time(plan: Plan) -> None:
    for seconds in (-1.0, float("inf"), float("nan")):
        solver = plan.solver.model_copy(update={"seconds": seconds})
        assert "solver.seconds" in rules(plan.model_copy(update={"solver": solver}))


def test_a_bound_of_nothing_is_none(plan: Plan) -> None:
    metrics = plan.metrics.model_copy(update={"lower_bound": 0})
    assert "metrics.lower_bound" in rules(plan.model_copy(update={"metrics": metrics}))


@pytest.mark.processes
def test_the_checker_shares_no_code_with_the_solvers() -> None:
    names = "{name for name in sys.modules if 'planner.solvers' in name or name.endswith(('.dispatch', '.bounds'))}"
    program = f"import sys, openrecycle.planner.check; print({names} - {{'openrecycle.planner.plans.bounds'}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"
