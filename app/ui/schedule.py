"""Schedule: a plan as a Gantt chart, with its figures and the same facts in tables."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.console import Console, get_console
from app.errors import ConsoleError
from app.sources import Source
from app.ui import components, facts
from app.ui.charts import overview as large
from app.ui.charts import rows
from app.ui.charts.gantt import KIND_ORDER, gantt
from app.ui.charts.overview import Detail
from app.ui.exports import export_button
from app.ui.picker import open_job
from app.ui.plan_source import pick_plan
from app.ui.tables import operations_table, workers_table
from app.ui.theme import BOX_CONFIG, CHART_CONFIG, Palette
from planner.job import Worker
from planner.plan import Plan
from planner.schedule import Schedule

SHOW = {"all": "All workers", "failure": "Touched by the failure", "pipeline": "One pipeline", "stage": "One stage"}


def page() -> None:
    colours = components.use_style()
    console = get_console()
    # Without a job there may still be plans of the library, or one that a link names.
    jobless = not console.list_jobs() and bool(console.library.saved() or "plan" in st.query_params)
    opened = None if jobless else open_job(console, pace=False)
    if opened is None and not jobless:
        return
    view = opened[0] if opened else None
    if view is None:
        st.html('<h1 class="or-title">Schedule</h1>')
    else:
        st.fragment(_follow, run_every=2)(console, view.job_id, view.plan.fingerprint if view.plan else None)
    filters = st.container(horizontal=True, vertical_alignment="bottom", key="filters")
    with filters:
        source = pick_plan(console, view.job_id if view else None)
    if view is not None and view.plan is None:
        components.quiet(
            "No plan is in force yet: the first one is rolled out when all workers have registered. "
            f"Made ahead so far: {view.planned_ahead} of {view.plans_to_make} plans."
        )
    if source is None:
        return
    plan = source.plan
    schedule = st.cache_resource(_schedule, max_entries=16, show_spinner="Reading the plan …")(plan.fingerprint, plan)
    with filters:
        workers = _choose_workers(schedule)
    components.cards(facts.plan_cards(plan, schedule))
    detail = _chart(plan, schedule, workers, colours)
    _tables(console, source, schedule, workers, detail)


def _schedule(fingerprint: str, _plan: Plan) -> Schedule:
    """Keyed by the fingerprint; the plan itself is not hashed."""
    return _plan.schedule()


def _follow(console: Console, job_id: str, shown: str | None) -> None:
    """Runs the page again when another plan comes into force."""
    try:
        plan = console.view(job_id, iterations=1, events=1).plan
    except ConsoleError:
        return
    if (plan.fingerprint if plan else None) != shown:
        st.rerun()


def _choose_workers(schedule: Schedule) -> list[Worker]:
    job = schedule.problem.job
    touched = rows.touched_workers(schedule)
    options = [key for key in SHOW if key != "failure" or touched]
    show = st.segmented_control(
        "Show",
        options,
        default="all",
        required=True,
        format_func=SHOW.__getitem__,
        key="show",
        bind="query-params",
        wrap=True,
    )
    if show == "pipeline":
        pipeline = st.selectbox("Pipeline", range(job.pipelines), key="pipeline", width=120)
        return rows.pipeline_workers(schedule, pipeline)
    if show == "stage":
        stage = st.selectbox("Stage", range(job.stages), key="stage", width=120)
        return rows.stage_workers(schedule, stage)
    return touched if show == "failure" else list(job.workers())


def _chart(plan: Plan, schedule: Schedule, workers: list[Worker], colours: Palette) -> Detail | None:
    """Returns the part that is shown op by op, where that is not all of it."""
    ops = sum(len(schedule.ops.get(w, ())) for w in workers)
    revision = f"{plan.fingerprint}-{len(workers)}"
    if ops > large.MAX_BARS:
        return _large_chart(schedule, workers, colours, revision)
    job = schedule.problem.job
    fault_free = plan.metrics.period / (1 + plan.metrics.slowdown_vs_1f1b) * job.ticks_per_unit
    figure = gantt(schedule, colours, workers=workers, fault_free_end=fault_free, revision=revision)
    _legend(schedule, workers, ghost=True)
    with st.container(key="wide-chart"):
        st.plotly_chart(figure, theme=None, key="gantt", config=CHART_CONFIG, alt=facts.schedule_words(plan, schedule))
    st.caption(facts.reading_help(plan))
    return None


def _legend(schedule: Schedule, workers: Sequence[Worker], *, ghost: bool) -> None:
    shown = {(op.kind, op.rerouted) for w in workers for op in schedule.ops.get(w, ())}
    kinds = [kind for kind in KIND_ORDER if any(kind == k for k, _ in shown)]
    components.op_legend(kinds, rerouted=any(moved for _, moved in shown), ghost=ghost)


def _large_chart(schedule: Schedule, workers: list[Worker], colours: Palette, revision: str) -> Detail:
    """Beyond MAX_BARS ops: a picture of all, and bars for the part that a box or the fields choose."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        first = st.selectbox("First row", [str(w) for w in workers], key="first-row", width=160)
        start = st.number_input("From time", min_value=0.0, value=0.0, key="from-time", width=160)
        st.caption("Or draw a box on the overview; a double click there takes it away.")
    box = _drawn_box(st.session_state.get("overview"))
    names = [str(w) for w in workers]
    if box:
        detail = large.detail_of_box(schedule, workers, *box)
    else:
        detail = large.detail_of(schedule, workers, names.index(first), 16, start * schedule.problem.job.ticks_per_unit)
    st.plotly_chart(
        large.overview(schedule, colours, workers=workers, detail=detail, revision=revision),
        theme=None,
        key="overview",
        on_select="rerun",
        selection_mode="box",
        config=BOX_CONFIG,
        alt=f"Overview of {len(workers):,} workers over one iteration.",
    )
    components.heading("Detail", f"{detail.ops:,} ops" + (" of a part; draw a box for another" if detail.cut else ""))
    _legend(schedule, detail.workers, ghost=False)
    figure = gantt(
        schedule, colours, workers=detail.workers, window=detail.window, revision=f"{revision}-{detail.window}"
    )
    with st.container(key="wide-chart"):
        st.plotly_chart(figure, theme=None, key="gantt", config=CHART_CONFIG, alt="The chosen part, op by op.")
    return detail


def _drawn_box(state: object) -> tuple[tuple[float, float], tuple[float, float]] | None:
    selection = state.get("selection") if isinstance(state, dict) else None
    boxes = selection.get("box") if selection else None
    if not boxes:
        return None
    x, y = boxes[0]["x"], boxes[0]["y"]
    return (float(x[0]), float(x[1])), (float(y[0]), float(y[1]))


def _tables(console: Console, source: Source, schedule: Schedule, workers: list[Worker], detail: Detail | None) -> None:
    plan = source.plan
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        components.heading("The same in figures", f"times in {plan.job.time_unit}")
        job = console.job(source.job_id) if source.job_id else None
        export_button(plan, source.name, spec=job.spec if job else None, catalog=job.catalog if job else None)
    by_worker, by_op = st.tabs(["Workers", "Ops of the detail" if detail else "Ops"])
    with by_worker:
        st.dataframe(workers_table(schedule, workers), hide_index=True, key="workers-table", alt="Figures by worker")
    with by_op:
        ops = operations_table(schedule, *((detail.workers, detail.window) if detail else (workers, None)))
        st.dataframe(ops, hide_index=True, key="ops-table", alt="Ops in order of start")


components.guard(page)
