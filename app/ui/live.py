"""The Live page: shows what a job does now, and lets operators act on it.

A refresh of the page reads everything at once (`read_now`). Operators choose who decides when workers are lost, and
among the options; freeze the plan in force or have the job planned again, and see how a plan is taken up; and pause or
delete the job. Single workers and the event feed are in app.ui.worker_dialog.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import groupby
from typing import Any, TypeVar

import streamlit as st

from openrecycle.agent.coordination.membership import (
    ACK_ORDER,
    LEAST_CHOICE_TIMEOUT,
    MOST_CHOICE_TIMEOUT,
    Candidate,
    Mode,
)
from openrecycle.agent.messages.protocol import API
from openrecycle.app.charts import text
from openrecycle.app.charts.progress import (
    PICKED,
    generation_marks,
    losses,
    progress_rows,
    throughput,
    worker_grid,
    worker_sentence,
)
from openrecycle.app.charts.theme import Palette
from openrecycle.app.charts.vega import ZOOM
from openrecycle.app.console.operators import Choice
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.console.view import JobView, RollOut, WorkerView
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import OUT, TRAINING_ALONE, RoleState
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.app.plans.service import Replan
from openrecycle.app.plans.solving import MAX_SECONDS
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, facts, standby, tables, worker_dialog
from openrecycle.app.ui.access import acting, actor, say_error, told
from openrecycle.app.ui.address import forget_job
from openrecycle.app.ui.components import open_job
from openrecycle.app.ui.facts import OVER, SOLVER_WORDS, ready_words, roll_out_words
from openrecycle.app.ui.worker_dialog import open_worker, page_wanted, say_later, show_opened
from openrecycle.planner.jobs.words import names
from openrecycle.planner.solvers.portfolio import SOLVERS

# -- what a refresh of Live reads of the database, all at once ----------------------------------

# A database that hangs does not even refuse, and a page that waited for it would stand still without a word. So a page
# waits no longer than this.
READ_SECONDS = 3.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class LiveSnapshot:
    """All that one refresh shows. at: when it was read, in POSIX seconds."""

    view: JobView
    choice: Choice
    measured: MeasuredIteration | None
    roll_out: RollOut | None
    at: float


def read_now(console: ConsoleService, job_id: str, iterations: int, events: int) -> LiveSnapshot:
    """Reads all that a refresh shows. iterations, events: how many of the newest. Raises ConsoleError: 404; 503, also
    when it takes too long."""

    def read() -> LiveSnapshot:
        at = time.time()
        view = console.queries.view(job_id, iterations, events)
        choice = console.operators.choice(job_id)
        return LiveSnapshot(
            view,
            choice,
            console.measuring.iteration(console.jobs.find(job_id)),
            console.roll_outs.of(console.jobs.find(job_id)),
            at,
        )

    return shared_reads.read((id(console), job_id, events), read)


class SharedReads:
    """Shares reads between pages. Thread-safe. A page that asks for something that is being read already waits for that
    read. So a database that hangs blocks one thread for each thing that is read, however many pages show it. seconds:
    how long each page waits."""

    def __init__(self, seconds: float = READ_SECONDS) -> None:
        self._seconds = seconds
        self._reads: dict[Hashable, tuple[float, Future[Any]]] = {}  # with their begin, in monotonic seconds
        self._lock = threading.Lock()

    def read(self, what: Hashable, read: Callable[[], Result]) -> Result:
        """Returns the result of `read`, or raises its error; ConsoleError (503) if it takes too long. what: equal for
        equal reads."""
        with self._lock:
            found = self._reads.get(what)
            if found is None:
                found = self._reads[what] = time.monotonic(), Future()
                threading.Thread(target=self._run, args=(what, found[1], read), name="page read", daemon=True).start()
        began, future = found
        if not wait([future], self._seconds).done:
            seconds = time.monotonic() - began
            raise ConsoleError(503, "unavailable", f"the database has not answered for {seconds:.0f} s")
        return future.result()  # type: ignore[no-any-return]

    def _run(self, what: Hashable, future: Future[Any], read: Callable[[], object]) -> None:
        try:
            end = partial(future.set_result, read())
        except BaseException as error:  # raised by those who wait
            end = partial(future.set_exception, error)
        with self._lock:
            del self._reads[what]
        end()


shared_reads = SharedReads()

# -- what operators do on Live ------------------------------------------------------------------

WORDS = {Mode.AUTOMATIC: "Automatic", Mode.MANUAL: "Manual"}
MOST_COLUMNS = 4


def said_by_controls(console: ConsoleService, job_id: str, choice: Choice) -> tuple[object, ...]:
    """Returns all that the controls in the page's head show of the job. If it changes, by another operator or since
    workers have come further, the head has to be drawn anew. Raises ConsoleError."""
    menus = console.jobs.find(job_id).baseline, console.histories.kept_for(job_id)
    return choice.mode, choice.choice_timeout, choice.paused, choice.stopped, choice.frozen_by, *menus


def mode_switch(console: ConsoleService, job_id: str, choice: Choice, *, over: bool) -> None:
    """Draws the menu that says who decides (a change counts only once it is applied), and that pauses and resumes the
    job."""
    mode, paused, stopped = choice.mode, choice.paused, choice.stopped
    said = "Paused" if stopped else "Pausing" if paused else WORDS[mode]
    with st.popover(said, icon=":material/tune:", key="mode", disabled=over):
        st.markdown("**When workers are lost**")
        wanted = st.radio(
            "Who decides",
            list(Mode),
            index=list(Mode).index(mode),
            format_func=WORDS.__getitem__,
            captions=[
                "The console re-routes at once. Then it moves workers or layers, if that pays.",
                "The job waits for you to choose. If you don't in time, the first option in the list is taken.",
            ],
            key=f"mode-choice-{mode}",
            label_visibility="collapsed",
        )
        choice_timeout = st.number_input(
            "Seconds to choose in",
            min_value=LEAST_CHOICE_TIMEOUT,
            max_value=MOST_CHOICE_TIMEOUT,
            value=float(choice.choice_timeout),
            step=10.0,
            disabled=wanted is not Mode.MANUAL,
            key=f"choice_timeout-{choice.choice_timeout}",
        )
        unchanged = wanted is mode and (wanted is Mode.AUTOMATIC or choice_timeout == choice.choice_timeout)
        if st.button("Apply", type="primary", disabled=unchanged, key="mode-apply"):
            with told():
                console.operators.set_mode(job_id, Mode(wanted), choice_timeout, actor(console))
                st.rerun()
        st.divider()
        st.markdown(f"**The job is {said.lower()}**" if paused else "**The job**")
        st.caption(
            "All workers wait before the same iteration; resumed, they go on as if nothing had happened."
            if stopped
            else "All workers stop before the same iteration, which not all have come to yet."
            if paused
            else "Paused, all workers stop before the same iteration; nothing is redone, and no bit differs later."
        )
        _pause_button(console, job_id, "pause", paused=paused)


def _pause_button(console: ConsoleService, job_id: str, key: str, *, paused: bool) -> None:
    # It asks for what its label says, even if another operator has done the same meanwhile.
    ask = console.operators.resume if paused else console.operators.pause
    st.button(
        "Resume" if paused else "Pause",
        type="primary" if paused else "secondary",
        key=key,
        on_click=_try,
        args=(lambda: ask(job_id, actor(console)),),
    )


def options(console: ConsoleService, view: JobView, choice: Choice) -> None:
    """Draws the options side by side: in full while the job waits for a choice, and folded up while workers are out.
    Otherwise a line takes their place, so that a loss moves nothing on the page. The button to resume a paused job
    comes first."""
    with st.container(key="ways", gap="xsmall"):
        if choice.paused and view.state not in OVER:
            _pause_button(console, view.job_id, "resume", paused=True)
        if choice.candidates and choice.waiting:
            left = choice.seconds_left
            until = f"{_best(choice)} is taken in {text.seconds(left)} unless you choose" if left else ""
            components.heading("Which option?", until)
            _cards(console, view.job_id, choice, "Apply")
        elif choice.candidates or view.advice:
            out = choice.failed or [w.name for w in view.workers if w.state in OUT]
            title = f"Options with {names(out, 4)} empty" if out else "Options now that all workers are back"
            with address.expander(title, icon=":material/alt_route:", key="ways-folded"):
                if view.advice:
                    components.quiet(view.advice)
                _cards(console, view.job_id, choice, "Switch to it")
        elif not choice.paused and (words := ready_words(view)):
            components.quiet(words)


def _best(choice: Choice) -> str:
    return choice.candidates[0].name


def _cards(console: ConsoleService, job_id: str, choice: Choice, verb: str) -> None:
    ways = choice.candidates
    with st.container(key="ways-on"):
        for begin in range(0, len(ways), MOST_COLUMNS):
            row = ways[begin : begin + MOST_COLUMNS]
            for column, way in zip(st.columns(len(row)), row, strict=True):
                with column, st.container(border=True, height="stretch"):
                    _card(console, job_id, choice, way, verb)


def _card(console: ConsoleService, job_id: str, choice: Choice, way: Candidate, verb: str) -> None:
    name, best = way.name, way.name == _best(choice)
    # An option is in force if the job trains by its plan.
    run = console.jobs.find(job_id).plan_run
    in_force = not choice.waiting and run is not None and run.fingerprint == way.plan
    badge = "in force" if in_force else "the best" if best else ""
    moves = ", ".join(f"{source} → {to}" for source, to in way.moves)
    head = "h3" if choice.waiting else "h2"  # below a heading, or folded up below none
    st.html(
        f'<div class="or-way"><{head}>{escape(name)} <span class="or-aside">{badge}</span></{head}>'
        f"<p><b>{text.percent(way.share)}</b> of the fault-free plan's throughput · period "
        f"{text.percent(way.slowdown_vs_1f1b, sign=True)} vs fault-free 1F1B</p>"
        + (f"<p>Moves {escape(moves)}</p>" if moves else "")
        + (f"<p>Layers per stage {text.counts(way.partition)}</p>" if way.partition else "")
        + f"<p class='or-aside'>{escape(way.text)}.</p></div>"
    )
    if way.plan:
        st.markdown(f"[Its plan](schedule?job={job_id}&plan=job:{job_id}:{way.plan})")
    st.button(
        verb,
        key=f"choose-{name}",
        type="primary" if best else "secondary",
        disabled=in_force,
        width="stretch",
        on_click=_choose,
        args=(console, job_id, name, choice.failed),
    )


def _choose(console: ConsoleService, job_id: str, name: str, failed: tuple[str, ...]) -> None:
    _try(lambda: console.operators.choose(job_id, name, failed, actor(console)))


NAME = "delete-name"


def job_menu(console: ConsoleService, job: LiveJob) -> None:
    """Draws the menu that downloads the job's history, and deletes the job after a confirmation."""
    name, job_id = job.spec.name, job.job_id
    with st.popover("Job", icon=":material/folder:", key=f"job-menu-{job_id}"):
        st.markdown("**History**")
        link = f"{API}/jobs/{escape(job_id)}/history.zip"
        st.html(f'<a href="{link}" download>Download all that is stored</a>')
        st.caption("Iterations, events, op times, measured iterations and plans, as a zip file that can be imported.")
        st.divider()
        st.markdown("**Delete this job**")
        if why := console.histories.kept_for(job_id):
            st.caption(f"It can be deleted when it has ended; it {text.plain_markdown(why)}.")
            return
        st.caption(
            "All that is stored of it is gone for good; download its history first if you may want it back. "
            "Plans that other jobs use are kept, and so is the audit log."
        )
        key = f"{NAME}-{job_id}"
        typed = st.text_input("Its name, to confirm", key=key, placeholder=name, max_chars=200)
        st.button(
            "Delete this job",
            key="act-kill-job",
            type="primary",
            disabled=typed.strip() != name.strip(),
            help=None if typed.strip() == name.strip() else "Type the job's name above, then press Enter.",
            on_click=_delete,
            args=(console, job_id, name),
        )


