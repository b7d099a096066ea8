"""The model of a drawn schedule: its rows, bars, marks, memory and labels. All kinds of picture are made from it.

It knows nothing of Plotly, SVG or PNG. Times are ticks. The back ends are `planner.export.picture` (SVG, PNG) and
`app.charts` (Plotly, and the overview of a large schedule).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import count, names, planned, plural
from openrecycle.planner.plans import schedule as schedules
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.schedule import Op, Schedule

# In the order of legends.
OP_WORDS = {
    "F": "Forward",
    "I": "Backward, input (I)",
    "W": "Backward, weight (W)",
    "B": "Backward, I + W fused (B)",
    "O": "Optimizer step",
}
KINDS = tuple(OP_WORDS)
# Why a plan goes without a worker: it has failed, or the reason is not known.
FAILED, OUT = "failed", "out"

# -- looks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Colours:
    """The colours of a schedule in one theme. ops, ops_text: the fill and the text of each op kind. faint: opacity of
    the next iteration's bars. tint: that of `failed` behind the row of a worker that has failed."""

    name: str
    background: str
    surface: str
    text: str
    muted: str
    line: str
    track: str
    accent: str
    failed: str
    failed_text: str
    ops: dict[str, str]
    ops_text: dict[str, str]
    faint: float
    tint: float

    @property
    def failed_tint(self) -> str:
        """The ground of the row of a worker that has failed."""
        return rgba(self.failed, self.tint)


# The colours of ops were searched for the largest smallest distance under full deutan-, protan- and tritanomaly.
LIGHT = Colours(
    name="light",
    background="#FFFFFF",
    surface="#F6F8FA",
    text="#16222E",
    muted="#566573",
    line="#DCE3EA",
    track="#E9EDF2",
    accent="#2862B2",
    failed="#D7541F",
    failed_text="#A93D10",
    ops={"F": "#2862B2", "I": "#50BDD6", "W": "#F2AF50", "B": "#666F35", "O": "#652742"},
    ops_text={"F": "#FFFFFF", "I": "#16222E", "W": "#16222E", "B": "#FFFFFF", "O": "#FFFFFF"},
    faint=0.32,
    tint=0.16,
)
DARK = Colours(
    name="dark",
    background="#0F151C",
    surface="#161E27",
    text="#E8EEF4",
    muted="#9DACBA",
    line="#2B3744",
    track="#202A36",
    accent="#7FA6EA",
    failed="#D75734",
    failed_text="#F58A68",
    ops={"F": "#4771C5", "I": "#37CDA6", "W": "#EFC11D", "B": "#8C5638", "O": "#ECE2FD"},
    ops_text={"F": "#FFFFFF", "I": "#10181F", "W": "#10181F", "B": "#FFFFFF", "O": "#10181F"},
    faint=0.5,
    tint=0.22,
)


