"""What a browser gets of a console that does not lead: who does, and a link to it."""

from __future__ import annotations

import streamlit as st

from app.leadership.host import standing_by
from app.leadership.watch import Standing
from app.ui.components import use_style


def show(standing: Standing) -> None:
    """Until this console leads; then the page that was asked for comes by itself."""
    use_style()
    st.title("This console is a standby")
    st.fragment(run_every=1)(_state)()
    st.caption(
        "Two consoles share one database, and one of them leads: it decides, and shows the jobs. This one takes "
        "over within ten seconds when the leader is gone. Training goes on meanwhile, and this page changes by itself."
    )


def _state() -> None:
    standing = standing_by()
    if standing is None:
        st.rerun()
        return
    if standing.leader:
        rest = standing.reason.removeprefix(standing.leader).strip()
        st.markdown(f"The leader is [{standing.leader}]({standing.leader}): it {rest}.")
    else:
        st.markdown(f"{standing.reason[:1].upper()}{standing.reason[1:]}.")
