"""The Schedule page: a plan, or an iteration as it ran, as a Gantt chart, with its figures and the same facts in
tables.

The URL has which workers and which time are shown, and what is drawn beside the bars; the Compare page uses the same
controls. A schedule with too many ops for bars is shown as a picture of everything, and bars for a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.components.v2.types import ComponentRenderer

from openrecycle.app.charts import gantt as charts
from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import MAX_BARS, MAX_NODES, Detail, gantt
from openrecycle.app.charts.theme import Palette
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.sources import OfJob, PlanToMake, Source, job_of, parse_reference
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, components, facts, tables
from openrecycle.app.ui.address import Range, TimeRange, choose_time, within
from openrecycle.app.ui.components import open_job, schedule_of
from openrecycle.app.ui.facts import critical_words, many_words
from openrecycle.app.ui.plan_pickers import export_button, open_file, pick_plan, say_measured, show_instead
from openrecycle.app.ui.tables import Table, operations_table, workers_table
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Technique, Worker
from openrecycle.planner.plans.drawing import Drawing, rows_words
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

# -- what of a schedule is shown ----------------------------------------------------------------

SHOW = {"all": "All workers", "failure": "Touched by the failure", "pipeline": "One pipeline", "stage": "One stage"}
DRAW = {"held": "Memory", "next": "Next iteration", "critical": "Critical path"}
DRAWN = ["held", "next"]
PILLS = partial(st.pills, selection_mode="multi")
PATH = "path"
# More micro-batches than this are not listed; a click still shows any of them.
MAX_PATHS = 4096


@dataclass(frozen=True)
class ScheduleView:
    """What the user wants to see of a schedule. path: of a micro-batch, by (home pipeline, micro-batch)."""

    draw: frozenset[str]
    path: tuple[int, int] | None
    time: TimeRange


def choose_rows(schedules: Sequence[Schedule]) -> Callable[[Schedule], list[Worker]]:
    """Draws one choice of rows for several schedules. If one has no such pipeline or stage, all its workers are
    shown."""
    # The workers that a plan goes without, and those that run micro-batches of other pipelines.
    touched = {worker for schedule in schedules for worker in schedule.helpers | schedule.problem.failed}
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
            found = [w for w in schedule.problem.job.workers() if getattr(w, show) == number]
        return found or list(schedule.problem.job.workers())

    return chosen


def choose_view(plan: Plan, schedule: Schedule) -> ScheduleView:
    """Draws the choice of extras, of a micro-batch's path, and of the time."""
    draw = address.several(PILLS, "Draw", list(DRAW), default=DRAWN, format_func=DRAW.__getitem__, key="draw")
    path = _choose_path(plan)
    end = float(schedule.problem.job.units(schedule.end))
    return ScheduleView(frozenset(draw), path, choose_time(plan.fingerprint[:12], end, text.plural(plan.job.time_unit)))


def clicked(chart: str) -> None:
    """Handles a click on a bar of the chart of that key: it shows the path of its micro-batch; a second click removes
    that."""
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
    plan: Plan,
    schedule: Schedule,
    workers: list[Worker],
    wish: ScheduleView,
    colours: Palette,
    out: Mapping[str, str],
) -> Detail:
    """Draws the picture of a schedule and the bars of a part, which a box on the picture or the fields choose. Returns
    that part. out: why the job goes without a worker, if known.

    Without a box, the part begins where the chosen time begins. In either case only the chosen time of it is shown.
    """
    revision = f"{plan.fingerprint}-{len(workers)}"
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
        plan.fingerprint, ",".join(names), colours.name, sorted(out.items()), drawing, colours
    )
    with st.container(key="overview"):
        alt = f"Overview of {len(workers):,} workers over one iteration."
        st.html(charts.overview(drawing, drawn, alt))
        part = charts.box_of(drawing, detail)
        box_select(width, len(workers), part, key=PAD, on_box=partial(remember_box, wish.time))
    st.caption(rows_words(drawing))
    components.heading("Detail", f"{detail.ops:,} ops" + (" of a part; draw a box for another" if detail.cut else ""))
    part_drawing = Drawing.of(schedule, detail.workers, out, detail.window, plan.metrics.fault_free)
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
    """Draws a schedule op by op, in a chart in which a click shows a micro-batch's path. what: names the schedule and
    its rows. shown: the part of the time. ghost: with the next iteration."""
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
    """Makes the picture. Streamlit caches it by its content, since to make it for each box would take longer than all
    else."""
    return charts.picture(_drawing, _colours)