def _delete(console: ConsoleService, job_id: str, name: str) -> None:
    with told(say_later):
        console.histories.delete(job_id, actor(console))
        forget_job()
        say_later(f"{name} is deleted")


# Seconds for which the outcome of a request is shown; the event feed keeps it.
TOLD_FOR = 300.0
# Rows of the roll-out's table, the slowest workers first, which people look for.
MOST_ROWS = 24
HEADS = ("has the plan", "in its groups", "trains")


def plan_menu(console: ConsoleService, job_id: str, *, over: bool) -> None:
    """Draws the menu that freezes the plan in force, has the fault-free rate measured, and has the job planned
    again."""
    frozen_by = console.operators.choice(job_id).frozen_by
    with st.popover(
        "Plan frozen" if frozen_by else "Plan",
        icon=":material/lock:" if frozen_by else ":material/route:",
        key="plan-menu",
        disabled=over,
    ):
        st.markdown(f"**Frozen by {text.plain_markdown(frozen_by)}**" if frozen_by else "**Freeze the plan in force**")
        st.caption(
            "It stays for as long as the workers that run it do: a better plan, a better option and a worker that has "
            "come back wait. A failure is handled as ever, and the plan that follows is frozen in turn."
        )
        st.button(
            "Unfreeze" if frozen_by else "Freeze",
            key="freeze",
            type="primary" if frozen_by else "secondary",
            on_click=_try,
            args=(lambda: console.operators.freeze(job_id, not frozen_by, actor(console)),),
        )
        st.divider()
        st.markdown("**Fault-free throughput**")
        known = console.jobs.find(job_id).baseline
        if known is None:
            st.caption("The fault-free throughput is not known yet.")
        else:
            st.caption(
                f"{text.rate(known.samples_per_second)} samples/s, {known.words}. A predicted rate is replaced by the "
                "first measured one, and counts for nothing once the job has trained more than that. A measured rate "
                "stays until you press *Measure again*, or a better fault-free plan has proved quicker."
            )
            st.button(
                "Measure again",
                key="measure-anew",
                disabled=known.renew is not None,
                help="It is measured as soon as all workers have trained 20 steady iterations."
                if known.renew is not None
                else None,
                on_click=_try,
                args=(lambda: console.operators.measure_anew(job_id, actor(console)),),
            )
        st.divider()
        st.markdown("**Plan again**")
        st.caption(
            "For the workers that are out now. The new plan is used if it saves more time than one iteration takes: "
            "a change costs about that."
        )
        solver = st.selectbox("Solver", SOLVERS, format_func=lambda s: SOLVER_WORDS.get(s, s), key="replan-solver")
        seconds = st.number_input("Seconds at most", 1.0, MAX_SECONDS, 20.0, step=10.0, key="replan-seconds")
        st.button(
            "Plan again",
            key="replan",
            disabled=bool(frozen_by),
            help="The plan is frozen." if frozen_by else None,
            on_click=_try,
            args=(lambda: console.plans.replanning.start(job_id, solver, seconds, actor(console)),),
        )


