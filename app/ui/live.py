"""Live: what a job does now, and the hand on its workers."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import streamlit as st

from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.console.view import JobView, WorkerView
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, event_feed, facts, operating, standby, tables, text
from openrecycle.app.ui.charts.progress import generation_marks, losses, progress_rows, throughput
from openrecycle.app.ui.charts.vega import ZOOM
from openrecycle.app.ui.charts.worker_grid import PICKED, worker_grid, worker_sentence
from openrecycle.app.ui.facts import OVER
from openrecycle.app.ui.live_now import read_now
from openrecycle.app.ui.picker import open_job
from openrecycle.app.ui.theme import Palette
from openrecycle.app.ui.worker_dialog import open_worker, page_wanted, show_opened

# Up to here each worker is a button; larger grids are drawn as a heat-map.
MAX_TILES = 64
# What one refresh carries; about 80 bytes an iteration and chart.
ITERATIONS = 400
EVENTS = 100
# Read when the feed is filtered: what is looked for may be a while ago.
FILTERED_EVENTS = 2000


# In the session: what was shown last, for as long as the database does not answer.
SEEN = "live-seen"


def page() -> None:
    colours = components.use_style()
    console = get_console()
    opened = open_job(console)
    if opened is None:
        event_feed.say_now()
        return
    job, controls = opened
    over = job.state.job_state in OVER
    offered = console.operators.choice(job.job_id)
    with controls:
        operating.mode_switch(console, job.job_id, offered, over=over)
        operating.plan_menu(console, job.job_id, over=over)
        operating.job_menu(console, job)
        moving = address.toggle(
            "Refresh", value=True, key="refresh", help="Off: the page stands still, to look closely."
        )
    every = (1.0 if len(job.state.members) <= MAX_TILES else 2.0) if moving else None
    show_opened(console, job.job_id)  # first, since somebody has just clicked
    said = operating.said_by_controls(offered)
    st.fragment(_live, run_every=every)(console, job.job_id, colours, over=over, moving=moving, said=said)


def _live(
    console: ConsoleService, job_id: str, colours: Palette, *, over: bool, moving: bool, said: tuple[object, ...]
) -> None:
    page_wanted()
    in_doubt = standby.on_open_page()
    filtered = event_feed.filtering(*event_feed.asked_for())
    events = FILTERED_EVENTS if filtered else EVENTS
    try:
        now = read_now(console, job_id, ITERATIONS, events)
        st.session_state[SEEN] = now
    except ConsoleError as error:
        if error.status == 404:
            st.rerun()  # it was deleted; the page's head says so, and offers others
        seen = st.session_state.get(SEEN)
        if seen is None or seen.view.job_id != job_id:
            st.error(f"{error}. The page tries again by itself.")
            return
        now = seen
        if not in_doubt:
            st.warning(
                f"{str(error)[:1].upper()}{str(error)[1:]}. What is shown here is that of "
                f"{text.clock(now.at, st.context.timezone)}; the page tries again by itself. {standby.TRAINING}"
            )
    view = now.view
    if (view.state in OVER) != over or operating.said_by_controls(now.choice) != said:
        st.rerun()  # the head's controls are those of a job that has come further by now
    event_feed.say_now()
    zone = st.context.timezone
    with st.container(gap="small"):
        components.sentence(view)
        operating.options(console, view, now.choice)
        operating.replan_line(console, view)
        components.cards(facts.live_cards(view), now.at if moving else None)
    left, right = st.columns(2, gap="medium")
    with left, st.container(gap="xsmall"):
        components.heading("Workers", "select one for details and actions")
        if len(view.workers) <= MAX_TILES:
            _tiles(view)
        else:
            _heat_map(view, colours)
        components.heading("Events", "newest first")
        show, find = event_feed.controls()
        event_feed.feed(console, view, event_feed.chosen(view.events, show, find), zone)
    with right, st.container(gap="xsmall"):
        components.heading("Progress", f"newest {text.count(len(view.iterations), 'iteration')}")
        _progress(view, colours)
        _measured(job_id, now.measured)
        components.heading("Latest recovery", "from the death of a worker to training again")
        components.recovery(max(view.recoveries, key=lambda r: r.at, default=None), zone)
        if rolled := operating.roll_out_html(now.roll_out):
            components.heading("Roll-out of the plan", "who has taken it up, and when")
            st.html(rolled)


def _tiles(view: JobView) -> None:
    components.legend(facts.legend_counts(view))
    workers = sorted(view.workers, key=lambda w: (w.pipeline, w.stage))
    rows = [list(map(_tile, row)) for _, row in groupby(workers, lambda w: w.pipeline)]
    components.tiles(rows, "worker-grid", open_worker, view.held, view.coming)


def _tile(worker: WorkerView) -> components.Tile:
    tip = worker_sentence(worker).replace("<br>", "  \n").replace("<b>", "**").replace("</b>", "**")
    return components.Tile(worker.name, worker.state.value, facts.tile_words(worker), tip)


def _heat_map(view: JobView, colours: Palette) -> None:
    # Workers that need a look come first, so that they are found without scrolling.
    quiet = (RoleState.RUNNING, RoleState.FINISHED)
    names = [w.name for w in sorted(view.workers, key=lambda w: (w.state in quiet, w.pipeline, w.stage))]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Worker", names, index=None, placeholder="Type or choose, such as W1_2", key="worker-name"
        )
        st.button("Open", disabled=chosen is None, key="worker-open", on_click=open_worker, args=(chosen,))
    components.legend(facts.legend_counts(view))
    components.live_chart(
        worker_grid(view, colours),
        "worker-map",
        "Worker grid: pipelines across, stages down. The table below has each worker's state.",
        on_select=_picked,
        selection_mode=PICKED,
    )
    figures = address.expander("The same in figures", key="worker-figures")
    if figures.open:
        with figures:
            tables.show(tables.grid_table(view.workers), "worker-table", "State of each worker", height=250)


def _picked() -> None:
    """A click on a cell, or beside all of them."""
    picked = st.session_state["worker-map"]["selection"].get(PICKED)
    if picked:
        open_worker(picked[0]["worker"])


def _progress(view: JobView, colours: Palette) -> None:
    if not view.iterations:
        components.quiet("The curves begin with the first committed iteration.")
        return
    reference = facts.fault_free_rate(view)
    marks = generation_marks(view.iterations, view.recoveries, view.events)
    rows = progress_rows(view.iterations, marks, reference.samples_per_second if reference else None)
    shown = address.iterations_shown(view.iterations[0].iteration, view.iterations[-1].iteration)
    for name, make, alt in (
        ("throughput", throughput, "Throughput by iteration, in samples per second."),
        ("loss", losses, "Loss by iteration."),
    ):
        drawn, turn = address.drawn_with(name, f"{view.job_id} {colours.name}", shown)
        key = f"{name}-{turn}"
        with st.container(key=f"progress-{name}"):
            zoomed = partial(address.zoomed, name, key)
            components.live_chart(make(rows, colours, drawn), key, alt, on_select=zoomed, selection_mode=ZOOM)
    address.say(address.ITERATIONS)
    source = (
        f"Fault-free {text.rate(reference.samples_per_second)} samples/s (dotted), {reference.words}. "
        if reference
        else ""
    )
    waited = sum(i.waited for i in view.iterations)
    if waited >= 1:
        source += f"{text.milliseconds(1000 * waited)} of waiting for a person left out. "
    st.caption(source + "Drag to move, Alt + wheel to zoom, double-click to see all.")
    # Only what is opened is sent at each refresh.
    figures = address.expander("The same in figures", key="progress-figures")
    if figures.open:
        rows = tables.iterations_table(view.iterations, marks, view.spec.micro_batches)
        with figures:
            tables.show(rows, "progress-table", "Figures by iteration", height=250)


def _measured(job_id: str, found: MeasuredIteration | None) -> None:
    """The real period beside the planned one, and where the iteration can be seen op by op."""
    if found is None:
        return
    words = facts.measured_words(found)
    st.caption(f"{words} [See it op by op](schedule?job={job_id}&plan=measured:{job_id})")
