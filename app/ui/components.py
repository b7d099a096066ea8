"""Parts that several pages share: pieces of HTML (cards, the coordinator's sentence, recovery, legends), the head of a
page with the job that it shows (`?job=` of the URL, else the newest one that runs), and charts. All text from outside
is escaped here.

A schedule's figure is first shown as a picture (`chart_placeholder`), since the browser takes a second or more to load
Plotly and draw with it. The picture has the bars, their numbers, the memory held and the words between and beside the
rows, each where Plotly will put it. It lacks hatches, the numbers of the time axis, and everything that reacts to the
pointer. The style sheet shows it in the chart's place until the chart is there (console.css).
"""

from __future__ import annotations

import base64
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape, unescape
from itertools import groupby
from typing import Any, NamedTuple

import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.charts import text
from openrecycle.app.charts.progress import LOOKS
from openrecycle.app.charts.theme import Palette, palette
from openrecycle.app.charts.vega import LiveChart
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.console.view import JobView, RecoveryView, WorkerView
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import Condition, JobSummary
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import access, address
from openrecycle.app.ui.address import BEGAN_WITH, FOLLOWED_CONFIG, ITERATIONS, TimeRange, follow
from openrecycle.app.ui.facts import OVER, Card, is_old, op_time_words
from openrecycle.planner.export.picture import xml_text
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.drawing import Drawing
from openrecycle.planner.plans.drawing import legend as op_keys
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

# -- a schedule's figure as a picture, until the browser has drawn it ---------------------------

# The plot area's width, in the units of the pictures' paths; in pixels it is the browser's.
WIDTH = 10_000
# The width that a bar needs for its number: 20 pixels in a chart of 1,000 pixels.
LEAST_FOR_NUMBER = 200
# Half the height of a line, and the distance from the chart's bottom to the middle of its title, in pixels.
HALF_LINE, TITLE = 9, 8
_TAG = re.compile(r"(<[^>]*>)")
_DASHES = {"dot": ' stroke-dasharray="2 3"', "dash": ' stroke-dasharray="6 4"'}
_BOLD = {"<b>": '<tspan font-weight="600">', "</b>": "</tspan>"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Area:
    """Converts a figure's values to positions. left, right: the ends of its time axis. top, height: of the plot area,
    in pixels from the figure's top."""

    layout: Document
    left: float
    right: float
    top: float
    height: float

    @classmethod
    def of(cls, layout: Document) -> Area:
        """Makes the area of a layout, which must have a time axis with a range, a height and margins."""
        left, right = layout["xaxis"]["range"]
        margin = layout["margin"]
        return cls(layout, left, right, margin["t"], layout["height"] - margin["t"] - margin["b"])

    def x(self, value: float) -> int:
        """Converts a time to parts of WIDTH."""
        return round(WIDTH * (value - self.left) / (self.right - self.left))

    def y(self, value: float, axis: str) -> float:
        """Converts a position on an axis to pixels. axis: a row axis' name; with ` domain`, the value is a share of
        that axis' height. With `paper` it is a share of the whole plot area's."""
        low, high, share = 0.0, 1.0, value
        if axis != "paper":
            name, _, domain = axis.partition(" ")
            of = self.layout[name.replace("y", "yaxis")]
            low, high = of.get("domain", (0.0, 1.0))
            if not domain:
                bottom, top = of["range"]
                share = (value - bottom) / (top - bottom)
        return self.top + (1 - low - share * (high - low)) * self.height


def chart_placeholder(figure: go.Figure) -> str:
    """Returns HTML of a picture of a figure with bars in rows; "": it has no bars."""
    whole = figure.to_dict()
    traces, layout = whole["data"], whole["layout"]
    if not any(trace["type"] == "bar" for trace in traces):
        return ""
    area, margin, height, title = Area.of(layout), layout["margin"], layout["height"], layout["xaxis"]["title"]
    marks = (path for trace in traces for path in (_bars if trace["type"] == "bar" else _curve)(area, trace))
    drawn = "".join([*_failed(area), *marks, *_lines(area)])
    stretched = f'<svg width="100%" height="{height}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">'
    below = _text("50%", height - TITLE, title["text"], title["font"])
    inside = f"{stretched}{drawn}</svg>" + "".join([*_numbers(area, traces), *_notes(area), below])
    pictures = (
        ("left", _svg("".join(_names(area, margin["l"] - 3)), "end")),
        ("middle", _svg(inside, "middle")),
        ("right", _svg("".join(_notes(area, beside=True)), "start")),
    )
    images = "".join(f'<img class="or-first-{where}" alt="" src="{data}">' for where, data in pictures)
    return (
        '<div class="or-first" aria-hidden="true" '
        f'style="height:{height}px;--left:{margin["l"]}px;--right:{margin["r"]}px">{images}</div>'
    )


def _svg(inside: str, anchor: str) -> str:
    """Returns an SVG as a data URL."""
    whole = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="100%" font-family="Source Sans,system-ui,'
        f'sans-serif" font-size="12" text-anchor="{anchor}" dominant-baseline="central">{inside}</svg>'
    )
    return "data:image/svg+xml;base64," + base64.b64encode(whole.encode()).decode()


