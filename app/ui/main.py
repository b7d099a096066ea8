"""The console's pages. Streamlit runs this file for every browser session."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from openrecycle.app.leadership.host import standby_status
from openrecycle.app.ui import standby, url_state

_HERE = Path(__file__).resolve().parent
_LOGO = str(_HERE / "assets" / "logo.svg")

st.set_page_config(page_title="OpenReCycle", page_icon=_LOGO, layout="wide", initial_sidebar_state="collapsed")
st.logo(_LOGO, size="medium")
_standby_status = standby_status()
_page = st.navigation(
    [
        st.Page(_HERE / "live.py", title="Live", default=True),
        st.Page(_HERE / "schedule.py", title="Schedule", url_path="schedule"),
        st.Page(_HERE / "planner.py", title="Planner", url_path="planner"),
        st.Page(_HERE / "compare.py", title="Compare", url_path="compare"),
        st.Page(_HERE / "catalog.py", title="Catalog", url_path="catalog"),
        st.Page(_HERE / "simulate.py", title="Simulate", url_path="simulate"),
        st.Page(_HERE / "help.py", title="Help", url_path="help"),
    ],
    position="top" if _standby_status is None else "hidden",
)
if _standby_status is None:
    st.set_page_config(page_title=f"{_page.title} · OpenReCycle")
    url_state.enter(_page.url_path)
    url_state.say_unknown()
    _page.run()
else:
    standby.show(_standby_status)