def replan_line(console: ConsoleService, view: JobView) -> None:
    """Draws how far the search for a new plan is, or what became of it."""
    replan = console.plans.replanning.status(view.job_id)
    if replan is None:
        return
    if replan.outcome == "planning":
        with st.container(horizontal=True, vertical_alignment="center", key="replanning"):
            st.html(f'<div class="or-quiet" role="status">{escape(_searching(replan, view))}</div>', width="content")
            st.button(
                "Stop",
                key="replan-stop",
                type="tertiary",
                help="The best plan so far counts.",
                on_click=_try,
                args=(lambda: _stop(console, view.job_id),),
            )
    elif time.time() - replan.at < TOLD_FOR:
        st.html(f'<div class="or-quiet" role="status">{escape(_outcome(replan, st.context.timezone))}</div>')


def _stop(console: ConsoleService, job_id: str) -> str:
    with acting(console, "stop planning again", job_id):
        return console.plans.replanning.stop(job_id)


def _searching(replan: Replan, view: JobView) -> str:
    words = (
        f"Planning again: {text.seconds(min(replan.elapsed, replan.seconds))} of at most {text.seconds(replan.seconds)}"
    )
    if replan.elapsed > replan.seconds:
        words += "; the search is ending, and its best plan counts"
    unit = view.plan.job.time_unit if view.plan else "slot"
    if replan.best is not None:
        words += f"; best so far {text.planned(replan.best, unit)}"
        words += f", no plan can be below {text.planned(replan.bound, unit)}" if replan.bound else ""
    return words + "."


