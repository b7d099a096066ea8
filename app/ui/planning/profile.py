"""The profile of the question: chosen, uploaded or measured, edited in a table, and kept under a name."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.profiles import HELP, ProfileInfo, edited, measured_profile, row_name, table
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
    to_keep,
    uploaded,
)
from openrecycle.app.runtime.errors import PLAN_MIB
from openrecycle.app.ui import address, text
from openrecycle.app.ui.access import acting, actor, told, why_not
from openrecycle.app.ui.address import field_error
from openrecycle.app.ui.planning.controls import wrong
from openrecycle.app.ui.planning.state import PROFILE_NOTE, change, choice, now, said, say
from openrecycle.app.ui.plans import read_file, show_reading
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, StageProfile
from openrecycle.planner.plans.plan import JobDoc, job_doc
from openrecycle.planner.profiles import Profile, shipped

NAME = "planner-profile-name"
ASKED = "planner-profile-delete-asked"
# Fields that messages belong beside, and the page's own line for what has been done.
FIELD, KEPT = "profile-name", "profile-kept"
# What the session remembers of where the user's own profile comes from.
_NAMED, _MEASURED = "planner-profile-named", "planner-profile-measured"


def remember_name(question: WhatIf) -> None:
    """What is edited is most often saved under the name that it had."""
    if question.named is not None:
        st.session_state[_NAMED] = question.named.name


def remember_measured(word: str, read: Profile) -> None:
    """A measured profile is good for more grids than the one that the question takes of it."""
    st.session_state[_MEASURED] = (word, read)


def keep(console: ConsoleService, question: WhatIf, known: Sequence[ProfileInfo]) -> None:
    """The button and what is behind it. known: the profiles that have names."""
    lines = {line.name: line for line in known}
    named = question.named
    refused = why_not(console)
    with st.popover(
        "Saved profile" if named else "Save profile", icon=":material/bookmark:", key="planner-profile-keep"
    ):
        if named is not None and named.name in lines:
            st.markdown(f"Saved as **{text.plain_markdown(named.name)}**: {_about(lines[named.name])}")
            st.caption("Jobs, plans and catalogs take it by this name: `profile_name` in the API.")
            _delete_button(console, named.name, refused)
            st.divider()
        begin = named.name if named else st.session_state.get(_NAMED, "")
        # Another profile begins with another name.
        key = f"{NAME}-{abs(hash((question.profile, begin)))}"
        name = st.text_input(
            "Save it under another name" if named else "Name of the profile",
            "" if named else begin,
            key=key,
            max_chars=80,
            placeholder="my-model",
            disabled=bool(refused),
            help="Letters, digits, _ . + and -; a letter or digit first.",
        ).strip()
        seen = lines.get(name)
        replaced = seen if seen is not None and seen.source == "saved" else None
        if words := said(FIELD) or (refused and f"{refused[:1].upper()}{refused[1:]}."):
            field_error(words, "stretch")
        if replaced is not None:
            st.warning(f"**{text.plain_markdown(name)}** is there already: {_about(replaced)} Replace it?")
        st.button(
            "Replace it" if replaced else "Save",
            type="primary",
            key="planner-profile-save",
            disabled=bool(refused),
            on_click=_save,
            args=(console, key, replaced),
        )


def _about(line: ProfileInfo) -> str:
    at = text.moment(line.updated_at or 0, st.context.timezone, time.time())
    what = text.plain_markdown(line.about)
    if line.kind == "job":
        what = f"{text.count(line.stages or 0, 'stage')}, times in {text.plural(line.time_unit)}"
    return f"{what}; saved by {text.plain_markdown(line.saved_by)}, {at}."


def _save(console: ConsoleService, key: str, replaced: ProfileInfo | None) -> None:
    """replaced: what the user has seen under the name, and wants to put this in the place of."""
    name, question = st.session_state[key].strip(), now()
    seen = replaced.updated_at if replaced is not None and replaced.name == name else None
    word, measured = st.session_state.get(_MEASURED, ("", None))
    with told(partial(say, FIELD)):
        by = actor(console)
        document = to_keep(question, measured if word == question.profile else None)
        console.plans.profiles.put_over(name, document, by, updated_at=seen)
        console.security.audit.record(by, "save profile", name, detail="replaced" if seen else "")
        change(question.with_kept(console.plans.profiles.kept(name)))
        say(KEPT, f"Saved as **{text.plain_markdown(name)}**. The link to this page names it.")


def _delete_button(console: ConsoleService, name: str, refused: str) -> None:
    if st.session_state.get(ASKED) != name:
        st.button(
            "Delete it …",
            key="planner-profile-delete",
            disabled=bool(refused),
            help=refused or None,
            on_click=_ask,
            args=(name,),
        )
        return
    st.warning("Gone for all who use this console. Jobs and plans that were made with it keep what they have of it.")
    with st.container(horizontal=True):
        st.button("Delete it for good", type="primary", key="act-kill-profile", on_click=_delete, args=(console, name))
        st.button("Keep it", key="planner-profile-stay", on_click=_ask, args=("",))


def _ask(name: str) -> None:
    st.session_state[ASKED] = name


def _delete(console: ConsoleService, name: str) -> None:
    """What is on the page stays there, as the user's own."""
    question = now()
    _ask("")
    with told(partial(say, FIELD)), acting(console, "delete profile", name):
        console.plans.profiles.delete(name)
        remember_name(question)
        change(question.with_own())
        say(KEPT, f"**{text.plain_markdown(name)}** is deleted. What is shown here can be saved again.")


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