def _bars(area: Area, trace: Document) -> Iterator[str]:
    """Yields a path for each colour of a trace's bars."""
    fills, line = trace["marker"]["color"], trace["marker"]["line"]
    look = f' stroke="{line["color"]}" stroke-width="{line["width"]}"' if line["width"] else ""
    look += f' opacity="{trace["opacity"]}"' if trace.get("opacity") is not None else ""
    colours = [fills] * len(trace["x"]) if isinstance(fills, str) else fills
    half, axis = trace["width"] / 2, trace.get("yaxis", "y")
    edges = {row: [f"{area.y(row + side, axis):.1f}" for side in (-half, half)] for row in set(trace["y"])}
    bars = sorted(zip(colours, trace["base"], trace["x"], trace["y"], strict=True))
    for fill, same in groupby(bars, key=lambda bar: bar[0]):
        if steps := "".join(_bar(area, base, length, *edges[row]) for _, base, length, row in same):
            yield f'<path vector-effect="non-scaling-stroke" fill="{_paint(fill)}"{look} d="{steps}"/>'


def _bar(area: Area, base: float, length: float, top: str, bottom: str) -> str:
    """Returns one bar of a path; "" if it lies outside of the area."""
    left, right = area.x(base), area.x(base + length)
    return "" if right < 0 or left > WIDTH else f"M{left} {top}h{right - left}V{bottom}h{left - right}z"


def _curve(area: Area, trace: Document) -> Iterator[str]:
    """Yields the path of an area or a line, broken where there is no value."""
    line = trace.get("line") or {}
    if not trace.get("fill") and not line.get("width"):
        return
    rows: dict[float, str] = {}
    steps, pen, axis = [], "M", trace.get("yaxis", "y")
    for x, y in zip(trace["x"], trace["y"], strict=True):
        if x is None:
            pen = "M"
            continue
        if y not in rows:
            rows[y] = f"{area.y(y, axis):.1f}"
        steps.append(f"{pen}{area.x(x)} {rows[y]}")
        pen = "L"
    look = f'fill="{_paint(trace["fillcolor"])}"' if trace.get("fill") else _stroke(line)
    look += f' opacity="{trace["opacity"]}"' if trace.get("opacity") is not None else ""
    if steps:
        yield f'<path {look} d="{"".join(steps)}"/>'


def _stroke(line: Document) -> str:
    dash = _DASHES.get(line.get("dash", ""), "")
    look = f'stroke="{line["color"]}" stroke-width="{line["width"]}"{dash}'
    return f'fill="none" vector-effect="non-scaling-stroke" {look}'


def _paint(colour: str) -> str:
    return "none" if colour == "rgba(0,0,0,0)" else colour


