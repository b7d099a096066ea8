"""The Catalog page: plans made ahead, by number of failures, with what they cost and which are missing; and the button
that makes those. They are a job's, or a stored catalog's, which is in the URL."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from openrecycle.app.catalogs.contents import (
    MAX_TOLERANCE,
    CatalogReport,
    CatalogRequest,
    CatalogSummary,
    CountLine,
    stale,
    whole_counts,
)
from openrecycle.app.catalogs.service import Filling, exported
from openrecycle.app.charts import text
from openrecycle.app.charts.theme import CHART_CONFIG, LEGEND, Palette, fixed, lower_axis, note, style
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, tables
from openrecycle.app.ui.access import acting, say_error, told
from openrecycle.app.ui.facts import SOLVER_WORDS, Card
from openrecycle.app.ui.tables import rows_html
from openrecycle.planner.catalogs.catalog import PLANNER_VERSION, CatalogInfo
from openrecycle.planner.catalogs.catalog_build import most_failures
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.solvers.portfolio import SOLVERS

SEEN = "catalog-filling-seen"
# Names in the URL: the number of failures whose plans are shown, and which one of them.
COUNT, PLAN = "cat_count", "cat_plan"
# The most rows of a plain table; with more, the table can be scrolled and sorted.
MOST_ROWS = 100
# Seconds between two refreshes while a catalog is filled; above MANY plans, which take longer to draw, it is more.
REFRESH, MANY = 0.5, 100


def page() -> None:
    colours = components.use_style()
    console = get_console()
    st.html(
        '<h1 class="or-title">Catalog</h1><div class="or-about">Plans made ahead, so that recovery is a look-up: '
        "what each number of failures will cost, and what is not planned for yet.</div>"
    )
    request = stored(console) if "catalog" in st.query_params else ask(console)
    if request is None:
        _others(console, None)
        return
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    if "catalog" in st.query_params:
        components.heading(question_words(report))
    filling = console.catalogs.filling(report.fingerprint)
    st.session_state[SEEN] = filling is None or not filling.running
    every = REFRESH if report.wanted <= MANY else 4 * REFRESH
    st.fragment(_catalog, run_every=every if filling and filling.running else None)(console, request, colours)
    _others(console, report)


def _catalog(console: ConsoleService, request: CatalogRequest, colours: Palette) -> None:
    """Draws everything that changes while the catalog is filled."""
    report = console.catalogs.report(request.question, request.tolerance, st.query_params.get("catalog"))
    _fill(console, request, report)
    if not report.plans:
        components.quiet(
            f"Nothing is planned ahead for this question yet: {report.wanted:,} plans are to be made. Press Fill; "
            "with the list scheduler a plan takes milliseconds, for thousands of workers up to a second."
        )
        return
    components.cards(cards(report))
    components.heading("Period by number of failures", "beneath: how far from optimal, and activations held")
    show(console, report, colours)
    if report.by_pattern and report.tolerance > 1:
        st.caption(
            "At each count the longest plan is for failures that share a stage. Where workers change their stage "
            "(migrations), a shorter one serves: Planner says which, and what they cost."
        )
    elif not report.by_pattern:
        st.caption(
            "One plan per number of failures, for the stages where they cost least. Other failures are led there by "
            "migrations, or get the list scheduler's plan at once."
        )
    if report.question.job.layers:
        st.caption(
            "A job goes on by these plans at once. Unless it was started with `--relayout never`, its layers can then "
            "move to other stages where that makes the period shorter: Live shows the plan that follows."
        )
    components.heading("The same in figures")
    st.html(rows_html(counts_table(report), "Figures by failures"))
    _plans(report)


def _fill(console: ConsoleService, request: CatalogRequest, report: CatalogReport) -> None:
    """Draws the Fill button, its progress and Cancel. A stale catalog can't be filled."""
    current = st.query_params.get("catalog") in (None, CatalogInfo.of(request.question).fingerprint)
    filling = console.catalogs.filling(report.fingerprint)
    running = filling is not None and filling.running
    if not running and not st.session_state.get(SEEN, True):
        # The page runs once more, without the refresh that a filling needs.
        st.session_state[SEEN] = True
        st.rerun()
    whole = not report.missing and request.solver == "list"
    with st.container(horizontal=True, vertical_alignment="center", key="catalog-actions"):
        if running:
            if st.button("Cancel", key="cancel-fill"):
                with told():
                    with acting(console, "cancel filling", report.fingerprint):
                        console.catalogs.cancel(report.fingerprint)
                    st.rerun()
        elif current and st.button(
            "Fill",
            type="primary",
            key="fill",
            disabled=whole,
            help="Nothing is missing. Another solver looks for shorter plans where one is not proven optimal."
            if whole
            else "Plans what is missing, in the background.",
        ):
            with told():
                with acting(console, "fill catalog", report.fingerprint):
                    console.catalogs.fill(request)
                st.rerun()
        if report.plans:
            _export(console, report)
    if filling is None:
        return
    with st.container(key="fill-progress"):  # in one place, so that its end moves nothing
        if running:
            st.progress(filling.done / max(1, filling.total), text=filling_words(filling))
        elif filling.state == "failed":
            say_error(filling_words(filling))
        else:
            components.quiet(filling_words(filling))


