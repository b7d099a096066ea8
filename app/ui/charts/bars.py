"""What schedule charts are put together from: bars of ops, tracks, rows without a worker, paths, memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from openrecycle.app.coordination.worker_states import RoleState
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.rows import Rows
from openrecycle.app.ui.theme import OP_WORDS, Palette
from openrecycle.planner.job import Job, Worker
from openrecycle.planner.paths import Link
from openrecycle.planner.schedule import Op, Schedule

KIND_ORDER = ("F", "I", "W", "B", "O")
BAR_HEIGHT = 0.86
# Each bar is three and more elements of the page. More ops than this are drawn as one shape a kind, without numbers.
MAX_NODES = 1_000
# Of the length of such a bar.
GAP = 0.06
GHOST_OPACITY = {"light": 0.32, "dark": 0.5}
ASIDE_OPACITY = 0.3
"""Of what is not on the path that is looked at."""


@dataclass(frozen=True)
class Sheet:
    """A schedule and where it is drawn. factor: by which its times are scaled. axis: of the rows."""

    schedule: Schedule
    rows: Rows
    colours: Palette
    factor: float = 1.0
    axis: str = "y"

    @property
    def job(self) -> Job:
        return self.schedule.problem.job

    @property
    def living(self) -> list[Worker]:
        return [w for w in self.rows.workers if w in self.schedule.ops]

    def x(self, ticks: float) -> float | int:
        """Ticks on the time axis; whole numbers stay whole."""
        value = self.job.units(ticks)
        return value if self.factor == 1 else value * self.factor

    def ops(self, window: tuple[float, float] | None = None) -> list[Op]:
        """Of the rows shown, those that run inside the window (ticks)."""
        low, high = window or (float("-inf"), float("inf"))
        inside = [op for w in self.rows.workers for op in self.schedule.ops.get(w, ())]
        return inside if window is None else [op for op in inside if op.end > low and op.start < high]


# What is said of a worker that a plan goes without: it has failed, or nobody knows why.
FAILED, OUT = RoleState.FAILED.value, "out"


def op_bars(sheet: Sheet, ops: Sequence[Op], *, aside: bool = False, suffix: str = "") -> list[go.Bar]:
    """One trace per kind, and one more for what is re-routed. aside: faint, as not on the path looked at."""
    traces = []
    for kind in KIND_ORDER:
        for moved in (False, True):
            own = [op for op in ops if op.kind == kind and op.rerouted == moved]
            if own:
                traces.append(_bars(sheet, own, kind, moved=moved, aside=aside, suffix=suffix))
    return traces


def op_shapes(sheet: Sheet, ops: Sequence[Op], *, aside: bool = False) -> list[go.Scatter]:
    """As `op_bars`, for many ops: one element a kind, and one more that says what is under the pointer."""
    traces = []
    for kind in KIND_ORDER:
        for moved in (False, True):
            own = [op for op in ops if op.kind == kind and op.rerouted == moved]
            if own:
                traces.append(_shape(sheet, own, kind, moved=moved, aside=aside))
    # A line without width or a break, which is one element, over the middles of all.
    under = go.Scatter(
        x=[sheet.x(op.start + op.duration / 2) for op in ops],
        y=[sheet.rows.at[op.worker] for op in ops],
        yaxis=sheet.axis,
        mode="lines",
        line={"width": 0, "simplify": False},
        hovertext=[op_sentence(op, sheet.job) for op in ops],
        hoverinfo="text",
        meta={"kind": "under"},
    )
    return [*traces, under]


def _shape(sheet: Sheet, ops: Sequence[Op], kind: str, *, moved: bool, aside: bool) -> go.Scatter:
    colours = sheet.colours
    # A step of no duration still shows.
    least = sheet.schedule.end / 500 if kind == "O" else 0
    return go.Scatter(
        **_boxes(sheet, [(op.worker, op.start, max(op.end, op.start + least)) for op in ops]),
        name=OP_WORDS[kind],
        fillcolor=colours.ops[kind],
        fillpattern=_hatch(colours) if moved else None,
        opacity=ASIDE_OPACITY if aside else None,
        meta={"kind": kind, "rerouted": moved, "aside": aside},
    )


def _boxes(sheet: Sheet, boxes: Iterable[tuple[Worker, float, float]]) -> dict[str, Any]:
    """What a trace of them has in common with others. boxes: worker, from and to in ticks.

    One outline without a break, which Plotly would make an element of: along the bottom of a row, up and down at each
    box, back along the bottom, and on to the next row by the line on which it will come back. A gap on the right of
    each tells it from the next.
    """
    rows: dict[Worker, list[tuple[float, float]]] = {}
    for worker, begin, end in boxes:
        rows.setdefault(worker, []).append((begin, end))
    edge = sheet.x(min((begin for row in rows.values() for begin, _ in row), default=0))
    x: list[float | int] = []
    y: list[float] = []
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
    return {
        "x": x,
        "y": y,
        "yaxis": sheet.axis,
        "mode": "lines",
        "line": {"width": 0, "simplify": False},
        "fill": "toself",
        "hoverinfo": "skip",
    }


def track(sheet: Sheet, start: float, end: float) -> go.Bar:
    """What stays visible of it is idle: the bubbles. start, end: ticks."""
    living = sheet.living
    return go.Bar(
        orientation="h",
        name="Bubble (idle)",
        base=[sheet.x(start)] * len(living),
        x=[sheet.x(end - start)] * len(living),
        y=[sheet.rows.at[w] for w in living],
        yaxis=sheet.axis,
        width=BAR_HEIGHT,
        marker={"color": sheet.colours.track, "line": {"width": 0}},
        hoverinfo="skip",
        meta={"kind": "track"},
    )


def ghost(sheet: Sheet, start: float, end: float, *, shapes: bool = False) -> list[go.Bar | go.Scatter]:
    """The next iteration's ops between two ticks, one period later, faint. shapes: one element a kind."""
    period, colours = sheet.schedule.period, sheet.colours
    ops = [
        op for w in sheet.living for op in sheet.schedule.ops[w] if op.start + period < end and op.end + period > start
    ]
    opacity = GHOST_OPACITY[colours.name]
    if shapes:
        return [
            go.Scatter(
                **_boxes(
                    sheet,
                    [(o.worker, o.start + period, min(o.end + period, end)) for o in ops if o.kind == kind],
                ),
                fillcolor=colours.ops[kind],
                opacity=opacity,
                meta={"kind": "ghost"},
            )
            for kind in KIND_ORDER
            if any(o.kind == kind for o in ops)
        ]
    if not ops:
        return []
    return [
        go.Bar(
            orientation="h",
            name="Next iteration",
            base=[sheet.x(op.start + period) for op in ops],
            x=[sheet.x(min(op.duration, end - op.start - period)) for op in ops],
            y=[sheet.rows.at[op.worker] for op in ops],
            yaxis=sheet.axis,
            width=BAR_HEIGHT,
            opacity=opacity,
            marker={
                "color": [colours.ops[op.kind] for op in ops],
                "line": {"width": 1, "color": colours.background},
            },
            hovertext=["next iteration<br>" + op_sentence(op, sheet.job) for op in ops],
            hoverinfo="skip",
            meta={"kind": "ghost"},
        )
    ]