def _failed(area: Area) -> Iterator[str]:
    """Yields the tints behind the rows of workers that are out."""
    for shape in area.layout.get("shapes", ()):
        if shape["type"] == "rect":
            top, bottom = sorted(area.y(value, shape["yref"]) for value in (shape["y0"], shape["y1"]))
            yield f'<path fill="{shape["fillcolor"]}" d="M0 {top:.1f}h{WIDTH}V{bottom:.1f}H0z"/>'


def _lines(area: Area) -> Iterator[str]:
    for shape in area.layout.get("shapes", ()):
        if shape["type"] == "line":
            x, ends = area.x(shape["x0"]), [area.y(value, shape["yref"]) for value in (shape["y0"], shape["y1"])]
            yield f'<path {_stroke(shape["line"])} d="M{x} {ends[0]:.1f}V{ends[1]:.1f}"/>'


def _numbers(area: Area, traces: list[Document]) -> Iterator[str]:
    """Yields the numbers in the bars that are wide enough."""
    least = LEAST_FOR_NUMBER * (area.right - area.left) / WIDTH
    for trace in traces:
        if trace.get("text") is None:
            continue
        font, axis = {"color": trace["textfont"]["color"], "opacity": trace.get("opacity")}, trace.get("yaxis", "y")
        for words, base, length, row in zip(trace["text"], trace["base"], trace["x"], trace["y"], strict=True):
            middle = area.x(base + length / 2)
            if length >= least and 0 <= middle <= WIDTH:
                yield _text(f"{middle / WIDTH:.2%}", area.y(row, axis), words, font)


def _notes(area: Area, *, beside: bool = False) -> Iterator[str]:
    """Yields the words between the rows, or, if `beside`, those at the right of them."""
    for note in area.layout.get("annotations", ()):
        x, from_left = note["x"], note.get("xanchor") == "left"
        across = x if note.get("xref", "x") in ("paper", "x domain") else area.x(x) / WIDTH
        if beside != (from_left and across == 1) or not 0 <= across <= 1:
            continue
        y = area.y(note["y"], note["yref"])
        if note.get("yanchor") == "bottom":
            y -= HALF_LINE + note.get("yshift", 0)
        at = str(note.get("xshift", 0)) if beside else f"{across:.2%}"
        yield _text(at, y, note["text"], note["font"], "" if beside else note.get("xanchor", ""))


def _names(area: Area, right: float) -> Iterator[str]:
    """Yields the names of the rows."""
    for name, axis in area.layout.items():
        if name.startswith("yaxis"):
            for row, words in zip(axis["tickvals"], axis["ticktext"], strict=True):
                yield _text(str(right), area.y(row, name.replace("axis", "")), words, axis["tickfont"])


def _text(x: str, y: float, words: str, font: Document, anchor: str = "") -> str:
    """Returns a text element. words: in Plotly's form, with tags."""
    size = f' font-size="{font["size"]}"' if "size" in font else ""
    faint = "" if font.get("opacity") is None else f' opacity="{font["opacity"]}"'
    side = {"left": ' text-anchor="start"', "right": ' text-anchor="end"'}.get(anchor, "")
    parts = (_BOLD.get(part, "") if _TAG.fullmatch(part) else xml_text(unescape(part)) for part in _TAG.split(words))
    return f'<text x="{x}" y="{y:.1f}"{size}{side}{faint} fill="{font["color"]}">{"".join(parts)}</text>'


# -- the console's own pieces of HTML -----------------------------------------------------------

JOB_TONE = {
    Condition.STARTING: "wait",
    Condition.RUNNING: "good",
    Condition.SILENT: "warn",
    Condition.DEGRADED: "warn",
    Condition.PAUSING: "paused",
    Condition.PAUSED: "paused",
    Condition.WAITING: "warn",
    Condition.RECOVERING: "warn",
    Condition.HALTED: "bad",
    Condition.FINISHED: "done",
    Condition.STOPPED: "done",
}


# The index of the step of a recovery in which it waited for a person.
PEOPLE = 4


