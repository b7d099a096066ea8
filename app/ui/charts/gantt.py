"""The Gantt chart of a schedule: one row per worker, one bar per op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from app.ui.charts.rows import Rows
from app.ui.theme import OP_WORDS, Palette, style
from planner.job import Job, Worker
from planner.schedule import Op, Schedule

KIND_ORDER = ("F", "I", "W", "B", "O")
BAR_HEIGHT = 0.86
GHOST_OPACITY = {"light": 0.32, "dark": 0.5}
# Above this many ops in a row, numbers appear only as far as they fit after zooming in.
DENSE_OPS_PER_ROW = 90


def gantt(
    schedule: Schedule,
    colours: Palette,
    *,
    workers: Sequence[Worker] | None = None,
    fault_free_end: float | None = None,
    window: tuple[float, float] | None = None,
    revision: str = "gantt",
) -> go.Figure:
    """Draws `schedule`, times in the job's own unit.

    workers: the rows to show (default: all). fault_free_end: where fault-free 1F1B would end, in
    ticks. window: the only ticks to show; ops outside are left out.
    """
    problem = schedule.problem
    job = problem.job
    rows = Rows.of(list(job.workers()) if workers is None else workers)
    shown = [op for w in rows.workers for op in schedule.ops.get(w, ()) if _inside(op, window)]
    start, end = window or (0, _axis_end(schedule, fault_free_end))

    figure = go.Figure()
    living = [w for w in rows.workers if w in schedule.ops]
    figure.add_trace(_track(living, rows, job, start, end, colours))
    if window is None:
        _add_ghost(figure, schedule, living, rows, end, colours)
    kinds = [k for k in KIND_ORDER if any(op.kind == k for op in shown)]
    for kind in kinds:
        own = [op for op in shown if op.kind == kind and not op.rerouted]
        moved = [op for op in shown if op.kind == kind and op.rerouted]
        figure.add_trace(_bars(own, kind, rows, job, colours, moved=False))
        if moved:
            figure.add_trace(_bars(moved, kind, rows, job, colours, moved=True))
    for worker in rows.workers:
        if worker in problem.failed:
            _mark_failed(figure, schedule, worker, rows, colours)
    if fault_free_end is not None and window is None:
        _mark_fault_free_end(figure, job, fault_free_end, colours)

    dense = len(shown) > DENSE_OPS_PER_ROW * max(1, len(living))
    style(figure, colours, height=rows.pixels() + 70, revision=revision)
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        dragmode="pan",
        margin={"l": 62, "r": 14, "t": 24, "b": 46},
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 7} if dense else None,
    )
    figure.update_xaxes(
        title_text=f"time in the iteration ({_plural(job.time_unit)})",
        range=[job.units(start), job.units(end)],
        showgrid=True,
        layer="below traces",
    )
    figure.update_yaxes(
        tickvals=[rows.at[w] for w in rows.workers],
        ticktext=[str(w) for w in rows.workers],
        ticksuffix=" ",
        tickfont={"size": 12, "color": colours.text},
        range=[rows.extent + 0.05, -0.05],
        fixedrange=True,
        showgrid=False,
        showline=False,
    )
    return figure


def op_sentence(op: Op, job: Job) -> str:
    """What one bar stands for, for hover and tables."""
    times = f"{_number(job.units(op.start))} to {_number(job.units(op.end))} {_plural(job.time_unit)}"
    if op.kind == "O":
        return f"<b>{op.worker}</b> · Optimizer step of stage {op.stage}<br>{times}"
    home = f"micro-batch {op.micro_batch} of pipeline {op.pipeline}"
    moved = "<br>re-routed: its home worker has failed" if op.rerouted else ""
    return f"<b>{op.worker}</b> · {OP_WORDS[op.kind]}<br>{home}{moved}<br>{times}"


def _axis_end(schedule: Schedule, fault_free_end: float | None) -> float:
    last = max(ops[-1].end for ops in schedule.ops.values() if ops)
    # Room behind the end for the next iteration's first ops, which staggering pulls forward.
    return max(last, fault_free_end or 0, schedule.period) * 1.12


def _inside(op: Op, window: tuple[float, float] | None) -> bool:
    return window is None or (op.end > window[0] and op.start < window[1])


def _bars(ops: Sequence[Op], kind: str, rows: Rows, job: Job, colours: Palette, *, moved: bool) -> go.Bar:
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
        base=[job.units(op.start) for op in ops],
        x=[job.units(op.duration) for op in ops],
        y=[rows.at[op.worker] for op in ops],
        width=BAR_HEIGHT,
        text=None if kind == "O" else [_label(op) for op in ops],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": colours.ops_text[kind], "size": 12},
        marker=marker,
        hovertext=[op_sentence(op, job) for op in ops],
        hoverinfo="text",
        meta={"kind": kind, "rerouted": moved},
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


def _track(living: Sequence[Worker], rows: Rows, job: Job, start: float, end: float, colours: Palette) -> go.Bar:
    return go.Bar(
        orientation="h",
        name="Bubble (idle)",
        base=[job.units(start)] * len(living),
        x=[job.units(end - start)] * len(living),
        y=[rows.at[w] for w in living],
        width=BAR_HEIGHT,
        marker={"color": colours.track, "line": {"width": 0}},
        hoverinfo="skip",
        meta={"kind": "track"},
    )


def _add_ghost(
    figure: go.Figure, schedule: Schedule, living: Iterable[Worker], rows: Rows, end: float, colours: Palette
) -> None:
    """The next iteration's first ops, one period later, faint."""
    job, period = schedule.problem.job, schedule.period
    ops = [op for w in living for op in schedule.ops[w] if op.start + period < end]
    if not ops:
        return
    figure.add_trace(
        go.Bar(
            orientation="h",
            name="Next iteration",
            base=[job.units(op.start + period) for op in ops],
            x=[job.units(min(op.duration, end - op.start - period)) for op in ops],
            y=[rows.at[op.worker] for op in ops],
            width=BAR_HEIGHT,
            opacity=GHOST_OPACITY[colours.name],
            marker={
                "color": [colours.ops[op.kind] for op in ops],
                "line": {"width": 1, "color": colours.background},
            },
            hovertext=["next iteration<br>" + op_sentence(op, job) for op in ops],
            hoverinfo="skip",
            meta={"kind": "ghost"},
        )
    )


