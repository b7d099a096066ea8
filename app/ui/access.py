"""Who sits before the page: the name under which they act, and whether they may act at all."""

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
    """A console, as far as it is asked here."""

    security: Security


def actor(console: Guarded) -> str:
    """For the audit log. Raises ConsoleError, a sentence, when they may only look on."""
    return console.security.access.operator(st.context.headers.get(CALLER))


def why_not(console: Guarded) -> str:
    """Why they may only look on; "" for an operator."""
    try:
        actor(console)
    except ConsoleError as error:
        return str(error)
    return ""


def say_error(words: str, where: DeltaGenerator | None = None) -> None:
    """What went wrong, as it is: words from outside may be in it. where: instead of after what was drawn last."""
    (where or st).error(text.plain_markdown(words))


@contextmanager
def told(say: Callable[[str], object] = say_error) -> Iterator[None]:
    """Around what may be refused: why is said, and the rest of it is left out."""
    try:
        yield
    except (ConsoleError, PlannerError) as error:
        say(str(error))


@contextmanager
def acting(console: Guarded, action: str, target: str = "") -> Iterator[None]:
    """Around what is no change of a job: asks whether they may, and puts it into the audit log when it is done."""
    name = actor(console)
    yield
    console.security.audit.record(name, action, target)


def who(console: Guarded) -> None:
    """Says who has signed in, and what they may not do. Nothing where the console has no token."""
    if not console.security.access.guarded:
        return
    with told():
        caller = console.security.access.caller(st.context.headers.get(CALLER))
        may = "may operate" if caller.operates else "may look at everything; what changes something is refused"
        st.html(
            f'<div class="or-quiet" role="note">Signed in as {escape(caller.name)}: {may}. '
            f'<a href="{SIGN_OUT}" target="_self">Sign out</a></div>'
        )
