"""Charts of schedules (`planner.plans.drawing`), as Plotly figures: the Gantt chart with the memory held below
(`gantt`), and the Compare page's chart (`comparison`). Large schedules are shown as a raster of all workers over time
(`overview`), and the part that a box on it selects in detail (`Detail`)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from openrecycle.app.charts import text
from openrecycle.app.charts.theme import Palette, note, style
from openrecycle.planner.export.picture import raster_png
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.drawing import (
    BAR_HEIGHT,
    EDGE,
    HATCH,
    Colours,
    Drawing,
    HeldMemory,
    Rows,
    axis_times,
    by_look,
    label,
    op_words,
    raster,
    rgba,
    row_marks,
)
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Link, Op, critical_path, micro_batch_path

# Each bar is three or more elements of the page. More ops than this are drawn as one shape per kind, without numbers.
MAX_NODES = 1_000
# The gap at the right of each bar in such a shape, as a share of its length.
GAP = 0.06
ASIDE_OPACITY = 0.3
"""The opacity of ops that are not on the selected path."""
# With more ops in a row than this, numbers are only shown where they fit, for example after zooming in.
DENSE_OPS_PER_ROW = 90
# With more rows than this, the figures at their right edges would overlap.
MAX_FIGURES = 64
# Pixels. HELD: height of a row of memory. HOVER: distance from the middle of a bar in which it reacts to the pointer,
# if bars have no elements of their own.
TOP, BOTTOM, BETWEEN, HELD = 24, 46, 34, 20
HOVER = 60
MARGIN = 70
HELD_OPACITY = 0.7
# Pixels, on the Compare page.
COMPARE_TOP, COMPARE_BETWEEN, PICTURE_HEIGHT = 34, 38, 220
# The unit of the time axis if the plans' units differ.
RELATIVE = "fault-free 1F1B iterations of its own job"
CLEAR = "rgba(0,0,0,0)"
# The position of a title, above its block and at the left edge.
AT_LEFT: dict[str, Any] = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "paper", "yanchor": "bottom"}

Span = tuple[Worker, float, float]
"""Worker, from and to in ticks."""
Places = list[float | int | None]
"""Along the time axis or across the rows. None breaks a line."""


@dataclass(frozen=True)
class Sheet:
    """A drawing with its place in a figure. factor: by which its times are scaled. axis: the y axis of its rows."""

    drawing: Drawing
    colours: Palette
    factor: float = 1.0
    axis: str = "y"

    # Cached, since these are used once per op.
    @cached_property
    def job(self) -> Job:
        return self.drawing.job

    @cached_property
    def rows(self) -> Rows:
        return self.drawing.rows

    def x(self, ticks: float) -> float | int:
        """Converts ticks to the time axis; whole numbers stay whole."""
        value = self.job.units(ticks)
        return value if self.factor == 1 else value * self.factor


# -- the Gantt chart --------------------------------------------------------------------------------


def gantt(
    drawing: Drawing,
    colours: Palette,
    *,
    shown: tuple[float, float] | None = None,
    path: tuple[int, int] | None = None,
    critical: bool = False,
    held: bool = False,
    next_iteration: bool = True,
    revision: str = "gantt",
) -> go.Figure:
    """Draws one row per worker and one bar per op, with times in the job's own unit. With more than MAX_NODES ops, bars
    have no numbers and do not react to clicks.

    shown: the part of the time axis that is shown first, in its unit; the user can move to the rest (default: all).
    path: (home pipeline, micro-batch), whose ops stand out and are joined by a line. critical: joins the critical path.
    held: adds rows below with the memory that each worker holds, on the same time axis. next_iteration: shows its first
    ops faintly.
    """
    sheet = Sheet(drawing, colours)
    ops = drawing.ops
    # Room behind the end for the next iteration's first ops, which staggering pulls forward.
    whole = max(drawing.schedule.end, drawing.fault_free_end, drawing.schedule.period) * 1.12
    start, end = drawing.window or (0, whole)
    shapes = len(ops) > MAX_NODES
    figure = go.Figure(_track(sheet, start, end))
    if next_iteration:
        figure.add_traces(_ghost(sheet, start, end, shapes=shapes))
    on_path = set(micro_batch_path(drawing.schedule, *path)) if path else set()
    others = [op for op in ops if op not in on_path]
    figure.add_traces((_shapes if shapes else _bars)(sheet, others, aside=bool(on_path)))
    if on_path:
        own = [op for op in ops if op in on_path]
        figure.add_traces(_bars(sheet, own))
        line = sorted((op for op in own if op.kind != "W"), key=lambda op: op.start)
        figure.add_traces(_thread(sheet, line, "path"))
    if critical:
        links = critical_path(drawing.schedule)
        figure.add_traces([*_waits(sheet, links), *_thread(sheet, [link.op for link in links], "critical", "dash")])
    _mark_out(figure, sheet)
    if start <= drawing.fault_free_end <= end:
        _mark_fault_free_end(figure, sheet)
    style(figure, colours, height=_pixels(sheet.rows) + TOP + BOTTOM, revision=revision)
    dense = len(ops) > DENSE_OPS_PER_ROW * max(1, len(drawing.living))
    with_figures = len(drawing.living) <= MAX_FIGURES
    _lay_out(figure, top=TOP, right=MARGIN if with_figures else 14, dense=dense, shapes=shapes)
    figure.update_layout(clickmode="event+select")
    figure.update_xaxes(
        title_text=drawing.axis_words,
        tickformat=",",
        range=list(shown or (sheet.x(start), sheet.x(end))),
        showgrid=True,
        layer="below traces",
    )
    figure.update_yaxes(**_rows_axis(sheet, 12))
    if with_figures:
        schedule = drawing.schedule
        idle = [text.percent(schedule.worker_bubble_fraction(w), digits=0) for w in drawing.living]
        _figures(figure, sheet, "idle", idle)
    if held:
        _add_held(figure, sheet, start, end, with_figures=with_figures)
    return figure


def _pixels(rows: Rows) -> int:
    """Returns the height of all rows, each lower if there are many, but still readable."""
    per_row = 32 if len(rows.workers) <= 16 else 24 if len(rows.workers) <= 48 else 16
    return round(rows.extent * per_row)


def _lay_out(figure: go.Figure, *, top: int, right: int, dense: bool, shapes: bool) -> None:
    """Sets the layout that all charts of schedules share."""
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        margin={"l": 62, "r": right, "t": top, "b": BOTTOM},
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 7} if dense else None,
        hoverdistance=HOVER if shapes else None,
    )


def _rows_axis(sheet: Sheet, size: int, colour: str = "") -> dict[str, object]:
    rows = sheet.rows
    return {
        "tickvals": [rows.at[w] for w in rows.workers],
        "ticktext": [str(w) for w in rows.workers],
        "ticksuffix": " ",
        "tickfont": {"size": size, "color": colour or sheet.colours.text},
        "range": [rows.extent + 0.05, -0.05],
        "fixedrange": True,
        "showgrid": False,
        "showline": False,
        "zeroline": False,
    }


def _figures(figure: go.Figure, sheet: Sheet, head: str, values: list[str], top: float = 1.0) -> None:
    """Adds a number at the end of each row, and above them, at `top` of the paper, a heading."""
    common = {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 6,
        "showarrow": False,
        "font": {"size": 11, "color": sheet.colours.muted},
    }
    made = [{**common, "text": head, "y": top, "yref": "paper", "yanchor": "bottom"}]
    for worker, words in zip(sheet.drawing.living, values, strict=True):
        made.append({**common, "text": words, "y": sheet.rows.at[worker], "yref": sheet.axis})
    # Added all at once: for each single one plotly would copy those that are there.
    figure.layout.annotations = (*figure.layout.annotations, *made)


def _mark_fault_free_end(figure: go.Figure, sheet: Sheet) -> None:
    drawing, colour = sheet.drawing, sheet.colours.text
    _rule(figure, sheet, drawing.fault_free_end, {"color": colour, "width": 1.5, "dash": "dot"})
    x, words = sheet.x(drawing.fault_free_end), drawing.fault_free_words
    note(figure, words, colour, x=x, xanchor="right", y=1, yref="paper", yanchor="bottom")


def _rule(figure: go.Figure, sheet: Sheet, tick: float, line: dict[str, Any], over: str = "paper", **more: Any) -> None:
    """Draws a vertical line at a tick, over all rows or those of an axis."""
    x = sheet.x(tick)
    figure.add_shape(type="line", x0=x, x1=x, yref=over, y0=0, y1=1, line=line, **more)


def _mark_out(figure: go.Figure, sheet: Sheet) -> None:
    """Tints the rows of workers that the plan goes without, and says which workers run their micro-batches."""
    colours = sheet.colours
    for out in sheet.drawing.out_rows:
        y = sheet.rows.at[out.worker]
        figure.add_shape(
            type="rect",
            xref="paper",
            yref=sheet.axis,
            x0=0,
            x1=1,
            y0=y - BAR_HEIGHT / 2,
            y1=y + BAR_HEIGHT / 2,
            fillcolor=colours.failed_tint if out.failed else colours.surface,
            line_width=0,
            name=str(out.worker),
        )
        words = f"<b>{out.title}</b> – {out.words}"
        colour = colours.failed_text if out.failed else colours.muted
        note(figure, words, colour, 13, x=0.5, xref="x domain", y=y, yref=sheet.axis)


# -- bars -------------------------------------------------------------------------------------------


def _spans(sheet: Sheet, spans: Sequence[Span], **look: Any) -> go.Bar:
    """Makes a trace of bars, each of which is an element of its own."""
    return go.Bar(
        orientation="h",
        base=[sheet.x(start) for _, start, _ in spans],
        x=[sheet.x(end - start) for _, start, end in spans],
        y=[sheet.rows.at[worker] for worker, _, _ in spans],
        yaxis=sheet.axis,
        width=BAR_HEIGHT,
        **look,
    )


def _track(sheet: Sheet, start: float, end: float) -> go.Bar:
    """Makes the background of the rows; its parts that stay visible are idle time (bubbles). start, end: ticks."""
    return _spans(
        sheet,
        [(worker, start, end) for worker in sheet.drawing.living],
        marker={"color": sheet.colours.track, "line": {"width": 0}},
        hoverinfo="skip",
        meta={"kind": "track"},
    )


def _bars(sheet: Sheet, ops: Sequence[Op], *, aside: bool = False) -> list[go.Bar]:
    """Makes one trace per kind of op, and one more per kind for re-routed ops. aside: faint, since they are not on the
    selected path."""
    return [_alike(sheet, own, kind, moved=moved, aside=aside) for (kind, moved), own in by_look(ops).items()]


def _alike(sheet: Sheet, ops: Sequence[Op], kind: str, *, moved: bool, aside: bool) -> go.Bar:
    colours = sheet.colours
    fill = colours.ops[kind]
    outline = colours.failed if moved else colours.background
    # A step of length 0 is still visible as a line, drawn by its outline.
    instant = kind == "O" and all(op.duration == 0 for op in ops)
    marker: dict[str, object] = {
        "color": fill,
        "line": {"color": fill if instant else outline, "width": 3 if instant else EDGE if moved else 1},
    }
    if moved:
        marker["pattern"] = _hatch(colours)
    strong = "<b>{}</b>" if moved else "{}"
    return _spans(
        sheet,
        [(op.worker, op.start, op.end) for op in ops],
        opacity=ASIDE_OPACITY if aside else None,
        # A click must not dim the other bars: it selects a path, which the server draws.
        unselected={"marker": {"opacity": 1}},
        text=None if kind == "O" else [strong.format(label(op)) for op in ops],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": colours.ops_text[kind], "size": 12},
        marker=marker,
        customdata=None if kind == "O" else [f"{op.pipeline}.{op.micro_batch}" for op in ops],
        hovertext=[_sentence(op, sheet.job) for op in ops],
        hoverinfo="text",
        meta={"kind": kind, "rerouted": moved, "aside": aside},
    )


def _sentence(op: Op, job: Job) -> str:
    return f"<b>{op.worker}</b> · " + "<br>".join(op_words(op, job))


def _hatch(colours: Palette) -> dict[str, object]:
    return {
        "shape": "/",
        "fillmode": "overlay",
        "fgcolor": colours.failed,
        "fgopacity": HATCH.opacity,
        "size": HATCH.size,
        "solidity": HATCH.solidity,
    }


def _shapes(sheet: Sheet, ops: Sequence[Op], *, aside: bool = False) -> list[go.Scatter]:
    """Does the same as `_bars` for many ops: one element per kind, and one more that shows what is under the
    pointer."""
    # A step of length 0 gets a visible width.
    least = {"O": sheet.drawing.schedule.end / 500}
    traces = [
        _boxes(
            sheet,
            [(op.worker, op.start, max(op.end, op.start + least.get(kind, 0))) for op in own],
            fillcolor=sheet.colours.ops[kind],
            fillpattern=_hatch(sheet.colours) if moved else None,
            opacity=ASIDE_OPACITY if aside else None,
            meta={"kind": kind, "rerouted": moved, "aside": aside},
        )
        for (kind, moved), own in by_look(ops).items()
    ]
    # An invisible line through the middles of all bars: it is a single element, and reacts to the pointer.
    under = _line(
        sheet,
        [sheet.x(op.start + op.duration / 2) for op in ops],
        [sheet.rows.at[op.worker] for op in ops],
        line={"width": 0, "simplify": False},
        hovertext=[_sentence(op, sheet.job) for op in ops],
        hoverinfo="text",
        meta={"kind": "under"},
    )
    return [*traces, under]


def _line(sheet: Sheet, x: Places, y: Places, **look: Any) -> go.Scatter:
    return go.Scatter(x=x, y=y, yaxis=sheet.axis, mode="lines", **{"hoverinfo": "skip", **look})


def _boxes(sheet: Sheet, boxes: Iterable[Span], **look: Any) -> go.Scatter:
    """Makes a trace that draws boxes as one outline.

    The outline has no break, since Plotly makes an element of each part. It runs along the bottom of a row, up and down
    at each box, back along the bottom, and on to the next row by the line on which it will come back. A gap at the
    right of each box separates it from the next.
    """
    rows: dict[Worker, list[tuple[float, float]]] = {}
    for worker, begin, end in boxes:
        rows.setdefault(worker, []).append((begin, end))
    edge = sheet.x(min(begin for row in rows.values() for begin, _ in row))
    x: Places = []
    y: Places = []
    for worker, row in rows.items():
        top, bottom = (sheet.rows.at[worker] + side * BAR_HEIGHT / 2 for side in (-1, 1))
        x.append(edge)
        y.append(bottom)
        for begin, end in sorted(row):
            left, right = sheet.x(begin), sheet.x(end - GAP * (end - begin))
            x += [left, left, right, right]
            y += [bottom, top, top, bottom]
        x.append(edge)
        y.append(bottom)
    return _line(sheet, x, y, line={"width": 0, "simplify": False}, fill="toself", **look)


def _ghost(sheet: Sheet, start: float, end: float, *, shapes: bool = False) -> list[go.Bar | go.Scatter]:
    """Makes faint traces of the next iteration's ops, one period later, between two ticks. shapes: one element per
    kind.
    """
    colours, following = sheet.colours, sheet.drawing.next_ops(start, end)
    look = {"opacity": colours.faint, "meta": {"kind": "ghost"}}
    if shapes:
        kinds: dict[str, list[Span]] = {}
        for op, begin, until in following:
            kinds.setdefault(op.kind, []).append((op.worker, begin, until))
        return [_boxes(sheet, boxes, fillcolor=colours.ops[kind], **look) for kind, boxes in kinds.items()]
    if not following:
        return []
    return [
        _spans(
            sheet,
            [(op.worker, begin, until) for op, begin, until in following],
            marker={
                "color": [colours.ops[op.kind] for op, *_ in following],
                "line": {"width": 1, "color": colours.background},
            },
            hoverinfo="skip",
            **look,
        )
    ]


def _thread(sheet: Sheet, ops: Sequence[Op], name: str, dash: str = "solid") -> list[go.Bar | go.Scatter]:
    """Outlines ops and joins each with the next by a line, dark on a light one so that it is visible on any colour."""
    colours, at = sheet.colours, sheet.rows.at
    shown = [op for op in ops if op.worker in at]
    x: Places = []
    y: Places = []
    for before, op in pairwise(shown):
        # From edge to edge, so that the numbers in the bars stay readable.
        x += [sheet.x(before.end), sheet.x(op.start), None]
        y += [at[before.worker], at[op.worker], None]
    outline = _spans(
        sheet,
        [(op.worker, op.start, op.end) for op in shown],
        marker={"color": CLEAR, "line": {"width": 2.5, "color": colours.text}},
        hoverinfo="skip",
        meta={"kind": name},
    )
    ground = _line(sheet, x, y, line={"width": 5, "color": colours.background}, meta={"kind": f"{name} ground"})
    line = {"width": 2, "color": colours.text, "dash": dash}
    return [outline, ground, _line(sheet, x, y, line=line, meta={"kind": f"{name} line"})]


def _waits(sheet: Sheet, path: Iterable[Link]) -> list[go.Bar]:
    """Marks where the critical path waits, that is, where none of its ops runs."""
    still = [link for link in path if link.waited and link.op.worker in sheet.rows.at]
    if not still:
        return []
    unit = sheet.job.time_unit
    return [
        _spans(
            sheet,
            [(link.op.worker, link.op.start - link.waited, link.op.start) for link in still],
            marker={"color": CLEAR, "line": {"width": 2, "color": sheet.colours.failed}},
            hovertext=[f"{each.op} waits {text.planned(sheet.job.units(each.waited), unit)} here" for each in still],
            hoverinfo="text",
            meta={"kind": "wait"},
        )
    ]


# -- memory -----------------------------------------------------------------------------------------


def _add_held(figure: go.Figure, above: Sheet, start: float, end: float, *, with_figures: bool) -> None:
    """Adds a second block of rows on the same time axis: the memory that each worker holds, and its limit."""
    sheet, held = replace(above, axis="y2"), HeldMemory(above.drawing)
    muted, living = sheet.colours.muted, sheet.drawing.living
    height, below = _pixels(sheet.rows), round(sheet.rows.extent * HELD)
    whole = height + BETWEEN + below
    figure.add_traces(_memory(sheet, held, start, end))
    figure.update_layout(
        height=whole + TOP + BOTTOM,
        yaxis={"domain": [1 - height / whole, 1]},
        yaxis2={**_rows_axis(sheet, 11, muted), "domain": [0, below / whole], "anchor": "x"},
        xaxis={"anchor": "y2"},
    )
    note(figure, _held_title(held), muted, y=below / whole, **AT_LEFT)
    if with_figures:
        _figures(figure, sheet, "peak", [_peak_words(held, w) for w in living], below / whole)


def _held_title(held: HeldMemory) -> str:
    """Says what the rows show, and what the dotted lines mean."""
    if held.in_bytes:
        what = "<b>Memory held</b>: weights, optimizer state and activations"
        return what + ("; dotted: the worker's capacity" if held.limited else "; the capacity is not known")
    return "<b>Activations held</b>" + (", dotted: the limit" if held.limited else "; there is no limit")


def _peak_words(held: HeldMemory, worker: Worker) -> str:
    """Returns the most that a worker holds, and its limit: `3 of 4`; in bytes `6.2 GiB`, with the limit on hover."""
    limit, peak = held.limit(worker), held.peak(worker)
    if held.in_bytes:
        return text.size(peak)
    return f"{peak}" if limit is None else f"{peak} of {limit}"


def _memory(sheet: Sheet, held: HeldMemory, start: float, end: float) -> list[go.Scatter]:
    """Draws what each worker holds between two ticks as an area, and its limit as a line."""
    amount = text.size if held.in_bytes else str
    unit = "" if held.in_bytes else " activations"
    areas: tuple[Places, Places] = [], []
    words: list[str] = []
    limits: tuple[Places, Places] = [], []
    for worker in sheet.drawing.living:
        limit = held.limit(worker)
        most = unit if limit is None else f" of {amount(limit)}{unit}"
        for tick, kept in held.outline(worker, start, end):
            areas[0].append(sheet.x(tick))
            areas[1].append(held.level(worker, kept))
            words.append(f"<b>{worker}</b> holds {amount(kept)}{most}")
        areas[0].append(None)
        areas[1].append(None)
        words.append("")
        if limit is not None:
            level = held.level(worker, limit)
            limits[0].extend([sheet.x(start), sheet.x(end), None])
            limits[1].extend([level, level, None])
    colours = sheet.colours
    fill = rgba(colours.ops["F"], HELD_OPACITY)
    look: dict[str, Any] = {"fill": "toself", "fillcolor": fill, "line": {"width": 0}, "meta": {"kind": "memory"}}
    traces = [_line(sheet, *areas, hovertext=words, hoverinfo="text", **look)]
    if limits[0]:
        line = {"width": 1.5, "dash": "dot", "color": colours.muted}
        traces.append(_line(sheet, *limits, line=line, meta={"kind": "memory limit"}))
    return traces


# -- several below each other -----------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """One of the schedules of the Compare page."""

    name: str
    plan: Plan
    drawing: Drawing


def comparison(
    strips: Sequence[Strip],
    colours: Palette,
    *,
    shown: tuple[float, float] | None = None,
    revision: str = "compare",
) -> go.Figure:
    """Draws two to four schedules on one time axis. The first is the baseline: its period is drawn through all of them.

    With more than MAX_NODES ops in all, bars have no numbers; with more than MAX_BARS, each schedule is a picture. If
    time units differ, each plan's times are shares of its own job's fault-free 1F1B iteration. shown: the part of the
    time axis that is shown first; the user can move to the rest (default: all).
    """
    factors = time_factors([s.plan for s in strips])
    ops = sum(s.drawing.op_count for s in strips)
    as_pictures, shapes = ops > MAX_BARS, ops > MAX_NODES
    sheets = [
        Sheet(s.drawing, colours, factor, f"y{i + 1}" if i else "y")
        for i, (s, factor) in enumerate(zip(strips, factors, strict=True))
    ]
    heights = [PICTURE_HEIGHT if as_pictures else sheet.rows.extent * _row_pixels(sheets) for sheet in sheets]
    whole = sum(heights) + COMPARE_BETWEEN * (len(strips) - 1)
    end = last_time(strips) * 1.03
    figure = go.Figure()
    style(figure, colours, height=round(whole + COMPARE_TOP + BOTTOM), revision=revision)
    top = whole
    for strip, sheet, height in zip(strips, sheets, heights, strict=True):
        domain = [max(0.0, (top - height) / whole), min(1.0, top / whole)]
        axis = _picture_axis(sheet) if as_pictures else _rows_axis(sheet, 11)
        figure.update_layout({sheet.axis.replace("y", "yaxis"): {**axis, "domain": domain, "anchor": "x"}})
        if as_pictures:
            _add_picture(figure, sheet)
        else:
            last = end / sheet.factor * sheet.job.ticks_per_unit
            figure.add_trace(_track(sheet, 0, last))
            figure.add_traces(_ghost(sheet, 0, last, shapes=shapes))
            figure.add_traces((_shapes if shapes else _bars)(sheet, sheet.drawing.ops))
            _mark_out(figure, sheet)
        _add_title(figure, strip, sheet, top / whole)
        top -= height + COMPARE_BETWEEN
    baseline = {"color": colours.accent, "width": 1.5, "dash": "dot"}
    _rule(figure, sheets[0], strips[0].drawing.schedule.period, baseline, name="baseline")
    dense = any(s.drawing.op_count > DENSE_OPS_PER_ROW * max(1, len(s.drawing.rows.workers)) for s in strips)
    _lay_out(figure, top=COMPARE_TOP, right=14, dense=dense, shapes=shapes)
    figure.update_xaxes(
        title_text=f"time ({RELATIVE if _relative(strips) else short_unit(strips)})",
        tickformat=",",
        range=list(shown or (0, end)),
        anchor=sheets[-1].axis,
        layer="below traces",
        showgrid=not as_pictures,  # lines over a picture look like part of it
    )
    return figure


def time_factors(plans: Sequence[Plan]) -> list[float]:
    """Returns the factors by which the plans' times are multiplied for a common axis."""
    if len({plan.job.time_unit for plan in plans}) == 1:
        return [1.0] * len(plans)
    return [1 / plan.metrics.fault_free for plan in plans]


