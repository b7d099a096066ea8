"""The Planner page: what would happen if these workers were dead? Users click workers, and get a plan with a proven
bound.

The page shows a running search and how it closes its gap, the plan beside others, and whether it would pay to move a
failure to another stage. All text from outside is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from openrecycle.app.charts import gantt as charts
from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import MAX_NODES, gantt
from openrecycle.app.charts.theme import CHART_CONFIG, Palette, style
from openrecycle.app.charts.vega import LiveChart, y_axis
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.plans.files import Export
from openrecycle.app.plans.service import misfit, use_plan
from openrecycle.app.plans.solving import PlanAsked, Solve
from openrecycle.app.plans.whatif import LIMITS, PARAMS, STEPS, Checked, WhatIf, checked, parse_word, step_of
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, facts, planner_controls, tables
from openrecycle.app.ui.access import acting, actor, say_error, told
from openrecycle.app.ui.address import choose_time, control
from openrecycle.app.ui.components import schedule_of
from openrecycle.app.ui.facts import Card, gap_words, many_words
from openrecycle.app.ui.plan_pickers import export_button
from openrecycle.app.ui.planner_controls import (
    BEFORE,
    PAGE,
    SAVED_PARAM,
    SHOW,
    WINDOW,
    change,
    grid,
    now,
    profile,
    question_words,
    said,
    say,
)
from openrecycle.app.ui.tables import beside_html, differences, workers_table
from openrecycle.planner.export.compare import comparable
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import AUTO, SECONDS, Job, Worker
from openrecycle.planner.layers.migration import Migrations
from openrecycle.planner.plans.drawing import FAILED, Drawing, rows_words
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.portfolio import reference_plan

# -- charts of the Planner page -----------------------------------------------------------------

# With more pipelines than this, only those in which workers are dead or move are drawn.
MAX_ROWS = 16


def migrations_chart(job: Job, failed: list[str], found: Migrations, colours: Palette) -> go.Figure:
    """Draws migrations on the grid, by stage (x) and pipeline (y). A solid arrow shows where a worker goes, a dotted
    one where it gets the weights."""
    dead = {Worker.parse(name) for name in failed}
    moves = [
        (Worker.parse(m.worker), Worker.parse(m.takes), Worker.parse(m.source) if m.source else None)
        for m in found.migrations
    ]
    touched = {w.pipeline for move in moves for w in move if w is not None} | {w.pipeline for w in dead}
    pipelines = range(job.pipelines) if job.pipelines <= MAX_ROWS else sorted(touched)[: 2 * MAX_ROWS]
    row = {pipeline: i for i, pipeline in enumerate(pipelines)}
    cells = [Worker(p, s) for p in row for s in range(job.stages)]
    leaving = {worker for worker, _, _ in moves}
    figure = go.Figure()
    for name, shown, symbol, fill in (
        ("alive", [c for c in cells if c not in dead and c not in leaving], "square", colours.healthy),
        ("moves", [c for c in cells if c in leaving], "square", colours.joining),
        ("dead", [c for c in cells if c in dead], "x", colours.failed),
    ):
        figure.add_scatter(
            x=[c.stage for c in shown],
            y=[row[c.pipeline] for c in shown],
            mode="markers+text" if len(cells) <= 64 else "markers",
            text=[str(c) for c in shown],
            textposition="bottom center",
            textfont={"size": 11, "color": colours.muted},
            marker={"symbol": symbol, "size": 17 if len(cells) <= 64 else 9, "color": fill},
            hovertext=[f"{c}: {name}" for c in shown],
            hoverinfo="text",
            meta=name,
        )
    for worker, takes, source in moves:
        if worker.pipeline in row and takes.pipeline in row:
            _arrow(figure, row, worker, takes, colours.joining, "solid")
        if source is not None and source.pipeline in row and takes.pipeline in row:
            _arrow(figure, row, source, takes, colours.muted, "dot")
    style(figure, colours, height=90 + 58 * max(1, len(row)), revision=found.reason)
    figure.update_layout(margin={"l": 62, "r": 14, "t": 12, "b": 44}, showlegend=False, dragmode=False)
    figure.update_xaxes(
        title_text="stage", dtick=1, range=[-0.5, job.stages - 0.5], showgrid=False, fixedrange=True, showline=False
    )
    figure.update_yaxes(
        tickvals=list(row.values()),
        ticktext=[f"pipeline {p}" for p in row],
        range=[len(row) - 0.4, -0.6],
        showgrid=False,
        fixedrange=True,
        showline=False,
    )
    return figure


def _arrow(figure: go.Figure, row: dict[int, int], start: Worker, end: Worker, colour: str, dash: str) -> None:
    """Draws an arrow from cell to cell that ends before the marks. Plotly's arrows have no dashes, so dotted ones are
    plain lines."""
    x0, y0, x1, y1 = start.stage, row[start.pipeline], end.stage, row[end.pipeline]
    if dash == "dot":
        figure.add_shape(
            type="line", x0=x0, y0=y0, x1=x1, y1=y1, layer="below", line={"color": colour, "dash": "dot", "width": 2}
        )
        return
    figure.add_annotation(
        x=x1,
        y=y1,
        ax=x0,
        ay=y0,
        xref="x",
        yref="y",
        axref="x",
        ayref="y",
        text="",
        arrowhead=2,
        arrowwidth=2.5,
        arrowcolor=colour,
        standoff=11,
        startstandoff=11,
    )


HEIGHT = 190


def search_chart(solve: Solve, unit: str, colours: Palette) -> LiveChart:
    """Draws the best period and the bound over time, as steps; the gap is between the two lines."""
    known = [p for p in solve.points if p.incumbent is not None]
    if known and solve.elapsed > known[-1].elapsed:
        known = [*known, known[-1]._replace(elapsed=solve.elapsed)]
    rows = {
        "seconds": np.array([p.elapsed for p in known], dtype=np.float32),
        "incumbent": np.array([p.incumbent for p in known], dtype=np.float64),
        "bound": np.array([p.bound for p in known], dtype=np.float64),
        "solver": [p.solver for p in known],
    }
    x = {
        "field": "seconds",
        "type": "quantitative",
        "scale": {"zero": True, "nice": False, "padding": 4},
        "axis": {"title": "seconds", "grid": False, "tickCount": 8},
    }
    return LiveChart(
        {
            "title": f"Best period and proven bound ({text.plural(unit)})",
            "height": HEIGHT,
            "transform": [
                {"joinaggregate": [{"op": "max", "field": "seconds", "as": "last"}]},
                {"calculate": "datum.seconds === datum.last ? 'best ' + datum.incumbent : ''", "as": "best_label"},
                {"calculate": "datum.seconds === datum.last ? 'bound ' + datum.bound : ''", "as": "bound_label"},
            ],
            "encoding": {"x": x},
            "layer": [
                {
                    "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.12, "color": colours.accent},
                    "encoding": {
                        "y": y_axis("incumbent", {"zero": False, "nice": True, "padding": 12}),
                        "y2": {"field": "bound"},
                    },
                },
                _line("incumbent", colours.accent, [1, 0]),
                _line("bound", colours.good, [5, 3]),
                _label("incumbent", "best_label", colours.accent, -6),
                _label("bound", "bound_label", colours.good, 14),
            ],
        },
        rows,
        colours,
    )


def search_words(solve: Solve, unit: str) -> str:
    """Describes the chart for people who can't see it."""
    known = [(p.incumbent, p.bound) for p in solve.points if p.incumbent is not None]
    if not known:
        return "Best period and bound over time; there is no plan yet."
    first, last = ([text.planned(value, unit) for value in known[i]] for i in (0, -1))
    return (
        f"Best period and proven bound over {text.seconds(solve.elapsed)}: from {first[0]} and {first[1]} "
        f"to {last[0]} and {last[1]}."
    )