def _outcome(replan: Replan, zone: str | None) -> str:
    lead = {
        "adopted": "A new plan is in force",
        "kept": "The plan in force stays",
        "failed": "No new plan was made",
    }[replan.outcome]
    return f"Planned again, {text.clock(replan.at, zone)}. {lead}: {replan.reason}."


def roll_out_html(found: RollOut | None) -> str:
    """Returns HTML of how far each worker has taken up the newest generation, the slowest first; "": there is none."""
    if found is None:
        return ""
    total = len(found.workers)
    if found.done:
        last = max((w.resumed or 0.0 for w in found.workers), default=0.0)
        summary = f"all {text.count(total, 'worker')} train by it, the last after {text.milliseconds(last)}"
    else:
        summary = roll_out_words([found.now_at(step) for step in ACK_ORDER])
    ordered = found.slowest_first()
    rows = (
        [escape(w.worker), *("waits" if at is None else f"+{text.milliseconds(at)}" for at in w.steps)]
        for w in ordered[:MOST_ROWS]
    )
    more = len(ordered) - MOST_ROWS
    table = tables.table_html(
        ["Worker", *HEADS],
        rows,
        "Time after the generation was opened, the slowest worker first",
        foot=f"and {more:,} more, none of them slower" if more > 0 else "",
    )
    return (
        f'<details class="or-roll-out"{"" if found.done else " open"}><summary>Generation '
        f"{found.generation}: {summary}</summary>{table}</details>"
    )


