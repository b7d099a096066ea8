"""What Catalog asks and shows: the question, of a job, one's own, or of a stored catalog, in the URL; cards, tables and
curves of what is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from openrecycle.app.catalogs.contents import (
    CatalogReport,
    CatalogRequest,
    CatalogSummary,
    CountLine,
    most_failures,
    parse_request,
    whole_counts,
)
from openrecycle.app.catalogs.service import Filling
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import components, text, url_state
from openrecycle.app.ui.charts.catalog import catalog_curves
from openrecycle.app.ui.facts import SOLVER_WORDS, Card
from openrecycle.app.ui.theme import CHART_CONFIG, Palette
from openrecycle.app.ui.url_state import CHOSEN
from openrecycle.planner.catalogs.catalog_store import PLANNER_VERSION
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.solvers.portfolio import SOLVERS

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
    if report.reference is None:  # nothing is stored
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
        "grid": list(map(text.grid, jobs)),
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
    question = report.question
    return f"{text.grid_words(question.job)} · {question.technique.value} · memory limit {question.memory.text}"


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


CHART = "catalog-chart"
DRAWN = "catalog-drawn"


def show(console: ConsoleService, report: CatalogReport, colours: Palette) -> None:
    drawn = _drawn(console, report)
    if drawn.plans:
        _curves(drawn, colours)
    else:
        components.quiet("Here is drawn what each number of failures costs, once all its plans are there.")


def _drawn(console: ConsoleService, report: CatalogReport) -> CatalogReport:
    """The same one at each refresh of a filling until more can be drawn: a chart that is drawn anew takes no
    click meanwhile."""
    filling = console.catalogs.filling(report.fingerprint)
    if filling is None or not filling.running:
        st.session_state.pop(DRAWN, None)
        return report
    drawn = whole_counts(report)
    key = (report.fingerprint, filling.began, [line.failures for line in drawn.lines if line.plans])
    kept = st.session_state.get(DRAWN)
    if kept is None or kept[0] != key:
        kept = st.session_state[DRAWN] = key, drawn
    return kept[1]  # type: ignore[no-any-return]


def _curves(report: CatalogReport, colours: Palette) -> None:
    event = st.plotly_chart(
        catalog_curves(report, colours, revision=report.fingerprint),
        theme=None,
        config=CHART_CONFIG,
        key=CHART,
        on_select="rerun",
        selection_mode="points",
        alt=chart_words(report),
    )
    clicked = _clicked(event)
    if clicked is not None and clicked < len(report.lines) and report.lines[clicked].worst is not None:
        open_plan(report, report.lines[clicked].plans[0].name)


def _clicked(event: Any) -> int | None:
    """The number of failures of the point that was clicked."""
    points = event.selection.points if event and "selection" in event else []
    return int(points[0]["x"]) if points else None


def open_plan(report: CatalogReport, name: str) -> None:
    st.switch_page(url_state.page("schedule"), query_params={"plan": f"catalog:{report.fingerprint}:{name}"})


OWN = "own"
JOB = "catalog-job"


def stored(console: ConsoleService) -> CatalogRequest | None:
    """A stored catalog by the URL's `catalog`."""
    fingerprint = st.query_params["catalog"]
    try:
        found = console.catalogs.stored(fingerprint)
    except ConsoleError as error:
        st.error(f"{error}. Ask a question of your own instead.")
        _leave_button("Ask a question")
        return None
    own = found.info
    most = max((header.failures for header in found.headers().values()), default=0)
    if own.planner_version != PLANNER_VERSION:
        st.warning(
            f"This catalog is stale: version {own.planner_version} of the planner made it. "
            "It is shown as it is, and no job uses it."
        )
    _leave_button("Ask another question")
    return parse_request(job=own.job, technique=own.technique.value, memory=own.memory, tolerance=most, **_effort())


def _leave_button(label: str) -> None:
    if st.button(label, key="leave-catalog"):
        del st.query_params["catalog"]
        st.rerun()