def _mark_failed(figure: go.Figure, schedule: Schedule, worker: Worker, rows: Rows, colours: Palette) -> None:
    y = rows.at[worker]
    figure.add_shape(
        type="rect",
        xref="paper",
        x0=0,
        x1=1,
        y0=y - BAR_HEIGHT / 2,
        y1=y + BAR_HEIGHT / 2,
        fillcolor=colours.failed_tint,
        line_width=0,
        name=str(worker),
    )
    takers = sorted(
        {
            op.worker
            for w, ops in schedule.ops.items()
            if w.stage == worker.stage
            for op in ops
            if op.kind == "F" and op.pipeline == worker.pipeline
        }
    )
    figure.add_annotation(
        x=0.5,
        xref="x domain",
        y=y,
        text=f"<b>✕ failed</b> – its micro-batches run on {_listed(takers)}",
        showarrow=False,
        font={"color": colours.failed_text, "size": 13},
    )


def _mark_fault_free_end(figure: go.Figure, job: Job, ticks: float, colours: Palette) -> None:
    x = job.units(ticks)
    figure.add_shape(
        type="line", x0=x, x1=x, yref="paper", y0=0, y1=1, line={"color": colours.text, "width": 1.5, "dash": "dot"}
    )
    figure.add_annotation(
        x=x,
        y=1,
        yref="paper",
        yanchor="bottom",
        xanchor="right",
        text=f"fault-free 1F1B ends at {_number(x)} {_plural(job.time_unit)}",
        showarrow=False,
        font={"size": 12, "color": colours.text},
    )


def _listed(workers: Sequence[Worker]) -> str:
    names = [str(w) for w in workers]
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no peer"


def _number(value: float) -> str:
    return f"{value:,.6g}"


def _plural(unit: str) -> str:
    return unit + "s" if unit == "slot" else unit
