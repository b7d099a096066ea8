"""One worker's details, with drain, kill and restart. Each is asked for, and then confirmed in the same place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.console.view import JobView, WorkerView
from openrecycle.app.console.worker_detail import WorkerDetail, worker_detail
from openrecycle.app.console.worker_history import worker_history
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import facts, url_state, worker_words
from openrecycle.app.ui.access import actor
from openrecycle.app.ui.charts.worker_time import memory, op_times
from openrecycle.app.ui.event_feed import feed_html
from openrecycle.app.ui.theme import palette
from openrecycle.app.workers.states import ALIVE, HOLDING, RoleState
from openrecycle.planner.plans.drawing import OP_WORDS

OPENED = "opened-worker"
ASKED = "worker-asked-for"
IN_ADDRESS = "worker"
# Widgets of the dialog that a link names, too.
TABS, SPAN = "worker-tabs", "worker-span"
REFRESH = 2.0
# What the charts reach back: words, seconds.
SPANS = {"10 min": 600.0, "1 hour": 3600.0, "1 day": 86_400.0}
DRAINABLE = HOLDING - {RoleState.SUSPECT}
EMPTY = (RoleState.FAILED, RoleState.DRAINED, RoleState.MOVED, RoleState.EMPTY)
# In the session: the worker and the action that was asked for, and is not confirmed.
ARMED = "worker-armed"


def open_worker(name: str) -> None:
    """For a callback: has the page's next run show the dialog of worker `name`; the address names it, too."""
    st.session_state[OPENED] = st.query_params[IN_ADDRESS] = name
    st.session_state[ASKED] = True
    _arm(None)


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
        _actions(console, view, worker)
        st.fragment(_detail, run_every=REFRESH)(console, job_id, name)

    st.dialog(f"Worker {name}", width="large", on_dismiss=_close)(dialog)()


def _close() -> None:
    st.session_state.pop(OPENED, None)
    _arm(None)
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
    present, over_time, history, log = url_state.tabs(["Now", "Over time", "History", "Log"], key=TABS)
    with present:
        st.html(worker_words.facts_html(detail))
        if detail.ranks:
            st.html(worker_words.ranks_html(detail))
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
    span = url_state.segmented_control(
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
    """What can be done with it. Each button asks first, in its place; nothing is armed before one is clicked."""
    offered = _offered(console, view, worker)
    if worker.state in ALIVE and not view.spec.demo:
        st.caption("Only the processes of a demo job can be killed from here.")
    if not offered:
        return
    asked = next((a for a in offered if st.session_state.get(ARMED) == (worker.name, a.kind)), None)
    if asked is not None:
        _ask(asked)
        return
    for action in offered:
        if not action.helps:
            st.caption(action.words)
    with st.container(horizontal=True, key="worker-actions"):
        for action in offered:
            if action.helps:
                asked_for = (worker.name, action.kind)
                st.button(action.label.split()[0], key=f"ask-{action.kind}", on_click=_arm, args=(asked_for,))


def _arm(wanted: tuple[str, str] | None) -> None:
    st.session_state[ARMED] = wanted


def _offered(console: Console, view: JobView, worker: WorkerView) -> list[_Action]:
    """What can be done with it, the mildest first."""
    name, job_id = worker.name, view.job_id
    process, made = facts.process_words(worker), []
    share = console.operators.share_without(job_id, name) if worker.state in ALIVE else None
    if worker.state in DRAINABLE and facts.living_peers(view, worker):
        made.append(
            _Action(
                "drain",
                f"Drain {name}",
                f"**Drain {name}?** This is {process}. {facts.consequence_of_drain(view, worker, share)}",
                True,
                f"{name} is asked to leave",
                lambda: console.operators.drain(job_id, name, actor(console)),
            )
        )
    if worker.state in ALIVE and view.spec.demo:
        consequence, survives = facts.consequence_of_kill(view, worker, share)
        made.append(
            _Action(
                "kill",
                f"Kill {name}",
                f"**Kill {name}?** {process[:1].upper()}{process[1:]} gets SIGKILL, as if its machine had died. "
                f"{consequence}",
                True,
                f"SIGKILL sent to {name}",
                lambda: console.operators.kill(job_id, name, actor(console), worker.pid),
                "" if survives else "This kill stops the job.",
            )
        )
    if worker.state in EMPTY:
        consequence, helps = facts.consequence_of_restart(view, worker)
        verb = "Restart" if worker.state in (RoleState.FAILED, RoleState.DRAINED) else "Start"
        made.append(
            _Action(
                "restart",
                f"{verb} {name}",
                f"**{verb} {name}?** {consequence}",
                helps,
                f"Starting a new process for {name}",
                lambda: console.operators.restart(job_id, name, actor(console)),
            )
        )
    return made


def _ask(action: _Action) -> None:
    with st.container(border=True, key=f"act-{action.kind}"):
        st.markdown(action.words)
        if action.warning:
            st.warning(action.warning, icon=":material/warning:")
        with st.container(horizontal=True, horizontal_alignment="right"):
            st.button("Cancel", key="worker-cancel", on_click=_arm, args=(None,))
            confirmed = st.button(action.label, type="primary", key="worker-confirm", disabled=not action.helps)
    if confirmed:
        try:
            action.act()
        except ConsoleError as error:
            st.error(str(error))
            return
        st.toast(action.done)
        _close()
        st.rerun()
