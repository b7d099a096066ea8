"""The torch CSV: what is in it, what is refused, and that torch 2.13 runs it to the right gradients."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given

from openrecycle.planner.export import EXPORTERS
from openrecycle.planner.export.text_formats import to_torch_csv
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.baseline import one_forward_one_backward, reference_schedule
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import at_length, examples, refuses
from tests.planner.plans import as_plan, listed, worked_example
from tests.planner.problems import problems

Cell = tuple[int, str, int]


def lines(text: str) -> list[list[Cell | None]]:
    """As torch reads it: stage, kind, micro-batch; None for an empty cell."""

    def cell(raw: str) -> Cell | None:
        kind = next((c for c in raw if c.isalpha()), "")
        stage, _, micro_batch = raw.partition(kind) if kind else ("", "", "")
        return (int(stage), kind, int(micro_batch)) if kind else None

    return [[cell(raw) for raw in row] for row in csv.reader(text.splitlines())]


def unlike_pipelines() -> Plan:
    """GPipe in pipeline 0, 1F1B in pipeline 1."""
    problem = Problem(Job.uniform(2, 3, 4), technique=Technique.FAULT_FREE, memory=MemoryLimit("none"))
    ops: list[Op] = []
    for pipeline, schedule in enumerate((reference_schedule(problem, "gpipe"), one_forward_one_backward(problem))):
        ops += [op for op in schedule.compute_ops() if op.pipeline == pipeline]
    return as_plan(Schedule.build(problem, ops))


def test_1f1b_of_two_stages_in_slots() -> None:
    problem = Problem(Job.uniform(3, 2, 2), technique=Technique.FAULT_FREE, memory=MemoryLimit("none"))
    text = to_torch_csv(as_plan(one_forward_one_backward(problem)))
    assert text == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,,,\n"


def test_a_cell_lies_at_its_start() -> None:
    plan = worked_example()
    rows = lines(to_torch_csv(plan))
    assert len(rows) == 4
    for stage, row in enumerate(rows):
        found = {(kind, mb): at for at, cell in enumerate(row) if cell for _, kind, mb in (cell,)}
        expected = {(op.kind, op.micro_batch): op.start for op in plan.workers[f"W0_{stage}"] if op.kind != "O"}
        assert found == expected


def test_uneven_durations_become_the_order_of_ops_without_bubbles() -> None:
    profiles = (StageProfile(1.0, 1.1, 0.9), StageProfile(1.2, 1.0, 0.7))
    plan = make_plan(Problem(Job(2, 2, 4, profiles=profiles)), solver="list", look_ahead=False)
    rows = lines(to_torch_csv(plan, 1))
    for stage, row in enumerate(rows):
        ops = [op for op in plan.workers[f"W1_{stage}"] if op.kind != "O"]
        assert row == [(stage, op.kind, op.micro_batch) for op in ops]


def test_an_op_of_a_billion_slots_is_no_billion_cells() -> None:
    profiles = (StageProfile(0.000001, 500.0, 500.0),)
    plan = make_plan(Problem(Job(1, 1, 1, profiles=profiles)), solver="list", look_ahead=False)
    assert len(lines(to_torch_csv(plan))[0]) < 10


def test_pipelines_that_differ_need_a_choice() -> None:
    plan = unlike_pipelines()
    with refuses("--pipeline", None):
        to_torch_csv(plan)
    first, second = to_torch_csv(plan, 0), to_torch_csv(plan, 1)
    assert first.splitlines()[0].startswith("0F0,0F1,0F2,0F3")
    assert second.splitlines()[0].startswith("0F0,0F1,0F2,,")
    assert EXPORTERS["torch-csv"].render(plan, pipeline=1) == second.encode()


def test_a_rerouted_plan_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="W1_2"):
        to_torch_csv(worked_example(Technique.STAGGERED, "W1_2"))


def test_rerouting_without_a_failure_is_refused_too() -> None:
    problem = Problem(Job.uniform(2, 1, 1), technique=Technique.ADAPTIVE, memory=MemoryLimit("none"))
    both_on_one = [
        Op(kind, p, 0, 0, Worker(0, 0), at + 3 * p, length)
        for p in (0, 1)
        for kind, at, length in (("F", 0, 1), ("B", 1, 2))
    ]
    with pytest.raises(InputError, match=r"re-routes F1\.0@W0_0"):
        to_torch_csv(as_plan(Schedule.build(problem, both_on_one)))


@examples(60)
@given(problem=problems(techniques=list(Technique), speeds=False))
def test_every_stage_in_the_order_of_the_lines_never_waits_for_ever(problem: Problem) -> None:
    """Ranks that run their lines in order, as torch does, all come to the end."""
    if problem.failed:
        problem = Problem(problem.job, technique=problem.technique)
    plan = listed(problem)
    waiting = [[cell for cell in row if cell] for row in lines(to_torch_csv(plan, problem.job.pipelines - 1))]
    assert len(waiting) == problem.job.stages
    assert all(len({(k, j) for _, k, j in row}) == len(row) for row in waiting)
    done: set[Cell] = set()
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(waiting):
            while row and _ready(row[0], stage, problem.job.stages, done):
                done.add(row.pop(0))
                moved = True
    assert not any(waiting)
    assert sum(kind == "F" for _, kind, _ in done) == problem.job.stages * problem.job.micro_batches
    assert sum(kind in "WB" for _, kind, _ in done) == problem.job.stages * problem.job.micro_batches


def _ready(cell: Cell, stage: int, stages: int, done: set[Cell]) -> bool:
    of_stage, kind, j = cell
    assert of_stage == stage
    if kind == "F":
        return stage == 0 or (stage - 1, "F", j) in done
    if kind == "W":
        return (stage, "I", j) in done
    above = {(stage + 1, "I", j), (stage + 1, "B", j)}
    return (stage, "F", j) in done and (stage == stages - 1 or bool(above & done))


UNEVEN = Job(
    2, 3, 5, profiles=(StageProfile(1.0, 0.0, 1.9), StageProfile(1.1, 1.2, 0.8), StageProfile(0.9, 1.0, 1.1)),
    transfers=(0.2, 0.1),
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(
    ("job", "technique"),
    [
        at_length(Job.uniform(2, 2, 3), Technique.FAULT_FREE),
        at_length(Job.uniform(3, 4, 6), Technique.STAGGERED),
        (UNEVEN, Technique.DECOUPLED),
    ],
    ids=["1F1B in slots", "split backward in slots", "split backward in order"],
)
def test_torch_runs_it_to_the_plain_model_s_gradients(tmp_path: Path, job: Job, technique: Technique) -> None:
    torch = pytest.importorskip("torch")
    from tests.agent.launches import Launched  # imports torch

    plan = make_plan(Problem(job, technique=technique, memory=MemoryLimit("none")), solver="list", look_ahead=False)
    schedule = tmp_path / "schedule.csv"
    schedule.write_bytes(EXPORTERS["torch-csv"].render(plan, pipeline=0))
    kinds = {cell[1] for row in lines(schedule.read_text()) for cell in row if cell}
    assert kinds >= ({"F", "I", "W"} if technique.splits else {"F", "B"})
    arguments, errors = (str(schedule), str(job.stages), str(job.micro_batches), str(tmp_path)), tmp_path / "errors"
    ranks = Launched(*arguments, errors=errors, module="tests.planner.torch_pipeline_run")
    try:
        assert ranks.wait(170) == 0, errors.read_text()[-2000:]
    finally:
        ranks.end()
    plain = torch.load(tmp_path / "plain.pt")
    for stage in range(job.stages):
        ran = torch.load(tmp_path / f"rank{stage}.pt")
        for mine, reference in zip(ran["gradients"], plain["gradients"][stage], strict=True):
            assert reference.abs().max() > 0
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(ran["losses"], plain["losses"], rtol=1e-12, atol=0)
