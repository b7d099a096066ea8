"""Large schedules: a raster of all workers over time, and what a box drawn on it selects."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from openrecycle.app.ui import text
from openrecycle.app.ui.charts import bars
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.job import Worker
from openrecycle.planner.plan_arrays import worker_arrays
from openrecycle.planner.schedule import Schedule

# Up to here one bar per op stays quick; beyond, overview and detail.
MAX_BARS = 8_000
MAX_DETAIL = 4_000
# What the detail opens with: few enough that the numbers in the bars can be read.
FIRST_DETAIL = 400
COLUMNS = 1_600
MAX_ROWS = 600
CODES = {"F": 1, "I": 2, "W": 3, "B": 4, "O": 5}
FAILED, OUT = 6, 7


@dataclass(frozen=True)
class Detail:
    """The part of a schedule drawn bar by bar: its rows, and a time window in ticks.

    cut: the window was shortened so that it holds no more ops than asked for.
    """

    workers: tuple[Worker, ...]
    window: tuple[float, float]
    ops: int
    cut: bool


def raster(
    schedule: Schedule, workers: Sequence[Worker], out: Mapping[str, str] | None = None, columns: int = COLUMNS
) -> NDArray[np.uint8]:
    """(rows, columns) of op codes (0: idle). Rows are `workers`, thinned out to MAX_ROWS. out: as of
    bars.mark_out."""
    step = -(-len(workers) // MAX_ROWS)
    shown = workers[::step]
    end = schedule.end
    centres = (np.arange(columns) + 0.5) * end / columns
    image = np.zeros((len(shown), columns), dtype=np.uint8)
    for row, worker in enumerate(shown):
        if worker not in schedule.ops:
            image[row] = FAILED if (out or {}).get(str(worker)) == bars.FAILED else OUT
            continue
        starts, ends, kinds = worker_arrays(schedule, worker)
        codes = np.array([CODES[kind] for kind in kinds], dtype=np.uint8)
        at = np.searchsorted(starts, centres, side="right") - 1
        busy = (at >= 0) & (centres < ends[np.maximum(at, 0)])
        image[row, busy] = codes[at[busy]]
    return image


def picture(
    schedule: Schedule, workers: Sequence[Worker], colours: Palette, out: Mapping[str, str] | None = None
) -> str:
    """`raster` as a PNG in a data URL."""
    return _png(raster(schedule, workers, out), colours)


def out_words(schedule: Schedule, workers: Sequence[Worker], out: Mapping[str, str]) -> str:
    """What rows without ops are, in a sentence or two; "": there are none."""
    names = [str(worker) for worker in workers if worker not in schedule.ops]
    failed = sum(out.get(name) == bars.FAILED for name in names)
    parts = [f"Red rows: {text.count(failed, 'failed worker')}."] if failed else []
    if rest := len(names) - failed:
        parts.append(f"Grey rows: {text.count(rest, 'place')} without a worker.")
    return " ".join(parts)


def overview(schedule: Schedule, workers: Sequence[Worker], drawn: str, alt: str) -> str:
    """The whole iteration as HTML: the `picture` between its axes, a few pixels per worker (console.css).

    It needs no script, so it paints as soon as it is on the page. drawn: the `picture`.
    """
    job = schedule.problem.job
    width, height = job.units(schedule.end), len(workers)
    rows = sorted({round(i) for i in np.linspace(0, height - 1, min(height, 9))})
    names = "".join(f'<span style="top:{100 * (i + 0.5) / height:.2f}%">{workers[i]}</span>' for i in rows)
    times = "".join(f'<span style="left:{100 * t / width:.2f}%">{t:,.10g}</span>' for t in _round_times(width))
    return (
        f'<figure class="or-overview"><div class="or-rows" aria-hidden="true">{names}</div>'
        f'<img src="{drawn}" alt="{escape(alt)}"><div class="or-times" aria-hidden="true">{times}</div>'
        f"<figcaption>time in the iteration ({escape(job.time_unit)})</figcaption></figure>"
    )


def box_of(schedule: Schedule, workers: Sequence[Worker], detail: Detail) -> tuple[float, float, float, float]:
    """Where in the overview the detail is: x in the job's unit, y in row numbers."""
    job = schedule.problem.job
    first, last = workers.index(detail.workers[0]), workers.index(detail.workers[-1])
    return job.units(detail.window[0]), job.units(detail.window[1]), first - 0.5, last + 0.5


def _round_times(end: float) -> list[float]:
    """4 to 10 times from 0 to `end`, at steps of 1, 2 or 5 times a power of ten."""
    rough = end / 10
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    return [round(i * step, 12) for i in range(int(end / step + 1e-9) + 1)]


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
    fills = [colours.track, *(colours.ops[k] for k in CODES), colours.failed, colours.muted]
    made = Image.fromarray(image).convert("P")
    made.putpalette([int(c[i : i + 2], 16) for c in fills for i in (1, 3, 5)])
    out = io.BytesIO()
    made.save(out, format="PNG", optimize=False, compress_level=3)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