def use_style() -> Palette:
    """Puts the theme's colours on the page for its style sheet, and returns the palette."""
    colours = palette(st.context.theme.type)
    names = [f.name for f in fields(Palette) if f.type == "str" and f.name != "name"]
    variables = "".join(f"--or-{n.replace('_', '-')}:{getattr(colours, n)};" for n in names)
    variables += "".join(f"--or-op-{k}:{v};" for k, v in colours.ops.items())
    variables += f"--or-failed-tint:{colours.failed_tint};"
    st.html(f"<style>:root{{{variables}}}</style>")
    return colours


def guard(page: Callable[[], None]) -> None:
    """Runs a page. If the console refuses something, or can't ask its database, the page shows a sentence; after the
    latter the page runs again once the database answers."""
    try:
        page()
    except (ConsoleError, PlannerError) as error:
        access.say_error(str(error))
        if isinstance(error, ConsoleError) and error.status == 503:
            st.fragment(_until_ready, run_every=2)()
    access.who(get_console())


def _until_ready() -> None:
    """Runs the page again once the database answers."""
    try:
        get_console().ready()
    except ConsoleError:
        st.caption("The page comes back by itself.")
        return
    st.rerun()


def cards(items: list[Card], fresh: float | None = None) -> None:
    """Draws cards. fresh: when their data was read, in POSIX seconds, on a page that refreshes itself; the style sheet
    tells the viewer when no newer data comes."""
    mark = "" if fresh is None else f'<i class="or-fresh" data-at="{fresh:.1f}"></i>'
    st.html('<div class="or-cards">' + "".join(map(_card, items)) + mark + "</div>")


def _card(card: Card) -> str:
    of = f' <span class="or-of">{escape(card.of)}</span>' if card.of else ""
    note, tone = escape(card.note), card.tone and f"or-{card.tone}"
    return (
        f'<div class="or-card"><div class="or-label">{escape(card.label)}</div>'
        f'<div class="or-value">{escape(card.value)}{of}</div>'
        f'<div class="or-note {tone}" title="{note}">{note}</div></div>'
    )


def tone_of(view: JobView) -> str:
    """Returns the tone of a job's state. While the database takes nothing, a job that goes on has a warning tone, since
    a worker that dies would halt it; so has one whose data is old."""
    tone = JOB_TONE[view.condition]
    doubtful = (view.unstorable and tone in ("good", "paused", "wait")) or (tone == "good" and is_old(view))
    return "warn" if doubtful else tone


def sentence(view: JobView) -> None:
    """Draws the sentence about what the coordinator does or waits for."""
    st.html(
        f'<div class="or-sentence or-tone-{tone_of(view)}" role="status" aria-live="polite">'
        f'<span class="or-state">{escape(view.condition.value)}</span>'
        f"<span class='or-says'>{escape(view.sentence) or '&nbsp;'}</span></div>"
    )


def legend(workers: Iterable[WorkerView]) -> None:
    """Draws a legend with one entry per state that occurs, with its shape, colour and count."""
    counts = Counter(worker.state for worker in workers)
    entries = "".join(
        f'<span class="or-key"><i class="or-shape or-look-{state.value}"></i>{escape(words)} '
        f"<b>{counts[state]:,}</b></span>"
        for state, (words, _, _) in LOOKS.items()
        if counts[state]
    )
    st.html(f'<div class="or-legend or-states">{entries}</div>')


def recovery(latest: RecoveryView | None, zone: str | None) -> None:
    """Draws the latest recovery to scale, step by step; the steps add up to the whole."""
    if latest is None:
        words = "None so far. It is measured once training goes on after a failure."
        st.html(f'<div class="or-quiet or-recovery">{words}</div>')
        return
    whole = max(sum(took for _, took in latest.steps), 1e-9)
    shown = [(i, words, took) for i, (words, took) in enumerate(latest.steps) if i < PEOPLE or took > 0]
    bars = [f'<i class="or-step-{i}" style="width:{100 * took / whole:.2f}%"></i>' for i, _, took in shown]
    items = "".join(
        f'<li><i class="or-dot or-step-{i}"></i><b>{text.milliseconds(took)}</b><span>{escape(words)}</span></li>'
        for i, words, took in shown
    )
    begin = "its death" if latest.death_known else "when its death was seen"
    st.html(
        f'<div class="or-recovery"><p><b>{escape(latest.worker)}</b> · generation {latest.generation} · '
        f"{text.moment(latest.at, zone, time.time())} · <b>{text.milliseconds(whole)}</b> from {begin} to training "
        f'again</p><div class="or-bar" aria-hidden="true">{"".join(bars)}</div><ol>{items}</ol></div>'
    )


