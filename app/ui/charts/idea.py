"""A small schedule as an SVG picture: it needs no script, scales with the page, and paints at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from openrecycle.app.ui import text
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.job import Worker
from openrecycle.planner.schedule import Op, Schedule

# Of the next iteration's bars.
FAINT = {"light": 0.32, "dark": 0.5}
LABEL, SLOT, ROW, BAR, GAP, HEAD, FOOT = 46.0, 22.0, 19.0, 16.0, 6.0, 20.0, 20.0
FONT = "Source Sans, Source Sans Pro, Helvetica, Arial, sans-serif"


def picture(
    schedule: Schedule, colours: Palette, *, end: int, reference: int, moved: Sequence[tuple[Worker, Worker]] = ()
) -> str:
    """All workers over ticks 0..end. reference: where fault-free 1F1B ends, as a dotted line. moved: (who,
    whose place they took)."""
    job = schedule.problem.job
    width = LABEL + SLOT * end
    height = HEAD + job.pipelines * job.stages * ROW + (job.pipelines - 1) * GAP + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{FONT}" font-size="11">',
        f'<defs><pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V6" stroke="{colours.failed}" stroke-width="2" opacity="0.75"/></pattern></defs>',
    ]
    for worker in job.workers():
        parts += _row(schedule, worker, _top(schedule, worker), colours, end, dict(moved))
    parts += _marks(schedule, colours, height, reference)
    return "".join(parts) + "</svg>"


def _top(schedule: Schedule, worker: Worker) -> float:
    return HEAD + (worker.pipeline * schedule.problem.job.stages + worker.stage) * ROW + worker.pipeline * GAP


def _row(
    schedule: Schedule, worker: Worker, top: float, colours: Palette, end: int, moved: Mapping[Worker, Worker]
) -> Iterator[str]:
    dead = worker in schedule.problem.failed
    tone = colours.failed_text if dead else colours.text
    weight = ' font-weight="bold"' if dead else ""
    yield f'<text x="0" y="{top + 12:g}" fill="{tone}"{weight}>{worker}</text>'
    fill = colours.failed_tint if dead else colours.track
    yield f'<rect x="{LABEL:g}" y="{top:g}" width="{SLOT * end:g}" height="{BAR:g}" fill="{fill}"/>'
    if dead:
        why = f"→ moved to {moved[worker]}" if worker in moved else "✕ failed"
        yield (
            f'<text x="{LABEL + SLOT * end / 2:g}" y="{top + 12:g}" fill="{tone}" text-anchor="middle">'
            f"{why}: its micro-batches run on its peers</text>"
        )
        return
    for op in schedule.ops[worker]:
        yield from _bar(op, 0, top, colours, end, faint=False)
        if op.start + schedule.period < end:
            yield from _bar(op, schedule.period, top, colours, end, faint=True)


def _bar(op: Op, later: int, top: float, colours: Palette, end: int, *, faint: bool) -> Iterator[str]:
    length = min(op.duration, end - op.start - later)
    if not length or op.kind == "O":
        return
    x, width = LABEL + SLOT * (op.start + later), SLOT * length - 1
    box = f'x="{x:g}" y="{top:g}" width="{width:g}" height="{BAR:g}"'
    if faint:
        yield f'<rect {box} fill="{colours.ops[op.kind]}" opacity="{FAINT[colours.name]}"/>'
        return
    yield f'<rect {box} fill="{colours.ops[op.kind]}"/>'
    if op.rerouted:
        yield f'<rect {box} fill="url(#h)"/>'
        inner = f'x="{x + 0.8:g}" y="{top + 0.8:g}" width="{width - 1.6:g}" height="{BAR - 1.6:g}"'
        yield f'<rect {inner} fill="none" stroke="{colours.failed}" stroke-width="1.6"/>'
    number = f"{op.pipeline}·{op.micro_batch}" if op.rerouted else str(op.micro_batch)
    middle = x + width / 2
    if op.rerouted:  # the number stands on plain ground, or the hatching runs through it
        ground = f'x="{middle - 8.5:g}" y="{top + 2:g}" width="17" height="{BAR - 4:g}"'
        yield f'<rect {ground} fill="{colours.ops[op.kind]}"/>'
    weight = ' font-weight="bold" font-size="10"' if op.rerouted else ""
    yield (
        f'<text x="{middle:g}" y="{top + 12:g}" fill="{colours.ops_text[op.kind]}" text-anchor="middle"{weight}>'
        f"{number}</text>"
    )


def _marks(schedule: Schedule, colours: Palette, height: float, reference: int) -> Iterator[str]:
    """The period, and where fault-free 1F1B ends."""
    bottom = height - FOOT + 2
    at = LABEL + SLOT * reference
    yield (
        f'<path d="M{at:g} {HEAD - 5:g}V{bottom:g}" stroke="{colours.text}" stroke-width="1.5" stroke-dasharray="2 3"/>'
        f'<text x="{at - 4:g}" y="{HEAD - 8:g}" fill="{colours.muted}" text-anchor="end">'
        f"fault-free 1F1B: {reference}</text>"
    )
    begin, until = LABEL, LABEL + SLOT * schedule.period
    y = height - 8
    yield (
        f'<path d="M{begin:g} {y:g}H{until:g}M{begin:g} {y - 4:g}v8M{until:g} {y - 4:g}v8" fill="none" '
        f'stroke="{colours.accent}" stroke-width="2"/>'
        f'<text x="{until + 6:g}" y="{y + 4:g}" fill="{colours.text}" font-weight="bold">'
        f"{escape(f'{schedule.period} slots')}</text>"
    )


def picture_words(schedule: Schedule) -> str:
    """The picture for those who can't see it."""
    failed = ", ".join(map(str, sorted(schedule.problem.failed))) or "none"
    moved = sum(op.kind == "F" and op.rerouted for op in schedule.compute_ops())
    return (
        f"Schedule of {len(schedule.ops)} living workers over {schedule.period} slots. Failed: {failed}. "
        f"Micro-batches on other workers than their own: {moved}. "
        f"Idle: {text.percent(schedule.bubble_fraction, digits=0)} of the slots."
    )
