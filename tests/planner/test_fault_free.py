"""No fault-free plan is longer than a published schedule that its constraints allow, and one baseline is for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check, claim, established_bound
from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.baseline import REFERENCES, reference_schedule
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.list_scheduler import ListScheduler, best_fault_free
from openrecycle.planner.solvers.portfolio import make_plan, reference_plan
from tests.conftest import at_length, examples

TIMES = st.integers(1, 9).map(float)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Uneven stages with transfers, one memory limit for all, or none."""
    stages = draw(st.integers(1, 6))
    profiles = tuple(
        StageProfile(draw(TIMES), draw(TIMES), draw(TIMES), draw(st.sampled_from((0.0, 1.0, 5.0))))
        for _ in range(stages)
    )
    transfers = tuple(draw(st.sampled_from((0.0, 0.5, 1.0, 4.0))) for _ in range(stages - 1))
    pipelines = draw(st.integers(1, 2))
    speeds = draw(st.sampled_from(((), ((Worker(0, 0), 0.5),)))) if pipelines > 1 else ()
    job = Job(pipelines, stages, draw(st.integers(1, 12)), profiles=profiles, transfers=transfers, speeds=speeds)
    memory = draw(st.sampled_from(("1f1b", "uniform", "none", str(2 * stages - 1), str(stages), "2")))
    technique = draw(st.sampled_from((Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)))
    return Problem(job, technique=technique, memory=MemoryLimit(memory))


def _allowed(problem: Problem) -> list[Schedule]:
    """The references that planner.check finds no fault with, under the constraints of `problem`."""
    found = []
    for name in REFERENCES:
        schedule = reference_schedule(problem, name)
        if not check(schedule):
            found.append(schedule)
    return found


@examples(150)
@given(problems())
def test_no_plan_is_longer_than_a_reference_that_its_constraints_allow(problem: Problem) -> None:
    made = ListScheduler().solve(problem).schedule
    assert check(made) == []
    for reference in _allowed(problem):
        assert made.period <= reference.period


@pytest.mark.parametrize("micro_batches", [4, at_length(6), 8, at_length(12), at_length(16)])
@pytest.mark.parametrize("stages", [3, at_length(4), 6, at_length(8)])
def test_with_transfers_a_plan_is_no_longer_than_zb_h1(stages: int, micro_batches: int) -> None:
    for transfer in (0.1, 0.25, 0.5, 1.0):
        job = Job.uniform(2, stages, micro_batches, durations={"transfer": transfer})
        problem = Problem(job, memory=MemoryLimit("uniform"))
        plan = make_plan(problem, solver="list", look_ahead=False)
        assert check(plan) == []
        assert plan.metrics.period <= job.units(reference_schedule(problem, "zb-h1").period)


@examples(60)
@given(problems())
def test_the_baseline_is_the_best_of_all_techniques_and_references(problem: Problem) -> None:
    job, memory = problem.job, problem.memory
    best = best_fault_free(job, memory)
    assert check(best) == []
    for technique in (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED):
        question = Problem(job, technique=technique, memory=memory)
        plan = make_plan(question, solver="list", look_ahead=False).metrics
        assert job.units(best.period) <= plan.period
        assert plan.slowdown_vs_best == pytest.approx(plan.period / job.units(best.period) - 1)
        for reference in _allowed(question):
            assert best.period <= reference.period


def test_the_worked_example_has_one_baseline() -> None:
    job = Job.uniform(3, 4, 6)
    assert [best_fault_free(job, MemoryLimit(m)).period for m in ("uniform", "none")] == [21, 19]
    for technique in (Technique.FAULT_FREE, Technique.ADAPTIVE, Technique.STAGGERED):
        metrics = make_plan(Problem(job, technique=technique), solver="list", look_ahead=False).metrics
        assert metrics.slowdown_vs_best == pytest.approx(metrics.period / 21 - 1)


def test_a_1f1b_that_gpipe_beats_is_not_called_optimal() -> None:
    """With transfers GPipe waits less; 1F1B has the better memory, and where that counts is proven again."""
    job = Job.uniform(2, 4, 8, durations={"transfer": 1.0})

    def plan(memory: str, solver: str = "auto") -> Plan:
        return make_plan(Problem(job, technique=Technique.FAULT_FREE, memory=MemoryLimit(memory)), solver=solver)

    gpipe = reference_plan(job, "gpipe")
    assert (gpipe.metrics.period, gpipe.solver.status) == (39, "optimal")
    for solver in ("auto", "list", "cp-sat", "milp"):
        long = plan("none", solver)
        assert (long.metrics.period, long.metrics.lower_bound, long.solver.status) == (49, 39, "feasible")
        assert "GPipe" in long.solver.message and "39" in long.solver.message
        assert check(long) == [] and claim(long) is None
    short = plan("1f1b")
    assert (short.metrics.period, short.solver.status, short.solver.message) == (49, "optimal", "")
    assert check(short) == [] and claim(short) is None
    # What the checker establishes for itself is no more than that either.
    said = long.metrics.model_copy(update={"lower_bound": 49.0, "gap": 0.0})
    solver_doc = long.solver.model_copy(update={"status": "optimal"})
    assert check(long.model_copy(update={"metrics": said, "solver": solver_doc}))


@examples(60)
@given(problems())
def test_the_bound_of_a_fault_free_plan_holds_for_every_published_order(problem: Problem) -> None:
    question = Problem(problem.job, technique=Technique.FAULT_FREE, memory=problem.memory)
    try:
        solution = ListScheduler().solve(question)
    except InfeasibleError:
        return
    shortest = min(schedule.period for schedule in _allowed(question))
    assert solution.bound == shortest <= solution.schedule.period
    assert established_bound(question, solution.schedule.period) == shortest