# Up to this many workers, each is a button; larger grids are drawn as a heat-map.
MAX_TILES = 64


class Tile(NamedTuple):
    """A worker as a button. look: the style of its state. words: below its name. tip: shown on hover, in Markdown."""

    name: str
    look: str
    words: str
    tip: str


def tiles(
    rows: Iterable[Sequence[Tile]],
    place: str,
    on_click: Callable[[str], None],
    held: Sequence[int] = (),
    coming: Sequence[int] = (),
) -> None:
    """Draws a grid of workers, with a row per pipeline. place: its key. on_click: called back with the worker's name.
    held, coming: as in `_grid_columns`."""
    with st.container(key=place, gap=None):
        for pipeline, row in enumerate(rows):
            if not pipeline:
                _grid_columns(len(row), held, coming)
            with st.container(key=f"grid-row-{pipeline}", horizontal=True):
                words = '<span class="or-long">pipeline&nbsp;</span><span class="or-short">P</span>'
                st.html(f'<div class="or-rowhead">{words}{pipeline}</div>')
                for name, look, words, tip in row:
                    with st.container(key=f"cell-{look}-{name}"):
                        label = f"**{name}** :small[{words}]"
                        st.button(label, f"worker-{name}", help=tip, width="stretch", on_click=on_click, args=(name,))


def heading(words: str, aside: str = "") -> None:
    extra = f' <span class="or-aside">{escape(aside)}</span>' if aside else ""
    st.html(f'<h2 class="or-heading">{escape(words)}{extra}</h2>')


def quiet(words: str) -> None:
    st.html(f'<div class="or-quiet">{escape(words)}</div>')


def op_legend(kinds: Iterable[str], *, rerouted: bool, ghost: bool) -> None:
    """Draws a legend for the bars of a schedule: the op kinds that occur, and the marks."""
    keys = op_keys(kinds, rerouted=rerouted, ghost=ghost)
    shapes = "".join(
        f'<span class="or-key"><i class="or-shape or-op-{key.look}"></i>{escape(key.words)}</span>' for key in keys
    )
    st.html(f'<div class="or-legend">{shapes}</div>')


def legend_of(drawings: Sequence[Drawing], *, ghost: bool) -> None:
    """Draws one legend for several drawings."""
    looks = {(op.kind, op.rerouted) for drawing in drawings for op in drawing.ops}
    op_legend({kind for kind, _ in looks}, rerouted=any(moved for _, moved in looks), ghost=ghost)


def job_title(spec: JobSpec, *, pace: bool = True) -> None:
    """Draws the job's name, its grid and technique, and whether its op times are paced."""
    about = _about(spec, spec.technique, spec.memory)
    if spec.profile is not None and spec.profile.layers:
        about += f" · {text.count(len(spec.profile.layers), 'layer')}"
    paced, times = "", op_time_words(spec)
    if spec.profile is not None and times and not spec.paced:
        about += f" · op times by stage: {times}"
    if spec.paced and pace:
        paced = (
            f"<br>Planned with {escape(times)}. Paced: F, I and W are stretched to these times, as an accelerator "
            "would take them. The computation inside is real."
        )
    st.html(f'<h1 class="or-title">{escape(spec.name)}</h1><div class="or-about">{escape(about)}{paced}</div>')


def _about(grid: text.Grid, technique: str, memory: str) -> str:
    limit = "by bytes" if memory == "bytes" else memory
    return f"{text.grid_words(grid)} · {technique} · memory limit {limit}"