def _try(act: Callable[[], str]) -> None:
    """Calls `act`; the page's next run shows its answer, or why it was refused."""
    with told(_say_sentence):
        _say_sentence(act())


def _say_sentence(words: str) -> None:
    say_later(text.capital(words))


# -- live ---------------------------------------------------------------------------------------

# How many iterations and events a refresh sends; about 80 bytes per iteration and chart.
ITERATIONS = 400
EVENTS = 100
# How many events are read when the feed is filtered, since the wanted ones may be old.
FILTERED_EVENTS = 2000


# The name in the session of what was shown last, which is shown while the database does not answer.
SEEN = "live-seen"


def page() -> None:
    colours = components.use_style()
    console = get_console()
    opened = open_job(console)
    if opened is None:
        worker_dialog.say_now()
        return
    job, controls = opened
    over = job.state.job_state in OVER
    offered = console.operators.choice(job.job_id)
    with controls:
        mode_switch(console, job.job_id, offered, over=over)
        plan_menu(console, job.job_id, over=over)
        job_menu(console, job)
        moving = address.toggle(
            "Refresh", value=True, key="refresh", help="Off: the page stands still, to look closely."
        )
    every = (1.0 if len(job.state.members) <= components.MAX_TILES else 2.0) if moving else None
    show_opened(console, job.job_id)  # first, since somebody who has just clicked waits for it
    said = said_by_controls(console, job.job_id, offered)
    st.fragment(_live, run_every=every)(console, job.job_id, colours, over=over, moving=moving, said=said)


