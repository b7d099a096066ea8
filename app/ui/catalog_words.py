"""What the Catalog page says in words, figures and tables. No Streamlit here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrecycle.app.catalogs.contents import CatalogReport, CatalogSummary, CountLine
from openrecycle.app.catalogs.service import Filling
from openrecycle.app.ui import text
from openrecycle.app.ui.facts import Card

Table = dict[str, list[Any]]


def cards(report: CatalogReport) -> list[Card]:
    """Plans, cover, the cost of the worst single failure and what it keeps of the throughput, gap."""
    unit = report.question.job.time_unit
    asked = f"up to {text.count(report.tolerance, 'failure')}" if report.tolerance else "without failures"
    covered = report.covered
    out = [
        Card(
            "Plans",
            f"{report.there:,}",
            "all there" if not report.missing else f"{report.missing:,} missing",
            "good" if not report.missing else "warn",
            of=f"of {report.wanted:,}, {asked}",
        ),
        Card(
            "Covered",
            "–" if covered is None else text.count(covered, "failure"),
            "not even the fault-free plan is there" if covered is None else _cover(report, covered),
            "warn" if covered is None else "good" if covered >= report.tolerance else "",
        ),
    ]
    if not report.plans:
        return out
    whole = report.lines[0]
    last = next((line for line in reversed(report.lines) if line.plans and line.wanted), whole)
    if whole.worst is not None:
        slower = whole.worst.period / report.reference - 1
        out.append(
            Card(
                "Without failures",
                text.planned(whole.worst.period, unit),
                f"{text.percent(slower, sign=True)} against 1F1B",
            )
        )
    if last.failures and last.worst is not None:
        out.append(
            Card(
                f"With {text.count(last.failures, 'failure')}",
                text.planned(last.worst.period, unit),
                f"{text.percent(last.worst.period / report.reference - 1, sign=True)} against 1F1B",
                of="longest" if len(last.plans) > 1 else "",
            )
        )
        out.append(_kept(whole, last))
    gaps = [line.gap for line in report.lines if line.gap is not None]
    proven = sum(plan.optimal for line in report.lines for plan in line.plans)
    worst = max(gaps)
    out.append(
        Card(
            "Proven optimal",
            f"{proven:,}",
            "nothing is left to gain" if worst <= 0 else f"the rest within {text.at_most(worst)}",
            of=f"of {report.plans:,}",
        )
    )
    return out


def _cover(report: CatalogReport, covered: int) -> str:
    what = "any failure pattern" if report.by_pattern else "one plan per count, reached by migrations"
    return what if covered >= report.tolerance else f"{what}; asked for {report.tolerance}"


def _kept(whole: CountLine, line: CountLine) -> Card:
    """How much of the fault-free plan's throughput the longest plan of a count keeps, beside how many workers live."""
    label = "Throughput kept"
    if whole.worst is None or line.worst is None or line.linear is None:
        return Card(label, "–", "the fault-free plan is missing")
    fault_free = whole.worst.period
    living = text.percent(fault_free / line.linear)  # as linear is drawn: throughput falls as the workers do
    at = f"at {text.count(line.failures, 'failure')}{', at worst' * (len(line.plans) > 1)}"
    return Card(
        label, text.percent(fault_free / line.worst.period), f"{at}; {living} of workers live", of="of fault-free"
    )


def counts_table(report: CatalogReport) -> Table:
    """One row per number of failures."""
    unit = text.plural(report.question.job.time_unit)
    lines = report.lines
    worst = [line.worst for line in lines]
    return {
        "failures": [line.failures for line in lines],
        "plans": [len(line.plans) for line in lines],
        "missing": [line.wanted - line.there if line.wanted else None for line in lines],
        f"shortest period ({unit})": [line.best.period if line.best else None for line in lines],
        f"longest period ({unit})": [w.period if w else None for w in worst],
        f"its lower bound ({unit})": [w.bound if w else None for w in worst],
        f"linear ({unit})": [None if line.linear is None else round(line.linear, 3) for line in lines],
        "largest gap %": [None if line.gap is None else round(100 * line.gap, 2) for line in lines],
        "activations, most": [line.peak for line in lines],
        **_memory([line.peak_bytes for line in lines]),
        "longest without": [w.words(12) if w else None for w in worst],
    }