def _plans(report: CatalogReport) -> None:
    """Draws the plans for one number of failures, with links to their Gantt charts."""
    counts = [line.failures for line in report.lines if line.plans]
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-plans"):
        count = address.selectbox(
            "Plans for failures",
            counts,
            default=counts[min(1, len(counts) - 1)],
            key=COUNT,
            on_change=lambda: address.put(PLAN, None),
            width=150,
        )
        line = report.lines[count]
        names = {plan.name: plan.words(8) or "fault-free" for plan in line.plans}
        chosen = address.selectbox("Without", list(names), format_func=names.__getitem__, key=PLAN, width=320)
        if st.button("Open on Schedule", key="open-plan"):
            open_plan(report, chosen)
    table, caption = plans_table(line, report.question.job.time_unit), "Plans of one number of failures"
    if len(line.plans) <= MOST_ROWS:
        st.html(rows_html(table, caption))
    else:
        tables.show(table, "catalog-plans-table", caption)


def _export(console: ConsoleService, report: CatalogReport) -> None:
    """Draws the export of the whole catalog; the file is made when the button is pressed."""
    st.download_button(
        "Export",
        partial(exported, console.catalogs, report.fingerprint),
        file_name=f"catalog-{report.fingerprint[:12]}.zip",
        mime="application/zip",
        on_click="ignore",
        icon=":material/download:",
        key="export-catalog",
        help="All its plans, as the folder that `openrecycle catalog` goes on from.",
    )


def _others(console: ConsoleService, report: CatalogReport | None) -> None:
    """Draws all stored catalogs, and why some are stale. report: on the one that the page shows, if any."""
    catalogs = console.catalogs.list()
    if not catalogs:
        return
    states = [_state(catalog) for catalog in catalogs]
    if report is not None:
        old = {catalog.fingerprint: f"stale: {why}" for catalog, why in stale(report.question, catalogs)}
        old[report.fingerprint] = "this one"
        states = [old.get(c.fingerprint, state) for c, state in zip(catalogs, states, strict=True)]
    components.heading("Stored catalogs", "stale ones are kept until they are deleted")
    st.html(rows_html(stored_table(catalogs, states, time.time()), "Stored catalogs"))
    names = {
        c.fingerprint: f"{c.info.job.pipelines} × {c.info.job.stages} × {c.info.job.micro_batches} · "
        f"{c.info.technique.value} · {c.info.memory} · {state} · {c.fingerprint[:8]}"
        for c, state in zip(catalogs, states, strict=True)
    }
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalogs-row"):
        chosen = st.selectbox("Stored catalog", list(names), format_func=names.__getitem__, key="stored", width=420)
        # The keys have the catalog's name: a click must not count for another catalog that has taken its place.
        if st.button("Show", key=f"show-catalog-{chosen}"):
            st.query_params["catalog"] = chosen
            st.rerun()
        with st.popover("Delete", key="delete-catalog"):
            st.markdown(f"**Delete {text.plain_markdown(names[chosen])}?**")
            st.caption("Its plans are gone for good; a job that runs keeps those it has, and Fill makes them anew.")
            if st.button("Delete this catalog", type="primary", key=f"act-kill-catalog-{chosen}"):
                with told():
                    with acting(console, "delete catalog", chosen):
                        console.catalogs.delete(chosen)
                    if st.query_params.get("catalog") == chosen:
                        del st.query_params["catalog"]
                    st.rerun()