def plan_title(name: str, plan: Plan, aside: str) -> None:
    """Draws the name of a plan that is not the job's, what it is for, and (`aside`) how it is related to the job."""
    about = f"{_about(plan.job, plan.technique.value, plan.memory)} · {aside}"
    st.html(f'<h1 class="or-title">{escape(name)}</h1><div class="or-about">{escape(about)}</div>')


def until_drawn(figure: go.Figure) -> None:
    """Draws a schedule's picture, which is shown until the browser has drawn the chart. The chart must come next in the
    same container."""
    if picture := chart_placeholder(figure):
        st.html(picture)


def live_chart(chart: LiveChart, key: str, alt: str, **look: Any) -> None:
    """Draws a Vega-Lite chart. look: passed on to Streamlit."""
    st.vega_lite_chart(None, chart.whole(), theme=None, key=key, alt=alt, **look)


def schedule_chart(
    figure: go.Figure, key: str, time: TimeRange, alt: str, *, place: str = "wide-chart", **look: Any
) -> None:
    """Draws a schedule's chart as wide as the page; moving it chooses the time. look: passed on to Streamlit."""
    with st.container(key=place, gap=None):
        until_drawn(figure)
        st.plotly_chart(figure, theme=None, key=key, config=FOLLOWED_CONFIG, alt=alt, **look)
        follow(key, time)


def _grid_columns(stages: int, held: Sequence[int] = (), coming: Sequence[int] = ()) -> None:
    """Draws the heads of the worker grid's columns, and tells the style sheet how many there are. held: layers per
    stage, if layers can move; coming: those that the stages will have once layers have moved."""
    heads = ""
    for s in range(stages):
        below = ""
        if held:
            now, then = text.layers(held, s), text.layers(coming or held, s)
            moves = f' <b class="or-coming">→&nbsp;{then}</b>' if then != now else ""
            below = f'<small><span class="or-long">layers </span><span class="or-short">L</span>{now}{moves}</small>'
        name = f'<span class="or-long">stage </span><span class="or-short">S</span>{s}'
        heads += f'<span class="or-colhead">{name}{below}</span>'
    st.html(f'<style>:root{{--or-stages:{stages}}}</style><div class="or-colheads"><span></span>{heads}</div>')


def no_job(address: str) -> None:
    """Draws what this console is for, and how to start a job."""
    st.html('<h1 class="or-title">No training job yet</h1>')
    st.markdown(
        "This console plans, watches and repairs pipeline-parallel training jobs. "
        "A job appears here as soon as its launcher registers it. In a second terminal, start 12 real worker "
        "processes, 3 pipelines of 4 stages, that train a small GPT and may be killed from this page:"
    )
    st.code(
        f"openrecycle train --console {address} --demo --pipelines 3 --stages 4 --micro-batches 6 "
        "--iterations 1000 --pace F=40ms,I=40ms,W=40ms",
        language=None,
        wrap_lines=True,
    )
    if get_console().security.access.guarded:
        st.markdown("This console asks for a token: the launcher finds it in `OPENRECYCLE_TOKEN`.")
    st.markdown("Leave out `--pace` to run as fast as the machine can, and `--demo` to forbid kills from here.")
    st.markdown(
        "No job is needed to [plan for failures](planner), to "
        "[simulate what failures cost](simulate), or to read [how it works](help)."
    )


def schedule_of(plan: Plan) -> Schedule:
    """Returns the plan's schedule, which is made once and shared by all viewers."""
    return st.cache_resource(_schedule, max_entries=16, show_spinner="Reading the plan …")(plan.fingerprint, plan)  # type: ignore[no-any-return]


def _schedule(fingerprint: str, _plan: Plan) -> Schedule:
    """Makes the schedule. Streamlit caches it by the fingerprint; the underscore keeps it from hashing the plan."""
    return _plan.schedule()


# -- the head of a page -------------------------------------------------------------------------

PICKER = "job-picker"


