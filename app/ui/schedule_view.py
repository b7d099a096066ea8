"""What of a schedule is shown: workers, time, and what is drawn beside the bars, all of it in the URL; and schedules of
more ops than there can be bars, as a picture of all of it and bars for a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

from openrecycle.app.ui import address, components, text
from openrecycle.app.ui.address import Range, TimeRange, choose_time, show_all, within
from openrecycle.app.ui.charts import gantt as charts
from openrecycle.app.ui.charts.gantt import MAX_NODES, Detail, gantt
from openrecycle.app.ui.facts import many_words
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.drawing import Drawing, pipeline_workers, stage_workers, touched_workers
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

SHOW = {"all": "All workers", "failure": "Touched by the failure", "pipeline": "One pipeline", "stage": "One stage"}
DRAW = {"held": "Memory", "next": "Next iteration", "critical": "Critical path"}
DRAWN = ["held", "next"]
PILLS = partial(st.pills, selection_mode="multi")
PATH = "path"
# More micro-batches than this are not listed; a click still shows any of them.
MAX_PATHS = 4096


@dataclass(frozen=True)
class ScheduleView:
    """path: (home pipeline, micro-batch)."""

    draw: frozenset[str]
    path: tuple[int, int] | None
    time: TimeRange


def choose_workers(schedule: Schedule) -> list[Worker]:
    """The rows. The controls go where the caller is."""
    return choose_rows([schedule])(schedule)


def choose_rows(schedules: Sequence[Schedule]) -> Callable[[Schedule], list[Worker]]:
    """One choice for all of them; where one has no such pipeline or stage, all its workers are shown."""
    touched = {worker for schedule in schedules for worker in touched_workers(schedule)}
    show = address.segmented_control(
        "Show",
        [key for key in SHOW if key != "failure" or touched],
        default="all",
        format_func=SHOW.__getitem__,
        key="show",
        wrap=True,
    )
    number = 0
    if show in ("pipeline", "stage"):
        sizes = [getattr(schedule.problem.job, f"{show}s") for schedule in schedules]
        number = address.selectbox(show.capitalize(), range(max(sizes)), key=show, width=120)

    def chosen(schedule: Schedule) -> list[Worker]:
        if show == "failure":
            found = [w for w in schedule.problem.job.workers() if w in touched]
        elif show == "all":
            found = []
        else:
            found = (pipeline_workers if show == "pipeline" else stage_workers)(schedule, number)
        return found or list(schedule.problem.job.workers())

    return chosen


def choose_view(plan: Plan, schedule: Schedule) -> ScheduleView:
    """What is drawn, the path of which micro-batch, and which time."""
    draw = address.several(PILLS, "Draw", list(DRAW), default=DRAWN, format_func=DRAW.__getitem__, key="draw")
    path = _choose_path(plan)
    end = float(schedule.problem.job.units(schedule.end))
    return ScheduleView(frozenset(draw), path, choose_time(plan.fingerprint[:12], end, text.plural(plan.job.time_unit)))


def clicked(chart: str) -> None:
    """A click on a bar of the chart of that key shows its micro-batch's path, a second one no path again."""
    state = st.session_state.get(chart)
    points = state["selection"]["points"] if state else []
    found = next((p["customdata"] for p in points if p.get("customdata")), None)
    name = found[0] if isinstance(found, list) else found.get("0") if isinstance(found, dict) else found
    address.put(PATH, None if name == address.read(PATH, str, "a path") else name)


def _choose_path(plan: Plan) -> tuple[int, int] | None:
    job = plan.job
    last = f"{job.pipelines - 1}.{job.micro_batches - 1}"
    expected = f"a pipeline and its micro-batch, from 0.0 to {last}"
    known = address.read(PATH, lambda name: name if _place(name, plan) else None, expected, "No path is shown.")
    if job.pipelines * job.micro_batches <= MAX_PATHS:
        names = [f"{p}.{m}" for p in range(job.pipelines) for m in range(job.micro_batches)]

        def draw(value: str | None, **rest: Any) -> str | None:
            return st.selectbox(  # type: ignore[no-any-return]
                "Path of micro-batch",
                names,
                None if value is None else names.index(value),
                format_func=lambda name: "{1} of pipeline {0}".format(*name.split(".")),
                placeholder="Click a bar, or choose",
                width=200,
                **rest,
            )

        address.control(draw, PATH, known, partial(address.put, PATH))
    address.say(PATH)
    return _place(known, plan)


