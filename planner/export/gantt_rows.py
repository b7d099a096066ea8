"""Rows of the Gantt chart, one per worker: tracks, bars, re-routed bars hatched.

A plan does not know why it goes without a worker: that may have failed, or moved, or never have been there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from openrecycle.planner.export import colours
from openrecycle.planner.export.drawing import Line, Rect, Shape, Text, text_width
from openrecycle.planner.export.gantt_frame import Frame
from openrecycle.planner.job import Worker
from openrecycle.planner.schedule import Op, Schedule

ROW, BAR, PIPELINE_GAP = 26.0, 22.0, 14.0
LABEL_SIZES = (12.0, 10.0, 8.0)
WORDS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def row_height(workers: Sequence[Worker]) -> float:
    """Pixels that the rows take in all."""
    return sum(height for _, height in _rows(workers))


def worker_rows(schedule: Schedule, workers: Sequence[Worker], frame: Frame) -> Iterator[Shape]:
    """workers: the rows, pipeline by pipeline."""
    y = frame.top
    for worker, height in _rows(workers):
        y += height
        top = y - (ROW + BAR) / 2
        out = worker not in schedule.ops
        tone = colours.MUTED if out else colours.TEXT
        yield Text(frame.left - 8, top + BAR / 2, str(worker), 12, tone, "end")
        if out:
            yield from _out(schedule, worker, frame, top)
            continue
        yield Rect(frame.left, top, frame.width, BAR, colours.TRACK)
        for op in schedule.ops[worker]:
            yield from _bar(op, schedule, frame, top)


def _rows(workers: Sequence[Worker]) -> Iterator[tuple[Worker, float]]:
    """Each worker with the height of its row, the gap above it included."""
    yield workers[0], ROW
    for before, worker in pairwise(workers):
        yield worker, ROW + (PIPELINE_GAP if before.pipeline != worker.pipeline else 0)


def _bar(op: Op, schedule: Schedule, frame: Frame, top: float) -> Iterator[Shape]:
    x = frame.x(op.start)
    width = frame.x(op.end) - x
    fill = colours.OPS[op.kind]
    if op.duration == 0:
        # No length, and still to be seen: that and when the stage steps is what staggering is about.
        yield Line((x, top), (x, top + BAR), fill, 2.0)
        return
    tooltip = _sentence(op, schedule)
    gap = min(1.0, width / 4)
    if op.rerouted:
        hatch = colours.blend(colours.FAILED, fill, 0.55)
        yield Rect(x, top, width - gap, BAR, fill, colours.FAILED, min(1.8, width / 4), hatch, tooltip)
    else:
        yield Rect(x, top, width - gap, BAR, fill, tooltip=tooltip)
    if op.kind == "O":
        return
    label = f"{op.pipeline}·{op.micro_batch}" if op.rerouted else str(op.micro_batch)
    size = next((s for s in LABEL_SIZES if text_width(label, s) + 4 <= width), None)
    if size is not None:
        middle = x + (width - gap) / 2
        if op.rerouted:  # the number stands on plain ground, or the hatching runs through it
            ground = text_width(label, size)
            yield Rect(middle - ground / 2, top + (BAR - size) / 2, ground, size, fill)
        yield Text(middle, top + BAR / 2, label, size, colours.OPS_TEXT[op.kind], "middle", bold=op.rerouted)


def _sentence(op: Op, schedule: Schedule) -> str:
    job = schedule.problem.job
    when = f"{job.units(op.start):,.6g} to {job.units(op.end):,.6g} {job.time_unit}"
    if op.kind == "O":
        return f"{op.worker}: optimizer step of stage {op.stage}, {when}"
    moved = f", re-routed from {Worker(op.pipeline, op.stage)}" if op.rerouted else ""
    return f"{op.worker}: {WORDS[op.kind]} of micro-batch {op.micro_batch} of pipeline {op.pipeline}{moved}, {when}"


def _out(schedule: Schedule, worker: Worker, frame: Frame, top: float) -> Iterator[Shape]:
    takers = sorted(
        {op.worker for w, ops in schedule.ops.items() if w.stage == worker.stage for op in ops if _of(op, worker)}
    )
    names = [str(w) for w in takers]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    words = f"out: its micro-batches run on {listed or 'nobody'}"
    yield Text(frame.left + frame.width / 2, top + BAR / 2, words, 13, colours.MUTED, "middle")


def _of(op: Op, home: Worker) -> bool:
    return op.kind == "F" and op.pipeline == home.pipeline