def last_time(strips: Sequence[Strip]) -> float:
    """Returns where the longest schedule ends on the common axis."""
    factors = time_factors([s.plan for s in strips])
    drawn = [s.drawing for s in strips]
    return max(f * d.job.units(max(d.schedule.period, d.schedule.end)) for f, d in zip(factors, drawn, strict=True))


def short_unit(strips: Sequence[Strip]) -> str:
    """Returns the unit of the common axis in a word, to stand beside a field."""
    return "iterations" if _relative(strips) else text.plural(strips[0].plan.job.time_unit)


def _relative(strips: Sequence[Strip]) -> bool:
    return len({s.plan.job.time_unit for s in strips}) > 1


def _row_pixels(sheets: Sequence[Sheet]) -> int:
    rows = sum(len(sheet.rows.workers) for sheet in sheets)
    return 26 if rows <= 16 else 24 if rows <= 48 else 20 if rows <= 64 else 16  # in 20, numbers are 9 px


def _picture_axis(sheet: Sheet) -> dict[str, object]:
    """Makes the y axis of a picture, from 0 to 1, with the names of a few workers."""
    places, workers = zip(*row_marks(sheet.drawing), strict=True)
    return {**_rows_axis(sheet, 11), "tickvals": places, "ticktext": list(map(str, workers)), "range": [1, 0]}