def profile(console: ConsoleService, question: WhatIf, found: Checked) -> None:
    known = console.plans.profiles.list()
    options = _options(console, known)
    named = question.profile if question.profile in options else OWN
    if question.named is not None:
        named = f"{SAVED}:{question.named.name}"
    options.setdefault(named, NAMES.get(named, named))
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-profile-row"):
        choice(
            "Profile",
            options,
            "planner-profile",
            named,
            partial(_choose, console),
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
            keep(console, question, known)
    show_reading(partial(_show_plan, console))
    wrong(found, PROFILE)
    if words := said(KEPT):
        st.success(words)
    if words := said(PROFILE_NOTE):
        st.warning(text.plain_markdown(words))
    if found.job is not None:
        what = "Layers" if found.job.layers else "Stages"
        with address.expander(f"{what}: {_sum_up(found.job)}", key="planner-stage-times"):
            _editor(question, found.job)


def _options(console: ConsoleService, known: Sequence[ProfileInfo]) -> dict[str, str]:
    """What may be chosen, and what it is called."""
    options = {name: NAMES[name] for name in PRESETS}
    options |= {f"{SAVED}:{line.name}": f"Saved: {line.name}" for line in known if line.source == "saved"}
    options |= {
        f"{MEASURED}:{live.job_id}": f"Measured by job {live.spec.name} · {live.job_id}"
        for live in console.jobs.live()
        if measured_profile(live.plans.nominal, live.measurements.op_times.smoothed) is not None
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
    memory = address.toggle("Memory too", key="planner-bytes", help="Bytes of activations, weights and workers, in MB.")
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
        field_error(words, "stretch")
    fixed = sum(p.weight_bytes + p.optimizer_bytes for p in job.profiles)
    if fixed:
        st.caption(f"Weights and optimizer state of all stages: {text.size(fixed)}.")


def _choose(console: ConsoleService, name: str) -> None:
    kind, _, of = name.partition(":")
    with told(partial(say, PROFILE)):
        if kind == SAVED:
            change(now().with_kept(console.plans.profiles.kept(of)))
        elif kind == MEASURED:
            _take_measured(console, of)
        elif name != OWN:
            change(replace(now(), profile=name))


def _take_measured(console: ConsoleService, job_id: str) -> None:
    """As it is now: later on the job's op times may be others, and the question stays what it was."""
    live = console.jobs.find(job_id)
    document = measured_profile(live.plans.nominal, live.measurements.op_times.smoothed)
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
    with told(partial(say, "table")):
        made = edited(document, edits)
        made.job()
        remember_name(now())
        change(replace(now(), profile=own_profile(made)))


def _show_plan(console: ConsoleService, reference: str) -> None:
    """Asks what the plan answers, and shows it as the answer."""
    fingerprint = reference.partition(":")[2]
    change(WhatIf.of_plan(console.plans.library.saved_plan(fingerprint)), saved=fingerprint)


def _upload(console: ConsoleService) -> None:
    turn = st.session_state.get(UPLOAD, 0)
    file = st.session_state[f"{UPLOAD}-{turn}"]
    if file is None:
        return
    st.session_state[UPLOAD] = turn + 1  # an empty uploader: the file is in the question now
    document = file.getvalue()
    with told(lambda why: say(PROFILE, f"{file.name}: {why}")):
        if len(document) > LARGE_FILE and b'"workers"' in document:
            read_file(console, file.name, document)
            return
        if len(document) > MOST_PROFILE:
            raise InputError("the file", f"{len(document):,} bytes", f"a plan, or at most {MOST_PROFILE:,} bytes")
        read = read_upload(document)
        change(uploaded(read, now()))
        if isinstance(read, Profile):
            remember_measured(now().profile, read)
