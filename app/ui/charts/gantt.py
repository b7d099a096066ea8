"""The Gantt chart of a schedule: one row per worker, one bar per op; below it what each worker holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import plotly.graph_objects as go

from openrecycle.app.ui import text
from openrecycle.app.ui.charts import bars, memory
from openrecycle.app.ui.charts.bars import KIND_ORDER, Sheet, op_sentence
from openrecycle.app.ui.charts.rows import Rows
from openrecycle.app.ui.theme import Palette, style
from openrecycle.planner.job import Worker
from openrecycle.planner.paths import critical_path, micro_batch_path
from openrecycle.planner.schedule import Op, Schedule

__all__ = ["KIND_ORDER", "gantt", "op_sentence"]

# Above this many ops in a row, numbers appear only as far as they fit after zooming in.
DENSE_OPS_PER_ROW = 90
# Above this many rows their figures at the right edge would run into each other.
MAX_FIGURES = 64
TOP, BOTTOM, BETWEEN = 24, 46, 34
# Pixels from the middle of a bar, where bars have no element of their own.
HOVER = 60
MARGIN = 70


def gantt(
    schedule: Schedule,
    colours: Palette,
    *,
    workers: Sequence[Worker] | None = None,
    fault_free_end: float | None = None,
    window: tuple[float, float] | None = None,
    shown: tuple[float, float] | None = None,
    path: tuple[int, int] | None = None,
    critical: bool = False,
    held: bool = False,
    next_iteration: bool = True,
    out: Mapping[str, str] | None = None,
    revision: str = "gantt",
) -> go.Figure:
    """Draws `schedule`, times in the job's own unit; above bars.MAX_NODES ops without numbers, and deaf to clicks.

    workers: the rows to show (default: all). fault_free_end: where fault-free 1F1B would end, in
    ticks. window: the only ticks to draw; ops outside are left out. shown: from and to of the time
    axis, in its unit; the rest can be moved to (default: all). path: (home pipeline, micro-batch),
    whose ops stand out and are threaded together. critical: thread the critical path. held: rows
    below with the activations that each worker holds, on the same time axis. next_iteration: its
    first ops, faint. out: why a job goes without a worker (default: nobody knows).
    """
    rows = Rows.of(list(schedule.problem.job.workers()) if workers is None else workers)
    sheet = Sheet(schedule, rows, colours)
    ops = sheet.ops(window)
    start, end = window or (0, _axis_end(schedule, fault_free_end))

    shapes = len(ops) > bars.MAX_NODES
    figure = go.Figure(bars.track(sheet, start, end))
    if next_iteration:
        figure.add_traces(bars.ghost(sheet, start, end, shapes=shapes))
    on_path = set(micro_batch_path(schedule, *path)) if path else set()
    others = [op for op in ops if op not in on_path]
    figure.add_traces(
        bars.op_shapes(sheet, others, aside=bool(on_path)) if shapes
        else bars.op_bars(sheet, others, aside=bool(on_path))
    )  # fmt: skip
    if on_path:
        _add_path(figure, sheet, [op for op in ops if op in on_path])
    if critical:
        links = critical_path(schedule)
        if (waits := bars.waits(sheet, links)) is not None:
            figure.add_trace(waits)
        figure.add_traces(bars.thread(sheet, [link.op for link in links], "critical", dash="dash"))
    bars.mark_out(figure, sheet, out)
    if fault_free_end is not None and start <= fault_free_end <= end:
        _mark_fault_free_end(figure, sheet, fault_free_end)
    style(figure, colours, height=rows.pixels() + TOP + BOTTOM, revision=revision)
    if shapes:
        figure.update_layout(hoverdistance=HOVER)
    dense = len(ops) > DENSE_OPS_PER_ROW * max(1, len(sheet.living))
    _lay_out(figure, sheet, shown or (sheet.x(start), sheet.x(end)), dense=dense)
    if held:
        _add_held(figure, sheet, start, end)
    return figure


def _lay_out(figure: go.Figure, sheet: Sheet, shown: tuple[float, float], *, dense: bool) -> None:
    with_figures = len(sheet.living) <= MAX_FIGURES
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        clickmode="event+select",
        margin={"l": 62, "r": MARGIN if with_figures else 14, "t": TOP, "b": BOTTOM},
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 7} if dense else None,
    )
    figure.update_xaxes(
        title_text=f"time in the iteration ({text.plural(sheet.job.time_unit)})",
        tickformat=",",
        range=list(shown),
        showgrid=True,
        layer="below traces",
    )
    figure.update_yaxes(**_rows_axis(sheet), tickfont={"size": 12, "color": sheet.colours.text})
    if with_figures:
        _figures(
            figure,
            sheet,
            "idle",
            [text.percent(sheet.schedule.worker_bubble_fraction(w), digits=0) for w in sheet.living],
        )


def _add_held(figure: go.Figure, sheet: Sheet, start: float, end: float) -> None:
    """A second block of rows below the first, on the same time axis."""
    rows, colours = sheet.rows, sheet.colours
    height, below = rows.pixels(), round(rows.extent * memory.ROW_PIXELS)
    whole = height + BETWEEN + below
    lower = replace(sheet, axis="y2")
    figure.add_traces(memory.held_traces(lower, start, end))
    small = {"size": 11, "color": colours.muted}
    figure.update_layout(
        height=whole + TOP + BOTTOM,
        yaxis={"domain": [1 - height / whole, 1]},
        yaxis2={**_rows_axis(sheet), "tickfont": small, "domain": [0, below / whole], "anchor": "x", "zeroline": False},
        xaxis={"anchor": "y2"},
    )
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="left",
        y=below / whole,
        yref="paper",
        yanchor="bottom",
        text=memory.title(lower),
        showarrow=False,
        font={"size": 12, "color": colours.muted},
    )
    if len(sheet.living) <= MAX_FIGURES:
        _figures(figure, lower, "peak", [memory.peak_words(lower, w) for w in sheet.living], below / whole)


def _rows_axis(sheet: Sheet) -> dict[str, object]:
    rows = sheet.rows
    return {
        "tickvals": [rows.at[w] for w in rows.workers],
        "ticktext": [str(w) for w in rows.workers],
        "ticksuffix": " ",
        "range": [rows.extent + 0.05, -0.05],
        "fixedrange": True,
        "showgrid": False,
        "showline": False,
    }


def _figures(figure: go.Figure, sheet: Sheet, head: str, values: list[str], top: float = 1.0) -> None:
    """A number behind each row, and above them, at `top` of the paper, what it is."""
    common = {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 6,
        "showarrow": False,
        "font": {"size": 11, "color": sheet.colours.muted},
    }
    made = [{**common, "text": head, "y": top, "yref": "paper", "yanchor": "bottom"}]
    for worker, words in zip(sheet.living, values, strict=True):
        made.append({**common, "text": words, "y": sheet.rows.at[worker], "yref": sheet.axis})
    # All at once: plotly copies those that are there for each one that is added.
    figure.layout.annotations = (*figure.layout.annotations, *made)


def _add_path(figure: go.Figure, sheet: Sheet, ops: Sequence[Op]) -> None:
    """The path's own bars, and a thread from op to op: forwards down the stages, then back."""
    figure.add_traces(bars.op_bars(sheet, ops))
    line = sorted((op for op in ops if op.kind != "W"), key=lambda op: op.start)
    figure.add_traces(bars.thread(sheet, line, "path"))


def _axis_end(schedule: Schedule, fault_free_end: float | None) -> float:
    # Room behind the end for the next iteration's first ops, which staggering pulls forward.
    return max(schedule.end, fault_free_end or 0, schedule.period) * 1.12


def _mark_fault_free_end(figure: go.Figure, sheet: Sheet, ticks: float) -> None:
    x, colours = sheet.x(ticks), sheet.colours
    figure.add_shape(
        type="line", x0=x, x1=x, yref="paper", y0=0, y1=1, line={"color": colours.text, "width": 1.5, "dash": "dot"}
    )
    figure.add_annotation(
        x=x,
        y=1,
        yref="paper",
        yanchor="bottom",
        xanchor="right",
        text=f"fault-free 1F1B ends at {text.planned(x, sheet.job.time_unit)}",
        showarrow=False,
        font={"size": 12, "color": colours.text},
    )