def _line(field: str, colour: str, dash: list[int]) -> dict[str, Any]:
    return {
        "mark": {
            "type": "line",
            "interpolate": "step-after",
            "color": colour,
            "strokeWidth": 2,
            "strokeDash": dash,
            "point": {"color": colour, "filled": True, "size": 22},
        },
        "encoding": {
            "y": {"field": field, "type": "quantitative"},
            "tooltip": [
                {"field": "seconds", "format": ".2f"},
                {"field": "incumbent", "title": "best period"},
                {"field": "bound"},
                {"field": "solver"},
            ],
        },
    }


def _label(field: str, words: str, colour: str, dy: int) -> dict[str, Any]:
    return {
        "mark": {"type": "text", "align": "right", "dy": dy, "dx": -2, "color": colour},
        "encoding": {"y": {"field": field, "type": "quantitative"}, "text": {"field": words}},
    }


# -- planner ------------------------------------------------------------------------------------


def page() -> None:
    colours = components.use_style()
    console = get_console()
    console.plans.solves.warm()
    saved = _saved(console)
    question, misread = planner_controls.current(console.plans.profiles.kept)
    found = checked(question)
    solve = console.plans.solves.find(found.asked) if found.asked is not None else None
    # Read only once, and before the plan: the search may end at any moment, and the page must be consistent.
    running = solve is not None and not solve.over
    plan = None if running else _answer(found.asked, saved, solve)
    with st.container(horizontal=True, vertical_alignment="bottom", key="page-head"):
        st.html(
            '<h1 class="or-title">Planner</h1><div class="or-about">Mark workers dead and see what it costs, '
            "before it happens. The link in the address bar says the whole question.</div>"
        )
        planner_controls.sources(console)
    for error in misread:
        say_error(f"{error}. The default is used instead.")
    if words := said(PAGE):
        say_error(words)
    if planner_controls.EXAMPLE in st.query_params:
        _example(console, question)
    left, right = st.columns([3, 2], gap="medium")
    with left, st.container(gap="xsmall"):
        planner_controls.sizes(question, found)
        if found.job is not None:
            grid(question, found, plan, colours)
    with right, st.container(gap="xsmall"):
        components.heading("What may be used")
        planner_controls.techniques(question, found)
        planner_controls.limits(question, found)
        profile(console, question, found)
        _go(console, found, solve, plan, running=running, misread=bool(misread))
    steps = [step.question for step in STEPS] if planner_controls.EXAMPLE in st.query_params else [question]
    others(console, [step.asked().id for step in steps] if found.asked else [])
    if solve is not None and running and found.job is not None:
        search(console, solve, found.job.time_unit, colours)
    elif plan is not None:
        result(console, question, plan, solve if plan is not saved else None, colours)
    elif solve is not None and solve.error:
        say_error(text.whole_sentence(solve.error))
    if question.failed and found.job is not None and question.technique.reroutes and (plan or found.infeasible):
        migrations(console, question, found.job, colours)


