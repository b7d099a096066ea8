"""The profile: presets, shipped ones, a file, and a table to edit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from app.plans.profile_table import HELP, edited, table
from app.plans.whatif import ENDS, EVEN, OWN, PRESETS, UNEVEN, WhatIf, own_profile, uploaded
from app.plans.whatif_check import PROFILE, Checked
from app.ui import text
from app.ui.planning.controls import wrong
from app.ui.planning.pieces import field_error
from app.ui.planning.state import change, entered, now, said, say, shown
from planner.errors import PlannerError
from planner.job import Job
from planner.plan import JobDoc, job_doc
from planner.profiles import shipped

NAMES = {
    EVEN: "Even: every op one slot",
    UNEVEN: "Uneven: 0.9 to 1.2 slots by stage",
    ENDS: "Embedding first, longer head last",
    OWN: "Your own",
}
UPLOAD = "planner-upload"
# Rows that the table shows without scrolling.
ROWS = 12


def profile(question: WhatIf, found: Checked) -> None:
    options = [*PRESETS, *shipped()]
    named = question.profile if question.profile in options else OWN
    if named == OWN:
        options.append(OWN)
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-profile-row"):
        st.selectbox(
            "Profile",
            options,
            index=options.index(named),
            format_func=lambda name: NAMES.get(name, f"Measured: {name}"),
            key=shown("planner-profile", named),
            on_change=_choose,
            help="Op times and bytes of each stage. The measured ones are of GPT-3 layers, on one processor core.",
            width=280,
        )
        with st.popover("Upload", icon=":material/upload:", key="planner-upload-box"):
            st.file_uploader(
                "A profile, a job document or a plan (JSON)",
                type="json",
                key=f"{UPLOAD}-{st.session_state.get(UPLOAD, 0)}",
                on_change=_upload,
                max_upload_size=8,
                help="`python -m agent profile --out FILE.json` writes profiles.",
            )
        if found.job is not None:
            st.download_button(
                "Download",
                job_doc(found.job).model_dump_json(indent=2),
                file_name="profile.json",
                mime="application/json",
                on_click="ignore",
                icon=":material/download:",
                key="planner-download",
                help="For `python -m planner plan --profile profile.json`.",
            )
    wrong(found, PROFILE)
    if found.job is not None:
        with st.expander(f"Stages: {_sum_up(found.job)}", key="planner-stage-times"):
            _editor(question, found.job)


def _sum_up(job: Job) -> str:
    """`F 1, I 1, W 1 slots`, or from the least to the most."""

    def span(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    parts = [
        f"F {span([p.forward for p in job.profiles])}",
        f"I {span([p.input_backward for p in job.profiles])}",
        f"W {span([p.weight_backward for p in job.profiles])}",
    ]
    if any(p.optimizer for p in job.profiles):
        parts.append(f"O {span([p.optimizer for p in job.profiles])}")
    if any(job.transfers):
        parts.append(f"transfers {span(list(job.transfers))}")
    return ", ".join(parts) + f" {job.time_unit}" + ("s" if job.time_unit == "slot" else "")


def _editor(question: WhatIf, job: Job) -> None:
    memory = st.toggle("Memory too", key="planner-bytes", help="Bytes of activations, weights and workers, in MB.")
    document = job_doc(job)
    # After each edit the table begins anew from what was made of it.
    key = f"planner-table-{abs(hash((question.profile, question.stages, memory)))}"
    rows = table(document, memory=memory)
    st.data_editor(
        rows,
        key=key,
        hide_index=True,
        disabled=["stage"],
        height=min(len(rows["stage"]), ROWS) * 35 + 40,
        column_config={
            name: st.column_config.NumberColumn(name, help=HELP.get(name), min_value=0.0 if name in HELP else None)
            for name in rows
        },
        on_change=_edit,
        args=(key, document),
    )
    if words := said("table"):
        field_error(words)
    fixed = sum(p.weight_bytes + p.optimizer_bytes for p in job.profiles)
    if fixed:
        st.caption(f"Weights and optimizer state of all stages: {text.size(fixed)}.")


def _choose() -> None:
    name = entered("planner-profile")
    if name != OWN:
        change(replace(now(), profile=name))


def _edit(key: str, document: JobDoc) -> None:
    edits: dict[int, dict[str, Any]] = st.session_state[key]["edited_rows"]
    try:
        made = edited(document, edits)
        made.job()
        change(replace(now(), profile=own_profile(made)))
    except PlannerError as error:
        say("table", str(error))


def _upload() -> None:
    turn = st.session_state.get(UPLOAD, 0)
    file = st.session_state[f"{UPLOAD}-{turn}"]
    if file is None:
        return
    st.session_state[UPLOAD] = turn + 1  # an empty uploader: the file is in the question now
    try:
        change(uploaded(file.getvalue(), now()))
    except PlannerError as error:
        say(PROFILE, f"{file.name}: {error}")
