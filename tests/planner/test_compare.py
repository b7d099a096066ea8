"""Plans side by side."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from openrecycle.planner.export.compare import ComparisonRow, compare
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.plan import MEASURED, Plan, SolverDoc
from openrecycle.planner.solvers.portfolio import make_plan, reference_plan
from tests.conftest import examples
from tests.golden import golden
from tests.planner.plans import listed, worked_example
from tests.planner.problems import problems


def rows(*plans: Plan) -> dict[str, ComparisonRow]:
    return {row.key: row for row in compare(plans)}


def test_the_numbers_are_those_of_the_plans() -> None:
    a, b = worked_example(Technique.ADAPTIVE), worked_example(Technique.ADAPTIVE, "W1_2")
    found = rows(a, b)
    for key in ("period", "makespan", "lower_bound", "gap", "bubble_fraction", "slowdown_vs_1f1b", "slowdown_vs_best"):
        assert found[key].values == (getattr(a.metrics, key), getattr(b.metrics, key))
    assert found["rerouted_ops"].values == (0, 12)
    assert found["failed"].values == ("none", "W1_2")
    assert found["peak_activations"].values == tuple(max(p.metrics.peak_activations.values()) for p in (a, b))
    assert found["ops"].values == (12 * 13, 11 * 13 + 12)
    assert found["period"].shown(0) == f"{a.metrics.period}"
    change = b.metrics.period / a.metrics.period - 1
    assert found["period"].shown(1) == f"{b.metrics.period} ({change:+.1%})"
    assert found["bubble_fraction"].shown(1) == f"{b.metrics.bubble_fraction:.2%}"


def test_memory_has_a_row_where_a_profile_says_what_a_worker_holds() -> None:
    job = Job.uniform(2, 2, 4)
    heavy = replace(job, profiles=tuple(replace(p, activation_bytes=2**29) for p in job.profiles))
    plain, holding = worked_example(), reference_plan(heavy, "1f1b")
    assert "peak_bytes" not in rows(plain, worked_example(Technique.ADAPTIVE))
    found = rows(plain, holding)["peak_bytes"]
    most = max(holding.schedule().peak_bytes.values())
    assert found.values == (None, most) and most > 0
    assert found.shown(0) == "-" and found.shown(1) == f"{most / 2**30:.4g} GiB"


def test_layers_have_a_row_where_a_job_has_them() -> None:
    """Plans for the same workers may differ in nothing else."""
    job = Job.uniform(2, 2, 4, layers=5, partition=(2, 3))
    home, moved = (make_plan(Problem(job.with_partition(cut)), solver="list") for cut in ((2, 3), (3, 2)))
    assert "partition" not in rows(worked_example(), worked_example(Technique.ADAPTIVE))
    found = rows(home, moved, worked_example())["partition"]
    assert found.values == ("2, 3", "3, 2", None) and found.shown(2) == "-"


def test_of_all_rows_those_that_are_asked_for_are_made() -> None:
    plans = [worked_example(Technique.ADAPTIVE), worked_example(Technique.ADAPTIVE, "W1_2")]
    whole = {row.key: row for row in compare(plans)}
    for key, row in whole.items():
        assert compare(plans, {key}) == (row,)


def test_all_plans_of_a_job_stand_beside_one_best() -> None:
    """1F1B of 27 slots keeps a tighter memory limit and is of another technique than ours of 21, and is 29 % longer."""
    job = Job.uniform(3, 4, 6)
    plain = reference_plan(job, "1f1b")
    ours = make_plan(Problem(job, memory=MemoryLimit("uniform")), solver="list", look_ahead=False)
    other = make_plan(Problem(Job.uniform(2, 2, 4)), solver="list", look_ahead=False)
    found = rows(plain, ours, other)
    assert found["period"].values == (27, 21, other.metrics.period)
    assert found["slowdown_vs_best"].values == (27 / 21 - 1, 0, other.metrics.slowdown_vs_best)
    assert found["slowdown_vs_best"].shown(0) == "+28.57%"
    assert found["period"].changes[1] is not None and found["period"].changes[2] is None, "another grid is not compared"


def test_an_iteration_as_it_ran_was_made_by_no_solver() -> None:
    plan = worked_example()
    ran = plan.model_copy(update={"solver": SolverDoc(name=MEASURED, status="feasible", seconds=0.0)})
    solver = plan.solver
    made = f"{solver.name}, {solver.status}, {solver.seconds:.2f} s"
    assert rows(plan, ran)["solver"].values == (made, golden("none-as-it-ran"))


def test_rerouted_ops_moved() -> None:
    found = rows(worked_example(Technique.ADAPTIVE), worked_example(Technique.ADAPTIVE, "W1_2"))
    assert found["moved_worker"].values == (0, 6 * 2)
    assert found["split_otherwise"].values == (0, 0)


def test_one_op_that_starts_later_is_counted() -> None:
    plan = worked_example()
    name, ops = next(iter(plan.workers.items()))
    late = (*ops[:-2], ops[-2].model_copy(update={"start": ops[-2].start + 1}), ops[-1])
    other = plan.model_copy(update={"workers": {**plan.workers, name: late}})
    found = rows(plan, other)
    assert (found["moved_worker"].values[1], found["moved_start"].values[1]) == (0, 1)


def test_backwards_that_are_split_in_one_plan_only() -> None:
    fused, split = worked_example(Technique.ADAPTIVE), worked_example(Technique.STAGGERED)
    found = rows(fused, split)
    weights = sum(op.kind == "W" for ops in split.workers.values() for op in ops)
    assert found["split_otherwise"].values[1] == weights > 0
    assert found["moved_worker"].values[1] == 0
    rerouted = worked_example(Technique.STAGGERED, "W1_2")
    assert rows(fused, rerouted)["moved_worker"].values[1] == 6 * 2  # F and, split or not, the backward


def test_other_grids_and_units_are_not_matched() -> None:
    a = worked_example()
    b = worked_example(Technique.STAGGERED, pipelines=2)
    in_ms = make_plan(
        Problem(Job.uniform(3, 4, 6, time_unit="ms"), memory=MemoryLimit("none")), solver="list", look_ahead=False
    )
    found = rows(a, b, in_ms)
    assert found["moved_worker"].values[1] is None
    assert found["moved_worker"].shown(1) == "-"
    assert found["moved_worker"].values[2] == 0
    assert found["moved_start"].values[1:] == (None, None)
    assert found["period"].changes[2] is None
    assert "%" not in found["period"].shown(2)
    assert found["time_unit"].values == ("slot", "slot", "ms")


@examples(30)
@given(problem=problems())
def test_a_plan_against_itself_and_its_mirror(problem: Problem) -> None:
    plan = listed(problem)
    same = rows(plan, plan)
    assert all(row.values[0] == row.values[1] for row in same.values())
    assert [same[key].values[1] for key in ("moved_worker", "moved_start", "split_otherwise")] == [0, 0, 0]
    # The same plan with its pipelines renamed: every number is the same, whatever moved.
    if problem.job.speeds:
        return
    mirror = plan.renamed(range(problem.job.pipelines)[::-1])
    found = rows(plan, mirror)
    for key in ("period", "makespan", "bubble_fraction", "peak_activations", "rerouted_ops", "ops"):
        assert found[key].values[0] == found[key].values[1]
    there, back = compare([plan, mirror]), compare([mirror, plan])
    for key in (-3, -2, -1):
        assert there[key].values[1] == back[key].values[1]