def _state(catalog: CatalogSummary) -> str:
    return "another question" if catalog.current else f"stale: planner version {catalog.info.planner_version}"


# -- what it asks and shows -------------------------------------------------------------------------

Table = dict[str, list[Any]]


def cards(report: CatalogReport) -> list[Card]:
    """Returns the cards: plans, cover, the period without failures and with the most failures, the throughput that is
    kept then, and how many plans are proven optimal."""
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
        out.append(_kept(report.question.job, whole, last))
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


def _kept(job: Job, whole: CountLine, line: CountLine) -> Card:
    """Shows the share of the fault-free throughput that the longest plan keeps, beside how many workers live: as a
    share, 2,047 of 2,048 would be 100 %."""
    label = "Throughput kept"
    if whole.worst is None or line.worst is None:
        return Card(label, "–", "the fault-free plan is missing")
    fault_free = whole.worst.period
    workers = job.pipelines * job.stages
    living = f"{workers - line.failures:,} of {text.count(workers, 'worker')} live"
    at = f"at {text.count(line.failures, 'failure')}{', at worst' * (len(line.plans) > 1)}"
    return Card(label, text.percent(fault_free / line.worst.period), f"{at}; {living}", of="of fault-free")


def counts_table(report: CatalogReport) -> Table:
    """Returns one row per number of failures."""
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
    """Returns one row per plan for a number of failures, the longest first."""
    unit = text.plural(unit)
    return {
        "failed": [", ".join(plan.failed) or "none" for plan in line.plans],
        f"period ({unit})": [plan.period for plan in line.plans],
        f"lower bound ({unit})": [plan.bound for plan in line.plans],
        "gap %": [round(100 * plan.gap, 2) for plan in line.plans],
        "activations, most": [plan.peak for plan in line.plans],
        **_memory([plan.peak_bytes for plan in line.plans]),
        "solver": [plan.solver for plan in line.plans],
    }


def _memory(peaks: Sequence[int | None]) -> Table:
    """Returns a column of bytes, if they are known."""
    if not any(peaks):
        return {}
    unit, scale = text.size_unit(max(peak or 0 for peak in peaks))
    return {f"memory, at most ({unit})": [None if peak is None else round(peak / scale, 2) for peak in peaks]}


def stored_table(catalogs: Sequence[CatalogSummary], states: Sequence[str], now: float) -> Table:
    """Returns one row per stored catalog. states: whether each is used, and why not. now: POSIX seconds."""
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
    """Returns the question: `3 pipelines × 4 stages, 6 micro-batches each · staggered · memory limit uniform`."""
    question = report.question
    return f"{text.grid_words(question.job)} · {question.technique.value} · memory limit {question.memory.text}"


def filling_words(filling: Filling) -> str:
    """Says what a filling does, or how it ended."""
    took = text.milliseconds(1000 * filling.elapsed)
    if filling.running:
        if filling.again_at is not None:
            wait = text.seconds(max(1, math.ceil(filling.again_at - time.monotonic())))
            return f"Failed {text.count(filling.failures, 'time')}, is begun again in {wait}: {filling.why}"
        if not filling.total:
            return "Working out what to plan …"
        return f"{filling.done:,} of {filling.total:,} plans are there, after {took}"
    if filling.state == "cancelled":
        return f"Cancelled after {took}. What was made is kept; Fill goes on from there."
    if filling.state == "failed":
        return f"{text.whole_sentence(filling.why)} What was made is kept; Fill goes on from there."
    if not filling.planned:
        return "Nothing was missing."
    return f"{text.count(filling.planned, 'plan')} made in {took}."


def chart_words(report: CatalogReport) -> str:
    """Describes the chart for people who can't see it."""
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
    """Returns the report to draw. While a catalog is filled it is the same one until more can be drawn, since a chart
    takes no clicks while it is drawn anew."""
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
    """Returns the number of failures of the point that was clicked."""
    points = event.selection.points if event and "selection" in event else []
    return int(points[0]["x"]) if points else None


def open_plan(report: CatalogReport, name: str) -> None:
    st.switch_page(address.page("schedule"), query_params={"plan": f"catalog:{report.fingerprint}:{name}"})


JOB = "catalog-job"


