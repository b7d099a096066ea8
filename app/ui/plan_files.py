"""Plans out and in as files: the export button that pages share, with one download per format, made when it is asked
for; and a plan out of a file, read in a process of its own, kept in the library under the file's name, and shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import streamlit as st

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.exporting import Export, offers, render
from openrecycle.app.plans.sources import Saved
from openrecycle.app.plans.uploading import Reading, ReadPlan
from openrecycle.app.runtime.errors import PLAN_MIB, ConsoleError
from openrecycle.app.ui import text, url_state
from openrecycle.app.ui.access import actor, why_not


def export_button(export: Export, *, key: str = "export") -> None:
    """A popover with every format of a plan; one that is refused is shown with its reason."""
    with st.popover("Export", icon=":material/download:", key=key):
        for offer in offers(export.plan, export.name, export.job_id):
            st.download_button(
                offer.title,
                partial(render, export, offer),
                file_name=offer.file_name,
                mime=offer.media_type,
                on_click="ignore",
                type="tertiary",
                key=f"{key}-{offer.name}",
                disabled=offer.refusal is not None,
            )
            if offer.refusal is not None:
                st.caption(f"Not for this plan: {offer.refusal.reason}.")


TURN, READING = "plan-upload-turn", "plan-upload-reading"
LOOK_SECONDS = 0.5


def open_file(console: ConsoleService, show: Callable[[str], None]) -> None:
    """The button, and beside it how far the reading is and what was wrong with the file.

    show: what the page does with the reference of the plan, once it is there.
    """
    refused = why_not(console)
    with st.popover("Open a file", icon=":material/upload_file:", key="plan-upload"):
        turn = st.session_state.get(TURN, 0)
        st.file_uploader(
            "A plan (JSON), as `openrecycle plan --out` writes it",
            type="json",
            key=f"{TURN}-{turn}",
            on_change=_begin,
            args=(console,),
            max_upload_size=PLAN_MIB,
            disabled=bool(refused),
            help=refused or "It is kept in the library under the file's name.",
        )
    show_reading(show)


def read_file(console: ConsoleService, name: str, document: bytes) -> None:
    """For a callback: begins to read it. Raises ConsoleError for who may only look on."""
    by = actor(console)
    st.session_state[READING] = console.plans.uploads.begin(name, document, partial(_keep, console, by))


def show_reading(show: Callable[[str], None]) -> None:
    """How far the reading is, if there is one; what was wrong with the file; or the plan, by `show`."""
    reading: Reading | None = st.session_state.get(READING)
    if reading is None:
        return
    if not reading.over:
        st.fragment(_wait, run_every=LOOK_SECONDS)(reading)
    elif reading.error:
        url_state.field_error(reading.error, "stretch")
    else:
        del st.session_state[READING]
        show(str(Saved(reading.kept)))
        st.rerun()


def _begin(console: ConsoleService) -> None:
    turn = st.session_state.get(TURN, 0)
    file = st.session_state[f"{TURN}-{turn}"]
    if file is None:
        return
    st.session_state[TURN] = turn + 1  # an empty uploader, which holds no megabytes
    try:
        read_file(console, file.name, file.getvalue())
    except ConsoleError as error:
        st.session_state[READING] = failed = Reading(file.name, 0)
        failed.error = str(error)


def _keep(console: ConsoleService, by: str, plan: ReadPlan) -> str:
    kept = console.plans.library.save_read(plan)
    console.security.audit.record(by, "save plan", kept, detail=plan.name)
    return kept


def _wait(reading: Reading) -> None:
    if reading.over:
        st.rerun()
    took = text.seconds(time.monotonic() - reading.began)
    st.caption(f"Reading and checking {text.plain_markdown(reading.name)} ({text.size(reading.size)}) … {took}")
