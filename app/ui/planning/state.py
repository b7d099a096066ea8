"""The page's question: the URL is its only truth, and every control writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from openrecycle.app.plans.introduction import step_of
from openrecycle.app.plans.whatif import PARAMS, PROFILE, Keeper, WhatIf, follow, parse
from openrecycle.app.ui import address
from openrecycle.planner.jobs.errors import InputError

QUESTION = "planner-question"
# Besides the question a link may name a saved plan that answers it, and the paper's example.
SAVED, EXAMPLE = "saved", "example"
# And what the plan stands beside: the question of the one before it, which of them is drawn, and which part of it.
BEFORE, SHOW, WINDOW = "before", "show", "window"
MESSAGE = "planner-message"
PAGE = "page"
PROFILE_NOTE = "profile-note"


def current(keeper: Keeper) -> tuple[WhatIf, list[InputError]]:
    """What the URL asks, and what in it is wrong. Links between pages drop it: the session remembers.

    keeper: finds a profile by the name that people keep it under. Raises ConsoleError.
    """
    words = {name: st.query_params[name] for name in PARAMS if name in st.query_params}
    if not words and SAVED not in st.query_params and QUESTION in st.session_state:
        words = st.session_state[QUESTION].params()
        st.query_params.update(words)
    kept = None
    if word := words.get(PROFILE):
        before = now()
        had = before.as_own if before.named is not None and before.profile == word else None
        named = follow(word, keeper, had)
        kept, words[PROFILE] = named.kept, named.word
        if named.word != word:
            st.query_params[PROFILE] = named.word
        if named.note:
            say(PROFILE_NOTE, named.note)
    made, wrong = parse(words, kept)
    st.session_state[QUESTION] = made
    return made, wrong


def now() -> WhatIf:
    """For callbacks, which run before the page does."""
    return st.session_state.get(QUESTION) or WhatIf()


def change(made: WhatIf, *, saved: str | None = None, example: bool = False) -> None:
    """Asks another question. saved: the fingerprint of a plan that answers it. example: show the paper's steps,
    which stay for as long as the question is one of them."""
    if made != st.session_state.get(QUESTION):
        for name in (SHOW, WINDOW):
            address.put(name, None)
    st.session_state[QUESTION] = made
    words = made.params()
    if saved:
        words[SAVED] = saved
    if example or (EXAMPLE in st.query_params and step_of(made)):
        words[EXAMPLE] = "paper"
    for name in (*PARAMS, SAVED, EXAMPLE):
        if words.get(name) != st.query_params.get(name):
            address.put(name, words.get(name))


def choice(
    label: str, options: Mapping[str, str], name: str, value: str, choose: Callable[[str], object], **look: Any
) -> None:
    """One of the options, by the words for each. choose: as of `address.control`. look: passed on to Streamlit."""

    def draw(value: str, **rest: Any) -> None:
        names = list(options)
        st.selectbox(label, names, names.index(value), format_func=lambda each: options.get(each, each), **look, **rest)

    address.control(draw, name, value, choose)


def say(where: str, words: str) -> None:
    """A sentence of a callback for the run of the page that follows. where: the field it belongs beside."""
    st.session_state[MESSAGE] = (where, words)


def said(where: str) -> str:
    """What a callback had to say there, once."""
    known, words = st.session_state.get(MESSAGE, ("", ""))
    if known != where:
        return ""
    del st.session_state[MESSAGE]
    return str(words)