def _live(
    console: ConsoleService, job_id: str, colours: Palette, *, over: bool, moving: bool, said: tuple[object, ...]
) -> None:
    page_wanted()
    in_doubt = standby.on_open_page()
    filtered = worker_dialog.asked_for() != (worker_dialog.DEFAULT, "")
    events = FILTERED_EVENTS if filtered else EVENTS
    try:
        now = read_now(console, job_id, ITERATIONS, events)
        head = said_by_controls(console, job_id, now.choice)
        st.session_state[SEEN] = now
    except ConsoleError as error:
        if error.status == 404:
            st.rerun()  # the job was deleted; the page's head will say so, and offer others
        seen = st.session_state.get(SEEN)
        if seen is None or seen.view.job_id != job_id:
            say_error(f"{error}. The page tries again by itself.")
            return
        now = seen
        if not in_doubt:
            st.warning(
                f"{text.plain_markdown(text.capital(str(error)))}. What is shown here is that of "
                f"{text.clock(now.at, st.context.timezone)}; the page tries again by itself. {TRAINING_ALONE}"
            )
    else:
        if (now.view.state in OVER) != over or head != said:
            st.rerun()  # the head's controls show an older state of the job
    view = now.view
    worker_dialog.say_now()
    zone = st.context.timezone
    with st.container(gap="small"):
        components.sentence(view)
        options(console, view, now.choice)
        replan_line(console, view)
        components.cards(facts.live_cards(view), now.at if moving else None)
    left, right = st.columns(2, gap="medium")
    with left, st.container(gap="xsmall"):
        components.heading("Workers", "select one for details and actions")
        if len(view.workers) <= components.MAX_TILES:
            _tiles(view)
        else:
            _heat_map(view, colours)
        components.heading("Events", "newest first")
        show, find = worker_dialog.controls()
        worker_dialog.feed(console, view, worker_dialog.chosen(view.events, show, find), zone)
    with right, st.container(gap="xsmall"):
        components.heading("Progress", f"newest {text.count(len(view.iterations), 'iteration')}")
        _progress(view, colours)
        _measured(job_id, now.measured)
        components.heading("Latest recovery", "from the death of a worker to training again")
        components.recovery(max(view.recoveries, key=lambda r: r.at, default=None), zone)
        if rolled := roll_out_html(now.roll_out):
            components.heading("Roll-out of the plan", "who has taken it up, and when")
            st.html(rolled)


def _tiles(view: JobView) -> None:
    components.legend(view.workers)
    workers = sorted(view.workers, key=lambda w: (w.pipeline, w.stage))
    rows = [list(map(_tile, row)) for _, row in groupby(workers, lambda w: w.pipeline)]
    components.tiles(rows, "worker-grid", open_worker, view.held, view.coming)


def _tile(worker: WorkerView) -> components.Tile:
    worker = replace(worker, host=text.plain_markdown(worker.host))
    tip = worker_sentence(worker).replace("<br>", "  \n").replace("<b>", "**").replace("</b>", "**")
    return components.Tile(worker.name, worker.state.value, facts.tile_words(worker), tip)


def _heat_map(view: JobView, colours: Palette) -> None:
    # Workers that need attention come first, so that they are found without scrolling.
    quiet = (RoleState.RUNNING, RoleState.FINISHED, RoleState.ENDED)
    names = [w.name for w in sorted(view.workers, key=lambda w: (w.state in quiet, w.pipeline, w.stage))]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Worker", names, index=None, placeholder="Type or choose, such as W1_2", key="worker-name"
        )
        st.button("Open", disabled=chosen is None, key="worker-open", on_click=open_worker, args=(chosen,))
    components.legend(view.workers)
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
    """Handles a click on a cell, or beside all cells."""
    picked = st.session_state["worker-map"]["selection"].get(PICKED)
    if picked:
        open_worker(picked[0]["worker"])


def _progress(view: JobView, colours: Palette) -> None:
    if not view.iterations:
        components.quiet("The curves begin with the first committed iteration.")
        return
    reference = facts.fault_free_rate(view)
    marks = generation_marks(view.iterations, view.recoveries, view.generations)
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
    # The figures are only sent while they are open.
    figures = address.expander("The same in figures", key="progress-figures")
    if figures.open:
        rows = tables.iterations_table(view.iterations, marks, view.spec.micro_batches)
        with figures:
            tables.show(rows, "progress-table", "Figures by iteration", height=250)


def _measured(job_id: str, found: MeasuredIteration | None) -> None:
    """Draws the measured period beside the planned one, and a link to the iteration op by op."""
    if found is None:
        return
    words = facts.measured_words(found)
    st.caption(f"{words} [See it op by op](schedule?job={job_id}&plan=measured:{job_id})")
