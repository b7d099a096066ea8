"""The page of a console that does not lead: it says which one leads, and links to it."""

from __future__ import annotations

import streamlit as st

from openrecycle.app.console.leadership import LeaderStatus, standby_status
from openrecycle.app.jobs.states import TRAINING_ALONE
from openrecycle.app.ui.components import use_style
from openrecycle.planner.jobs.words import capital, whole_sentence


def show(status: LeaderStatus) -> None:
    """Draws the page. Once this console leads, the page that was asked for comes by itself."""
    use_style()
    if status.doubt:
        st.title("This console may no longer lead")
        st.fragment(run_every=1)(_state)(doubt=True)
        st.caption(
            "It led until the database did not answer it any more, and changes nothing before it is sure again. "
            f"{TRAINING_ALONE} Reports wait at the agents, and this page changes by itself."
        )
        return
    st.title("This console is a standby")
    st.fragment(run_every=1)(_state)(doubt=False)
    st.caption(
        "Two consoles share one database, and one of them leads: it decides, and shows the jobs. This one takes "
        f"over within ten seconds when the leader is gone. {TRAINING_ALONE} This page changes by itself."
    )


def on_open_page() -> bool:
    """Warns on an open page while the console is not sure any more that it leads; what the page shows stays. Once
    another console leads, the page of a standby takes its place. Returns whether it has warned."""
    status = standby_status()
    if status is None:
        return False
    if not status.doubt:
        st.rerun()
    words = status.sentence
    st.warning(
        f"{capital(words)}. It changes nothing before it is sure again, and what is shown here may be "
        f"out of date. {TRAINING_ALONE}"
    )
    return True


def _state(*, doubt: bool) -> None:
    status = standby_status()
    if status is None or status.doubt != doubt:
        st.rerun()
        return
    if doubt:
        st.markdown(whole_sentence(status.sentence))
    elif status.leader:
        rest = status.reason.removeprefix(status.leader).strip()
        st.markdown(f"The leader is [{status.leader}]({status.leader}): it {rest}.")
    else:
        st.markdown(whole_sentence(status.reason))
