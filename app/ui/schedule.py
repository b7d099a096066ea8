"""Schedule: a plan, or an iteration as it ran, as a Gantt chart, with its figures and the same facts in tables."""

from __future__ import annotations

from functools import partial

import streamlit as st

from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.sources import Made, OfJob, Source, job_of, parse_reference
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, facts, tables
from openrecycle.app.ui.charts.gantt import MAX_BARS, MAX_NODES, Detail
from openrecycle.app.ui.components import schedule_of
from openrecycle.app.ui.facts import critical_words, many_words
from openrecycle.app.ui.picker import open_job
from openrecycle.app.ui.plans import export_button, open_file, pick_plan, say_measured, show_instead
from openrecycle.app.ui.schedule_view import ScheduleView, bars, choose_view, choose_workers, large_chart
from openrecycle.app.ui.tables import Table, operations_table, workers_table
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Technique, Worker
from openrecycle.planner.plans.drawing import Drawing
from openrecycle.planner.plans.schedule import Schedule

FEW = 24


def page() -> None:
    colours = components.use_style()
    console = get_console()
    # Without a job there may still be plans of the library, or one that a link names.
    jobless = not console.queries.list_jobs() and bool(console.plans.library.saved() or "plan" in st.query_params)
    opened = None if jobless else open_job(console, pace=False, title=partial(_title, console))
    if opened is None and not jobless:
        if not console.queries.list_jobs():
            open_file(console, partial(show_instead, None))
        return
    job = opened[0] if opened else None
    if job is None:
        st.html('<h1 class="or-title">Schedule</h1>')
    else:
        st.fragment(_follow, run_every=2)(console, job.job_id, _run_of(job))
    notes = st.container()
    filters = st.container(horizontal=True, vertical_alignment="bottom", key="filters")
    with filters:
        source = pick_plan(console, job.job_id if job else None, notes)
        open_file(console, partial(show_instead, None))
    if job is not None and job.plan_run is None:
        components.quiet(
            "No plan is in force yet: the first one is rolled out when all workers have registered. "
            f"Made ahead so far: {job.plans.ahead.made} of {job.plans.ahead.wanted} plans."
        )
    if source is None:
        return
    say_measured(console, source, show_instead)
    plan = source.plan
    schedule = schedule_of(plan)
    with filters:
        workers = choose_workers(schedule)
    with st.container(horizontal=True, vertical_alignment="bottom", key="drawn"):
        wish = choose_view(plan, schedule)
    components.cards(facts.plan_cards(plan, schedule))
    detail = _chart(source, schedule, workers, wish, colours)
    _tables(console, source, schedule, workers, detail)


def _title(console: ConsoleService, job: LiveJob) -> bool:
    """For `open_job`: the head names the plan that the address asks for, where that is not the job's."""
    said = st.query_params.get("plan", "")
    try:
        reference = parse_reference(said) if ":" in said else None
        found = console.sources.find(reference) if reference is not None and job_of(reference) != job.job_id else None
    except (InputError, ConsoleError):
        return False  # the page says why, and shows the job's
    if not isinstance(found, Source):
        return False
    components.plan_title(found.name, found.plan, f"not a plan of {job.spec.name}, the job chosen here")
    return True


def _workers_table(fingerprint: str, names: str, out: dict[str, str], _schedule: Schedule) -> Table:
    return workers_table(_schedule, [Worker.parse(name) for name in names.split(",")], out)


def _follow(console: ConsoleService, job_id: str, shown: tuple[str, str] | None) -> None:
    """Runs the page again when another plan is run."""
    try:
        now = _run_of(console.jobs.find(job_id))
    except ConsoleError:
        return
    if now != shown:
        st.rerun()


def _run_of(job: LiveJob) -> tuple[str, str] | None:
    """The plan that it runs now, and in words how it stands to it."""
    run = job.plan_run
    return (run.fingerprint, run.words) if run else None


def _chart(
    source: Source, schedule: Schedule, workers: list[Worker], wish: ScheduleView, colours: Palette
) -> Detail | None:
    """Returns the part that is shown op by op, where that is not all of it."""
    plan, out = source.plan, source.out
    ops = sum(schedule.op_counts.get(w, 0) for w in workers)
    if ops > MAX_BARS:
        return large_chart(plan.fingerprint, schedule, workers, wish, colours, out)
    drawing = Drawing.of(schedule, workers, out)
    ghost = "next" in wish.draw
    components.legend_of([drawing], ghost=ghost)
    what = f"{plan.fingerprint} {','.join(map(str, workers))}"
    bars("gantt", what, drawing, wish, wish.time.shown, colours, facts.schedule_words(plan, schedule), ghost=ghost)
    if ops > MAX_NODES:
        st.caption(many_words(ops, "show fewer workers"))
    else:
        st.caption(f"{facts.reading_help(plan)} Click a bar to see its micro-batch's path through all stages.")
    if "critical" in wish.draw:
        st.caption(critical_words(schedule))
    return None


def _comparison(source: Source) -> dict[str, str | list[str]]:
    """The link to Compare: an iteration as it ran beside the plan in force, a plan beside fault-free 1F1B."""
    query: dict[str, str | list[str]] = {"plans": [str(source.reference)]}
    if source.job_id is not None:
        in_force, plain = OfJob(source.job_id), Made(Technique.FAULT_FREE, "1f1b", source.job_id)
        other = in_force if source.measured or source.reference == plain else plain
        query = {"plans": [str(other), str(source.reference)], "job": source.job_id}
    return query


def _tables(
    console: ConsoleService,
    source: Source,
    schedule: Schedule,
    workers: list[Worker],
    detail: Detail | None,
) -> None:
    plan = source.plan
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        components.heading("The same in figures", f"times in {plan.job.time_unit}")
        with st.container(horizontal=True, width="content", vertical_alignment="center"):
            st.page_link(
                address.page("compare"),
                label="Compare with others",
                icon=":material/compare_arrows:",
                query_params=_comparison(source),
            )
            export_button(console.sources.export_of(source))
    tabs = ["Workers", "Ops of the detail" if detail else "Ops"]
    by_worker, by_op = address.tabs(tabs, key="figures")
    with by_worker:
        table = st.cache_data(_workers_table, max_entries=32, show_spinner=False)(
            plan.fingerprint, ",".join(map(str, workers)), dict(source.out), schedule
        )
        # A failed worker has no figures; few workers are seen without scrolling.
        height = "content" if len(workers) <= FEW else "auto"
        tables.show(table, "workers-table", "Figures by worker", placeholder="–", height=height)
    with by_op:
        ops = operations_table(schedule, *((detail.workers, detail.window) if detail else (workers, None)))
        tables.show(ops, "ops-table", "Ops in order of start")