def _box(rows: int, width: float) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Reads `?box=20,60,100,140` from the address: the begin and end of the time, then of the rows."""

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
    """For a callback: writes the drawn box into the address, and shows all of its time."""
    if box := drawn_box(PAD):
        address.choose_range(time.name, None)
        address.put(BOX, ",".join(f"{value:.6g}" for value in box))


def _forget_box() -> None:
    address.put(BOX, None)


_SCRIPT = Path(__file__).parent / "assets" / "box_select.js"
_HTML = '<div class="or-pad" aria-hidden="true"><i class="or-part"></i><i class="or-drawn" hidden></i></div>'

Box = tuple[float, float, float, float]


def box_select(width: float, rows: int, part: Box, *, key: str, on_box: Callable[[], None]) -> None:
    """Lets users draw boxes on the picture in the same container, which this covers (console.css). Boxes are
    (x0, x1, y0, y1): x in the unit of `width`, y in row numbers, each from the lower edge to the upper one.

    part: the box that is outlined. on_box: called once for each new box; `drawn_box` then returns it.
    """
    _component()(key=key, data={"width": width, "rows": rows, "part": part}, height="stretch", on_box_change=on_box)


def drawn_box(key: str) -> Box | None:
    """Returns the box that has just been drawn; None for anything invalid from the browser."""
    state = st.session_state.get(key)
    box = state.get("box") if state else None
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(edge, int | float) for edge in box):
        return None
    return box[0], box[1], box[2], box[3]


@cache
def _component() -> ComponentRenderer:
    return st.components.v2.component("box-select", html=_HTML, js=_SCRIPT.read_text(), isolate_styles=False)


# -- schedule -----------------------------------------------------------------------------------

FEW = 24


def page() -> None:
    colours = components.use_style()
    console = get_console()
    if _outlives_its_job(console):
        address.put(address.JOB, None)
    # Without a job there may still be plans in the library, or one that a link names.
    jobless = not console.queries.list_jobs() and bool(console.plans.library.saved() or "plan" in st.query_params)
    opened = None if jobless else open_job(console, pace=False, title=partial(_title, console))
    if opened is None and not jobless:
        if not console.queries.list_jobs():
            open_file(console, partial(show_instead, None))
        return
    job = opened[0] if opened else None
    if job is None:
        st.html('<h1 class="or-title">Schedule</h1>')
    else:
        st.fragment(_follow, run_every=2)(console, job.job_id, _run_of(job))
    notes = st.container()
    filters = st.container(horizontal=True, vertical_alignment="bottom", key="filters")
    with filters:
        source = pick_plan(console, job.job_id if job else None, notes)
        open_file(console, partial(show_instead, None))
    if job is not None and job.plan_run is None:
        components.quiet(
            "No plan is in force yet: the first one is rolled out when all workers have registered. "
            f"Made ahead so far: {job.plans.ahead.made} of {job.plans.ahead.wanted} plans."
        )
    if source is None:
        return
    say_measured(console, source, show_instead)
    plan = source.plan
    schedule = schedule_of(plan)
    with filters:
        workers = choose_rows([schedule])(schedule)
    with st.container(horizontal=True, vertical_alignment="bottom", key="drawn"):
        wish = choose_view(plan, schedule)
    components.cards(facts.plan_cards(plan, schedule))
    detail = _chart(source, schedule, workers, wish, colours)
    _tables(console, source, schedule, workers, detail)


def _outlives_its_job(console: ConsoleService) -> bool:
    """Says whether the address names an existing plan and a job that is gone."""
    job_id, said = st.query_params.get(address.JOB), st.query_params.get("plan", "")
    if job_id is None or ":" not in said or any(job.job_id == job_id for job in console.queries.list_jobs()):
        return False
    try:
        reference = parse_reference(said)
        return job_of(reference) is None and console.sources.find(reference) is not None
    except (InputError, ConsoleError):
        return False


def _title(console: ConsoleService, job: LiveJob) -> bool:
    """For `open_job`: draws the title of the plan that the address names, if that is not the job's."""
    said = st.query_params.get("plan", "")
    try:
        reference = parse_reference(said) if ":" in said else None
        found = console.sources.find(reference) if reference is not None and job_of(reference) != job.job_id else None
    except (InputError, ConsoleError):
        return False  # the page says why, and shows the job's
    if not isinstance(found, Source):
        return False
    components.plan_title(found.name, found.plan, f"not a plan of {job.spec.name}, the job chosen here")
    return True


