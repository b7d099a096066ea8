"""What of a schedule is shown: workers, time, and what is drawn beside the bars. All of it is in the URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from openrecycle.app.ui import text, url_state
from openrecycle.app.ui.time_range import TimeRange, choose_time
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.drawing import pipeline_workers, stage_workers, touched_workers
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

SHOW = {"all": "All workers", "failure": "Touched by the failure", "pipeline": "One pipeline", "stage": "One stage"}
DRAW = {"held": "Memory", "next": "Next iteration", "critical": "Critical path"}
DRAWN = ["held", "next"]
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
    show = url_state.segmented_control(
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
        number = url_state.selectbox(show.capitalize(), range(max(sizes)), key=show, width=120)

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
    draw = url_state.pills("Draw", list(DRAW), default=DRAWN, format_func=DRAW.__getitem__, key="draw")
    path = _choose_path(plan)
    end = float(schedule.problem.job.units(schedule.end))
    return ScheduleView(frozenset(draw), path, choose_time(plan.fingerprint[:12], end, text.plural(plan.job.time_unit)))


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
    last = f"{job.pipelines - 1}.{job.micro_batches - 1}"
    expected = f"a pipeline and its micro-batch, from 0.0 to {last}"
    known = url_state.read(PATH, lambda name: name if _place(name, plan) else None, expected, "No path is shown.")
    if PATH not in st.session_state:
        st.session_state[PATH] = known
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
    url_state.say(PATH)
    return _place(st.session_state[PATH], plan)


def _place(name: str | None, plan: Plan) -> tuple[int, int] | None:
    pipeline, dot, micro_batch = (name or "").partition(".")
    if not (dot and pipeline.isdecimal() and micro_batch.isdecimal()):
        return None
    place = int(pipeline), int(micro_batch)
    return place if place[0] < plan.job.pipelines and place[1] < plan.job.micro_batches else None


def _remember_path() -> None:
    url_state.put(PATH, st.session_state.get(PATH) or None)
