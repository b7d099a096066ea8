"""The profile on the page, kept under a name: saved, replaced when that is confirmed, and deleted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.plans.profiles import ProfileInfo
from openrecycle.app.plans.whatif import WhatIf, to_keep
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import text
from openrecycle.app.ui.access import actor, why_not
from openrecycle.app.ui.planning.pieces import field_error
from openrecycle.app.ui.planning.state import change, now, said, say
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.profiles import Profile

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


def keep(console: Console, question: WhatIf, known: Sequence[ProfileInfo]) -> None:
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
            field_error(words)
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


def _save(console: Console, key: str, replaced: ProfileInfo | None) -> None:
    """replaced: what the user has seen under the name, and wants to put this in the place of."""
    name, question = st.session_state[key].strip(), now()
    seen = replaced.updated_at if replaced is not None and replaced.name == name else None
    word, measured = st.session_state.get(_MEASURED, ("", None))
    try:
        by = actor(console)
        document = to_keep(question, measured if word == question.profile else None)
        console.plans.profiles.put_over(name, document, by, updated_at=seen)
        console.security.audit.record(by, "save profile", name, detail="replaced" if seen else "")
        change(question.with_kept(console.plans.profiles.kept(name)))
    except (ConsoleError, PlannerError) as error:
        say(FIELD, str(error))
        return
    say(KEPT, f"Saved as **{text.plain_markdown(name)}**. The link to this page names it.")


def _delete_button(console: Console, name: str, refused: str) -> None:
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


def _delete(console: Console, name: str) -> None:
    """What is on the page stays there, as the user's own."""
    question = now()
    _ask("")
    try:
        by = actor(console)
        console.plans.profiles.delete(name)
        console.security.audit.record(by, "delete profile", name)
        remember_name(question)
        change(question.with_own())
    except (ConsoleError, PlannerError) as error:
        say(FIELD, str(error))
        return
    say(KEPT, f"**{text.plain_markdown(name)}** is deleted. What is shown here can be saved again.")
