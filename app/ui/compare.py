"""The Compare page: two to four plans, or a plan and the iteration that ran it, on one time axis."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import streamlit as st

from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import (
    MAX_BARS,
    MAX_NODES,
    Strip,
    comparison,
    last_time,
    short_unit,
    time_factors,
)
from openrecycle.app.charts.theme import Palette
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.sources import (
    MOST,
    NOT_KEPT,
    PendingPlan,
    Reference,
    Source,
    job_of,
    parse_reference,
    pinned,
)
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, facts, tables
from openrecycle.app.ui.access import say_error
from openrecycle.app.ui.address import BEGAN_WITH, choose_time
from openrecycle.app.ui.components import open_job, schedule_of
from openrecycle.app.ui.facts import Card
from openrecycle.app.ui.plan_pickers import clock, export_button, newest, open_file, say_measured, wait_for
from openrecycle.app.ui.schedule import choose_rows
from openrecycle.app.ui.tables import beside_html, differences, stage_table
from openrecycle.planner.export.compare import comparable
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.drawing import Drawing, thinned_words
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

PICKER = "compare-picker"
TITLE = '<h1 class="or-title">Compare</h1><div class="or-about">Two to four plans on one time axis.</div>'


def page() -> None:
    colours = components.use_style()
    console = get_console()
    opened = open_job(console, pace=False, title=_title) if console.queries.list_jobs() else None
    job_id = opened[0].job_id if opened else None
    if opened is None:
        st.html(TITLE)
    found = _choose(console, job_id)
    waiting = [each for each in found if isinstance(each, PendingPlan)]
    sources = [each for each in found if isinstance(each, Source)]
    wait_for(console, [each.reference for each in waiting])
    if len(found) < 2:
        components.quiet(
            "Choose two to four plans above: of a job, from the library, or made now for the job's grid by one "
            "technique after another. The newest iteration as it ran can be among them."
        )
        return
    if len(sources) > 1:
        for source in sources:
            say_measured(console, source, _replace)
        _compare(console, sources, colours)


def _title(job: LiveJob) -> bool:
    """For `open_job`: draws another title if none of the plans belongs to the job."""
    try:
        asked = [parse_reference(each, field="plans") for each in st.query_params.get_all("plans")]
    except InputError:
        return False  # the page will say so
    if not asked or any(job_of(each) == job.job_id for each in asked):
        return False
    st.html(TITLE)
    return True


def _choose(console: ConsoleService, job_id: str | None) -> list[Source | PendingPlan]:
    """Draws the choice of plans; returns them, the baseline first. They are in the URL: one `?plans=` each, and
    `?baseline=`."""
    wanted = _wanted(console, job_id)
    options = console.sources.candidates(job_id, clock)
    found: dict[str, Source | PendingPlan] = {}
    named: dict[str, str] = {}  # reference in the URL -> pinned reference: this very plan, and not "in force"
    for reference in wanted:
        try:
            each = console.sources.find(reference)
        except ConsoleError as error:
            say_error(f"{error}. It is left out.")
            if error.code == NOT_KEPT:
                args = (reference, newest(reference))
                st.button("Show the newest that was measured", on_click=_replace, args=args, key=f"newest-{reference}")
            continue
        if isinstance(each, Source):
            each = replace(each, reference=pinned(each))
        name = named[str(reference)] = str(each.reference)
        found[name] = each
        options.setdefault(name, each.name)
    _into_address(named)
    with st.container(horizontal=True, vertical_alignment="bottom", key="compared"):
        # The widget's value is only set if the URL was changed elsewhere, such as by the button below.
        if PICKER not in st.session_state or st.session_state[PICKER] != list(found):
            st.session_state[PICKER] = list(found)
        st.multiselect(
            "Plans",
            list(options),
            format_func=options.__getitem__,
            key=PICKER,
            max_selections=MOST,
            placeholder=f"Choose two to {MOST}",
            on_change=_remember,
            args=(frozenset(options),),
            wrap=True,
        )
        open_file(console, partial(_add, list(found)))
        if len(found) > 1:
            names = list(found)
            first = address.selectbox(
                "Baseline",
                names,
                format_func=options.__getitem__,
                key="baseline",
                instead="The first one is it.",
                width=320,
                help="Changes are against it, and its period is drawn through all.",
            )
            return [found[first], *(each for name, each in found.items() if name != first)]
    return list(found.values())


def _wanted(console: ConsoleService, job_id: str | None) -> list[Reference]:
    texts = st.query_params.get_all("plans")
    if not texts:
        return [] if st.session_state.get(PICKER) == [] else console.sources.first_choice(job_id)
    out: list[Reference] = []
    for given in dict.fromkeys(texts):
        try:
            out.append(parse_reference(given, field="plans"))
        except InputError as error:
            say_error(f"{error}. It is left out.")
    if len(out) > MOST:
        say_error(f"plans: got {len(out)}, expected at most {MOST}. The first {MOST} are shown.")
    return out[:MOST]


def _into_address(names: dict[str, str]) -> None:
    """Replaces the references in the address by those to the plans that are shown, so that a link shows the same
    later."""
    asked = st.query_params.get_all("plans")
    shown = list(dict.fromkeys(names.get(each, each) for each in asked or names))
    if shown != asked:
        st.query_params["plans"] = shown
    if not asked:
        st.session_state[BEGAN_WITH] = shown
    pinned_one = st.query_params.get("baseline")
    if pinned_one in names and names[pinned_one] != pinned_one:
        st.query_params["baseline"] = names[pinned_one]


def _replace(old: Reference, new: Reference) -> None:
    """For callbacks: replaces one plan by another."""
    for name in ("plans", "baseline"):
        asked = st.query_params.get_all(name)
        if str(old) in asked:
            st.query_params[name] = [str(new) if each == str(old) else each for each in asked]


def _add(shown: list[str], reference: str) -> None:
    """Adds a plan to those that are shown; if there is no room, it replaces the last one."""
    st.query_params["plans"] = [*[each for each in shown if each != reference][: MOST - 1], reference]


def _remember(known: frozenset[str]) -> None:
    """Takes the choice. known: the plans that were offered; a browser may still send an older name of a plan."""
    if known.issuperset(st.session_state[PICKER]):
        address.moved()
        st.query_params["plans"] = st.session_state[PICKER]


def _compare(console: ConsoleService, sources: list[Source], colours: Palette) -> None:
    schedules = [schedule_of(source.plan) for source in sources]
    labels = _labels(sources)
    named = "-".join(s.plan.fingerprint[:12] for s in sources)
    with st.container(horizontal=True, vertical_alignment="bottom", key="drawn"):
        rows = choose_rows(schedules)
        strips = [
            Strip(label, source.plan, Drawing.of(schedule, rows(schedule), source.out))
            for label, source, schedule in zip(labels, sources, schedules, strict=True)
        ]
        time = choose_time(named, last_time(strips), short_unit(strips))
    components.cards(_cards(labels, sources))
    what = " ".join([colours.name, named, *labels, *(",".join(map(str, s.drawing.rows.workers)) for s in strips)])
    what += "".join(f" {sorted(s.drawing.out.items())}" for s in strips)
    shown, turn = address.drawn_with("compare-chart", what, time.shown)
    pictured = sum(strip.drawing.op_count for strip in strips) > MAX_BARS
    if pictured:
        thinned = dict.fromkeys(filter(None, (thinned_words(strip.drawing) for strip in strips)))
        shown_as = "So many ops are shown as pictures; the Schedule page shows each plan's ops."
        components.quiet(" ".join([shown_as, *thinned]))
    components.legend_of([s.drawing for s in strips], ghost=not pictured)
    figure = comparison(strips, colours, shown=shown, revision=str(turn))
    alt = "Gantt charts below each other: " + "; ".join(map(facts.schedule_words, (s.plan for s in sources), schedules))
    components.schedule_chart(figure, "compare-chart", time, alt)
    ops = sum(strip.drawing.op_count for strip in strips)
    if MAX_NODES < ops <= MAX_BARS:
        components.quiet(
            f"All {ops:,} ops are drawn; so many have no numbers. Fewer workers, or fewer plans, have them."
        )
    mixed = " Their units differ, so each is measured by its own job's fault-free 1F1B iteration." * (
        len(set(time_factors([s.plan for s in sources]))) > 1
    )
    st.caption(
        f"The dotted line is the period of the baseline, {labels[0]}; each plan's own is the solid one. "
        f"Faint bars are the next iteration.{mixed} {facts.DRAG_WORDS}"
    )
    _tables(console, sources, schedules, labels)


def _labels(sources: list[Source]) -> list[str]:
    """Returns the plans' names, numbered if two are alike."""
    names = [s.name for s in sources]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _cards(labels: list[str], sources: list[Source]) -> list[Card]:
    """Returns a card per plan with its period, and its difference from the baseline's if both answer the same
    question."""
    first = sources[0].plan
    cards = []
    for i, (label, source) in enumerate(zip(labels, sources, strict=True)):
        metrics, unit = source.plan.metrics, source.plan.job.time_unit
        if i == 0:
            note, tone = f"baseline · {facts.gap_words(source.plan)}", ""
        elif comparable(first, source.plan):
            change = metrics.period / first.metrics.period - 1
            note, tone = f"{text.percent(change, sign=True)} against the baseline", "good" if change < 0 else ""
        else:
            why = (
                ""
                if _grid(first) == _grid(source.plan)
                else f"of {_grid(source.plan)}, the baseline of {_grid(first)}; "
            )
            note, tone = f"{why}{text.percent(metrics.slowdown_vs_1f1b, sign=True)} against its fault-free 1F1B", ""
        cards.append(Card(label, text.planned(metrics.period, unit), note, tone, of="period"))
    return cards


def _grid(plan: Plan) -> str:
    return text.grid(plan.job)


def _tables(console: ConsoleService, sources: list[Source], schedules: list[Schedule], labels: list[str]) -> None:
    components.heading("What differs", "changes are against the baseline, the first column")
    plans, stages, files = address.tabs(["Plans", "Stages", "Files"], key="figures")
    with plans:
        st.html(beside_html(labels, differences([s.plan for s in sources]), "Figures by plan"))
    with stages:
        tables.show(stage_table(labels, schedules), "stages", "Figures by stage and plan")
    with files:
        for i, (label, source) in enumerate(zip(labels, sources, strict=True)):
            with st.container(horizontal=True, vertical_alignment="center"):
                export_button(console.sources.export_of(source), key=f"export-{i}")
                st.markdown(f":small[{text.plain_markdown(label)}]")
