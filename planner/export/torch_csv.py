"""The schedule CSV of torch.distributed.pipelining (torch 2.13, `_load_csv(format="compute_only")`).

No header, one line per stage (its rank), cells such as `0F3` = stage, kind, micro-batch; an empty
cell is a bubble. Torch runs each stage on one rank, so a file holds one pipeline, and a plan that
re-routes micro-batches has no such file.
"""

from __future__ import annotations

import csv
import io

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op, Schedule

ONE_RANK = "torch.distributed.pipelining runs each stage of a pipeline on one rank"


def to_torch_csv(plan: Plan, pipeline: int | None = None) -> str:
    """One pipeline of a fault-free plan. pipeline: which; None when all are alike.

    A cell is one slot where the ops fit a grid of slots as long as the shortest op (an op of n
    slots has n - 1 empty cells behind it). Otherwise a line is the stage's ops by start time,
    without bubbles: torch runs them in that order, and it is consistent with the dependencies
    because the plan's times are.

    Raises InputError for a plan that re-routes, and for pipelines that differ when none is named.
    """
    schedule = plan.schedule()
    _refuse_rerouted(schedule)
    if pipeline is None:
        pipeline = _the_one_of_all(schedule)
    lines = [_compute(schedule, Worker(pipeline, s)) for s in range(plan.job.stages)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(_slots(lines) or [[_cell(op) for op in line] for line in lines])
    return out.getvalue()


def _refuse_rerouted(schedule: Schedule) -> None:
    problem = schedule.problem
    if problem.failed:
        names = [str(w) for w in sorted(problem.failed)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise InputError("--format", "torch-csv", f"another format for a plan with {shown} failed, since {ONE_RANK}")
    moved = next((op for op in schedule.compute_ops() if op.rerouted), None)
    if moved is not None:
        raise InputError("--format", "torch-csv", f"another format for a plan that re-routes {moved}, since {ONE_RANK}")


def _the_one_of_all(schedule: Schedule) -> int:
    """0, if every pipeline does the same at the same time."""
    job = schedule.problem.job

    def shape(pipeline: int) -> list[list[tuple[str, int, int]]]:
        workers = (Worker(pipeline, s) for s in range(job.stages))
        return [[(op.kind, op.micro_batch, op.start) for op in _compute(schedule, w)] for w in workers]

    first = shape(0)
    other = next((p for p in range(1, job.pipelines) if shape(p) != first), None)
    if other is not None:
        raise InputError(
            "--pipeline",
            None,
            f"a pipeline from 0 to {job.pipelines - 1}: {other} runs otherwise than 0, and a file holds one",
        )
    return 0


def _compute(schedule: Schedule, worker: Worker) -> list[Op]:
    return [op for op in schedule.ops[worker] if op.kind != "O"]


def _slots(lines: list[list[Op]]) -> list[list[str]] | None:
    """One cell per slot; None when some op doesn't fill whole slots."""
    slot = min(op.duration for line in lines for op in line)
    if slot == 0 or any(op.start % slot or op.duration % slot for line in lines for op in line):
        return None
    cells = [[""] * (max(op.end for line in lines for op in line) // slot) for _ in lines]
    for row, line in zip(cells, lines, strict=True):
        for op in line:
            row[op.start // slot] = _cell(op)
    return cells


def _cell(op: Op) -> str:
    return f"{op.stage}{op.kind}{op.micro_batch}"
