"""One worker's details, with kill and restart. Both act only after they were confirmed here."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import streamlit as st

from agent.protocol import WorkerState
from app.console import Console
from app.errors import ConsoleError
from app.ui import text
from app.ui.charts.worker_grid import LOOKS
from app.ui.facts import consequence_of_kill, consequence_of_restart, look
from app.view import JobView, WorkerView

ACTOR = "operator in the browser"
OPENED = "opened-worker"
ALIVE = (WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.REJOINING)


def open_worker(name: str) -> None:
    """Has the page's next run show the dialog of worker `name`."""
    st.session_state[OPENED] = name


def show_opened(console: Console, job_id: str) -> None:
    """Shows the dialog of the opened worker, if one is. Call it from the page's main run, not from a
    fragment that runs again by itself: that would close it."""
    name = st.session_state.get(OPENED)
    if name is None:
        return

    def dialog() -> None:
        try:
            view = console.view(job_id)
        except ConsoleError as error:
            st.error(str(error))
            return
        worker = next((w for w in view.workers if w.name == name), None)
        if worker is None:
            st.error(f"worker: got {name!r}, expected a worker of this job's grid.")
            return
        _facts(worker)
        if worker.state in ALIVE:
            _kill(console, view, worker)
        elif worker.state is WorkerState.FAILED:
            _restart(console, view, worker)

    st.dialog(f"Worker {name}", width="medium", on_dismiss=_close)(dialog)()


def _close() -> None:
    st.session_state.pop(OPENED, None)


def _facts(worker: WorkerView) -> None:
    times = ", ".join(f"{kind} {text.milliseconds(ms)}" for kind, ms in sorted(worker.op_milliseconds.items()))
    rows = {
        "State": LOOKS[look(worker)][0] + (f" – {worker.detail}" if worker.detail else ""),
        "Place": f"pipeline {worker.pipeline}, stage {worker.stage}",
        "Iteration": f"{worker.iteration:,}, epoch {worker.epoch}" + (f", {worker.phase}" if worker.phase else ""),
        "Re-routed work": text.count(worker.takes_rerouted, "micro-batch", "micro-batches") + " per iteration"
        if worker.takes_rerouted
        else "",
        "Last heartbeat": text.age(worker.heartbeat_age),
        "Op times, mean": times,
        "Process": f"{worker.pid} on {worker.host}" if worker.pid else "",
        "Memory in use": text.size(worker.resident_bytes) if worker.resident_bytes else "",
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items() if v)
    st.html(f'<dl class="or-facts">{items}</dl>')


def _kill(console: Console, view: JobView, worker: WorkerView) -> None:
    if not view.spec.demo:
        st.caption("Only the processes of a demo job can be killed from here.")
        return
    consequence, survives = consequence_of_kill(view, worker)
    process = f"Its process (pid {worker.pid}) gets SIGKILL" if worker.pid else "Its process gets SIGKILL"
    st.markdown(f"**Kill {worker.name}?** {process}, as if its machine had died. {consequence}")
    if not survives:
        st.warning("This kill stops the job.", icon=":material/warning:")
    _act(
        "kill",
        f"Kill {worker.name}",
        f"SIGKILL sent to {worker.name}",
        lambda: console.operators.kill(view.job_id, worker.name, ACTOR),
    )


def _restart(console: Console, view: JobView, worker: WorkerView) -> None:
    consequence, helps = consequence_of_restart(view, worker)
    st.markdown(f"**Restart {worker.name}?** {consequence}")
    if not helps:
        return
    _act(
        "restart",
        f"Restart {worker.name}",
        f"Starting a new process for {worker.name}",
        lambda: console.operators.restart(view.job_id, worker.name, ACTOR),
    )


def _act(kind: str, label: str, done: str, action: Callable[[], None]) -> None:
    with st.container(horizontal=True, horizontal_alignment="right", key=f"act-{kind}"):
        cancelled = st.button("Cancel", key="worker-cancel")
        confirmed = st.button(label, type="primary", key="worker-confirm")
    if cancelled:
        _close()
        st.rerun()
    if confirmed:
        try:
            action()
        except ConsoleError as error:
            st.error(str(error))
            return
        st.toast(done)
        _close()
        st.rerun()