def _add_picture(figure: go.Figure, sheet: Sheet) -> None:
    figure.add_layout_image(
        source=picture(sheet.drawing, sheet.colours),
        xref="x",
        yref=sheet.axis,
        x=0,
        y=0,
        sizex=sheet.x(sheet.drawing.schedule.end),
        sizey=1,
        sizing="stretch",
        layer="below",
    )
    # Plotly does not draw a y axis without points.
    figure.add_trace(
        go.Scatter(x=[0], y=[0], yaxis=sheet.axis, mode="markers", marker={"opacity": 0}, hoverinfo="skip", meta={})
    )


def _add_title(figure: go.Figure, strip: Strip, sheet: Sheet, top: float) -> None:
    """Adds the plan's name and period above its rows, in one text so that they don't overlap, and a line where the
    period ends."""
    period = sheet.drawing.schedule.period
    words = text.planned(sheet.job.units(period), sheet.job.time_unit)
    # Plotly reads some HTML in annotations.
    title = f"<b>{escape(strip.name, quote=False)}</b> · period {escape(words, quote=False)}"
    note(figure, title, sheet.colours.text, 13, y=top, yshift=2, **AT_LEFT)
    _rule(figure, sheet, period, {"color": sheet.colours.text, "width": 2}, f"{sheet.axis} domain")


