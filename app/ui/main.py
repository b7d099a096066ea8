"""The console's pages. Streamlit runs this file for every browser session."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from openrecycle.app.leadership.host import standby_status
from openrecycle.app.runtime.patches import PAGES
from openrecycle.app.ui import components, standby, url_state

_LOGO = str(Path(__file__).resolve().parent / "assets" / "logo.svg")

st.set_page_config(page_title="OpenReCycle", page_icon=_LOGO, layout="wide", initial_sidebar_state="collapsed")
st.logo(_LOGO, size="medium")
_standby_status = standby_status()
_page = st.navigation(
    [url_state.page(name) for name in (url_state.FIRST, *PAGES)],
    position="top" if _standby_status is None else "hidden",
)
if _standby_status is None:
    st.set_page_config(page_title=f"{_page.title} · OpenReCycle")
    url_state.enter(_page.url_path)
    url_state.say_unknown()
    components.guard(_page.run)
else:
    standby.show(_standby_status)
