"""The console's pages. Streamlit runs this file for every browser session."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from openrecycle.app.console.leadership import standby_status
from openrecycle.app.runtime.patches import FIRST, PAGES
from openrecycle.app.ui import address, components, standby

_LOGO = str(Path(__file__).resolve().parent / "assets" / "logo.svg")

st.set_page_config(page_title="OpenReCycle", page_icon=_LOGO, layout="wide", initial_sidebar_state="collapsed")
st.logo(_LOGO, size="medium")
_standby_status = standby_status()
_page = st.navigation(
    [address.page(name) for name in (FIRST, *PAGES)],
    position="top" if _standby_status is None else "hidden",
)
if _standby_status is None:
    st.set_page_config(page_title=f"{_page.title} · OpenReCycle")
    address.enter(_page.url_path)
    address.say_unknown()
    components.guard(_page.run)
else:
    standby.show(_standby_status)