# Up to this many ops one bar per op stays quick; larger schedules get an overview and a detail.
MAX_BARS = 8_000
MAX_DETAIL = 4_000
# Ops in the first detail: few enough that the numbers in the bars can be read.
FIRST_DETAIL = 400
# A detail has at most as many rows as leave room for so many ops in each.
OPS_PER_ROW = 4


# -- large schedules, as rasters ----------------------------------------------------------------


@dataclass(frozen=True)
class Detail:
    """The part of a schedule that is drawn bar by bar: its rows, and a time window in ticks.

    cut: rows were left out, or the window was shortened, to limit the number of ops.
    """

    workers: tuple[Worker, ...]
    window: tuple[float, float]
    ops: int
    cut: bool


def picture(drawing: Drawing, colours: Colours) -> str:
    """Returns the drawing's raster as a PNG in a data URL."""
    return "data:image/png;base64," + base64.b64encode(raster_png(raster(drawing), colours)).decode()


def overview(drawing: Drawing, drawn: str, alt: str) -> str:
    """Returns the whole iteration as HTML: the picture between its axes, with a few pixels per worker (console.css).

    It needs no script, so it is visible as soon as it is on the page. drawn: what `picture` returns.
    """
    width = drawing.job.units(drawing.schedule.end)
    names = "".join(f'<span style="top:{100 * at:.2f}%">{worker}</span>' for at, worker in row_marks(drawing))
    times = "".join(f'<span style="left:{100 * t / width:.2f}%">{t:,.10g}</span>' for t in axis_times(width))
    return (
        f'<figure class="or-overview"><div class="or-rows" aria-hidden="true">{names}</div>'
        f'<img src="{drawn}" alt="{escape(alt)}"><div class="or-times" aria-hidden="true">{times}</div>'
        f"<figcaption>{escape(drawing.axis_words)}</figcaption></figure>"
    )


