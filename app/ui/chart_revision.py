"""Charts that a browser has and that somebody may have moved since: which part each was drawn with, and which it shows.

A chart is drawn anew, with the part that is asked for, only where it does not show that already: what somebody drags
does not come back to be drawn again while it is being dragged.
"""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

Range = tuple[float, float]


@dataclass
class _ChartRevision:
    """what: is in it. drawn: the part that it was drawn with, None: all; showing: that it shows. turn: counts
    drawings."""

    what: str
    drawn: Range | None
    showing: Range | None
    turn: int


def drawn_with(chart: str, what: str, shown: Range | None) -> tuple[Range | None, int]:
    """The part to draw the chart of that key with so that it shows `shown`, and a number that is another one whenever
    the browser is to forget what somebody has moved. what: names all else that is in the chart."""
    name = _name(chart)
    chart_revision: _ChartRevision | None = st.session_state.get(name)
    if chart_revision is None or chart_revision.what != what or chart_revision.showing != shown:
        turn = chart_revision.turn + 1 if chart_revision is not None else 0
        chart_revision = st.session_state[name] = _ChartRevision(what, shown, shown, turn)
    return chart_revision.drawn, chart_revision.turn


def moved(chart: str, showing: Range | None) -> None:
    """For a callback: somebody has moved it, and it shows that part by now."""
    if (chart_revision := st.session_state.get(_name(chart))) is not None:
        chart_revision.showing = showing


def forget(chart: str) -> None:
    """For a callback: it is drawn anew in any case."""
    if (chart_revision := st.session_state.get(_name(chart))) is not None:
        chart_revision.what = ""


def _name(chart: str) -> str:
    return f"{chart}-revision"