def stored(console: ConsoleService) -> CatalogRequest | None:
    """Returns the request for the stored catalog that the URL names; None: there is none, and the page has said so."""
    fingerprint = st.query_params["catalog"]
    try:
        found = console.catalogs.stored(fingerprint)
    except ConsoleError as error:
        say_error(str(error))
        _leave_button()
        return None
    version = found.info.planner_version
    most = max((header.failures for header in found.headers().values()), default=0)
    if version != PLANNER_VERSION:
        st.warning(
            f"This catalog is stale: version {version} of the planner made it. "
            "It is shown as it is, and no job uses it."
        )
    _leave_button()
    return CatalogRequest(found.question, most, *_effort())


def _leave_button() -> None:
    if st.button("Show a job's catalog", key="leave-catalog"):
        del st.query_params["catalog"]
        st.rerun()


def ask(console: ConsoleService) -> CatalogRequest | None:
    """Draws the controls, whose state is in the URL; returns the request. None: there is no such job, and the page has
    said so. Raises InputError."""
    jobs = components.job_names(components.jobs_to_pick(console))
    wanted = address.job_asked_for(jobs)
    if wanted is not None and wanted not in jobs:
        components.unknown_job(wanted, others=bool(jobs))
    elif not jobs:
        st.caption("No training job yet. `openrecycle catalog` makes plans ahead for any grid, without a job.")
    if not jobs:
        return None
    source = wanted or next(iter(jobs))
    with st.container(horizontal=True, vertical_alignment="bottom", key="catalog-question"):
        components.pick_job("Plans for", jobs, source if source in jobs else None, key=JOB, width=230)
        if source not in jobs:
            return None
        address.show_job(source)  # the link names its job, so that a newer one does not change what it shows
        question = console.jobs.find(source).plans.question
        most = most_failures(question)
        tolerance = address.number_input(
            "Failures at once",
            0,
            MAX_TOLERANCE,
            min(console.tolerance, most),
            key=f"cat_tolerance-{source}",
            help=f"Plan for up to so many failed workers; at most {most}, as each stage needs a living one.",
            width=125,
        )
        request = CatalogRequest(question, tolerance, *_effort())
    request.check()
    return request