def _place(name: str | None, plan: Plan) -> tuple[int, int] | None:
    pipeline, dot, micro_batch = (name or "").partition(".")
    if not (dot and pipeline.isdecimal() and micro_batch.isdecimal()):
        return None
    place = int(pipeline), int(micro_batch)
    return place if place[0] < plan.job.pipelines and place[1] < plan.job.micro_batches else None


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
        first = address.selectbox("First row", names, key="first-row", on_change=_forget_box, width=160)
        box = _box(len(workers), width)
        if box:
            st.button("Forget the box", on_click=_forget_box, key="forget-box")
        else:
            st.caption("Or draw a box on the overview.")
            address.say(BOX)
    if box:
        detail = charts.detail_of_box(drawing, *box)
    else:
        start = wish.time.shown[0] * schedule.problem.job.ticks_per_unit if wish.time.shown else 0.0
        detail = charts.detail_of(drawing, names.index(first), ROWS, start)
    drawn = st.cache_data(_picture, max_entries=32, show_spinner=False)(
        fingerprint, ",".join(names), colours.name, sorted(out.items()), drawing, colours
    )
    with st.container(key="overview"):
        alt = f"Overview of {len(workers):,} workers over one iteration."
        st.html(charts.overview(drawing, drawn, alt))
        part = charts.box_of(drawing, detail)
        box_select(width, len(workers), part, key=PAD, on_box=partial(remember_box, wish.time))
    if words := charts.out_words(drawing):
        st.caption(words)
    components.heading("Detail", f"{detail.ops:,} ops" + (" of a part; draw a box for another" if detail.cut else ""))
    part_drawing = Drawing.of(schedule, detail.workers, out, detail.window)
    components.legend_of([part_drawing], ghost=False)
    low, high = map(schedule.problem.job.units, detail.window)
    what, alt = f"{revision} {detail.window}", "The chosen part, op by op."
    bars("detail", what, part_drawing, wish, within(wish.time, low, high), colours, alt)
    if detail.ops > MAX_NODES:
        st.caption(many_words(detail.ops, "draw a smaller box"))
    return detail


def bars(
    key: str,
    what: str,
    drawing: Drawing,
    wish: ScheduleView,
    shown: Range | None,
    colours: Palette,
    alt: str,
    *,
    ghost: bool = False,
) -> None:
    """Op by op, in a chart in which a click shows a micro-batch's path. what: names the schedule and its rows. shown:
    the part of the time. ghost: with the next iteration."""
    what += f" {sorted(wish.draw)} {wish.path} {colours.name} {sorted(drawing.out.items())}"
    part, turn = address.drawn_with(key, what, shown)
    figure = gantt(
        drawing,
        colours,
        shown=part,
        path=wish.path,
        critical="critical" in wish.draw,
        held="held" in wish.draw,
        next_iteration=ghost,
        revision=str(turn),
    )
    components.schedule_chart(figure, key, wish.time, alt, on_select=partial(clicked, key), selection_mode="points")


def _picture(
    fingerprint: str, names: str, theme: str, out: list[tuple[str, str]], _drawing: Drawing, _colours: Palette
) -> str:
    """Keyed by what it shows; drawn anew for each box it would take longer than the rest."""
    return charts.picture(_drawing, _colours)


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
    return address.read(BOX, accept, expected, "No box is drawn.")


def remember_box(time: TimeRange) -> None:
    """Shows all of it."""
    if box := drawn_box(PAD):
        show_all(time)
        address.put(BOX, ",".join(f"{value:.6g}" for value in box))


def _forget_box() -> None:
    address.put(BOX, None)


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