def _workers_table(fingerprint: str, names: str, out: dict[str, str], _schedule: Schedule) -> Table:
    return workers_table(_schedule, [Worker.parse(name) for name in names.split(",")], out)


def _follow(console: ConsoleService, job_id: str, shown: tuple[str, str] | None) -> None:
    """Runs the page again when the job runs another plan."""
    try:
        now = _run_of(console.jobs.find(job_id))
    except ConsoleError:
        return
    if now != shown:
        st.rerun()


def _run_of(job: LiveJob) -> tuple[str, str] | None:
    """Returns the plan that the job runs now, and how it uses it, in words."""
    run = job.plan_run
    return (run.fingerprint, run.words) if run else None


def _chart(
    source: Source, schedule: Schedule, workers: list[Worker], wish: ScheduleView, colours: Palette
) -> Detail | None:
    """Draws the chart. Returns the part that is shown op by op; None: all of it is."""
    plan, out = source.plan, source.out
    ops = sum(schedule.op_counts.get(w, 0) for w in workers)
    if ops > MAX_BARS:
        return large_chart(plan, schedule, workers, wish, colours, out)
    drawing = Drawing.of(schedule, workers, out, fault_free=plan.metrics.fault_free)
    ghost = "next" in wish.draw
    components.legend_of([drawing], ghost=ghost)
    what = f"{plan.fingerprint} {','.join(map(str, workers))}"
    bars("gantt", what, drawing, wish, wish.time.shown, colours, facts.schedule_words(plan, schedule), ghost=ghost)
    if ops > MAX_NODES:
        st.caption(many_words(ops, "show fewer workers"))
    else:
        st.caption(f"{facts.reading_help(plan)} Click a bar to see its micro-batch's path through all stages.")
    if "critical" in wish.draw:
        st.caption(critical_words(schedule))
    return None


def _comparison(source: Source) -> dict[str, str | list[str]]:
    """Returns the query of a link to Compare: a measured iteration beside the plan in force, or a plan beside
    fault-free 1F1B."""
    query: dict[str, str | list[str]] = {"plans": [str(source.reference)]}
    if source.job_id is not None:
        in_force, plain = OfJob(source.job_id), PlanToMake(Technique.FAULT_FREE, "1f1b", source.job_id)
        other = in_force if source.measured or source.reference == plain else plain
        query = {"plans": [str(other), str(source.reference)], "job": source.job_id}
    return query


def _tables(
    console: ConsoleService,
    source: Source,
    schedule: Schedule,
    workers: list[Worker],
    detail: Detail | None,
) -> None:
    plan = source.plan
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        components.heading("The same in figures", f"times in {plan.job.time_unit}")
        with st.container(horizontal=True, width="content", vertical_alignment="center"):
            st.page_link(
                address.page("compare"),
                label="Compare with others",
                icon=":material/compare_arrows:",
                query_params=_comparison(source),
            )
            export_button(console.sources.export_of(source))
    tabs = ["Workers", "Ops of the detail" if detail else "Ops"]
    by_worker, by_op = address.tabs(tabs, key="figures")
    with by_worker:
        table = st.cache_data(_workers_table, max_entries=32, show_spinner=False)(
            plan.fingerprint, ",".join(map(str, workers)), dict(source.out), schedule
        )
        # A failed worker has no figures. A table of few workers is shown without scrolling.
        height = "content" if len(workers) <= FEW else "auto"
        tables.show(table, "workers-table", "Figures by worker", placeholder="–", height=height)
    with by_op:
        ops = operations_table(schedule, *((detail.workers, detail.window) if detail else (workers, None)))
        tables.show(ops, "ops-table", "Ops in order of start")