def plans_table(line: CountLine, unit: str) -> Table:
    """One row per plan of a count, the longest first."""
    unit = text.plural(unit)
    return {
        "failed": [", ".join(plan.failed()) or "none" for plan in line.plans],
        f"period ({unit})": [plan.period for plan in line.plans],
        f"lower bound ({unit})": [plan.bound for plan in line.plans],
        "gap %": [round(100 * plan.gap, 2) for plan in line.plans],
        "activations, most": [plan.peak for plan in line.plans],
        **_memory([plan.peak_bytes for plan in line.plans]),
        "solver": [plan.solver for plan in line.plans],
    }


def _memory(peaks: Sequence[int | None]) -> Table:
    """A column of bytes, where they are known."""
    if not any(peaks):
        return {}
    unit, scale = text.size_unit(max(peak or 0 for peak in peaks))
    return {f"memory, at most ({unit})": [None if peak is None else round(peak / scale, 2) for peak in peaks]}


def stored_table(catalogs: Sequence[CatalogSummary], states: Sequence[str], now: float) -> Table:
    """One row per stored catalog. states: whether each is used, and why not. now: POSIX seconds."""
    jobs = [catalog.info.job for catalog in catalogs]
    return {
        "grid": [f"{job.pipelines} × {job.stages} × {job.micro_batches}" for job in jobs],
        "technique": [catalog.info.technique.value for catalog in catalogs],
        "memory": [catalog.info.memory for catalog in catalogs],
        "unit": [job.time_unit for job in jobs],
        "plans": [catalog.plans for catalog in catalogs],
        "up to failures": [catalog.failures for catalog in catalogs],
        "size": [text.size(catalog.bytes) for catalog in catalogs],
        "begun": [text.age(now - catalog.created_at) for catalog in catalogs],
        "state": list(states),
    }


def question_words(report: CatalogReport) -> str:
    """`3 pipelines × 4 stages, 6 micro-batches each · staggered · memory limit uniform`."""
    job, question = report.question.job, report.question
    return (
        f"{text.count(job.pipelines, 'pipeline')} × {text.count(job.stages, 'stage')}, "
        f"{text.count(job.micro_batches, 'micro-batch', 'micro-batches')} each · {question.technique.value} · "
        f"memory limit {question.memory.text}"
    )


def filling_words(filling: Filling) -> str:
    """What a filling does, or how it ended."""
    took = text.milliseconds(1000 * filling.elapsed)
    if filling.running:
        if not filling.total:
            return "Working out what to plan …"
        return f"{filling.done:,} of {filling.total:,} plans are there, after {took}"
    if filling.state == "cancelled":
        return f"Cancelled after {took}. What was made is kept; Fill goes on from there."
    if filling.state == "failed":
        return filling.why
    if not filling.planned:
        return "Nothing was missing."
    return f"{text.count(filling.planned, 'plan')} made in {took}."


def chart_words(report: CatalogReport) -> str:
    """The chart for those who can't see it."""
    unit = report.question.job.time_unit
    parts = []
    for line in report.lines[:12]:
        if line.worst is not None and line.best is not None:
            span = text.planned(line.worst.period, unit)
            if line.best.period < line.worst.period:
                span = f"{text.planned(line.best.period, unit)} to {span}"
            parts.append(f"{text.count(line.failures, 'failure')}: {span}")
    more = f"; and {len(report.lines) - 12} more" if len(report.lines) > 12 else ""
    return "Period by number of failures. " + "; ".join(parts) + more