def _saved(console: ConsoleService) -> Plan | None:
    """Returns the saved plan that the link names. If the link has no question, the plan's question is asked."""
    fingerprint = st.query_params.get(SAVED_PARAM)
    if fingerprint is None:
        return None
    try:
        plan = console.plans.library.saved_plan(fingerprint)
    except ConsoleError:
        words = f"saved: got {fingerprint!r}, expected the fingerprint of a plan that is kept. Plan it anew instead."
        say_error(words)
        return None
    if not any(name in st.query_params for name in PARAMS):
        change(WhatIf.of_plan(plan), saved=fingerprint)
    return plan


def _answer(asked: PlanAsked | None, saved: Plan | None, solve: Solve | None) -> Plan | None:
    """Returns the plan that answers the question: the saved one that the link names, or the one that was made."""
    if saved is not None and asked is not None:
        same = (saved.job, saved.failed, saved.technique, saved.memory)
        if same == (asked.job, asked.failed, asked.technique, asked.memory):
            return saved
    return solve.plan if solve is not None else None


def _go(
    console: ConsoleService, found: Checked, solve: Solve | None, plan: Plan | None, *, running: bool, misread: bool
) -> None:
    """Draws the button that starts the search, and beside it the bound or what prevents a plan. misread: the link has a
    mistake, so that this may not be the question that was sent; any change by the user makes it their own."""
    answered = not running and solve is not None and solve.plan is not None and not solve.stopped
    with st.container(horizontal=True, vertical_alignment="center", key="planner-go"):
        st.button(
            "Planning …" if running else "Plan again" if plan is not None and not answered else "Plan",
            type="primary",
            key="planner-plan",
            icon=":material/play_arrow:",
            disabled=not found.plannable or running or answered or misread,
            help="It is planned already: see below. More time or another solver asks anew." if answered else None,
            on_click=_plan,
            args=(console,),
            width=150,
        )
        if misread:
            components.quiet("The link has a mistake (see above). No plan is made until you change something here.")
        elif found.bound is not None and found.job is not None and plan is None and not running:
            least = text.planned(found.job.units(found.bound.ticks), found.job.time_unit)
            components.quiet(f"No plan can be shorter than {least}: {found.bound.reason}.")
        elif found.errors or found.infeasible:
            components.quiet("What is marked ✕ stands in the way of a plan.")


