"""The part of a job's progress that Live shows: chosen by moving or zooming either curve, kept in the address.

A curve that is moved tells the console once it has stood still for a moment, whatever the mouse did. Its view stands,
and the other's is made anew with that part; new rows are handed to both as before. A plain choice of the newest so
many would not do: what an operator looks at closely is a failure, and that moves away from the newest.
"""

from __future__ import annotations

import math
import re

import streamlit as st

from openrecycle.app.ui import time_range, url_state
from openrecycle.app.ui.charts.progress import ZOOM
from openrecycle.app.ui.time_range import Range

ITERATIONS = "iterations"
_WORD = re.compile(r"([0-9]{1,12})-([0-9]{1,12})")


def asked_for(first: int, last: int) -> Range | None:
    """`?iterations=120-180`; None: all. A part that the job has left behind is none any more.

    first, last: the iterations that there are to see.
    """

    def accept(word: str) -> Range | None:
        found = _WORD.fullmatch(word)
        low, high = map(int, found.groups()) if found else (0, 0)
        return (low, high) if low < high and low <= last and high >= first else None

    expected = f"two iterations between {first} and {last}, the newest, such as {first}-{max(first + 1, last)}"
    return url_state.read(ITERATIONS, accept, expected, "All of them are shown.")


def zoomed(chart: str, key: str) -> None:
    """For a callback of the chart `chart`, whose widget is `key`. What else a browser may send changes nothing."""
    state = st.session_state.get(key)
    edges = next(iter((state["selection"].get(ZOOM) or {}).values()), None) if state else None
    part = None
    if edges is not None:
        if not isinstance(edges, list) or not all(isinstance(e, int | float) and math.isfinite(e) for e in edges):
            return
        low, high = (round(max(0.0, edge)) for edge in (edges[0], edges[-1]))
        if low >= high:
            return
        part = float(low), float(high)
    time_range.moved(chart, part)
    url_state.put(ITERATIONS, f"{part[0]:.0f}-{part[1]:.0f}" if part else None)
