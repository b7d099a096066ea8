"""The part of a schedule's time that is shown: chosen by a slider or by dragging over the chart, and in the address.

Also which part each chart was drawn with, and which it shows since somebody moved it: it is drawn anew only where it
does not show the part that is asked for, so what somebody drags does not come back to be drawn again meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

from openrecycle.app.ui import url_state
from openrecycle.app.ui.theme import CHART_CONFIG

Range = tuple[float, float]

TIME = "time"
# Of a chart that is followed: a double click is for `chart_zoom.js`.
FOLLOWED_CONFIG: dict[str, object] = {**CHART_CONFIG, "doubleClick": False}
_SCRIPT = Path(__file__).parent / "assets" / "chart_zoom.js"


@dataclass(frozen=True)
class TimeRange:
    """Times in the unit of the chart's axis. shown: None: all, from 0 to `end`. name: in the address. key: of the
    slider."""

    name: str
    key: str
    end: float
    shown: Range | None


def choose_time(of: str, end: float, unit: str, name: str = TIME) -> TimeRange:
    """Draws the slider. of: what is shown; each has a slider of its own, since their times differ in length. name: in
    the address."""
    key = f"{name}-{of}"
    expected = f"two times from 0 to {spelled(end)}, such as 0-{spelled(end / 2)}"
    sent = url_state.read(name, lambda word: parsed(word, end), expected, "All of it is shown.")
    if key not in st.session_state:
        st.session_state[key] = sent or (0.0, end)
    chosen = st.slider(
        f"Time ({unit})",
        0.0,
        end,
        step=_step(end),
        format="%g",
        key=key,
        on_change=slid,
        args=(name, key, end),
        width=240,
    )
    url_state.say(name)
    return TimeRange(name, key, end, narrowed(chosen, end))


def follow(chart: str, time: TimeRange) -> None:
    """Has the chart of that key choose the time: dragging over it, moving its axis, and a double click for all."""
    _component()(
        key=_key(chart), data={"chart": chart}, on_range_change=partial(dragged, chart, time)
    )  # fmt: skip


def within(time: TimeRange, low: float, high: float) -> Range | None:
    """Of what is chosen, the part that lies in a chart which has only the time from `low` to `high`. None: all of
    that."""
    if time.shown is None:
        return None
    part = max(low, time.shown[0]), min(high, time.shown[1])
    return part if part[0] < part[1] and part != (low, high) else None


def show_all(time: TimeRange) -> None:
    """For a callback."""
    st.session_state[time.key] = (0.0, time.end)
    _remember(time.name, None)


def dragged(chart: str, time: TimeRange) -> None:
    """What else a browser may send than two times in order, or nothing for all, changes nothing."""
    state = st.session_state.get(_key(chart))
    sent = state.get("range") if state else None
    if not isinstance(sent, list) or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in sent):
        return
    if not sent:
        part = None
        forget(chart)  # the browser waits for it
    else:
        low, high = (min(max(edge, 0.0), time.end) for edge in (sent[0], sent[-1]))
        if low >= high:
            return
        digits = max(0, 3 - math.floor(math.log10(high - low)))
        part = narrowed((round(low, digits), min(time.end, round(high, digits))), time.end)
        moved(chart, part)
    st.session_state[time.key] = part or (0.0, time.end)
    _remember(time.name, part)


def slid(name: str, key: str, end: float) -> None:
    """The slider was moved."""
    _remember(name, narrowed(st.session_state[key], end))


def _remember(name: str, part: Range | None) -> None:
    url_state.put(name, "-".join(map(spelled, part)) if part else None)


def narrowed(chosen: Range, end: float) -> Range | None:
    """None where it is all, as far as the slider can tell, or nothing."""
    low, high = chosen
    return None if (low <= 0 and high > end - _step(end)) or low >= high else (low, high)


def parsed(word: str, end: float) -> Range | None:
    """`5-12`."""
    low, _, high = word.partition("-")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return (found[0], min(found[1], end)) if 0 <= found[0] < found[1] <= end * (1 + 1e-9) else None


def spelled(value: float) -> str:
    """As it stands in an address."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _step(end: float) -> float:
    """A hundredth of the iteration or so, whole where times are."""
    rough = end / 200
    return max(1.0, float(round(rough))) if end >= 20 else rough


def _key(chart: str) -> str:
    return f"zoom-of-{chart}"


@cache
def _component() -> ComponentRenderer:
    return st.components.v2.component("chart-zoom", js=_SCRIPT.read_text(), isolate_styles=False)


# -- charts that somebody may have moved since -------------------------------------------------------


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
    key = _revision_key(chart)
    chart_revision: _ChartRevision | None = st.session_state.get(key)
    if chart_revision is None or chart_revision.what != what or chart_revision.showing != shown:
        turn = chart_revision.turn + 1 if chart_revision is not None else 0
        chart_revision = st.session_state[key] = _ChartRevision(what, shown, shown, turn)
    return chart_revision.drawn, chart_revision.turn


def moved(chart: str, showing: Range | None) -> None:
    """For a callback: somebody has moved it, and it shows that part by now."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.showing = showing


def forget(chart: str) -> None:
    """For a callback: it is drawn anew in any case."""
    if (chart_revision := st.session_state.get(_revision_key(chart))) is not None:
        chart_revision.what = ""


def _revision_key(chart: str) -> str:
    return f"{chart}-revision"