def _effort() -> tuple[str] | tuple[str, float]:
    """Draws the choice of a solver. Returns it, with seconds per plan if it takes any."""
    solver = address.selectbox(
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
        return (solver,)
    limit = address.number_input("Seconds per plan", 0.1, 600.0, 10.0, key="cat_seconds", width=130, format="%g")
    return solver, limit


# -- curves -----------------------------------------------------------------------------------------

# With more numbers of failures than this, markers would overlap.
MARKED = 60


def catalog_curves(report: CatalogReport, colours: Palette, *, revision: str) -> go.Figure:
    """Draws three panels over one axis of failures. The points of the longest plans have their number of failures in
    customdata."""
    lines = [line for line in report.lines if line.plans]
    unit = text.plural(report.question.job.time_unit)
    figure = go.Figure()
    x = [line.failures for line in lines]
    mode = "lines+markers" if len(lines) <= MARKED else "lines"
    if report.by_pattern:
        _spread(figure, lines, x, colours)
    figure.add_scatter(
        x=[line.failures for line in report.lines if line.linear is not None],
        y=[line.linear for line in report.lines if line.linear is not None],
        name="Linear: fault-free × workers / living",
        mode="lines",
        line={"color": colours.muted, "width": 1.5, "dash": "dash"},
        hovertemplate=f"%{{y:,.5g}} {unit} if throughput fell as workers do<extra></extra>",
    )
    figure.add_scatter(
        x=x,
        y=[line.worst.period for line in lines if line.worst],
        name="Longest plan" if report.by_pattern else "Plan",
        mode=mode,
        line={"color": colours.accent, "width": 2.5},
        marker={"size": 9},
        customdata=x,
        hovertext=[_sentence(line, unit) for line in lines],
        hoverinfo="text",
    )
    figure.add_scatter(
        x=x,
        y=[line.worst.bound for line in lines if line.worst],
        name="Proven lower bound",
        mode="lines",
        line={"color": colours.good, "width": 2, "dash": "dot"},
        hoverinfo="skip",  # it often lies on the plans, which say it too
    )
    _reference(figure, report, colours, unit)
    figure.add_bar(
        x=x,
        y=[100 * (line.gap or 0.0) for line in lines],
        yaxis="y2",
        marker={"color": colours.ops["W"], "line": {"width": 0}},
        showlegend=False,
        hovertemplate="at most %{y:.2f} % above the best<extra></extra>",
    )
    figure.add_bar(
        x=x,
        y=[line.peak for line in lines],
        yaxis="y3",
        marker={"color": colours.ops["I"], "line": {"width": 0}},
        showlegend=False,
        hovertemplate="%{y} activations at most on one worker<extra></extra>",
    )
    style(figure, colours, height=560, revision=revision)
    figure.update_layout(
        margin={"l": 62, "r": 12, "t": 40, "b": 44},
        clickmode="event+select",
        bargap=0.35 if len(lines) <= MARKED else 0,
        legend=LEGEND,
        xaxis={
            "title": {"text": "failed workers"},
            "anchor": "y3",
            "showgrid": False,
            "range": [-0.5, report.lines[-1].failures + 0.5],
            "dtick": 1 if len(report.lines) <= 16 else None,
            "tickformat": "d",
        },
        yaxis={"title": {"text": f"period ({unit})"}, "domain": [0.46, 1], "rangemode": "normal", "tickformat": ","},
        yaxis2=lower_axis("gap (%)", colours, [0.24, 0.39], 4),
        yaxis3=lower_axis("activations", colours, [0, 0.17], 4),
    )
    muted = colours.muted
    if not any(line.gap for line in lines):
        figure.update_layout(yaxis2={"range": [0, 1], "showgrid": False})
        note(figure, "every plan is proven optimal", muted, x=0.5, xref="x domain", y=0.5, yref="y2 domain")
    if report.limit is not None:
        figure.add_hline(y=report.limit, yref="y3", line={"color": colours.text, "width": 1.25, "dash": "dot"})
        figure.update_layout(yaxis3={"range": [0, 1.35 * max([report.limit, *(line.peak or 0 for line in lines)])]})
        right: dict[str, Any] = {"x": 1, "xref": "x domain", "xanchor": "right"}
        note(figure, f"limit {report.limit}", muted, y=report.limit, yref="y3", yanchor="bottom", **right)
    return fixed(figure)


def _spread(figure: go.Figure, lines: Sequence[CountLine], x: list[int], colours: Palette) -> None:
    """Draws the range from the shortest to the longest plan of each number of failures."""
    for name, y, fill in (
        ("Shortest plan", [line.best.period for line in lines if line.best], None),
        ("", [line.worst.period for line in lines if line.worst], "tonexty"),
    ):
        figure.add_scatter(
            x=x,
            y=y,
            name=name,
            mode="lines",
            line={"color": colours.accent, "width": 1 if name else 0},
            fill=fill,
            fillcolor="rgba(71, 113, 197, 0.16)",
            showlegend=bool(name),
            hoverinfo="skip",
        )


def _sentence(line: CountLine, unit: str) -> str:
    worst, best = line.worst, line.best
    assert worst is not None and best is not None
    failed = text.count(line.failures, "failed worker")
    names = worst.words()
    words, longest = f"<b>{failed if line.failures else 'fault-free'}</b>", text.planned(worst.period, unit)
    if len(line.plans) > 1:
        words += f" · {len(line.plans):,} plans, {text.planned(best.period, unit)} to {longest}"
    words += f"<br>longest: {longest}" if len(line.plans) > 1 else f"<br>{longest}"
    if names:
        words += f" without {names}"
    proof = "proven optimal" if worst.gap <= 0 else f"no plan can be below {text.planned(worst.bound, unit)}"
    return f"{words}<br>{proof}<br>click: open on Schedule"


def _reference(figure: go.Figure, report: CatalogReport, colours: Palette, unit: str) -> None:
    """Draws a line at the period of fault-free 1F1B."""
    if report.reference is None:
        return
    figure.add_hline(y=report.reference, line={"color": colours.text, "width": 1, "dash": "dot"})
    note(
        figure,
        f"fault-free 1F1B: {text.planned(report.reference, unit)}",
        colours.text,
        x=0,
        xref="x domain",
        xanchor="left",
        y=report.reference,
        yanchor="bottom",
        bgcolor=colours.background,  # on narrow screens the curves pass behind it
        opacity=0.85,
    )
