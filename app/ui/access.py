"""The person at the page: the name under which they act, and whether they may act at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Protocol

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from openrecycle.app.charts import text
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.access import CALLER, SIGN_OUT, Security
from openrecycle.planner.jobs.errors import PlannerError


class Guarded(Protocol):
    """The part of a console that is used here."""

    security: Security


def actor(console: Guarded) -> str:
    """Returns the person's name for the audit log. Raises ConsoleError, with a sentence, if they may only look."""
    return console.security.access.operator(st.context.headers.get(CALLER))


def why_not(console: Guarded) -> str:
    """Says why the person may only look; "": they may act."""
    try:
        actor(console)
    except ConsoleError as error:
        return str(error)
    return ""


def say_error(words: str, where: DeltaGenerator | None = None) -> None:
    """Shows an error, with all Markdown in it escaped, since it may have text from outside. where: a place for it; by
    default it comes after what was drawn last."""
    (where or st).error(text.plain_markdown(words))


@contextmanager
def told(say: Callable[[str], object] = say_error) -> Iterator[None]:
    """Shows the reason if the code inside is refused; the rest of that code is skipped."""
    try:
        yield
    except (ConsoleError, PlannerError) as error:
        say(str(error))


@contextmanager
def acting(console: Guarded, action: str, target: str = "") -> Iterator[None]:
    """For an action that changes no job: checks that the person may act, and writes the action to the audit log after
    it is done."""
    name = actor(console)
    yield
    console.security.audit.record(name, action, target)


def who(console: Guarded) -> None:
    """Shows who has signed in, and what they may do; nothing if the console has no token."""
    if not console.security.access.guarded:
        return
    with told():
        caller = console.security.access.caller(st.context.headers.get(CALLER))
        may = "may operate" if caller.operates else "may look at everything; what changes something is refused"
        st.html(
            f'<div class="or-quiet" role="note">Signed in as {escape(caller.name)}: {may}. '
            f'<a href="{SIGN_OUT}" target="_self">Sign out</a></div>'
        )
