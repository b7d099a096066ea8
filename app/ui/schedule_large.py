"""Schedules of more ops than there can be bars: a picture of all of it, and bars for a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

from openrecycle.app.ui import chart_revision, components, url_state
from openrecycle.app.ui.charts import overview as large
from openrecycle.app.ui.charts.overview import Detail
from openrecycle.app.ui.charts.schedule import MAX_NODES, gantt
from openrecycle.app.ui.schedule_facts import many_words
from openrecycle.app.ui.schedule_filters import ScheduleView, clicked
from openrecycle.app.ui.theme import Palette
from openrecycle.app.ui.time_range import FOLLOWED_CONFIG, TimeRange, follow, show_all, within
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.drawing import Drawing
from openrecycle.planner.plans.schedule import Schedule

BOX, PAD = "box", "overview-pad"
ROWS = 16


def large_chart(
    fingerprint: str,
    schedule: Schedule,
    workers: list[Worker],
    wish: ScheduleView,
    colours: Palette,
    out: Mapping[str, str],
) -> Detail:
    """Draws both; a box on the picture, or the fields, choose the part, which is returned. out: why the job goes
    without a worker, where it is known.

    Without a box, it begins where the chosen time does. In either case it shows what of that time lies in it.
    """
    revision = f"{fingerprint}-{len(workers)}"
    drawing = Drawing.of(schedule, workers, out)
    names = [str(w) for w in drawing.rows.workers]
    width = schedule.problem.job.units(schedule.end)
    with st.container(horizontal=True, vertical_alignment="bottom", key="overview-part"):
        first = url_state.selectbox("First row", names, key="first-row", on_change=_forget_box, width=160)
        box = _box(len(workers), width)
        if box:
            st.button("Forget the box", on_click=_forget_box, key="forget-box")
        else:
            st.caption("Or draw a box on the overview.")
            url_state.say(BOX)
    if box:
        detail = large.detail_of_box(drawing, *box)
    else:
        start = wish.time.shown[0] * schedule.problem.job.ticks_per_unit if wish.time.shown else 0.0
        detail = large.detail_of(drawing, names.index(first), ROWS, start)
    drawn = st.cache_data(_picture, max_entries=32, show_spinner=False)(
        fingerprint, ",".join(names), colours.name, sorted(out.items()), drawing, colours
    )
    with st.container(key="overview"):
        alt = f"Overview of {len(workers):,} workers over one iteration."
        st.html(large.overview(drawing, drawn, alt))
        part = large.box_of(drawing, detail)
        box_select(width, len(workers), part, key=PAD, on_box=partial(remember_box, wish.time))
    if words := large.out_words(drawing):
        st.caption(words)
    components.heading("Detail", f"{detail.ops:,} ops" + (" of a part; draw a box for another" if detail.cut else ""))
    part_drawing = Drawing.of(schedule, detail.workers, out, detail.window)
    components.legend_of([part_drawing], ghost=False)
    low, high = map(schedule.problem.job.units, detail.window)
    what = f"{revision} {detail.window} {sorted(wish.draw)} {wish.path} {colours.name} {sorted(out.items())}"
    shown, turn = chart_revision.drawn_with("detail", what, within(wish.time, low, high))
    figure = gantt(
        part_drawing,
        colours,
        shown=shown,
        path=wish.path,
        critical="critical" in wish.draw,
        held="held" in wish.draw,
        next_iteration=False,
        revision=str(turn),
    )
    with st.container(key="wide-chart", gap=None):
        components.until_drawn(figure)
        st.plotly_chart(
            figure,
            theme=None,
            key="detail",
            config=FOLLOWED_CONFIG,
            on_select=partial(clicked, "detail"),
            selection_mode="points",
            alt="The chosen part, op by op.",
        )
        follow("detail", wish.time)
    if detail.ops > MAX_NODES:
        st.caption(many_words(detail.ops, "draw a smaller box"))
    return detail


def _picture(
    fingerprint: str, names: str, theme: str, out: list[tuple[str, str]], _drawing: Drawing, _colours: Palette
) -> str:
    """Keyed by what it shows; drawn anew for each box it would take longer than the rest."""
    return large.picture(_drawing, _colours)


def _box(rows: int, width: float) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """`?box=20,60,100,140`: from and to of the time, then of the rows."""

    def accept(word: str) -> tuple[tuple[float, float], tuple[float, float]] | None:
        try:
            x0, x1, y0, y1 = map(float, word.split(","))
        except ValueError:
            return None
        fits = x0 < x1 and x0 < width and x1 > 0 and -1 <= y0 < y1 <= rows
        return ((x0, x1), (y0, y1)) if fits else None

    expected = f"two times up to {width:,.10g} and two rows up to {rows:,}, such as 20,60,0,8"
    return url_state.read(BOX, accept, expected, "No box is drawn.")


def remember_box(time: TimeRange) -> None:
    """Shows all of it."""
    if box := drawn_box(PAD):
        show_all(time)
        url_state.put(BOX, ",".join(f"{value:.6g}" for value in box))


def _forget_box() -> None:
    url_state.put(BOX, None)


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