def thread(sheet: Sheet, ops: Sequence[Op], name: str, *, dash: str = "solid") -> list[go.Bar | go.Scatter]:
    """Outlines ops and joins each with the next by a line, dark on light so that it shows on any colour."""
    colours = sheet.colours
    shown = [op for op in ops if op.worker in sheet.rows.at]
    x: list[float | int | None] = []
    y: list[float | None] = []
    for before, op in pairwise(shown):
        # From edge to edge: the numbers in the bars stay readable.
        x += [sheet.x(before.end), sheet.x(op.start), None]
        y += [sheet.rows.at[before.worker], sheet.rows.at[op.worker], None]
    outline = go.Bar(
        orientation="h",
        base=[sheet.x(op.start) for op in shown],
        x=[sheet.x(op.duration) for op in shown],
        y=[sheet.rows.at[op.worker] for op in shown],
        yaxis=sheet.axis,
        width=BAR_HEIGHT,
        marker={"color": "rgba(0,0,0,0)", "line": {"width": 2.5, "color": colours.text}},
        hoverinfo="skip",
        meta={"kind": name},
    )
    line = {"x": x, "y": y, "yaxis": sheet.axis, "mode": "lines", "hoverinfo": "skip"}
    ground = go.Scatter(**line, line={"width": 5, "color": colours.background}, meta={"kind": f"{name} ground"})
    above = go.Scatter(**line, line={"width": 2, "color": colours.text, "dash": dash}, meta={"kind": f"{name} line"})
    return [outline, ground, above]


def waits(sheet: Sheet, path: Iterable[Link]) -> go.Bar | None:
    """Where a critical path stands still: nothing it needs runs there."""
    still = [link for link in path if link.waited and link.op.worker in sheet.rows.at]
    if not still:
        return None
    return go.Bar(
        orientation="h",
        name="Wait on the critical path",
        base=[sheet.x(link.op.start - link.waited) for link in still],
        x=[sheet.x(link.waited) for link in still],
        y=[sheet.rows.at[link.op.worker] for link in still],
        yaxis=sheet.axis,
        width=BAR_HEIGHT,
        marker={"color": "rgba(0,0,0,0)", "line": {"width": 2, "color": sheet.colours.failed}},
        hovertext=[f"{link.op} waits {number(sheet.job.units(link.waited))} here" for link in still],
        hoverinfo="text",
        meta={"kind": "wait"},
    )


