"""The profile: presets, shipped ones, those that people keep or a job measures, a file, and a table to edit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.plans.measured_profile import measured_profile
from openrecycle.app.plans.profiles import HELP, ProfileInfo, edited, row_name, table
from openrecycle.app.plans.whatif import (
    ENDS,
    EVEN,
    OWN,
    PRESETS,
    PROFILE,
    SAVED,
    UNEVEN,
    Checked,
    WhatIf,
    own_profile,
    read_upload,
    uploaded,
)
from openrecycle.app.runtime.errors import PLAN_MIB, ConsoleError
from openrecycle.app.ui import text, url_state
from openrecycle.app.ui.plan_upload import read_file, show_reading
from openrecycle.app.ui.planning import keeping
from openrecycle.app.ui.planning.controls import wrong
from openrecycle.app.ui.planning.pieces import field_error
from openrecycle.app.ui.planning.state import PROFILE_NOTE, change, entered, now, said, say, shown
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, StageProfile
from openrecycle.planner.plans.plan import JobDoc, job_doc
from openrecycle.planner.profiles import Profile, shipped

NAMES = {
    EVEN: "Even: every op one slot",
    UNEVEN: "Uneven: 0.9 to 1.2 slots by stage",
    ENDS: "Embedding first, longer head last",
    OWN: "Your own",
}
UPLOAD = "planner-upload"
# Bytes. A larger plan is read elsewhere; no profile or job is as large as that.
LARGE_FILE, MOST_PROFILE = 1 << 20, 8 << 20
MEASURED = "measured"
# Rows that the table shows without scrolling.
ROWS = 12


def profile(console: Console, question: WhatIf, found: Checked) -> None:
    known = console.plans.profiles.list()
    options = _options(console, known)
    named = question.profile if question.profile in options else OWN
    if question.named is not None:
        named = f"{SAVED}:{question.named.name}"
    options.setdefault(named, NAMES.get(named, named))
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-profile-row"):
        st.selectbox(
            "Profile",
            list(options),
            index=list(options).index(named),
            format_func=lambda name: options.get(name, name),
            key=shown("planner-profile", named),
            on_change=_choose,
            args=(console,),
            help="Op times and bytes of each stage: presets; profiles of GPT-3 layers that come with the planner, "
            "measured on one processor core; those that are saved here under a name; and the op times that the "
            "workers of a job report.",
            width=260,
        )
        with st.popover("File", icon=":material/upload_file:", key="planner-upload-box"):
            st.file_uploader(
                "A profile, a job document or a plan (JSON)",
                type="json",
                key=f"{UPLOAD}-{st.session_state.get(UPLOAD, 0)}",
                on_change=_upload,
                args=(console,),
                max_upload_size=PLAN_MIB,
                help="`openrecycle profile --out FILE.json` writes profiles.",
            )
            if found.job is not None:
                document = job_doc(found.job).model_dump_json(indent=2)
                st.download_button(
                    "Download this profile",
                    document,
                    file_name=f"profile-{hashlib.sha256(document.encode()).hexdigest()[:8]}.json",
                    mime="application/json",
                    on_click="ignore",
                    icon=":material/download:",
                    key="planner-download",
                    help="For `openrecycle plan --profile profile.json`.",
                )
        if found.job is not None:
            keeping.keep(console, question, known)
    show_reading(partial(_show_plan, console))
    wrong(found, PROFILE)
    if words := said(keeping.KEPT):
        st.success(words)
    if words := said(PROFILE_NOTE):
        st.warning(text.plain_markdown(words))
    if found.job is not None:
        what = "Layers" if found.job.layers else "Stages"
        with url_state.expander(f"{what}: {_sum_up(found.job)}", key="planner-stage-times"):
            _editor(question, found.job)


def _options(console: Console, known: Sequence[ProfileInfo]) -> dict[str, str]:
    """What may be chosen, and what it is called."""
    options = {name: NAMES[name] for name in PRESETS}
    options |= {f"{SAVED}:{line.name}": f"Saved: {line.name}" for line in known if line.source == "saved"}
    options |= {
        f"{MEASURED}:{live.job_id}": f"Measured by job {live.spec.name} · {live.job_id}"
        for live in console.live_jobs()
        if measured_profile(live) is not None
    }
    return options | {name: f"Shipped: {name}" for name in shipped()}


def _sum_up(job: Job) -> str:
    """`F 1, I 1, W 1 slots`, or from the least to the most."""

    def span(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

    rows: Sequence[StageProfile] = job.layers or job.profiles
    parts = [
        f"F {span([p.forward for p in rows])}",
        f"I {span([p.input_backward for p in rows])}",
        f"W {span([p.weight_backward for p in rows])}",
    ]
    if any(p.optimizer for p in rows):
        parts.append(f"O {span([p.optimizer for p in rows])}")
    if any(job.transfers):
        parts.append(f"transfers {span(list(job.transfers))}")
    return ", ".join(parts) + f" {text.plural(job.time_unit)}"


def _editor(question: WhatIf, job: Job) -> None:
    memory = url_state.toggle(
        "Memory too", key="planner-bytes", help="Bytes of activations, weights and workers, in MB."
    )
    document = job_doc(job)
    # After each edit the table begins anew from what was made of it.
    key = f"planner-table-{abs(hash((question.profile, question.stages, memory)))}"
    rows = table(document, memory=memory)
    st.data_editor(
        rows,
        key=key,
        hide_index=True,
        disabled=[row_name(document)],
        height=min(len(rows[row_name(document)]), ROWS) * 35 + 40,
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


def _choose(console: Console) -> None:
    name = entered("planner-profile")
    kind, _, of = name.partition(":")
    try:
        if kind == SAVED:
            change(now().with_kept(console.plans.profiles.kept(of)))
        elif kind == MEASURED:
            _take_measured(console, of)
        elif name != OWN:
            change(replace(now(), profile=name))
    except (ConsoleError, PlannerError) as error:
        say(PROFILE, str(error))


def _take_measured(console: Console, job_id: str) -> None:
    """As it is now: later on the job's op times may be others, and the question stays what it was."""
    live = console.job(job_id)
    document = measured_profile(live)
    if document is None:
        say(PROFILE, f"profile: job {live.spec.name} has not reported the op times of every stage yet")
        return
    changed = replace(now(), stages=document.stages, profile=own_profile(document))
    change(changed.with_failed(set(changed.failed)))
    say(
        PROFILE_NOTE,
        f"What the workers of {live.spec.name} reported until now: medians of a stage's peers. "
        "Optimizer steps, transfers and bytes are those of the job's own profile.",
    )