def _plan(console: ConsoleService) -> None:
    question = now()
    with told(partial(say, PAGE)), acting(console, "plan"):
        console.plans.solves.start(question.asked())
        if question.failed:
            console.plans.solves.start(question.migrations_asked())


def _example(console: ConsoleService, question: WhatIf) -> None:
    """Draws the steps of the paper's example side by side; one of them is shown in full below."""
    solves = [console.plans.solves.find(step.question.asked()) for step in STEPS]
    chosen = step_of(question)
    going = any(s is not None and not s.over for s in solves)
    components.heading("The paper's worked example", "3 × 4 workers, 6 micro-batches each; F = I = W = 1 slot")
    st.fragment(_steps, run_every=0.5 if going else None)(console, chosen.name if chosen else None, going)
    with st.container(horizontal=True, vertical_alignment="center", key="planner-steps"):
        names = [step.name for step in STEPS]
        control(
            lambda value, **rest: st.segmented_control("Shown in full below", names, default=value, wrap=True, **rest),
            "planner-step",
            chosen.name if chosen else None,
            _choose_step,
        )
        if any(s is None for s in solves):
            st.button("Plan all four", key="planner-example-go", on_click=planner_controls.example, args=(console,))


def _steps(console: ConsoleService, chosen: str | None, going: bool) -> None:
    solves = [console.plans.solves.find(step.question.asked()) for step in STEPS]
    if going and all(s is None or s.over for s in solves):
        st.rerun()
    steps = (_step(s.name, s.about, made, s.name == chosen) for s, made in zip(STEPS, solves, strict=True))
    st.html(f'<div class="or-steps">{"".join(steps)}</div>')


def _choose_step(name: str | None) -> None:
    chosen = next((s for s in STEPS if s.name == name), None)
    change(chosen.question if chosen else now(), example=True)


def _step(name: str, about: str, solve: Solve | None, chosen: bool) -> str:
    """Returns a step of the paper's example. chosen: it is the one shown below."""
    value, note = "–", "not planned yet"
    good = ""
    if solve is not None and solve.plan is not None:
        unit, metrics = solve.plan.job.time_unit, solve.plan.metrics
        value = text.planned(metrics.period, unit)
        share = f" · {text.percent(metrics.slowdown_vs_1f1b, sign=True)}" if solve.plan.failed else ""
        note = f"bound {text.planned(metrics.lower_bound, unit)}, {gap_words(solve.plan)}{share}"
        good = " or-good" if metrics.gap <= 0 else ""
    elif solve is not None:
        note = solve.error or (
            "waits its turn" if solve.state == "waiting" else f"{text.seconds(solve.elapsed)} so far"
        )
        if solve.points and solve.points[-1].incumbent is not None:
            value = f"{text.planned(solve.points[-1].incumbent, 'slot')} …"
    return (
        f'<div class="or-step{" or-chosen" if chosen else ""}"><div class="or-label">{escape(name)}</div>'
        f'<div class="or-value">{escape(value)}</div><div class="or-note{good}">{escape(note)}</div>'
        f'<div class="or-note">{escape(about)}</div></div>'
    )


