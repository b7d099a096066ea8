"""The page's question: the URL is its only truth, and every control writes to it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.whatif import PARAMS, WhatIf, parse
from app.worked_example import step_of
from planner.errors import InputError

QUESTION = "planner-question"
# Besides the question a link may name a saved plan that answers it, and the paper's example.
SAVED, EXAMPLE = "saved", "example"
MESSAGE = "planner-message"
PAGE = "page"


def current() -> tuple[WhatIf, list[InputError]]:
    """What the URL asks, and what in it is wrong. Links between pages drop it: the session remembers."""
    words = {name: st.query_params[name] for name in PARAMS if name in st.query_params}
    if not words and SAVED not in st.query_params and QUESTION in st.session_state:
        words = st.session_state[QUESTION].params()
        st.query_params.update(words)
    made, wrong = parse(words)
    st.session_state[QUESTION] = made
    return made, wrong


def now() -> WhatIf:
    """For callbacks, which run before the page does."""
    return st.session_state.get(QUESTION) or WhatIf()


def change(made: WhatIf, *, saved: str | None = None, example: bool = False) -> None:
    """Asks another question. saved: the fingerprint of a plan that answers it. example: show the paper's steps,
    which stay for as long as the question is one of them."""
    st.session_state[QUESTION] = made
    words = made.params()
    if saved:
        words[SAVED] = saved
    if example or (EXAMPLE in st.query_params and step_of(made)):
        words[EXAMPLE] = "paper"
    for name in (*PARAMS, SAVED, EXAMPLE):
        if name in words:
            st.query_params[name] = words[name]
        elif name in st.query_params:
            del st.query_params[name]


def shown(key: str, value: Any) -> str:
    """Has the widget of that key show `value`; returns the key. Call right before the widget."""
    if st.session_state.get(key) != value:
        st.session_state[key] = value
    return key


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
