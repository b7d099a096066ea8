"""One worker's details, with drain, kill and restart. These act only after they were confirmed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from agent.protocol import WorkerState
from app.console import Console
from app.errors import ConsoleError
from app.observing.worker_detail import WorkerDetail, worker_detail
from app.observing.worker_history import worker_history
from app.ui import bound, worker_words
from app.ui.access import actor
from app.ui.charts.worker_time import memory, op_times
from app.ui.event_feed import feed_html
from app.ui.facts import consequence_of_drain, consequence_of_kill, consequence_of_restart, living_peers
from app.ui.theme import OP_WORDS, palette
from app.view import JobView, WorkerView

OPENED = "opened-worker"
ASKED = "worker-asked-for"
IN_ADDRESS = "worker"
# Widgets of the dialog that a link names, too.
TABS, SPAN = "worker-tabs", "worker-span"
REFRESH = 2.0
# What the charts reach back: words, seconds.
SPANS = {"10 min": 600.0, "1 hour": 3600.0, "1 day": 86_400.0}
ALIVE = (WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.REJOINING)
DRAINABLE = (WorkerState.RUNNING,)


def open_worker(name: str) -> None:
    """For a callback: has the page's next run show the dialog of worker `name`; the address names it, too."""
    st.session_state[OPENED] = st.query_params[IN_ADDRESS] = name
    st.session_state[ASKED] = True


def page_wanted() -> None:
    """Call it first in the fragment in which workers are clicked: a dialog is opened by a run of the whole page,
    and nothing need be drawn before that one."""
    if st.session_state.get(ASKED):
        st.rerun()


def show_opened(console: Console, job_id: str) -> None:
    """Shows the dialog of the opened worker, if one is. Call it from the page's main run, not from a
    fragment that runs again by itself: that would close it."""
    st.session_state.pop(ASKED, None)
    name = st.session_state.get(OPENED) or st.query_params.get(IN_ADDRESS)
    if name is None:
        return

    def dialog() -> None:
        try:
            view = console.view(job_id)
            worker = worker_detail(console, view, name, time.time()).worker
        except ConsoleError as error:
            st.error(str(error))
            return
        st.fragment(_detail, run_every=REFRESH)(console, job_id, name)
        _actions(console, view, worker)

    st.dialog(f"Worker {name}", width="large", on_dismiss=_close)(dialog)()


def _close() -> None:
    st.session_state.pop(OPENED, None)
    st.query_params.pop(IN_ADDRESS, None)


def _detail(console: Console, job_id: str, name: str) -> None:
    try:
        view = console.view(job_id)
        now = time.time()
        detail = worker_detail(console, view, name, now)
    except ConsoleError as error:
        st.error(str(error))
        return
    zone = st.context.timezone
    present, over_time, history, log = bound.tabs(["Now", "Over time", "History", "Log"], key=TABS)
    with present:
        st.html(worker_words.facts_html(detail))
        if detail.op_times:
            st.html(worker_words.op_times_html(detail))
    with over_time:
        _over_time(console, job_id, detail)
    with history:
        st.html(worker_words.stays_html(detail, zone, now))
        st.html(feed_html(list(detail.events), zone, now))
    with log:
        st.html(worker_words.log_html(detail, zone, now))


def _over_time(console: Console, job_id: str, detail: WorkerDetail) -> None:
    """Op times against the plan's and memory, as charts and in figures."""
    name = detail.worker.name
    span = bound.segmented_control(
        "Span", list(SPANS), default=next(iter(SPANS)), key=SPAN, label_visibility="collapsed"
    )
    until = time.time() + 1
    try:
        series = worker_history(console, job_id, name, until - SPANS[span], until)
    except ConsoleError as error:
        st.error(str(error))
        return
    if not series.metrics:
        st.html('<div class="or-quiet">It has reported nothing in this time.</div>')
        return
    colours = palette(st.context.theme.type)
    planned = {op.kind: op.planned for op in detail.op_times if op.planned is not None}
    if any(kind in series.metrics for kind in OP_WORDS):
        chart = op_times(series, planned, colours)
        alt = f"Op times of {name} over time, by op kind. The table below has the same in figures."
        st.vega_lite_chart(None, chart.whole(), theme=None, key="worker-op-times", alt=alt)
    if "resident_bytes" in series.metrics:
        chart = memory(series, colours)
        alt = f"Memory of {name}'s process over time. The table below has the same in figures."
        st.vega_lite_chart(None, chart.whole(), theme=None, key="worker-memory", alt=alt)
    st.html(worker_words.over_time_html(series, planned))


@dataclass(frozen=True)
class _Action:
    """kind: for keys and looks. helps: False when it can't do any good, so that it isn't offered."""

    kind: str
    label: str
    words: str
    helps: bool
    done: str
    act: Callable[[], object]
    warning: str = ""


def _actions(console: Console, view: JobView, worker: WorkerView) -> None:
    offered = _offered(console, view, worker)
    if worker.state in ALIVE and not view.spec.demo:
        st.caption("Only the processes of a demo job can be killed from here.")
    if not offered:
        return
    chosen = offered[0]
    if len(offered) > 1:
        kind = st.segmented_control(
            "Action",
            [a.kind for a in offered],
            default=chosen.kind,
            required=True,
            format_func=str.capitalize,
            key="worker-action",
            label_visibility="collapsed",
        )
        chosen = next((a for a in offered if a.kind == kind), chosen)
    st.markdown(chosen.words)
    if chosen.warning:
        st.warning(chosen.warning, icon=":material/warning:")
    if chosen.helps:
        _confirm(chosen)


def _offered(console: Console, view: JobView, worker: WorkerView) -> list[_Action]:
    """What can be done with it, the usual one first."""
    name, job_id = worker.name, view.job_id
    made = []
    if worker.state in ALIVE and view.spec.demo:
        consequence, survives = consequence_of_kill(view, worker)
        process = f"Its process (pid {worker.pid}) gets SIGKILL" if worker.pid else "Its process gets SIGKILL"
        made.append(
            _Action(
                "kill",
                f"Kill {name}",
                f"**Kill {name}?** {process}, as if its machine had died. {consequence}",
                True,
                f"SIGKILL sent to {name}",
                lambda: console.operators.kill(job_id, name, actor(console)),
                "" if survives else "This kill stops the job.",
            )
        )
    if worker.state in DRAINABLE and living_peers(view, worker):
        made.append(
            _Action(
                "drain",
                f"Drain {name}",
                f"**Drain {name}?** {consequence_of_drain(view, worker)}",
                True,
                f"{name} is asked to leave",
                lambda: console.operators.drain(job_id, name, actor(console)),
            )
        )
    if worker.state is WorkerState.FAILED:
        consequence, helps = consequence_of_restart(view, worker)
        made.append(
            _Action(
                "restart",
                f"Restart {name}",
                f"**Restart {name}?** {consequence}",
                helps,
                f"Starting a new process for {name}",
                lambda: console.operators.restart(job_id, name, actor(console)),
            )
        )
    return made


def _confirm(action: _Action) -> None:
    with st.container(horizontal=True, horizontal_alignment="right", key=f"act-{action.kind}"):
        cancelled = st.button("Cancel", key="worker-cancel")
        confirmed = st.button(action.label, type="primary", key="worker-confirm")
    if cancelled:
        _close()
        st.rerun()
    if confirmed:
        try:
            action.act()
        except ConsoleError as error:
            st.error(str(error))
            return
        st.toast(action.done)
        _close()
        st.rerun()