def rgba(colour: str, opacity: float) -> str:
    """Return a colour, given as #RRGGBB, with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"


@dataclass(frozen=True)
class Hatch:
    """The lines at 45 degrees over re-routed ops. size: pixels between two lines. solidity: a line's width as a
    fraction of `size`."""

    size: int = 8
    solidity: float = 0.16
    opacity: float = 0.6


HATCH = Hatch()
# The outline of re-routed ops, in pixels.
EDGE = 1.8

# -- rows -------------------------------------------------------------------------------------------

# Fractions of a row's height.
BAR_HEIGHT, PIPELINE_GAP = 0.86, 0.55


@dataclass(frozen=True)
class Rows:
    """One row per worker, one unit high, with a gap between pipelines. `at[worker]`: its middle."""

    workers: tuple[Worker, ...]
    at: dict[Worker, float]
    extent: float

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Rows:
        """Workers in grid order, pipeline by pipeline."""
        ordered = tuple(sorted(workers))
        # A single stage shown across pipelines reads as one block, without gaps.
        gap = PIPELINE_GAP if len({w.stage for w in ordered}) > 1 else 0.0
        at: dict[Worker, float] = {}
        y = 0.0
        for i, worker in enumerate(ordered):
            if i and ordered[i - 1].pipeline != worker.pipeline:
                y += gap
            at[worker] = y + 0.5
            y += 1
        return cls(ordered, at, y)


@dataclass(frozen=True)
class OutRow:
    """The row of a worker that the plan goes without. title: why it does, if that is known. words: the workers that run
    its micro-batches. failed: whether it is known to have failed; otherwise it may have moved, been drained, or never
    been there."""

    worker: Worker
    title: str
    words: str
    failed: bool


# -- the whole --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A schedule, and the part of it that is shown. out: why the job goes without a worker, by name, where that is
    known (a plan alone does not say). window: first and last tick; ops outside are left out (default: all are shown).
    fault_free: period of fault-free 1F1B in the job's unit, as the plan says (default: that of the schedule's job). An
    iteration as it ran is compared with that of its plan, and its own job has other op times.
    """

    schedule: Schedule
    rows: Rows
    out: Mapping[str, str] = field(default_factory=dict)
    window: tuple[float, float] | None = None
    fault_free: float | None = None

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        workers: Iterable[Worker] | None = None,
        out: Mapping[str, str] | None = None,
        window: tuple[float, float] | None = None,
        fault_free: float | None = None,
    ) -> Drawing:
        """Makes a drawing. workers: the rows (default: all)."""
        rows = Rows.of(schedule.problem.job.workers() if workers is None else workers)
        return cls(schedule, rows, out or {}, window, fault_free)

    @property
    def job(self) -> Job:
        return self.schedule.problem.job

    @cached_property
    def living(self) -> tuple[Worker, ...]:
        """The workers of the rows that have ops."""
        return tuple(w for w in self.rows.workers if w in self.schedule.ops)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The bars, row by row."""
        rows = [op for w in self.living for op in self.schedule.ops[w]]
        if self.window is None:
            return tuple(rows)
        low, high = self.window
        return tuple(op for op in rows if op.end > low and op.start < high)

    @property
    def op_count(self) -> int:
        """The number of ops of the rows, also outside of the window."""
        return sum(self.schedule.op_counts[w] for w in self.living)

    @cached_property
    def fault_free_end(self) -> int:
        """The end of fault-free 1F1B, which the slowdown is measured against."""
        if self.fault_free is not None:
            return round(self.fault_free * self.job.ticks_per_unit)
        return reference_period(self.job.at_home)

    @property
    def fault_free_words(self) -> str:
        return f"fault-free 1F1B ends at {planned(self.job.units(self.fault_free_end), self.job.time_unit)}"

    @property
    def axis_words(self) -> str:
        return f"time in the iteration ({plural(self.job.time_unit)})"

    def next_ops(self, start: float, end: float) -> list[tuple[Op, int, float]]:
        """Returns (op, from, to) for the next iteration's ops that run between two ticks, one period later."""
        period = self.schedule.period
        return [
            (op, op.start + period, min(op.end + period, end))
            for w in self.living
            for op in self.schedule.ops[w]
            if op.start + period < end and op.end + period > start
        ]

    @cached_property
    def out_rows(self) -> tuple[OutRow, ...]:
        return tuple(self._out(w) for w in self.rows.workers if w in self.schedule.problem.failed)

    def _out(self, worker: Worker) -> OutRow:
        takers = sorted(
            w
            for w in self.schedule.ops
            if w.stage == worker.stage
            and any(op.kind == "F" and op.pipeline == worker.pipeline for op in self.schedule.ops[w])
        )
        why = self.out.get(str(worker), OUT)
        return OutRow(
            worker,
            f"✕ {why}" if why == FAILED else why,
            f"its micro-batches run on {names(list(map(str, takers)), 4, ' and ') or 'no peer'}",
            why == FAILED,
        )


