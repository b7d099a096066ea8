"""What the Compare page compares: which plans there are, which it begins with, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrecycle.app.console.plan_sources import made_name, measured_name, names, saved_names, techniques
from openrecycle.app.console.service import Console
from openrecycle.app.plans.references import Made, OfJob, Reference
from openrecycle.planner.export.compare import by_stage
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.schedule import Schedule

MOST = 4
# The paper's: 27, 36, 29 and 27 slots.
WORKED_EXAMPLE = (
    Made(Technique.FAULT_FREE, "1f1b", "3x4x6"),
    Made(Technique.ADAPTIVE, "1f1b", "3x4x6", ("W1_2",)),
    Made(Technique.DECOUPLED, "none", "3x4x6", ("W1_2",)),
    Made(Technique.STAGGERED, "none", "3x4x6", ("W1_2",)),
)

Table = dict[str, list[object]]


def candidates(console: Console, job_id: str | None, clock: Callable[[float], str] | None = None) -> dict[str, str]:
    """Everything that can be compared, by its reference: the job's, the library's, the paper's. clock: see names."""
    out: dict[str, str] = {}
    if job_id is not None:
        job = console.job(job_id)
        out |= names(console, job_id, clock)
        out |= measured_name(console, job_id)
        lost = job.state.current.failed if job.state.current else ()
        out |= {str(made): f"Made now: {made_name(made)}" for made in techniques(job_id, lost, job.spec.memory)}
    out |= saved_names(console)
    return out | {str(made): f"Paper: {made_name(made)}" for made in WORKED_EXAMPLE}


def first_choice(console: Console, job_id: str | None) -> list[Reference]:
    """What a page without a link begins with: fault-free 1F1B and the plan in force; without a job nothing."""
    if job_id is None or console.job(job_id).state.current is None:
        return []
    return [Made(Technique.FAULT_FREE, "1f1b", job_id), OfJob(job_id)]


def stage_table(labels: Sequence[str], schedules: Sequence[Schedule]) -> Table:
    """One row per stage and plan; times in each plan's own unit."""
    table: Table = {
        name: []
        for name in (
            "stage",
            "plan",
            "living workers",
            "busiest works",
            "bubbles %",
            "from",
            "to",
            "peak activations",
            "limit",
            "re-routed micro-batches",
        )
    }
    both = [(figures, label, s) for label, s in zip(labels, schedules, strict=True) for figures in by_stage(s)]
    for figures, label, schedule in sorted(both, key=lambda found: found[0].stage):
        units = schedule.problem.job.units
        row: tuple[object, ...] = (
            figures.stage,
            label,
            figures.living,
            units(figures.busy),
            round(100 * figures.bubble_fraction, 1),
            units(figures.start),
            units(figures.end),
            figures.peak,
            figures.limit,
            figures.rerouted,
        )
        for column, value in zip(table.values(), row, strict=True):
            column.append(value)
    return table
