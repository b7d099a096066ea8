"""What the Schedule page says of a measured iteration and of the critical path. No Streamlit here."""

from __future__ import annotations

from openrecycle.app.console.measured import MeasuredIteration
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.schedule import MAX_NODES
from openrecycle.planner.plans.paths import critical_path, waited, workers_of
from openrecycle.planner.plans.schedule import Schedule


def measured_words(measured: MeasuredIteration) -> str:
    """Which iteration it is, and how it compares with the plan that it ran."""
    words = f"**Iteration {measured.iteration}** as it ran in generation {measured.generation}"
    if measured.period_ms is not None:
        words += f"; iterations around it took {text.milliseconds(measured.period_ms)} from commit to commit"
    if measured.over_plan is not None and measured.planned_ms is not None:
        over = text.percent(measured.over_plan, sign=True)
        words += f", planned {text.milliseconds(measured.planned_ms)} ({over})"
    if measured.uncertainty_ms:
        words += f". Times of different hosts may be off by {text.milliseconds(measured.uncertainty_ms)}"
    return words + "."


def critical_words(schedule: Schedule) -> str:
    """What sets the period, in a sentence."""
    path, job = critical_path(schedule), schedule.problem.job
    unit = job.time_unit
    still = waited(path)
    whole = path[-1].op.end - path[0].op.start + path[0].waited
    workers = [str(w) for w in workers_of(path)]
    named = ", ".join(workers[:6]) + (f" and {len(workers) - 6} more" if len(workers) > 6 else "")
    words = (
        f"Critical path: {text.count(len(path), 'op')} on {named}, {text.planned(job.units(whole), unit)} from "
        f"end to end; each op starts when the one before it lets it."
    )
    if still:
        return words + f" For {text.planned(job.units(still), unit)} of that it waits (outlined): an order or a limit."
    return words + " It never waits, so only shorter ops, or another order, would make the period shorter."


def many_words(ops: int, instead: str) -> str:
    """Of a chart of more ops than have an element each: what it lacks. instead: what to do about it."""
    return (
        f"All {ops:,} ops are drawn; so many have no numbers and can't be clicked. Point at one to read what it is, or "
        f"{instead}: up to {MAX_NODES:,} ops have both."
    )