def box_of(drawing: Drawing, detail: Detail) -> tuple[float, float, float, float]:
    """Returns the place of a detail in the overview: x in the job's unit, y in row numbers."""
    job, workers = drawing.job, drawing.rows.workers
    first, last = workers.index(detail.workers[0]), workers.index(detail.workers[-1])
    return job.units(detail.window[0]), job.units(detail.window[1]), first - 0.5, last + 0.5


def detail_of(drawing: Drawing, first_row: int, rows: int, start: float, most: int = FIRST_DETAIL) -> Detail:
    """Returns the detail of `rows` workers from `first_row` on, from `start` (ticks) for as long as `most` ops
    allow. Of very many workers only the first are taken: the ops that run at `start` alone would be too many."""
    count = min(rows, most // OPS_PER_ROW)
    schedule, chosen = drawing.schedule, drawing.rows.workers[first_row : first_row + count]
    starts = np.sort(np.array([op.start for w in chosen for op in schedule.ops.get(w, ()) if op.end > start]))
    later = starts[most:][starts[most:] > start]
    end = float(later[0]) if len(later) else float(schedule.end)
    return Detail(chosen, (start, end), int(np.searchsorted(starts, end)), count < rows or len(later) > 0)


def detail_of_box(drawing: Drawing, x: tuple[float, float], y: tuple[float, float]) -> Detail:
    """Returns the detail that a box over the overview selects: x in the job's unit, y in row numbers. Rows are left out
    only if their ops are too many."""
    schedule, workers = drawing.schedule, drawing.rows.workers
    scale = drawing.job.ticks_per_unit
    first = max(0, min(len(workers) - 1, round(min(y))))
    last = max(first, min(len(workers) - 1, round(max(y))))
    start, end = max(0.0, min(x) * scale), min(float(schedule.end), max(x) * scale)

    def within(rows: Sequence[Worker]) -> int:
        return sum(op.end > start and op.start < end for w in rows for op in schedule.ops.get(w, ()))

    chosen = workers[first : last + 1]
    if (count := within(chosen)) <= MAX_DETAIL:
        return Detail(chosen, (start, end), count, False)
    detail = detail_of(drawing, first, len(chosen), start, MAX_DETAIL)
    if detail.window[1] <= end:
        return detail
    return Detail(detail.workers, (start, end), within(detail.workers), True)