def ask(console: ConsoleService) -> CatalogRequest:
    """The controls; their state is in the URL. Raises InputError."""
    jobs = {job.job_id: job.name for job in console.queries.list_jobs()}
    wanted = st.query_params.get("job") or st.session_state.get(CHOSEN) or next(iter(jobs), OWN)
    if wanted not in (OWN, *jobs):
        st.error(f"job: got {wanted!r}, expected the id of a job that this console knows. Choose one instead.")
        wanted = OWN
    values: dict[str, Any] = {}
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-question"):
        source = st.selectbox(
            "Plans for",
            [OWN, *jobs],
            index=[OWN, *jobs].index(wanted),
            format_func=lambda j: "A question of your own" if j == OWN else f"{jobs[j]} · {j}",
            key=JOB,
            on_change=_remember,
            width=230,
        )
        if st.query_params.get("job") != source:
            st.query_params["job"] = source  # a newer job must not change what a link shows
        if source == OWN:
            values |= _own_question()
            most = values["stages"] * (values["pipelines"] - 1)
            default = min(2, most)
        else:
            question = console.jobs.find(source).plans.question
            values = {
                "job": job_doc(question.job),
                "technique": question.technique.value,
                "memory": question.memory.text,
            }
            most = most_failures(question)
            default = min(console.tolerance, most)
        values["tolerance"] = url_state.number_input(
            "Failures at once",
            0,
            1024,
            default,
            key="cat_tolerance" if source == OWN else f"cat_tolerance-{source}",
            help=f"Plan for up to so many failed workers; at most {most}, as each stage needs a living one.",
            width=125,
        )
        values |= _effort()
    return parse_request(**values)


def _own_question() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, label, value, most in (
        ("pipelines", "Pipelines", 3, 1024),
        ("stages", "Stages", 4, 512),
        ("micro_batches", "Micro-batches", 6, 1024),
    ):
        values[name] = url_state.number_input(
            label, 1, most, value, key=f"cat_{name}", width=105, help="Per pipeline."
            if name == "micro_batches" else None,
        )  # fmt: skip
    values["technique"] = url_state.selectbox(
        "Technique",
        [t.value for t in Technique if t.reroutes],
        default=Technique.STAGGERED.value,
        key="cat_technique",
        help="Each includes the ones before it.",
        width=125,
    )
    values["memory"] = url_state.text_input(
        "Memory limit",
        "uniform",
        key="cat_memory",
        max_chars=12,
        help="Activations that a worker may hold: 1f1b, uniform, none, or a number.",
        width=110,
    )
    with st.popover("Op times", key="cat-times"):
        st.caption("In slots; the same on all stages.")
        durations: dict[str, float] = {}
        for kind, name, time_of in (
            ("F", "Forward", 1.0),
            ("I", "Backward, input", 1.0),
            ("W", "Backward, weight", 1.0),
            ("O", "Optimizer step", 0.0),
            ("transfer", "Transfer", 0.0),
        ):
            durations[kind] = url_state.number_input(name, 0.0, 1e6, time_of, key=f"cat_{kind}")
    return values | {"durations": durations}


def _effort() -> dict[str, Any]:
    solver = url_state.selectbox(
        "Solver",
        list(SOLVERS),
        default="list",
        format_func=lambda s: SOLVER_WORDS.get(s, s),
        key="cat_solver",
        help="A plan that is stored already is made again only when more is asked for than made it, and it is not "
        "proven optimal.",
        width=200,
    )
    if solver == "list":
        return {"solver": solver}
    limit = url_state.number_input("Seconds per plan", 0.1, 600.0, 10.0, key="cat_seconds", width=130, format="%g")
    return {"solver": solver, "time_limit": limit}


def _remember() -> None:
    url_state.moved()
    st.query_params["job"] = st.session_state[JOB]
    if st.session_state[JOB] != OWN:
        st.session_state[CHOSEN] = st.session_state[JOB]