def open_job(
    console: ConsoleService, *, pace: bool = True, title: Callable[[LiveJob], bool] = lambda job: False
) -> tuple[LiveJob, DeltaGenerator] | None:
    """Draws the page's head; returns the job and a container for the page's own controls. Returns None if there is no
    job, or none with the URL's id, which the page then says.

    pace: also says whether the job is paced. title: may draw another title than the job's name, and then returns True.
    Raises ConsoleError.
    """
    jobs = jobs_to_pick(console)
    known = {job.job_id: job for job in jobs}
    wanted = address.job_asked_for(known)
    if not jobs:
        if wanted is not None:
            unknown_job(wanted, others=False)
        no_job((st.context.url or "http://127.0.0.1:8501").removesuffix("/schedule").rstrip("/"))
        st.fragment(_wait_for_job, run_every=2)(console)
        return None
    unknown = wanted is not None and wanted not in known
    if unknown:
        st.html('<h1 class="or-title">Which job?</h1>')
    with st.container(horizontal=True, vertical_alignment="bottom", key="page-head"):
        place = st.empty()
        controls = st.container(horizontal=True, vertical_alignment="bottom", width="content", key="page-controls")
    job_id = jobs[0].job_id if wanted is None else wanted
    # Drawn before the controls: on a narrow page they are below the title, and it would move them.
    opened = None if unknown else _titled(place, console, job_id, title, pace=pace)
    if len(jobs) > 1 or unknown:
        with controls:
            pick_job("Job", job_names(jobs), None if unknown else job_id, key=PICKER, width=340, on_change=_left)
        if unknown:
            unknown_job(str(wanted))
    if opened is None:
        return None
    address.show_job(job_id)
    return opened, controls


def _titled(
    place: DeltaGenerator, console: ConsoleService, job_id: str, title: Callable[[LiveJob], bool], *, pace: bool
) -> LiveJob:
    job = console.jobs.find(job_id)
    with place.container():
        if not title(job):
            job_title(job.spec, pace=pace)
    return job


def jobs_to_pick(console: ConsoleService) -> list[JobSummary]:
    """Returns the jobs that run, then those that have ended, each newest first: people mostly look for a running
    job."""
    return sorted(console.queries.list_jobs(), key=lambda job: (job.state not in OVER, job.created_at), reverse=True)


def job_names(jobs: Iterable[JobSummary]) -> dict[str, str]:
    """Returns the jobs' names for a list, by id. Only ended jobs have their condition there: that of a running one
    would soon be out of date."""
    return {
        job.job_id: " · ".join([job.name, *([job.condition.value] if job.state in OVER else []), job.job_id])
        for job in jobs
    }


def pick_job(
    label: str,
    names: dict[str, str],
    job_id: str | None,
    *,
    key: str,
    width: int,
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Draws the choice of a job, which goes into the address. names: by id. job_id: the one that is shown; None: none
    yet."""
    options = list(names)

    def draw(value: str | None, **rest: Any) -> None:
        shown = None if value is None else options.index(value)
        words = names.__getitem__
        st.selectbox(label, options, shown, format_func=words, placeholder="Choose a job", width=width, **rest)

    def choose(chosen: str) -> None:
        if chosen in options:  # a browser may still send a job that is gone
            address.moved()
            address.put(address.JOB, chosen)
            on_change()

    address.control(draw, key, job_id, choose)


def _left() -> None:
    """For a callback: removes from the address what belongs to the job that was shown before."""
    left = ["plan", "follow", ITERATIONS]
    if st.query_params.get_all("plans") == st.session_state.get(BEGAN_WITH):
        left += ["plans", "baseline"]
    for name in left:
        st.query_params.pop(name, None)


def unknown_job(job_id: str, *, others: bool = True) -> None:
    """Shows that there is no such job. job_id: in the address. others: whether there are other jobs; if there are none,
    the console may be on another database."""
    instead = "Choose one instead." if others else "It knows none: is it on the database that the job was on?"
    words = f"job: got {job_id!r}, expected the id of a job that this console knows. {instead}"
    access.say_error(words)


def _wait_for_job(console: ConsoleService) -> None:
    if console.queries.list_jobs():
        st.rerun()
    st.caption("This page changes by itself once a job is there.")