def log(lines: list[str]) -> None:
    """Draws lines, oldest first, in a list of its own scrolling."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    st.html(f'<ol class="or-log" tabindex="0" aria-label="What the solvers reported">{items}</ol>')


def log_lines(solve: Solve, unit: str) -> list[str]:
    """Returns what the search has reported, with one line for each better plan, bound or other solver."""
    lines = []
    for point in solve.points:
        best = "no plan yet" if point.incumbent is None else f"period {text.planned(point.incumbent, unit)}"
        gap = ""
        if point.incumbent is not None and point.bound > 0:
            gap = f", gap {text.percent(max(0.0, point.incumbent / point.bound - 1))}"
        lines.append(f"{point.elapsed:8.2f} s  {point.solver}: {best}, bound {text.planned(point.bound, unit)}{gap}")
    if solve.plan is not None and solve.plan.solver.message:
        lines.append(f"{solve.elapsed:8.2f} s  {solve.plan.solver.message}")
    return lines


def search_cards(solve: Solve, unit: str) -> list[Card]:
    """Returns the cards of a running search."""
    last = solve.points[-1] if solve.points else None
    limit = solve.request.timeout
    if last is None or last.incumbent is None:
        best = [Card("Best so far", "–", "no plan yet"), Card("Proven bound", "–"), Card("Gap", "–")]
    else:
        gap = max(0.0, last.incumbent / last.bound - 1) if last.bound else 0.0
        best = [
            Card("Best so far", text.planned(last.incumbent, unit), f"by {last.solver}"),
            Card("Proven bound", text.planned(last.bound, unit), "no plan can be shorter"),
            Card("Gap", text.percent(gap), "closed" if gap == 0 else "between the two"),
        ]
    return [*best, Card("Time", text.seconds(solve.elapsed), f"{text.seconds(limit)} at most")]


REFRESH = 0.5


def search(console: ConsoleService, solve: Solve, unit: str, colours: Palette) -> None:
    """Draws a running solve, again and again until it is over; then the page is drawn anew, with the result."""
    st.fragment(_follow, run_every=REFRESH)(console, solve.id, unit, colours)


def _follow(console: ConsoleService, solve_id: str, unit: str, colours: Palette) -> None:
    try:
        solve = console.plans.solves.get(solve_id)
    except ConsoleError:
        st.rerun()
    if solve.over:
        st.rerun()
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        components.heading("Planning", _search_status(solve))
        st.button(
            "Stopping …" if solve.state == "stopping" else "Stop",
            key="planner-cancel",
            icon=":material/stop_circle:",
            disabled=solve.state == "stopping",
            on_click=_stop,
            args=(console, solve_id),
            help="Ends the search and keeps the best plan so far.",
        )
    if solve.state == "waiting":
        components.quiet("This plan waits its turn: as many others are being made as this machine has room for.")
        return
    components.cards(search_cards(solve, unit))
    drawn(solve, unit, colours, key="planner-search")


def drawn(solve: Solve, unit: str, colours: Palette, *, key: str) -> None:
    """Draws the chart of a search, and the same in words."""
    if not any(p.incumbent is not None for p in solve.points):
        components.quiet("The first plan is on its way.")
        return
    if not solve.over or len(solve.points) > 1:
        components.live_chart(search_chart(solve, unit, colours), key, search_words(solve, unit))
    log(log_lines(solve, unit))


def others(console: ConsoleService, shown: Sequence[str]) -> None:
    """Draws other plans that are being made, by anybody, with a button to stop each. shown: ids of solves that the page
    shows elsewhere."""
    for solve in console.plans.solves.all():
        if solve.over or solve.id in shown or solve.request.kind != "plan":
            continue
        job = solve.request.job
        with st.container(horizontal=True, vertical_alignment="center", key=f"planner-other-{solve.id}"):
            components.quiet(
                f"Also being planned: {text.grid(job)}, "
                f"{text.count(len(solve.request.failed), 'worker')} dead, {solve.request.technique.value} "
                f"({_search_status(solve)})."
            )
            st.button("Stop", key=f"planner-cancel-{solve.id}", on_click=_stop, args=(console, solve.id))


def _search_status(solve: Solve) -> str:
    if solve.state == "waiting":
        return "waits its turn"
    return f"{text.seconds(solve.elapsed)} of at most {text.seconds(solve.request.timeout)}"


def _stop(console: ConsoleService, solve_id: str) -> None:
    with told(partial(say, PAGE)), acting(console, "stop solve", solve_id):
        console.plans.solves.stop(solve_id)


COSTS = (
    ("state_gb", "Weights of a stage (GB)", "Weights and optimizer state that a copy moves. Empty: the profile's."),
    ("copy_gbs", "Copy (GB/s)", "How fast weights go from one worker to another."),
    ("heals_in", "Back in (s)", "Seconds until the dead workers are expected back. 0: they are not."),
)


def migrations(console: ConsoleService, question: WhatIf, job: Job, colours: Palette) -> None:
    components.heading("Migrations", "a living worker may take a dead one's place, with a copy of its peers' weights")
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-costs"):
        for name, label, note in COSTS:
            draw = partial(
                st.number_input, label, *LIMITS[name], format="%g", help=note, width=170, placeholder="the profile's"
            )
            address.control(draw, f"planner-{name}", getattr(question, name), partial(_price, console, name))
        known = console.plans.solves.find(question.migrations_asked())
        if known is None or (known.over and known.migrations is None):
            st.button("Look for migrations", key="planner-look", on_click=look, args=(console,))
    if question.state_gb is None and not any(p.weight_bytes + p.optimizer_bytes for p in job.profiles):
        st.caption(
            "The profile says nothing of weights, so copies count as free; give their size to see what they cost."
        )
    if known is None:
        return
    if not known.over:
        search(console, known, job.time_unit, colours)
    elif known.migrations is None:
        address.field_error(known.error, "stretch")
    else:
        _found(question, job, known.migrations, colours)


def look(console: ConsoleService) -> None:
    """Starts the search for migrations, in the background."""
    with told(partial(say, PAGE)), acting(console, "look for migrations"):
        console.plans.solves.start(now().migrations_asked())


def _price(console: ConsoleService, name: str, value: float | None) -> None:
    changes: dict[str, Any] = {name: value}
    change(replace(now(), **changes))
    look(console)


def _found(question: WhatIf, job: Job, found: Migrations, colours: Palette) -> None:
    st.markdown(text.whole_sentence(found.reason))
    if question.heals_in and job.time_unit not in SECONDS:
        st.caption(f"One {job.time_unit} counts as 1 s.")
    if question.partition == AUTO:
        layers = f": {text.counts(found.partition)} afterwards" * bool(found.partition)
        st.caption(f"Each period is with the layers per stage that are best for it{layers}.")
    if not found.migrations:
        return
    unit = job.time_unit
    before = "no plan without migrations"
    if found.period_now is not None:
        saved = text.percent(found.period / found.period_now - 1, sign=True)
        before = f"{text.planned(found.period_now, unit)} without migrations; {saved}"
    gained = "–" if found.gained is None else f"{found.gained:,.3g}"
    components.cards(
        [
            Card("Period, list scheduler", text.planned(found.period, unit), before),
            Card("Pause for the copies", text.milliseconds(1000 * found.pause), "nobody trains meanwhile"),
            Card(
                "Iterations gained",
                gained,
                f"in {text.seconds(question.heals_in)}" if question.heals_in else "set “Back in”",
            ),
        ]
    )
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.plotly_chart(
            migrations_chart(job, list(question.failed), found, colours),
            theme=None,
            key="planner-migrations",
            config={**CHART_CONFIG, "displayModeBar": False},
            alt="; ".join(_sentence(m.worker, m.takes, m.source) for m in found.migrations[:8]),
        )
    with right:
        tables.show(
            {
                "worker": [m.worker for m in found.migrations],
                "takes the place of": [m.takes for m in found.migrations],
                "weights from": [m.source or "the last checkpoint" for m in found.migrations],
            },
            "planner-migrations-table",
            "Migrations",
        )
        dead, left_over = (
            ", ".join(f"stage {s}: {n}" for s, n in enumerate(c) if n) for c in (found.present, found.counts)
        )
        st.caption(f"Dead by stage: {dead}; afterwards {left_over}.")
        st.button(
            "Apply the migrations to the question",
            key="planner-migrate",
            on_click=_migrate,
            args=(found.failed,),
            help="Then the places that are empty afterwards are dead. No job is touched.",
        )


def _migrate(failed: list[str]) -> None:
    change(now().with_failed(set(failed)))


def _sentence(worker: str, takes: str, source: str | None) -> str:
    return f"{worker} takes the place of {takes}, with the weights of {source or 'the last checkpoint'}"


RESULTS = "planner-results"
GANTT = "planner-gantt"
NAME = "planner-save-name"
# How many earlier plans the page keeps, and the most ops that such a plan may have.
MAX_BEFORE = 4
MAX_BEFORE_OPS = 10_000
THIS, REFERENCE = "this", "1f1b"
# The rows of the comparison, out of all that there are (planner.export.compare).
FIGURES = (
    "failed",
    "partition",
    "period",
    "lower_bound",
    "gap",
    "slowdown_vs_1f1b",
    "slowdown_vs_best",
    "bubble_fraction",
    "peak_activations",
    "peak_bytes",
    "solver",
)


@dataclass(frozen=True)
class NamedPlan:
    """A plan with its name on the page. link: its word in a link, which is `saved:` and its fingerprint, or its whole
    question."""

    name: str
    plan: Plan
    link: str = ""


def result(console: ConsoleService, question: WhatIf, plan: Plan, solve: Solve | None, colours: Palette) -> None:
    """Draws a plan. solve: the search that made it; None for a saved plan."""
    schedule = schedule_of(plan)
    link = question.in_a_word() if solve is not None else f"{SAVED_PARAM}:{plan.fingerprint}"
    before = _before(console, NamedPlan(question_words(question), plan, link))
    large_one = plan.op_count > charts.MAX_BARS
    compared = {THIS: NamedPlan("This plan", plan)}
    if not large_one:
        compared[REFERENCE] = NamedPlan("Fault-free 1F1B", _reference(plan))
    if before is not None:
        other = "" if before.plan.job.profiles == plan.job.profiles else ", other op times"
        compared[BEFORE] = NamedPlan(f"Before: {before.name}{other}", before.plan)
    with st.container(
        horizontal=True, vertical_alignment="center", horizontal_alignment="distribute", key="planner-result-head"
    ):
        components.heading("Plan", question_words(question))
        with st.container(horizontal=True, width="content", key="planner-result-actions"):
            _save(console, plan, question)
            apply(console, plan)
            export_button(Export(plan, "what-if"), key="planner-export")
    if words := said(SAVED_PARAM):
        st.success(words)
    components.cards(facts.plan_cards(plan, schedule))
    if plan.solver.message:
        st.caption(text.plain_markdown(text.whole_sentence(plan.solver.message)))
    if large_one:
        _picture(schedule, colours)
    else:
        _chart(compared, colours)
    components.heading("Compared", "changes are against this plan")
    shown = list(compared.values())
    figures = differences([s.plan for s in shown], FIGURES)
    st.html(beside_html([s.name for s in shown], figures, "Plans compared"))
    how, workers = address.tabs(["How it was found", "Workers"], key="details")
    with how:
        if solve is None:
            made = plan.solver
            took = text.milliseconds(1000 * made.seconds)
            components.quiet(f"A saved plan: made by {made.name} in {took}, {facts.gap_words(plan)}.")
        else:
            drawn(solve, plan.job.time_unit, colours, key="planner-found")
    with workers:
        rows = list(schedule.problem.job.workers())
        table = workers_table(schedule, rows, dict.fromkeys(plan.failed, FAILED))
        tables.show(table, "planner-workers", "Figures by worker", placeholder="–")


def _chart(compared: dict[str, NamedPlan], colours: Palette) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-drawn"):
        shown = address.segmented_control(
            "Show", list(compared), default=THIS, format_func=lambda name: compared[name].name, key=SHOW, wrap=True
        )
        plan = compared[shown].plan
        schedule = schedule_of(plan)
        end = float(schedule.problem.job.units(schedule.end))
        time = choose_time(f"planner-{plan.fingerprint[:12]}", end, text.plural(plan.job.time_unit), WINDOW)
    drawing = Drawing.of(schedule, out=dict.fromkeys(plan.failed, FAILED))
    components.legend_of([drawing], ghost=True)
    part, turn = address.drawn_with(GANTT, f"{plan.fingerprint} {colours.name}", time.shown)
    figure = gantt(drawing, colours, shown=part, revision=str(turn))
    components.schedule_chart(figure, GANTT, time, facts.schedule_words(plan, schedule), place="wide-chart-planner")
    if plan.op_count > MAX_NODES:
        st.caption(many_words(plan.op_count, "save it, and show fewer workers on Schedule"))
    else:
        st.caption(facts.reading_help(plan))


def _picture(schedule: Schedule, colours: Palette) -> None:
    drawing = Drawing.of(schedule, out={str(worker): FAILED for worker in schedule.problem.failed})
    components.quiet(f"{rows_words(drawing)} Save the plan to look at it op by op on Schedule.")
    alt = f"Overview of {len(drawing.rows.workers):,} workers over one iteration."
    st.html(charts.overview(drawing, charts.picture(drawing, colours), alt))


# -- keeping ------------------------------------------------------------------------------------


def _save(console: ConsoleService, plan: Plan, question: WhatIf) -> None:
    kept = next((row for row in console.plans.library.saved() if row["fingerprint"] == plan.fingerprint), None)
    with st.popover("Saved" if kept else "Save", icon=":material/bookmark:", key="planner-save"):
        if kept:
            st.markdown(f"Kept as **{text.plain_markdown(kept['name'])}**. The link to this page shows it.")
        name = kept["name"] if kept else question_words(question)[:80]
        key = f"{NAME}-{plan.fingerprint[:8]}"
        st.text_input("Name", name, key=key, max_chars=80)
        words = "Rename" if kept else "Save"
        st.button(words, type="primary", key="planner-keep", on_click=_keep, args=(console, plan, key))
        if kept:
            st.button("Forget it", key="planner-forget", on_click=_forget, args=(console, plan))
            for words, page, word in (("Open on Schedule", "schedule", "plan"), ("Compare", "compare", "plans")):
                if st.button(words, type="tertiary", key=f"planner-to-{word}"):
                    st.switch_page(address.page(page), query_params={word: f"saved:{plan.fingerprint}"})


def _keep(console: ConsoleService, plan: Plan, key: str) -> None:
    name = st.session_state[key]
    with told(partial(say, PAGE)):
        with acting(console, "save plan", plan.fingerprint):
            console.plans.library.save(plan, name)
        change(now(), saved=plan.fingerprint)
        say(SAVED_PARAM, f"Saved as “{' '.join(name.split())}”. The link to this page shows the same.")


def _forget(console: ConsoleService, plan: Plan) -> None:
    with told(partial(say, PAGE)):
        with acting(console, "forget plan", plan.fingerprint):
            console.plans.library.forget(plan.fingerprint)
        change(now())


# -- details ------------------------------------------------------------------------------------


def _before(console: ConsoleService, shown: NamedPlan) -> NamedPlan | None:
    """Notes the plan that is shown. Returns the newest other plan that was shown before, here or to the sender of the
    link, if it is for the same grid and unit."""
    known: list[NamedPlan] = st.session_state.setdefault(RESULTS, [])
    if not known and (sent := st.query_params.get(BEFORE)) and (found := _sent(console, sent)):
        known.append(found)
    if shown.plan.op_count <= MAX_BEFORE_OPS and (not known or known[-1].plan.fingerprint != shown.plan.fingerprint):
        others = [s for s in known if s.plan.fingerprint != shown.plan.fingerprint]
        known[:] = [*others[-MAX_BEFORE:], shown]
    others = [s for s in reversed(known) if s.plan.fingerprint != shown.plan.fingerprint]
    before = next((s for s in others if comparable(shown.plan, s.plan)), None)
    if before is not None:
        st.query_params[BEFORE] = before.link
    elif st.query_params.get(BEFORE) and known[:1] == others[-1:]:
        components.quiet("What was planned before is of another grid or unit, so nothing stands beside this plan.")
    return before


def _sent(console: ConsoleService, link: str) -> NamedPlan | None:
    """Returns the plan that the sender of a link saw beside it. If it is not there, the page says so."""
    try:
        if link.startswith(f"{SAVED_PARAM}:"):
            plan = console.plans.library.saved_plan(link.partition(":")[2])
            return NamedPlan(question_words(WhatIf.of_plan(plan)), plan, link)
        asked = parse_word(link)
        solve = console.plans.solves.find(asked.asked())
        if solve is not None and solve.plan is not None:
            return NamedPlan(question_words(asked), solve.plan, link)
        words = f"plan {question_words(asked)} to see it"
    except (ConsoleError, PlannerError):
        words = "the link does not say which it was"
    components.quiet(f"The plan that the link was compared with is not kept: {words}.")
    return None


def _reference(plan: Plan) -> Plan:
    """Makes the plan of fault-free 1F1B, in milliseconds at the sizes that are drawn op by op."""
    return reference_plan(plan.job.job(), "1f1b")


JOB = "planner-apply-job"


def apply(console: ConsoleService, plan: Plan) -> None:
    """Draws the button that puts the plan in force in a job, or says why it does not fit that job."""
    jobs = components.job_names(job for job in console.queries.list_jobs() if job.state not in facts.OVER)
    with st.popover("Apply to a job", icon=":material/play_circle:", key="planner-apply", disabled=not jobs):
        if not jobs:
            return
        job_id = st.selectbox("Job", list(jobs), format_func=jobs.__getitem__, key=JOB)
        why = misfit(console.jobs.find(job_id), plan)
        if why:
            st.caption(f"It does not fit this job: {why}.")
        else:
            st.caption("All workers take it up at the end of the same iteration; nobody is restarted.")
        st.button(
            "Put in force",
            type="primary",
            key="planner-apply-go",
            disabled=bool(why),
            on_click=_apply,
            args=(console, plan),
        )


def _apply(console: ConsoleService, plan: Plan) -> None:
    with told(lambda why: say(PAGE, f"The plan was not applied: {why}")):
        reason = use_plan(console.jobs.find(st.session_state[JOB]), plan, actor(console))
        say(SAVED_PARAM, f"Applied: {reason}. Live shows the workers take it up.")
