"""The layout of a plan's Gantt chart: title, key, rows, time axis. Knows nothing of SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator

from openrecycle.planner.baseline import reference_period
from openrecycle.planner.errors import PlannerError
from openrecycle.planner.export import colours
from openrecycle.planner.export.drawing import PROSE_WIDTH, Drawing, Line, Rect, Shape, Text, text_width
from openrecycle.planner.export.gantt_frame import Frame
from openrecycle.planner.export.gantt_overview import overview_height, overview_rows
from openrecycle.planner.export.gantt_rows import row_height, worker_rows
from openrecycle.planner.plan import Plan
from openrecycle.planner.schedule import Op, Schedule

# Above either a bar per op can't be read; then a row is a stage.
MAX_ROWS = 128
MAX_OPS = 20_000
MAX_STAGES = 256

MARGIN = 24.0
TITLE, BODY, SMALL = 17.0, 13.0, 12.0
LINE_HEIGHT = 19.0
MIN_PLOT, MAX_PLOT = 960.0, 3_200.0
OVERVIEW_PLOT = 1_400.0
OP_WIDTH = 30.0  # of an op of median length, where that fits between the limits
KIND_WORDS = {
    "F": "Forward (F)",
    "I": "Backward, input (I)",
    "W": "Backward, weight (W)",
    "B": "Backward, I + W fused (B)",
    "O": "Optimizer step (O)",
}


def gantt(plan: Plan, pipeline: int | None = None) -> Drawing:
    """A row per worker; for a large plan a row per stage, whose heights are shares of its workers.

    pipeline: only its workers. Raises PlannerError for more than MAX_STAGES stages in rows by stage.
    """
    schedule = plan.schedule()
    workers = [w for w in schedule.problem.job.workers() if pipeline in (None, w.pipeline)]
    ops = [op for w in workers for op in schedule.ops.get(w, ())]
    detailed = len(workers) <= MAX_ROWS and len(ops) <= MAX_OPS
    if not detailed and plan.job.stages > MAX_STAGES:
        raise PlannerError(
            f"a picture has at most {MAX_ROWS} rows of workers or {MAX_STAGES} of stages, and the plan has "
            f"{len(workers):,} workers in {plan.job.stages} stages; use chrome-trace or csv"
        )
    labels = [str(w) for w in workers] if detailed else [f"stage {s}" for s in range(plan.job.stages)]
    end = max([op.end for op in ops] + [reference_period(schedule.problem.job), schedule.period])
    label = max(text_width(label, SMALL) for label in labels)
    frame = Frame(MARGIN + label + 10, 0, _plot_width(ops, end) if detailed else OVERVIEW_PLOT, end)
    head = list(_head(plan, frame, ops, detailed=detailed, pipeline=pipeline))
    frame = frame.moved_down_to(max(shape.y for shape in head if isinstance(shape, Text)) + 30)
    height = row_height(workers) if detailed else overview_height(plan.job.stages)
    body = worker_rows(schedule, workers, frame) if detailed else overview_rows(schedule, workers, frame)
    shapes = [*head, *body, *_axis(plan, frame, height), *_reference(schedule, frame, height)]
    return Drawing(
        width=frame.right + MARGIN,
        height=frame.top + height + 58,
        background=colours.BACKGROUND,
        title=_title(plan, pipeline),
        description=" ".join(_facts(plan)),
        shapes=tuple(shapes),
    )


def _plot_width(ops: list[Op], end: int) -> float:
    """Wide enough for numbers in the bars, within the limits of a page."""
    lengths = sorted(op.duration for op in ops if op.kind != "O")
    median = lengths[len(lengths) // 2] if lengths else end
    return min(MAX_PLOT, max(MIN_PLOT, OP_WIDTH * end / max(median, 1)))


def _title(plan: Plan, pipeline: int | None) -> str:
    job = plan.job
    out = ", ".join(plan.failed[:3]) + (f" and {len(plan.failed) - 3} more" if len(plan.failed) > 3 else "")
    only = "" if pipeline is None else f"Pipeline {pipeline} of "
    grid = f"{job.pipelines} pipelines x {job.stages} stages x {job.micro_batches} micro-batches"
    return f"{only}{grid}, " + (f"without {out}" if out else "all workers")


def _facts(plan: Plan) -> list[str]:
    m, unit = plan.metrics, plural(plan.job.time_unit)
    proof = "optimal" if plan.solver.status == "optimal" else f"gap {m.gap:.2%}"
    return [
        f"{plan.technique.value}, memory {plan.memory};",
        f"period {_value(m.period)} {unit}, lower bound {_value(m.lower_bound)} ({proof}),",
        f"makespan {_value(m.makespan)};",
        f"{m.slowdown_vs_1f1b:+.1%} against fault-free 1F1B,",
        f"{m.slowdown_vs_best:+.1%} against the best fault-free plan;",
        f"bubbles {m.bubble_fraction:.1%}; plan {plan.fingerprint[:12]}",
    ]


def _head(plan: Plan, frame: Frame, ops: list[Op], *, detailed: bool, pipeline: int | None) -> Iterator[Shape]:
    """Title, facts and key, each broken into lines that fit."""
    room = frame.right - MARGIN
    y = MARGIN + 8
    yield Text(MARGIN, y, _title(plan, pipeline), TITLE, colours.TEXT, bold=True)
    y += 6
    note = [] if detailed else ["Each row is a stage; a colour's height is the share of its living workers in that op."]
    for line in _wrapped(_facts(plan), room) + note:
        y += LINE_HEIGHT
        yield Text(MARGIN, y, line, BODY, colours.MUTED)
    y += LINE_HEIGHT + 9
    yield from _key(plan, ops, y, room, detailed=detailed)


def _wrapped(pieces: list[str], room: float) -> list[str]:
    lines = [""]
    for piece in pieces:
        longer = f"{lines[-1]} {piece}".strip()
        if lines[-1] and text_width(longer, BODY, character=PROSE_WIDTH) > room:
            lines.append(piece)
        else:
            lines[-1] = longer
    return lines


def _key(plan: Plan, ops: list[Op], y: float, room: float, *, detailed: bool) -> Iterator[Shape]:
    x, swatch = MARGIN, 13.0
    present = {op.kind for op in ops if detailed or op.duration}
    entries: list[tuple[str, str | None, str]] = [
        (colours.OPS[kind], None, words) for kind, words in KIND_WORDS.items() if kind in present
    ]
    if detailed and any(op.rerouted for op in ops):
        entries.append((colours.BACKGROUND, colours.FAILED, "Re-routed: pipeline·micro-batch"))
    entries.append((colours.TRACK, None, "Bubble"))
    for fill, hatch, words in entries:
        width = swatch + 6 + text_width(words, SMALL, character=PROSE_WIDTH) + 15
        if x + width > room and x > MARGIN:
            x, y = MARGIN, y + LINE_HEIGHT
        edge = 1.6 if hatch else 0.0
        yield Rect(x, y - swatch / 2, swatch, swatch, fill, stroke=hatch, stroke_width=edge, hatch=hatch)
        yield Text(x + swatch + 6, y, words, SMALL, colours.TEXT)
        x += width


def _axis(plan: Plan, frame: Frame, height: float) -> Iterator[Shape]:
    bottom = frame.top + height + 4
    job = plan.job.job()
    step = _nice_step(job.units(frame.end) / max(4.0, frame.width / 90))
    yield Line((frame.left, bottom), (frame.right, bottom), colours.LINE)
    for i in range(math.floor(job.units(frame.end) / step + 1e-9) + 1):
        x = frame.x(i * step * job.ticks_per_unit)
        yield Line((x, bottom), (x, bottom + 5), colours.MUTED)
        yield Text(x, bottom + 15, _value(i * step), SMALL, colours.MUTED, "middle")
    label = f"time in the iteration ({plural(plan.job.time_unit)})"
    yield Text((frame.left + frame.right) / 2, bottom + 36, label, SMALL, colours.MUTED, "middle")


def _reference(schedule: Schedule, frame: Frame, height: float) -> Iterator[Shape]:
    """Where fault-free 1F1B ends: what the slowdown is measured against."""
    job = schedule.problem.job
    ticks = reference_period(job)
    x, top = frame.x(ticks), frame.top
    yield Line((x, top - 4), (x, top + height + 4), colours.TEXT, 1.4, (2.5, 3.0))
    words = f"fault-free 1F1B: {_value(job.units(ticks))} {plural(job.time_unit)}"
    yield Text(x, top - 11, words, SMALL, colours.TEXT, "end" if x > frame.left + frame.width / 2 else "start")


def _nice_step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def plural(unit: str) -> str:
    return unit + "s" if unit == "slot" else unit


def _value(value: float) -> str:
    return f"{value:,.6g}"