def by_look(ops: Iterable[Op]) -> dict[tuple[str, bool], list[Op]]:
    """Group ops that look alike: (kind, re-routed) to ops, in the order of legends."""
    found: dict[tuple[str, bool], list[Op]] = {(kind, moved): [] for kind in KINDS for moved in (False, True)}
    for op in ops:
        found[op.kind, op.rerouted].append(op)
    return {look: alike for look, alike in found.items() if alike}


@dataclass(frozen=True)
class Key:
    """An entry of a legend. look: an op kind, `moved`, `bubble` or `ghost`."""

    look: str
    words: str


def legend(kinds: Iterable[str], *, rerouted: bool, ghost: bool) -> list[Key]:
    present = set(kinds)
    entries = [Key(kind, words) for kind, words in OP_WORDS.items() if kind in present]
    if rerouted:
        entries.append(Key("moved", "Re-routed: home pipeline·micro-batch"))
    entries.append(Key("bubble", "Bubble (idle)"))
    if ghost:
        entries.append(Key("ghost", "Next iteration"))
    return entries


# -- words ------------------------------------------------------------------------------------------


def label(op: Op) -> str:
    """The text in a bar: the micro-batch, with its home pipeline where another one runs it."""
    if op.kind == "O":
        return ""
    return f"{op.pipeline}·{op.micro_batch}" if op.rerouted else str(op.micro_batch)


def op_words(op: Op, job: Job) -> list[str]:
    """Describe a bar in pieces: its kind, its micro-batch, its times. The worker is left out."""
    times = f"{number(job.units(op.start))} to {number(job.units(op.end))} {plural(job.time_unit)}"
    if op.kind == "O":
        return [f"{OP_WORDS['O']} of stage {op.stage}", times]
    home = [f"micro-batch {op.micro_batch} of pipeline {op.pipeline}"]
    if op.rerouted:  # without a reason: the home worker may have failed or moved, or be there and slow
        home.append(f"re-routed from {Worker(op.pipeline, op.stage)}")
    return [OP_WORDS[op.kind], *home, times]


def number(value: float) -> str:
    return f"{value:,.6g}"


def axis_times(end: float, most: float = 10) -> list[float]:
    """Return at most `most` steps from 0 to `end`, of 1, 2 or 5 times a power of ten."""
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.floor(end / step + 1e-9) + 1)]


# -- memory -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldMemory:
    """What each worker holds over time, and its limit.

    Where the profile has byte sizes, this is in bytes with weights and optimizer state, and the limit is the capacity.
    Otherwise it is in activations, and the limit is the memory limit.
    """

    drawing: Drawing

    @property
    def in_bytes(self) -> bool:
        return self.drawing.schedule.counts_bytes

    @cached_property
    def top(self) -> int:
        """The upper end of the scale that all rows share: the largest limit or peak among them."""
        return max([1, *(max(self.limit(w) or 0, self.peak(w)) for w in self.drawing.living)])

    @property
    def limited(self) -> bool:
        return any(self.limit(worker) is not None for worker in self.drawing.living)

    def peak(self, worker: Worker) -> int:
        schedule = self.drawing.schedule
        return (schedule.peak_bytes if self.in_bytes else schedule.peak_activations)[worker]

    def limit(self, worker: Worker) -> int | None:
        problem = self.drawing.schedule.problem
        if self.in_bytes:
            return problem.job.capacity_bytes[worker.stage] if problem.job.capacity_bytes else None
        return problem.most_held[worker.stage][1]

    def outline(self, worker: Worker, start: float, end: float) -> list[tuple[float, int]]:
        """Returns the corners (tick, held) of the area: along the steps, and back to 0."""
        schedule = self.drawing.schedule
        steps: list[tuple[float, int]] = []
        for at, held in schedule.held_bytes(worker) if self.in_bytes else schedule.held_activations(worker):
            if at <= start:
                steps = [(start, held)]  # what is held at the start
            elif at <= end:
                steps.append((at, held))
        corners: list[tuple[float, int]] = []
        before = 0
        for tick, held in steps:
            corners += [(tick, before), (tick, held)]
            before = held
        if not corners:
            return []
        last = max(corners[-1][0], 0) if before == 0 else end
        return [*corners, (last, before), (last, 0), (corners[0][0], 0)]

    def level(self, worker: Worker, kept: int) -> float:
        """Return the place of an amount in the worker's row; rows count downwards."""
        return self.drawing.rows.at[worker] + BAR_HEIGHT / 2 - BAR_HEIGHT * kept / self.top


