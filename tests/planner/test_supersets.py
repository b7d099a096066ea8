"""A plan for more failures is one for fewer: no plan is longer than those that the planner looks at."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from openrecycle.planner.catalogs.catalog_build import InlineEngine, build_catalog
from openrecycle.planner.check import check
from openrecycle.planner.jobs.failures import canonical_pattern, failures_per_stage, levelled, with_one_more
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.baseline import REFERENCES, reference_schedule
from openrecycle.planner.plans.packed import CatalogQuestion, Effort
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.base import Run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import SOLVERS, best_solution, of_more_failures
from tests.conftest import examples
from tests.planner.problems import problems


@examples(60)
@given(problems())
def test_a_plan_is_no_longer_than_that_for_as_many_failures_on_every_stage(problem: Problem) -> None:
    made = ListScheduler().solve(problem)
    assert check(made.schedule) == []
    more = replace(problem, failed=levelled(problem.failed, problem.job))
    assert problem.failed <= more.failed
    assert max(failures_per_stage(more.failed, problem.job)) == max(failures_per_stage(problem.failed, problem.job))
    if not problem.job.speeds and problem.technique.reroutes:
        serving = ListScheduler().solve(more).schedule.for_fewer(problem)
        assert check(serving) == []
        assert made.schedule.period <= serving.period


@examples(60)
@given(problems())
def test_a_plan_is_no_longer_than_a_reference_with_the_rerouted_work_in_it(problem: Problem) -> None:
    job = problem.job
    whole = [p for p in range(job.pipelines) if all(w.pipeline != p for w in problem.failed)]
    if not whole or job.speeds or not problem.technique.reroutes:
        return
    made = ListScheduler().solve(problem).schedule
    share = -(-job.pipelines * job.micro_batches // len(whole))
    alone = Problem(replace(job, pipelines=1, micro_batches=share), technique=problem.technique, memory=problem.memory)
    for name in REFERENCES:
        reference = reference_schedule(alone, name)
        if check(reference):
            continue
        ops = []
        for place, pipeline in enumerate(whole):
            for op in reference.compute_ops():
                home = op.micro_batch * len(whole) + place
                if home < job.pipelines * job.micro_batches:
                    j, p = divmod(home, job.pipelines)
                    ops.append(Op(op.kind, p, j, op.stage, Worker(pipeline, op.stage), op.start, op.duration))
        inserted = Schedule.build(problem, ops)
        assert check(inserted) == []
        assert made.period <= inserted.period


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("grid", "memory", "durations", "technique"),
    [
        ((3, 4, 6), "8", {"F": 1, "I": 1.1, "W": 0.9, "transfer": 0.2}, Technique.STAGGERED),
        ((4, 4, 8), "1f1b", {"F": 1, "I": 1.1, "W": 0.9, "transfer": 0.2}, Technique.ADAPTIVE),
    ],
)
def test_with_time_no_plan_is_longer_than_one_for_a_failure_more(
    grid: tuple[int, int, int], memory: str, durations: dict[str, float], technique: Technique
) -> None:
    job = Job.uniform(*grid, durations=durations)
    workers = list(job.workers())
    random.Random(1).shuffle(workers)
    problem = Problem(job, frozenset(workers[:2]), technique, MemoryLimit(memory))
    made = of_more_failures(ListScheduler().solve(problem), Run())
    assert check(made.schedule) == []
    for more in with_one_more(problem.failed, job):
        other = ListScheduler().solve(replace(problem, failed=more)).schedule
        assert made.schedule.period <= other.for_fewer(problem).period


def test_one_more_is_each_pattern_once() -> None:
    job = Job.uniform(3, 4, 6)
    found = list(with_one_more({Worker(1, 2)}, job))
    patterns = {canonical_pattern(f, job)[0] for f in found}
    assert len(found) == len(patterns) == 7
    assert all(len(f) == 2 and Worker(1, 2) in f for f in found)
    full = frozenset({Worker(0, s) for s in range(4)} | {Worker(1, s) for s in range(4)})
    assert list(with_one_more(full, job)) == []


def test_no_plan_of_a_catalog_is_longer_than_one_for_a_failure_more(tmp_path: Path) -> None:
    """By pattern; by count tests/planner/test_catalog_build.py has it."""
    job = Job.uniform(4, 4, 4, durations={"F": 1, "I": 1.1, "W": 0.9, "transfer": 0.2})
    question = CatalogQuestion(job, Technique.ADAPTIVE, MemoryLimit("1f1b"))
    catalog = build_catalog(question, 3, tmp_path, engine=InlineEngine(), effort=Effort(solver="list"), per="pattern")
    stored = [catalog.catalog.plan(name) for name in catalog.catalog.blobs.names()]
    plans = {frozenset(map(Worker.parse, p.failed)): p for p in stored}
    assert len(plans) > 50
    for failed, plan in plans.items():
        for more in with_one_more(failed, job):
            other = plans.get(canonical_pattern(more, job)[0])
            assert other is None or plan.metrics.period <= other.metrics.period
        if "serves for" in plan.solver.message:
            assert check(plan) == []
    assert any("serves for" in plan.solver.message for plan in plans.values())


UNEVEN = {"F": 1, "I": 1.5, "W": 0.8, "transfer": 0.1, "O": 0.5}
# One failure more once made a shorter plan: grid, durations, technique, memory, failures, one more.
STEPS = [
    ((3, 3, 6), {}, Technique.ADAPTIVE, "uniform", "W0_1 W1_0", "W1_2"),
    ((3, 3, 6), UNEVEN, Technique.STAGGERED, "8", "W1_0 W2_2", "W2_1"),
    ((3, 4, 6), UNEVEN, Technique.STAGGERED, "8", "W0_2 W2_3", "W2_1"),
    ((3, 4, 6), UNEVEN, Technique.STAGGERED, "1f1b", "W1_3 W2_2", "W2_1"),
    # Shorter only with two failures more than these.
    ((3, 4, 6), UNEVEN, Technique.DECOUPLED, "uniform", "W0_1 W2_0 W2_1", "W2_2"),
]


@pytest.mark.parametrize(
    ("solver", "grid", "durations", "technique", "memory", "failed", "more"),
    [("list", *step) for step in STEPS] + [(solver, *STEPS[0]) for solver in SOLVERS if solver != "list"],
)
def test_with_no_solver_a_failure_more_makes_a_shorter_plan(
    solver: str,
    grid: tuple[int, int, int],
    durations: dict[str, float],
    technique: Technique,
    memory: str,
    failed: str,
    more: str,
) -> None:
    dead = frozenset(map(Worker.parse, failed.split()))
    problem = Problem(Job.uniform(*grid, durations=durations), dead, technique, MemoryLimit(memory))
    limit = float("inf") if solver == "list" else 3.0
    made = best_solution(problem, Run(limit), solver=solver).schedule
    assert check(made) == []
    other = best_solution(replace(problem, failed=dead | {Worker.parse(more)}), solver="list").schedule
    assert made.period <= other.period


@examples(40)
@given(problems(pipelines=3, stages=3, micro_batches=4, speeds=False, unlike=False))
def test_no_list_plan_is_longer_than_one_for_a_failure_more(problem: Problem) -> None:
    made = best_solution(problem, solver="list").schedule
    assert check(made) == []
    for more in with_one_more(problem.failed, problem.job) if problem.failed else ():
        other = ListScheduler().solve(replace(problem, failed=more)).schedule.for_fewer(problem)
        assert made.period <= other.period
