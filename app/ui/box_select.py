"""A box drawn with the pointer over a picture. It is a page's own few lines of script: a picture in a chart of
Plotly's would be there only after 5 MB of code have been read and run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

_SCRIPT = Path(__file__).parent / "assets" / "box_select.js"
_HTML = '<div class="or-pad" aria-hidden="true"><i class="or-part"></i><i class="or-drawn" hidden></i></div>'

Box = tuple[float, float, float, float]


def box_select(width: float, rows: int, part: Box, *, key: str, on_box: Callable[[], None]) -> None:
    """Covers the picture in the same container (console.css). Boxes are (x0, x1, y0, y1): x in the unit of `width`,
    y in row numbers, each from the lower edge to the upper one.

    part: outlined. on_box: called once for each box drawn; `drawn_box` then returns it.
    """
    _component()(key=key, data={"width": width, "rows": rows, "part": part}, height="stretch", on_box_change=on_box)


def drawn_box(key: str) -> Box | None:
    """The box that has just been drawn. What else a browser may send is none."""
    state = st.session_state.get(key)
    box = state.get("box") if state else None
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(edge, int | float) for edge in box):
        return None
    return box[0], box[1], box[2], box[3]


@cache
def _component() -> ComponentRenderer:
    return st.components.v2.component("box-select", html=_HTML, js=_SCRIPT.read_text(), isolate_styles=False)
