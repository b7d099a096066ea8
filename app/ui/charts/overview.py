"""Large schedules: a raster of all workers over time, and what a box drawn on it selects."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape

import numpy as np

from openrecycle.app.ui import text
from openrecycle.planner.export.png import raster_png
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.drawing import FAILED, Colours, Drawing, axis_times, raster

# Up to here one bar per op stays quick; beyond, overview and detail.
MAX_BARS = 8_000
MAX_DETAIL = 4_000
# What the detail opens with: few enough that the numbers in the bars can be read.
FIRST_DETAIL = 400


@dataclass(frozen=True)
class Detail:
    """The part of a schedule drawn bar by bar: its rows, and a time window in ticks.

    cut: the window was shortened so that it holds no more ops than asked for.
    """

    workers: tuple[Worker, ...]
    window: tuple[float, float]
    ops: int
    cut: bool


def picture(drawing: Drawing, colours: Colours) -> str:
    """The drawing's raster as a PNG in a data URL."""
    return "data:image/png;base64," + base64.b64encode(raster_png(raster(drawing), colours)).decode()


def out_words(drawing: Drawing) -> str:
    """What rows without ops are, in a sentence or two; "": there are none."""
    names = [str(worker) for worker in drawing.rows.workers if worker not in drawing.schedule.ops]
    failed = sum(drawing.out.get(name) == FAILED for name in names)
    parts = [f"Red rows: {text.count(failed, 'failed worker')}."] if failed else []
    if rest := len(names) - failed:
        parts.append(f"Grey rows: {text.count(rest, 'place')} without a worker.")
    return " ".join(parts)


def overview(drawing: Drawing, drawn: str, alt: str) -> str:
    """The whole iteration as HTML: the `picture` between its axes, a few pixels per worker (console.css).

    It needs no script, so it paints as soon as it is on the page. drawn: the `picture`.
    """
    job, workers = drawing.job, drawing.rows.workers
    width, height = job.units(drawing.schedule.end), len(workers)
    rows = sorted({round(i) for i in np.linspace(0, height - 1, min(height, 9))})
    names = "".join(f'<span style="top:{100 * (i + 0.5) / height:.2f}%">{workers[i]}</span>' for i in rows)
    times = "".join(f'<span style="left:{100 * t / width:.2f}%">{t:,.10g}</span>' for t in axis_times(width))
    return (
        f'<figure class="or-overview"><div class="or-rows" aria-hidden="true">{names}</div>'
        f'<img src="{drawn}" alt="{escape(alt)}"><div class="or-times" aria-hidden="true">{times}</div>'
        f"<figcaption>{escape(drawing.axis_words)}</figcaption></figure>"
    )


def box_of(drawing: Drawing, detail: Detail) -> tuple[float, float, float, float]:
    """Where in the overview the detail is: x in the job's unit, y in row numbers."""
    job, workers = drawing.job, drawing.rows.workers
    first, last = workers.index(detail.workers[0]), workers.index(detail.workers[-1])
    return job.units(detail.window[0]), job.units(detail.window[1]), first - 0.5, last + 0.5


def detail_of(drawing: Drawing, first_row: int, rows: int, start: float, most: int = FIRST_DETAIL) -> Detail:
    """`rows` workers from `first_row`, from `start` (ticks) for as long as `most` ops allow."""
    schedule, chosen = drawing.schedule, drawing.rows.workers[first_row : first_row + rows]
    starts = np.sort(np.array([op.start for w in chosen for op in schedule.ops.get(w, ()) if op.end > start]))
    end = float(schedule.end)
    if len(starts) > most:
        return Detail(chosen, (start, float(starts[most])), most, True)
    return Detail(chosen, (start, end), len(starts), False)


def detail_of_box(drawing: Drawing, x: tuple[float, float], y: tuple[float, float]) -> Detail:
    """What a box over the overview selects: x in the job's unit, y in row numbers."""
    schedule, workers = drawing.schedule, drawing.rows.workers
    scale = drawing.job.ticks_per_unit
    first = max(0, min(len(workers) - 1, round(min(y))))
    last = max(first, min(len(workers) - 1, round(max(y))))
    start, end = max(0.0, min(x) * scale), min(float(schedule.end), max(x) * scale)
    detail = detail_of(drawing, first, last - first + 1, start, MAX_DETAIL)
    if detail.window[1] <= end:
        return detail
    count = sum(op.end > start and op.start < end for w in detail.workers for op in schedule.ops.get(w, ()))
    return Detail(detail.workers, (start, end), count, False)