# -- large schedules --------------------------------------------------------------------------------

# The codes of a raster, beside 0 for idle.
CODES = {kind: i + 1 for i, kind in enumerate(KINDS)}
_CODES = np.array([*(CODES[kind] for kind in schedules.KINDS), 0], np.uint8)
CODE_FAILED, CODE_OUT = 6, 7
COLUMNS, MAX_ROWS = 1_600, 600


def raster_workers(drawing: Drawing) -> list[Worker]:
    """Return the workers of a raster's rows: the drawing's, thinned out to MAX_ROWS. Of neighbours one stays, if
    possible one without ops."""
    schedule, workers = drawing.schedule, drawing.rows.workers
    step = -(-len(workers) // MAX_ROWS)
    neighbours = [workers[first : first + step] for first in range(0, len(workers), step)]
    return [next((worker for worker in those if worker not in schedule.ops), those[0]) for those in neighbours]


def raster(drawing: Drawing, columns: int = COLUMNS) -> NDArray[np.uint8]:
    """Return [rows, columns] of op codes over the whole iteration, with a row for each of `raster_workers`."""
    schedule, shown = drawing.schedule, raster_workers(drawing)
    centres = (np.arange(columns) + 0.5) * schedule.end / columns
    image = np.zeros((len(shown), columns), dtype=np.uint8)
    for row, worker in enumerate(shown):
        if worker not in schedule.ops:
            image[row] = CODE_FAILED if drawing.out.get(str(worker)) == FAILED else CODE_OUT
            continue
        part, arrays = schedule.part(worker), schedule.arrays
        starts, ends, codes = arrays.start[part], arrays.end[part], _CODES[arrays.kind[part]]
        at = np.searchsorted(starts, centres, side="right") - 1
        busy = (at >= 0) & (centres < ends[np.maximum(at, 0)])
        image[row, busy] = codes[at[busy]]
    return image


def raster_fills(colours: Colours) -> list[str]:
    """Return the colour of each code."""
    return [colours.track, *(colours.ops[kind] for kind in CODES), colours.failed, colours.muted]


def row_marks(drawing: Drawing) -> list[tuple[float, Worker]]:
    """Return a few of the workers, with the middle of their row in a raster, as a fraction of its height."""
    workers = drawing.rows.workers
    rows = sorted({round(i) for i in np.linspace(0, len(workers) - 1, min(len(workers), 9))})
    return [((row + 0.5) / len(workers), workers[row]) for row in rows]


def thinned_words(drawing: Drawing) -> str:
    """Say in a sentence that the drawing's raster has not all workers; "": it has."""
    shown, workers = len(raster_workers(drawing)), drawing.rows.workers
    if shown == len(workers):
        return ""
    first = ", those that are out first" if len(drawing.living) < len(workers) else ""
    return f"Of {len(workers):,} workers {shown:,} are drawn{first}."


def rows_words(drawing: Drawing) -> str:
    """Say in a few sentences what the rows of the drawing's raster are."""
    gone = [str(worker) for worker in drawing.rows.workers if worker not in drawing.schedule.ops]
    failed = sum(drawing.out.get(name) == FAILED for name in gone)
    parts = [thinned_words(drawing) or "One row per worker."]
    if failed:
        parts.append(f"Red rows: {count(failed, 'failed worker')}.")
    if rest := len(gone) - failed:
        parts.append(f"Grey rows: {count(rest, 'place')} without a worker.")
    return " ".join(parts)
