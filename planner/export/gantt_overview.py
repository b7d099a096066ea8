"""Rows of the Gantt chart of a large plan, one per stage: what share of its workers does what, when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from openrecycle.planner.export import colours
from openrecycle.planner.export.drawing import Point, Polygon, Rect, Shape, Text
from openrecycle.planner.export.gantt_frame import Frame
from openrecycle.planner.job import Worker
from openrecycle.planner.schedule import Op, Schedule

COLUMN = 2.0  # pixels over which shares are averaged
KINDS = ("F", "I", "B", "W", "O")
WORDS = {"F": "forward", "I": "input gradient", "B": "backward", "W": "weight gradient", "O": "optimizer step"}


def overview_height(stages: int) -> float:
    return stages * _row(stages)


def overview_rows(schedule: Schedule, workers: Sequence[Worker], frame: Frame) -> Iterator[Shape]:
    """Stacked shares of the stage's living workers among `workers`; what is left is the bubble."""
    job = schedule.problem.job
    living: dict[int, list[Worker]] = defaultdict(list)
    out: dict[int, int] = defaultdict(int)
    for worker in workers:
        if worker in schedule.ops:
            living[worker.stage].append(worker)
        else:
            out[worker.stage] += 1
    row = _row(job.stages)
    bar = row * 0.84
    for s in range(job.stages):
        top = frame.top + s * row + (row - bar) / 2
        yield Text(frame.left - 8, top + bar / 2, f"stage {s}", min(12.0, row * 0.8), colours.TEXT, "end")
        yield Rect(frame.left, top, frame.width, bar, colours.TRACK)
        shares = _shares([op for w in living[s] for op in schedule.ops[w]], len(living[s]), frame)
        yield from _areas(shares, frame, top, bar, s)
        if out[s]:
            words = f"{out[s]} of {out[s] + len(living[s])} out"
            ground = len(words) * 6.4 + 10
            size = min(12.0, bar)
            yield Rect(frame.right - ground, top + (bar - size) / 2 - 1, ground, size + 2, colours.BACKGROUND)
            yield Text(frame.right - 5, top + bar / 2, words, size - 1, colours.TEXT, "end")


def _row(stages: int) -> float:
    return 28.0 if stages <= 32 else 18.0 if stages <= 64 else 12.0


def _shares(ops: list[Op], workers: int, frame: Frame) -> dict[str, list[float]]:
    """For each kind the share of the workers in it, column by column."""
    columns = max(1, round(frame.width / COLUMN))
    per_tick = columns / frame.end
    shares = {kind: [0.0] * columns for kind in KINDS}
    for op in ops:
        row = shares[op.kind]
        start, end = op.start * per_tick, op.end * per_tick
        for column in range(int(start), min(columns, int(end) + 1)):
            row[column] += max(0.0, min(end, column + 1) - max(start, column)) / max(1, workers)
    return {kind: row for kind, row in shares.items() if any(row)}


def _areas(shares: dict[str, list[float]], frame: Frame, top: float, bar: float, stage: int) -> Iterator[Shape]:
    """Each kind a band on those before it, as steps; where nobody is in it, there is no band."""
    lower: list[float] = []
    for kind, row in shares.items():
        lower = lower or [0.0] * len(row)
        upper = [low + share for low, share in zip(lower, row, strict=True)]
        for first, end in _runs(row):
            roof = _steps(upper, first, end, frame, top + bar, bar)
            floor = _steps(lower, first, end, frame, top + bar, bar)
            yield Polygon((*roof, *reversed(floor)), colours.OPS[kind], f"stage {stage}: {WORDS[kind]}")
        lower = upper


def _runs(row: list[float]) -> Iterator[tuple[int, int]]:
    """First and behind-last column of each stretch above 0."""
    first = None
    for i, share in enumerate([*row, 0.0]):
        if share > 0 and first is None:
            first = i
        elif share == 0 and first is not None:
            yield first, i
            first = None


def _steps(heights: list[float], first: int, end: int, frame: Frame, bottom: float, bar: float) -> list[Point]:
    """Corner points from column `first` to behind the last, equal neighbours left out."""
    width = frame.width / len(heights)
    points: list[Point] = []
    before = math.nan
    for i in range(first, end):
        y = bottom - min(1.0, heights[i]) * bar
        if not abs(y - before) <= 0.01:  # also for the first, which has nothing before it
            if points:
                points.append((frame.left + i * width, before))
            points.append((frame.left + i * width, y))
            before = y
    return [*points, (frame.left + end * width, before)]