def mark_out(figure: go.Figure, sheet: Sheet, out: Mapping[str, str] | None = None) -> None:
    """Tints the rows of workers that the plan goes without, and says who runs their micro-batches. out: why a job that
    runs it goes without them, where that is known. A plan alone does not know: there, they are just out."""
    for worker in sheet.rows.workers:
        if worker in sheet.schedule.problem.failed:
            _mark_out(figure, sheet, worker, (out or {}).get(str(worker), OUT))


def op_sentence(op: Op, job: Job) -> str:
    """What one bar stands for, for hover and tables."""
    times = f"{number(job.units(op.start))} to {number(job.units(op.end))} {text.plural(job.time_unit)}"
    if op.kind == "O":
        return f"<b>{op.worker}</b> · Optimizer step of stage {op.stage}<br>{times}"
    home = f"micro-batch {op.micro_batch} of pipeline {op.pipeline}"
    # Not why: its home worker may have failed or moved, or be there and slow.
    moved = f"<br>re-routed from {Worker(op.pipeline, op.stage)}" if op.rerouted else ""
    return f"<b>{op.worker}</b> · {OP_WORDS[op.kind]}<br>{home}{moved}<br>{times}"


def _bars(sheet: Sheet, ops: Sequence[Op], kind: str, *, moved: bool, aside: bool, suffix: str) -> go.Bar:
    colours, job = sheet.colours, sheet.job
    fill = colours.ops[kind]
    outline = colours.failed if moved else colours.background
    # A step of no duration still shows: as a line, drawn by its outline.
    instant = kind == "O" and all(op.duration == 0 for op in ops)
    marker: dict[str, object] = {
        "color": fill,
        "line": {"color": fill if instant else outline, "width": 3 if instant else 1.8 if moved else 1},
    }
    if moved:
        marker["pattern"] = _hatch(colours)
    return go.Bar(
        orientation="h",
        name=OP_WORDS[kind],
        base=[sheet.x(op.start) for op in ops],
        x=[sheet.x(op.duration) for op in ops],
        y=[sheet.rows.at[op.worker] for op in ops],
        yaxis=sheet.axis,
        width=BAR_HEIGHT,
        opacity=ASIDE_OPACITY if aside else None,
        # A click must not dim what was not clicked: the path that it asks for is drawn by the server.
        unselected={"marker": {"opacity": 1}},
        text=None if kind == "O" else [_label(op) for op in ops],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": colours.ops_text[kind], "size": 12},
        marker=marker,
        customdata=None if kind == "O" else [f"{op.pipeline}.{op.micro_batch}" for op in ops],
        hovertext=[op_sentence(op, job) + suffix for op in ops],
        hoverinfo="text",
        meta={"kind": kind, "rerouted": moved, "aside": aside},
    )


def _label(op: Op) -> str:
    return f"<b>{op.pipeline}·{op.micro_batch}</b>" if op.rerouted else str(op.micro_batch)


def _hatch(colours: Palette) -> dict[str, object]:
    return {
        "shape": "/",
        "fillmode": "overlay",
        "fgcolor": colours.failed,
        "fgopacity": 0.6,
        "size": 8,
        "solidity": 0.16,
    }


def _mark_out(figure: go.Figure, sheet: Sheet, worker: Worker, why: str) -> None:
    y, colours = sheet.rows.at[worker], sheet.colours
    figure.add_shape(
        type="rect",
        xref="paper",
        yref=sheet.axis,
        x0=0,
        x1=1,
        y0=y - BAR_HEIGHT / 2,
        y1=y + BAR_HEIGHT / 2,
        fillcolor=colours.failed_tint if why == FAILED else colours.surface,
        line_width=0,
        name=str(worker),
    )
    takers = sorted(
        {
            op.worker
            for w in sheet.schedule.ops
            if w.stage == worker.stage
            for op in sheet.schedule.ops[w]
            if op.kind == "F" and op.pipeline == worker.pipeline
        }
    )
    figure.add_annotation(
        x=0.5,
        xref="x domain",
        y=y,
        yref=sheet.axis,
        text=f"<b>{'✕ ' if why == FAILED else ''}{why}</b> – its micro-batches run on {_listed(takers)}",
        showarrow=False,
        font={"color": colours.failed_text if why == FAILED else colours.muted, "size": 13},
    )


def _listed(workers: Sequence[Worker]) -> str:
    names = [str(w) for w in workers]
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no peer"


def number(value: float) -> str:
    return f"{value:,.6g}"