def _edit(key: str, document: JobDoc) -> None:
    edits: dict[int, dict[str, Any]] = st.session_state[key]["edited_rows"]
    try:
        made = edited(document, edits)
        made.job()
        keeping.remember_name(now())
        change(replace(now(), profile=own_profile(made)))
    except PlannerError as error:
        say("table", str(error))


def _show_plan(console: Console, reference: str) -> None:
    """Asks what the plan answers, and shows it as the answer."""
    fingerprint = reference.partition(":")[2]
    change(WhatIf.of_plan(console.plans.library.saved_plan(fingerprint)), saved=fingerprint)


def _upload(console: Console) -> None:
    turn = st.session_state.get(UPLOAD, 0)
    file = st.session_state[f"{UPLOAD}-{turn}"]
    if file is None:
        return
    st.session_state[UPLOAD] = turn + 1  # an empty uploader: the file is in the question now
    document = file.getvalue()
    try:
        if len(document) > LARGE_FILE and b'"workers"' in document:
            read_file(console, file.name, document)
            return
        if len(document) > MOST_PROFILE:
            raise InputError("the file", f"{len(document):,} bytes", f"a plan, or at most {MOST_PROFILE:,} bytes")
        read = read_upload(document)
        change(uploaded(read, now()))
    except (ConsoleError, PlannerError) as error:
        say(PROFILE, f"{file.name}: {error}")
        return
    if isinstance(read, Profile):
        keeping.remember_measured(now().profile, read)
