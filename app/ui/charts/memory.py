"""What each worker holds over time, against its limit, in rows like those of the Gantt chart.

In bytes where the profile says what a worker keeps (weights and optimizer state with it), against the
capacity; else in activations, against the memory limit.
"""

from __future__ import annotations

import plotly.graph_objects as go

from openrecycle.app.ui import text
from openrecycle.app.ui.charts.bars import BAR_HEIGHT, Sheet
from openrecycle.planner.job import Worker

ROW_PIXELS = 20
FILL_OPACITY = 0.7


def held_traces(sheet: Sheet, start: float, end: float) -> list[go.Scatter]:
    """One trace with an area per worker, one with the limits. start, end: ticks between which they are drawn.

    All rows have one scale: the largest limit or peak among them.
    """
    top = scale(sheet)
    curves = go.Scatter(
        x=[],
        y=[],
        yaxis=sheet.axis,
        mode="lines",
        fill="toself",
        name="Memory held" if sheet.schedule.counts_bytes else "Activations held",
        line={"width": 0},
        fillcolor=_faint(sheet.colours.ops["F"]),
        hoverinfo="text",
        meta={"kind": "memory"},
    )
    x: list[float | int | None] = []
    y: list[float | None] = []
    words: list[str] = []
    for worker in sheet.living:
        limit = _of(sheet, worker)
        for tick, held in _outline(sheet, worker, start, end):
            x.append(sheet.x(tick))
            y.append(_height(sheet, worker, held, top))
            words.append(f"<b>{worker}</b> holds {_amount(sheet, held)}{limit}")
        x.append(None)
        y.append(None)
        words.append("")
    curves.x, curves.y, curves.hovertext = x, y, words
    limits = _limits(sheet, start, end, top)
    return [curves, limits] if limits is not None else [curves]


def title(sheet: Sheet) -> str:
    """What the rows show, and what the dotted lines mean."""
    limited = any(_limit(sheet, worker) is not None for worker in sheet.living)
    if sheet.schedule.counts_bytes:
        what = "<b>Memory held</b>: weights, optimizer state and activations"
        return what + ("; dotted: the worker's capacity" if limited else "; the capacity is not known")
    return "<b>Activations held</b>" + (", dotted: the limit" if limited else "; there is no limit")


def scale(sheet: Sheet) -> int:
    limits = [_limit(sheet, w) or 0 for w in sheet.living]
    return max([*limits, *(_peak(sheet, w) for w in sheet.living), 1])


def peak_words(sheet: Sheet, worker: Worker) -> str:
    """`3 of 4`: the most that the worker holds, and its limit; in bytes `6.2 GiB`, the limit is on hover."""
    limit, peak = _limit(sheet, worker), _peak(sheet, worker)
    if sheet.schedule.counts_bytes:
        return text.size(peak)
    return f"{peak}" if limit is None else f"{peak} of {limit}"


def _peak(sheet: Sheet, worker: Worker) -> int:
    schedule = sheet.schedule
    return (schedule.peak_bytes if schedule.counts_bytes else schedule.peak_activations)[worker]


def _limit(sheet: Sheet, worker: Worker) -> int | None:
    problem = sheet.schedule.problem
    if sheet.schedule.counts_bytes:
        return problem.job.capacity_bytes[worker.stage] if problem.job.capacity_bytes else None
    return problem.limits[worker.stage]


def _outline(sheet: Sheet, worker: Worker, start: float, end: float) -> list[tuple[float, int]]:
    """Corners of the area: along the steps, and back to the ground."""
    schedule = sheet.schedule
    steps: list[tuple[float, int]] = []
    for at, held in schedule.held_bytes(worker) if schedule.counts_bytes else schedule.held_activations(worker):
        if at <= start:
            steps = [(start, held)]  # what it comes with
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


def _limits(sheet: Sheet, start: float, end: float, top: int) -> go.Scatter | None:
    x: list[float | int | None] = []
    y: list[float | None] = []
    for worker in sheet.living:
        limit = _limit(sheet, worker)
        if limit is not None:
            level = _height(sheet, worker, limit, top)
            x += [sheet.x(start), sheet.x(end), None]
            y += [level, level, None]
    if not x:
        return None
    return go.Scatter(
        x=x,
        y=y,
        yaxis=sheet.axis,
        mode="lines",
        name="Memory limit",
        line={"width": 1.5, "dash": "dot", "color": sheet.colours.muted},
        hoverinfo="skip",
        meta={"kind": "memory limit"},
    )


def _height(sheet: Sheet, worker: Worker, held: int, top: int) -> float:
    """Rows count downwards."""
    return sheet.rows.at[worker] + BAR_HEIGHT / 2 - BAR_HEIGHT * held / top


def _of(sheet: Sheet, worker: Worker) -> str:
    limit = _limit(sheet, worker)
    unit = "" if sheet.schedule.counts_bytes else " activations"
    return unit if limit is None else f" of {_amount(sheet, limit)}{unit}"


def _amount(sheet: Sheet, held: int) -> str:
    return text.size(held) if sheet.schedule.counts_bytes else f"{held}"


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {FILL_OPACITY})"
