"""What of a schedule is shown: workers, time, and what is drawn beside the bars. All of it is in the URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from app.ui.charts import rows
from planner.job import Worker
from planner.plan import Plan
from planner.schedule import Schedule

SHOW = {"all": "All workers", "failure": "Touched by the failure", "pipeline": "One pipeline", "stage": "One stage"}
DRAW = {"held": "Memory", "next": "Next iteration", "critical": "Critical path"}
DRAWN = ["held", "next"]
PATH = "path"
TIME = "time"
# More micro-batches than this are not listed; a click still shows any of them.
MAX_PATHS = 4096


@dataclass(frozen=True)
class Wish:
    """window: ticks; None: all of the iteration. path: (home pipeline, micro-batch)."""

    draw: frozenset[str]
    path: tuple[int, int] | None
    window: tuple[float, float] | None


def choose_workers(schedule: Schedule) -> list[Worker]:
    """The rows. The controls go where the caller is."""
    return choose_rows([schedule])(schedule)


def choose_rows(schedules: Sequence[Schedule]) -> Callable[[Schedule], list[Worker]]:
    """One choice for all of them; where one has no such pipeline or stage, all its workers are shown."""
    touched = {worker for schedule in schedules for worker in rows.touched_workers(schedule)}
    show = st.segmented_control(
        "Show",
        [key for key in SHOW if key != "failure" or touched],
        default="all",
        required=True,
        format_func=SHOW.__getitem__,
        key="show",
        bind="query-params",
        wrap=True,
    )
    number = 0
    if show in ("pipeline", "stage"):
        sizes = [getattr(schedule.problem.job, f"{show}s") for schedule in schedules]
        number = st.selectbox(show.capitalize(), range(max(sizes)), key=show, bind="query-params", width=120)

    def chosen(schedule: Schedule) -> list[Worker]:
        if show == "failure":
            found = [w for w in schedule.problem.job.workers() if w in touched]
        elif show == "all":
            found = []
        else:
            found = (rows.pipeline_workers if show == "pipeline" else rows.stage_workers)(schedule, number)
        return found or list(schedule.problem.job.workers())

    return chosen


def choose_view(plan: Plan, schedule: Schedule) -> Wish:
    """What is drawn, the path of which micro-batch, and which time."""
    draw = st.pills(
        "Draw",
        list(DRAW),
        selection_mode="multi",
        default=DRAWN,
        format_func=DRAW.__getitem__,
        key="draw",
        bind="query-params",
    )
    return Wish(frozenset(draw), _choose_path(plan), _choose_time(plan, schedule))


def clicked(chart: str) -> None:
    """A click on a bar of the chart of that key shows its micro-batch's path, a second one no path again."""
    state = st.session_state.get(chart)
    points = state["selection"]["points"] if state else []
    found = next((p["customdata"] for p in points if p.get("customdata")), None)
    name = found[0] if isinstance(found, list) else found.get("0") if isinstance(found, dict) else found
    st.session_state[PATH] = None if name == st.session_state.get(PATH) else name
    _remember_path()


def _choose_path(plan: Plan) -> tuple[int, int] | None:
    job = plan.job
    known = st.query_params.get(PATH)
    if PATH not in st.session_state:
        st.session_state[PATH] = known if known and _place(known, plan) else None
    elif st.session_state[PATH] and not _place(st.session_state[PATH], plan):
        st.session_state[PATH] = None  # that of another plan
    if job.pipelines * job.micro_batches <= MAX_PATHS:
        st.selectbox(
            "Path of micro-batch",
            [f"{p}.{m}" for p in range(job.pipelines) for m in range(job.micro_batches)],
            index=None,
            format_func=lambda name: "{1} of pipeline {0}".format(*name.split(".")),
            placeholder="Click a bar, or choose",
            key=PATH,
            on_change=_remember_path,
            width=200,
        )
    return _place(st.session_state[PATH], plan)


def _place(name: str | None, plan: Plan) -> tuple[int, int] | None:
    pipeline, dot, micro_batch = (name or "").partition(".")
    if not (dot and pipeline.isdecimal() and micro_batch.isdecimal()):
        return None
    place = int(pipeline), int(micro_batch)
    return place if place[0] < plan.job.pipelines and place[1] < plan.job.micro_batches else None


def _remember_path() -> None:
    _remember(PATH, st.session_state.get(PATH))


def _choose_time(plan: Plan, schedule: Schedule) -> tuple[float, float] | None:
    """`?time=5-12`, in the job's own unit."""
    job = schedule.problem.job
    end = float(job.units(schedule.end))
    # A slider of its own for each plan, whose iterations differ in length.
    key = f"time-{plan.fingerprint[:12]}"
    if key not in st.session_state:
        st.session_state[key] = _time_of_link(end) or (0.0, end)
    step = _step(end)
    low, high = st.slider(
        f"Time ({plan.job.time_unit})",
        0.0,
        end,
        step=step,
        format="%g",
        key=key,
        on_change=_remember_time,
        args=(key, end - step),
        width=240,
    )
    if (low <= 0 and high > end - step) or low >= high:
        return None
    return low * job.ticks_per_unit, high * job.ticks_per_unit


def _time_of_link(end: float) -> tuple[float, float] | None:
    low, dash, high = st.query_params.get(TIME, "").partition("-")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    return found if dash and 0 <= found[0] < found[1] <= end else None


def _remember_time(key: str, almost: float) -> None:
    low, high = st.session_state[key]
    _remember(TIME, None if low <= 0 and high > almost else f"{low:g}-{high:g}")


def _remember(name: str, value: str | None) -> None:
    if value is None:
        st.query_params.pop(name, None)
    else:
        st.query_params[name] = value


def _step(end: float) -> float:
    """A hundredth of the iteration or so, whole where times are."""
    rough = end / 200
    return max(1.0, float(round(rough))) if end >= 20 else rough
