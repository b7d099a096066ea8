"""Large schedules: a raster of all workers over time, and what a box drawn on it selects."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from PIL import Image

from app.ui.theme import Palette, style
from planner.columnar import worker_arrays
from planner.job import Worker
from planner.schedule import Schedule

# Up to here one bar per op stays quick; beyond, overview and detail.
MAX_BARS = 8_000
MAX_DETAIL = 4_000
# What the detail opens with: few enough that the numbers in the bars can be read.
FIRST_DETAIL = 400
COLUMNS = 1_600
MAX_ROWS = 600
CODES = {"F": 1, "I": 2, "W": 3, "B": 4, "O": 5}
FAILED = 6


@dataclass(frozen=True)
class Detail:
    """The part of a schedule drawn bar by bar: its rows, and a time window in ticks.

    cut: the window was shortened so that it holds no more ops than asked for.
    """

    workers: tuple[Worker, ...]
    window: tuple[float, float]
    ops: int
    cut: bool


def raster(schedule: Schedule, workers: Sequence[Worker], columns: int = COLUMNS) -> NDArray[np.uint8]:
    """(rows, columns) of op codes (0: idle). Rows are `workers`, thinned out to MAX_ROWS."""
    step = -(-len(workers) // MAX_ROWS)
    shown = workers[::step]
    end = schedule.end
    centres = (np.arange(columns) + 0.5) * end / columns
    image = np.zeros((len(shown), columns), dtype=np.uint8)
    for row, worker in enumerate(shown):
        if worker not in schedule.ops:
            image[row] = FAILED
            continue
        starts, ends, kinds = worker_arrays(schedule, worker)
        codes = np.array([CODES[kind] for kind in kinds], dtype=np.uint8)
        at = np.searchsorted(starts, centres, side="right") - 1
        busy = (at >= 0) & (centres < ends[np.maximum(at, 0)])
        image[row, busy] = codes[at[busy]]
    return image


def picture(schedule: Schedule, workers: Sequence[Worker], colours: Palette) -> str:
    """`raster` as a PNG in a data URL."""
    return _png(raster(schedule, workers), colours)


def overview(
    schedule: Schedule,
    colours: Palette,
    *,
    workers: Sequence[Worker],
    detail: Detail | None = None,
    drawn: str | None = None,
    revision: str = "overview",
) -> go.Figure:
    """The whole iteration as a picture, a few pixels per worker; a box selects the detail.

    drawn: the `picture`, where it is at hand.
    """
    job = schedule.problem.job
    width, height = job.units(schedule.end), len(workers)
    figure = go.Figure(
        # Streamlit reports a drawn box only where the figure has points.
        go.Scatter(x=[0, width], y=[0, height - 1], mode="markers", marker={"opacity": 0}, hoverinfo="skip")
    )
    figure.add_layout_image(
        source=drawn or picture(schedule, workers, colours),
        xref="x",
        yref="y",
        x=0,
        y=-0.5,
        sizex=width,
        sizey=height,
        sizing="stretch",
        layer="below",
    )
    if detail is not None and detail.workers:
        index = {w: i for i, w in enumerate(workers)}
        figure.add_shape(
            type="rect",
            x0=job.units(detail.window[0]),
            x1=job.units(detail.window[1]),
            y0=index[detail.workers[0]] - 0.5,
            y1=index[detail.workers[-1]] + 0.5,
            line={"color": colours.text, "width": 2},
        )
    style(figure, colours, height=380, revision=revision)
    figure.update_layout(margin={"l": 72, "r": 14, "t": 12, "b": 44}, dragmode="select", showlegend=False)
    title = f"time in the iteration ({job.time_unit})"
    figure.update_xaxes(title_text=title, range=[0, width], showgrid=False, fixedrange=True)
    ticks = sorted({round(i) for i in np.linspace(0, height - 1, min(height, 9))})
    figure.update_yaxes(
        range=[height - 0.5, -0.5],
        showgrid=False,
        fixedrange=True,
        tickvals=ticks,
        ticktext=[str(workers[i]) for i in ticks],
    )
    return figure


def detail_of(
    schedule: Schedule, workers: Sequence[Worker], first_row: int, rows: int, start: float, most: int = FIRST_DETAIL
) -> Detail:
    """`rows` workers from `first_row`, from `start` (ticks) for as long as `most` ops allow."""
    chosen = tuple(workers[first_row : first_row + rows])
    starts = np.sort(np.array([op.start for w in chosen for op in schedule.ops.get(w, ()) if op.end > start]))
    end = float(schedule.end)
    if len(starts) > most:
        return Detail(chosen, (start, float(starts[most])), most, True)
    return Detail(chosen, (start, end), len(starts), False)


def detail_of_box(
    schedule: Schedule, workers: Sequence[Worker], x: tuple[float, float], y: tuple[float, float]
) -> Detail:
    """What a box over the overview selects: x in the job's unit, y in row numbers."""
    scale = schedule.problem.job.ticks_per_unit
    first = max(0, min(len(workers) - 1, round(min(y))))
    last = max(first, min(len(workers) - 1, round(max(y))))
    start, end = max(0.0, min(x) * scale), min(float(schedule.end), max(x) * scale)
    detail = detail_of(schedule, workers, first, last - first + 1, start, MAX_DETAIL)
    if detail.window[1] <= end:
        return detail
    count = sum(op.end > start and op.start < end for w in detail.workers for op in schedule.ops.get(w, ()))
    return Detail(detail.workers, (start, end), count, False)


def _png(image: NDArray[np.uint8], colours: Palette) -> str:
    fills = [colours.track, *(colours.ops[k] for k in CODES), colours.failed]
    made = Image.fromarray(image).convert("P")
    made.putpalette([int(c[i : i + 2], 16) for c in fills for i in (1, 3, 5)])
    out = io.BytesIO()
    made.save(out, format="PNG", optimize=False, compress_level=3)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
