"""One line per op, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io

from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan

COLUMNS = (
    "worker",
    "stage",
    "kind",
    "home_pipeline",
    "micro_batch",
    "start",
    "duration",
    "end",
    "rerouted_from",
    "time_unit",
)


def to_tidy_csv(plan: Plan) -> str:
    """Times in `time_unit`; micro_batch is empty for O, rerouted_from for what runs at home."""
    unit = _no_formula(plan.job.time_unit)
    schedule = plan.schedule()
    units = schedule.problem.job.units
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for worker, ops in schedule.ops.items():
        for op in ops:
            writer.writerow(
                (
                    worker,
                    op.stage,
                    op.kind,
                    op.pipeline,
                    "" if op.kind == "O" else op.micro_batch,
                    units(op.start),
                    units(op.duration),
                    units(op.end),
                    Worker(op.pipeline, op.stage) if op.rerouted else "",
                    unit,
                )
            )
    return out.getvalue()


def _no_formula(text: str) -> str:
    """The unit is free text from the plan's author; a spreadsheet must not run it."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
