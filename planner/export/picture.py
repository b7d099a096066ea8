"""A drawn schedule as a picture: shapes in pixels, and their rendering as SVG or PNG.

SVG needs no browser. PNG, and the raster of a large plan in both, is drawn with Pillow and the font that comes with
Pillow, so it is the same on every machine.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import names, planned, plural
from openrecycle.planner.plans import drawing as model
from openrecycle.planner.plans.drawing import (
    BAR_HEIGHT,
    EDGE,
    HATCH,
    LIGHT,
    Colours,
    Drawing,
    raster_fills,
)
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

# -- a drawn schedule as shapes in pixels, which SVG and PNG draw alike -------------------------

# With more rows or ops, single bars can't be read, so the picture is a raster.
MAX_ROWS = 128
MAX_OPS = 20_000

MARGIN = 24.0
TITLE, BODY, SMALL = 17.0, 13.0, 12.0
LABEL_SIZES = (12.0, 10.0, 8.0)
LINE_HEIGHT = 19.0
ROW = 26.0
MIN_PLOT, MAX_PLOT = 960.0, 3_200.0
OVERVIEW_PLOT, OVERVIEW_HEIGHT = 1_600.0, 640.0
OP_WIDTH = 30.0  # pixels of an op of median length, as far as the limits of the page allow
# Mean width of a character in common sans-serif fonts, as a fraction of the font size.
DIGIT_WIDTH = 0.6
PROSE_WIDTH = 0.52

# -- shapes -----------------------------------------------------------------------------------------

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """stroke is drawn inside the edge. hatch: colour of the 45 degree lines over the fill; None: no lines."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None = None
    stroke_width: float = 0.0
    hatch: str | None = None
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Raster:
    """png: the pixels, which are stretched over the place."""

    x: float
    y: float
    width: float
    height: float
    png: bytes


@dataclass(frozen=True, slots=True)
class Line:
    start: Point
    end: Point
    colour: str
    width: float = 1.0
    dash: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """x, y: the anchor, at half the height of the letters."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Rect | Raster | Line | Text


@dataclass(frozen=True)
class Picture:
    """Sizes in pixels. title and description: for people who can't see the picture."""

    width: float
    height: float
    background: str
    title: str
    description: str
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float, *, character: float = DIGIT_WIDTH) -> float:
    """Estimate the width of `text` in pixels, to decide whether it fits."""
    return len(text) * size * character


def hatch_lines(rect: Rect) -> Iterator[tuple[Point, Point]]:
    """Yield the 45 degree lines across `rect`, cut off at its edges."""
    left, right = rect.x, rect.x + rect.width
    bottom = rect.y + rect.height
    foot = left - rect.height + HATCH.size / 2
    while foot < right:
        x0, x1 = max(foot, left), min(foot + rect.height, right)
        if x1 > x0:
            yield (x0, bottom - (x0 - foot)), (x1, bottom - (x1 - foot))
        foot += HATCH.size


def blend(over: str, under: str, opacity: float) -> str:
    """Return `over` at `opacity` on `under` as one opaque colour, so that pictures need no transparency."""
    channels = [(int(over[i : i + 2], 16), int(under[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(o * opacity + u * (1 - opacity)):02X}" for o, u in channels)


@dataclass(frozen=True)
class ChartFrame:
    """The part of the picture in which the rows are. left, top, width, height: pixels. end: the tick at the right edge;
    0 is at the left edge."""

    left: float
    top: float
    width: float
    height: float
    end: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, tick: float) -> float:
        return self.left + self.width * tick / self.end


# -- the page for export ----------------------------------------------------------------------------


def gantt(plan: Plan, pipeline: int | None = None) -> Picture:
    """Draw a row per worker; of a large plan as a raster, as on the console's pages.

    pipeline: show only its workers. Raises PlannerError for a large plan where Pillow is not installed.
    """
    schedule, colours = plan.schedule(), LIGHT
    job = schedule.problem.job
    shown = [w for w in job.workers() if pipeline in (None, w.pipeline)]
    drawing = Drawing.of(schedule, shown, fault_free=plan.metrics.fault_free)
    workers = drawing.rows.workers
    detailed = len(workers) <= MAX_ROWS and drawing.op_count <= MAX_OPS
    image = None if detailed else model.raster(drawing)
    end = max([schedule.ends[w] for w in drawing.living] + [drawing.fault_free_end, schedule.period])
    left = MARGIN + max(text_width(str(worker), SMALL) for worker in workers) + 10
    height, width = ROW * drawing.rows.extent, OVERVIEW_PLOT
    if image is None:
        width = _plot_width(drawing, end)
    else:
        height = len(image) * max(1, round(OVERVIEW_HEIGHT / len(image)))  # so that all rows are equally high
    frame = ChartFrame(left, 0, width, height, end)
    head = list(_head(plan, drawing, image, frame, colours, pipeline))
    frame = replace(frame, top=max(shape.y for shape in head if isinstance(shape, Text)) + 30)
    body = _worker_rows(drawing, frame, colours) if image is None else _overview(drawing, image, frame, colours)
    return Picture(
        width=frame.right + MARGIN,
        height=frame.bottom + 58,
        background=colours.background,
        title=_title(plan, pipeline),
        description=" ".join(_facts(plan)),
        shapes=(*head, *body, *_axis(drawing, frame, colours), *_fault_free_end(drawing, frame, colours)),
    )


def _plot_width(drawing: Drawing, end: int) -> float:
    """Choose a width with room for numbers in the bars, within the limits of a page."""
    lengths = sorted(op.duration for op in drawing.ops if op.kind != "O")
    median = lengths[len(lengths) // 2] if lengths else end
    return min(MAX_PLOT, max(MIN_PLOT, OP_WIDTH * end / max(median, 1)))


def _title(plan: Plan, pipeline: int | None) -> str:
    job = plan.job
    only = "" if pipeline is None else f"Pipeline {pipeline} of "
    grid = f"{job.pipelines} pipelines x {job.stages} stages x {job.micro_batches} micro-batches"
    return f"{only}{grid}, " + (f"without {names(plan.failed, 3)}" if plan.failed else "all workers")


def _facts(plan: Plan) -> list[str]:
    m, unit = plan.metrics, plural(plan.job.time_unit)
    proof = "optimal" if plan.solver.status == "optimal" else f"gap {m.gap:.2%}"
    return [
        f"{plan.technique.value}, memory {plan.memory};",
        f"period {model.number(m.period)} {unit}, lower bound {model.number(m.lower_bound)} ({proof}),",
        f"makespan {model.number(m.makespan)};",
        f"{m.slowdown_vs_1f1b:+.1%} against fault-free 1F1B,",
        f"{m.slowdown_vs_best:+.1%} against the best fault-free plan;",
        f"bubbles {m.bubble_fraction:.1%}; plan {plan.fingerprint[:12]}",
    ]


def _head(
    plan: Plan,
    drawing: Drawing,
    image: NDArray[np.uint8] | None,
    frame: ChartFrame,
    colours: Colours,
    pipeline: int | None,
) -> Iterator[Shape]:
    """Draw title, facts and legend, each broken into lines that fit. image: the raster, if there is one."""
    room = frame.right - MARGIN
    y = MARGIN + 8
    yield Text(MARGIN, y, _title(plan, pipeline), TITLE, colours.text, bold=True)
    y += 6
    notes = [] if image is None else [model.rows_words(drawing)]
    for line in _wrapped(_facts(plan), room) + notes:
        y += LINE_HEIGHT
        yield Text(MARGIN, y, line, BODY, colours.muted)
    y += LINE_HEIGHT + 9
    yield from _key(drawing, image, y, room, colours)


def _wrapped(pieces: list[str], room: float) -> list[str]:
    lines = [""]
    for piece in pieces:
        longer = f"{lines[-1]} {piece}".strip()
        if lines[-1] and text_width(longer, BODY, character=PROSE_WIDTH) > room:
            lines.append(piece)
        else:
            lines[-1] = longer
    return lines


def _key(drawing: Drawing, image: NDArray[np.uint8] | None, y: float, room: float, colours: Colours) -> Iterator[Shape]:
    x, swatch = MARGIN, 13.0
    if image is None:
        kinds, rerouted = {op.kind for op in drawing.ops}, any(op.rerouted for op in drawing.ops)
    else:
        kinds, rerouted = {kind for kind, code in model.CODES.items() if (image == code).any()}, False
    fills = {**colours.ops, "moved": colours.background, "bubble": colours.track}
    for entry in model.legend(kinds, rerouted=rerouted, ghost=False):
        hatch = colours.failed if entry.look == "moved" else None
        width = swatch + 6 + text_width(entry.words, SMALL, character=PROSE_WIDTH) + 15
        if x + width > room and x > MARGIN:
            x, y = MARGIN, y + LINE_HEIGHT
        box = Rect(x, y - swatch / 2, swatch, swatch, fills[entry.look])
        yield replace(box, stroke=hatch, stroke_width=EDGE, hatch=hatch) if hatch else box
        yield Text(x + swatch + 6, y, entry.words, SMALL, colours.text)
        x += width


def _axis(drawing: Drawing, frame: ChartFrame, colours: Colours) -> Iterator[Shape]:
    bottom, job = frame.bottom + 4, drawing.job
    yield Line((frame.left, bottom), (frame.right, bottom), colours.line)
    for time in model.axis_times(job.units(frame.end), max(4.0, frame.width / 90)):
        x = frame.x(time * job.ticks_per_unit)
        yield Line((x, bottom), (x, bottom + 5), colours.muted)
        yield Text(x, bottom + 15, model.number(time), SMALL, colours.muted, "middle")
    middle = (frame.left + frame.right) / 2
    yield Text(middle, bottom + 36, drawing.axis_words, SMALL, colours.muted, "middle")


# -- rows -------------------------------------------------------------------------------------------


def _worker_rows(drawing: Drawing, frame: ChartFrame, colours: Colours, *, following: bool = False) -> Iterator[Shape]:
    """Draw labels, tracks and bars in the frame. following: also the bars of the next iteration, faint."""
    row = frame.height / drawing.rows.extent
    bar = row * BAR_HEIGHT
    size = min(SMALL, 0.6 * row)

    def top(worker: Worker) -> float:
        return frame.top + row * drawing.rows.at[worker] - bar / 2

    out = {each.worker: each for each in drawing.out_rows}
    for worker in drawing.rows.workers:
        y, gone = top(worker), out.get(worker)
        tone, ground = colours.text, colours.track
        if gone is not None:
            tone = colours.failed_text if gone.failed else colours.muted
            ground = blend(colours.failed, colours.background, colours.tint) if gone.failed else colours.surface
        bold = gone is not None and gone.failed
        yield Text(frame.left - 8, y + bar / 2, str(worker), size, tone, "end", bold=bold)
        yield Rect(frame.left, y, frame.width, bar, ground)
        if gone is not None:
            words = f"{gone.title} – {gone.words}"
            yield Text(frame.left + frame.width / 2, y + bar / 2, words, size, tone, "middle")
    for op, start, end in drawing.next_ops(0, frame.end) if following else ():
        x, right = frame.x(start), frame.x(end)
        if right > x:
            fill = blend(colours.ops[op.kind], colours.track, colours.faint)
            yield Rect(x, top(op.worker), right - x - min(1.0, (right - x) / 4), bar, fill)
    for op in drawing.ops:
        if op.start <= frame.end:
            yield from _bar(op, drawing, frame, top(op.worker), bar, colours)


def _bar(op: Op, drawing: Drawing, frame: ChartFrame, top: float, bar: float, colours: Colours) -> Iterator[Shape]:
    x = frame.x(op.start)
    width = frame.x(min(op.end, frame.end)) - x
    fill = colours.ops[op.kind]
    if op.duration == 0:
        # An op without length must still be seen: when each stage steps is the point of staggering.
        yield Line((x, top), (x, top + bar), fill, 2.0)
        return
    gap = min(1.0, width / 4)
    box = Rect(x, top, width - gap, bar, fill, tooltip=f"{op.worker}: {', '.join(model.op_words(op, drawing.job))}")
    if op.rerouted:
        hatch = blend(colours.failed, fill, HATCH.opacity)
        box = replace(box, stroke=colours.failed, stroke_width=min(EDGE, width / 4), hatch=hatch)
    yield box
    label = model.label(op)
    size = next((s for s in LABEL_SIZES if text_width(label, s) + 4 <= width), None)
    if label and size is not None:
        middle = x + (width - gap) / 2
        if op.rerouted:  # the number gets a plain ground, so that the hatching does not run through it
            ground = text_width(label, size)
            yield Rect(middle - ground / 2, top + (bar - size) / 2, ground, size, fill)
        yield Text(middle, top + bar / 2, label, size, colours.ops_text[op.kind], "middle", bold=op.rerouted)


def _fault_free_end(drawing: Drawing, frame: ChartFrame, colours: Colours) -> Iterator[Shape]:
    x = frame.x(drawing.fault_free_end)
    yield Line((x, frame.top - 4), (x, frame.bottom + 4), colours.text, 1.4, (2.5, 3.0))
    anchor: Literal["start", "end"] = "end" if x > frame.left + frame.width / 2 else "start"
    yield Text(x, frame.top - 11, drawing.fault_free_words, SMALL, colours.text, anchor)


def _overview(drawing: Drawing, image: NDArray[np.uint8], frame: ChartFrame, colours: Colours) -> Iterator[Shape]:
    for place, worker in model.row_marks(drawing):
        yield Text(frame.left - 8, frame.top + place * frame.height, str(worker), SMALL, colours.text, "end")
    yield Rect(frame.left, frame.top, frame.width, frame.height, colours.track)
    width = frame.x(drawing.schedule.end) - frame.left
    yield Raster(frame.left, frame.top, width, frame.height, raster_png(image, colours))


# -- the small picture ------------------------------------------------------------------------------


def small(drawing: Drawing, colours: Colours, end: int, description: str) -> Picture:
    """Draw all rows over ticks 0 to `end` and the period below them, with little else; a unit of time is 22 pixels."""
    frame = ChartFrame(46.0, 22.0, 22.0 * drawing.job.units(end), 19.0 * drawing.rows.extent, end)
    foot, until = frame.bottom + 10, frame.x(drawing.schedule.period)
    words = planned(drawing.job.units(drawing.schedule.period), drawing.job.time_unit)
    return Picture(
        width=frame.right,
        height=frame.bottom + 20,
        background=colours.background,
        title=words,
        description=description,
        shapes=(
            *_worker_rows(drawing, frame, colours, following=True),
            *_fault_free_end(drawing, frame, colours),
            Line((frame.left, foot), (until, foot), colours.accent, 2.0),
            Line((frame.left, foot - 4), (frame.left, foot + 4), colours.accent, 2.0),
            Line((until, foot - 4), (until, foot + 4), colours.accent, 2.0),
            Text(until + 6, foot, words, SMALL, colours.text, bold=True),
        ),
    )


# -- the Gantt chart as SVG, drawn without a browser --------------------------------------------

FONT = "'Source Sans 3', 'Source Sans Pro', Helvetica, Arial, 'DejaVu Sans', sans-serif"
# Characters that XML 1.0 does not allow, escaped or not.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_svg(plan: Plan, pipeline: int | None = None) -> str:
    """Export as SVG, with a tooltip for each bar. pipeline: show only its rows. Raises as `gantt` does."""
    return draw_svg(gantt(plan, pipeline))


def draw_svg(picture: Picture) -> str:
    width, height = _number(picture.width), _number(picture.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}" role="img">',
        f"<title>{xml_text(picture.title)}</title>",
        f"<desc>{xml_text(picture.description)}</desc>",
        f'<rect width="100%" height="100%" fill="{picture.background}"/>',
    )
    return "\n".join(chain(head, chain.from_iterable(map(_element, picture.shapes)), ("</svg>", "")))


def _element(shape: Shape) -> Iterator[str]:
    match shape:
        case Rect():
            yield from _svg_rect(shape)
        case Raster():
            yield (
                f'<image x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}" '
                f'height="{_number(shape.height)}" preserveAspectRatio="none" image-rendering="pixelated" '
                f'href="data:image/png;base64,{base64.b64encode(shape.png).decode()}"/>'
            )
        case Line((x0, y0), (x1, y1)):
            dash = f' stroke-dasharray="{_number(shape.dash[0])} {_number(shape.dash[1])}"' if shape.dash else ""
            yield (
                f'<line x1="{_number(x0)}" y1="{_number(y0)}" x2="{_number(x1)}" y2="{_number(y1)}" '
                f'stroke="{shape.colour}" stroke-width="{_number(shape.width)}"{dash}/>'
            )
        case Text():
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            bold = ' font-weight="bold"' if shape.bold else ""
            # Capitals are 0.7 of the size high: this puts their middle on y in every viewer.
            yield (
                f'<text x="{_number(shape.x)}" y="{_number(shape.y + 0.35 * shape.size)}" '
                f'font-size="{_number(shape.size)}" fill="{shape.colour}"{anchor}{bold}>{xml_text(shape.text)}</text>'
            )


def _svg_rect(rect: Rect) -> Iterator[str]:
    inset = rect.stroke_width / 2 if rect.stroke else 0
    size = (
        f'x="{_number(rect.x + inset)}" y="{_number(rect.y + inset)}" '
        f'width="{_number(max(0, rect.width - 2 * inset))}" height="{_number(max(0, rect.height - 2 * inset))}"'
    )
    edge = f' stroke="{rect.stroke}" stroke-width="{_number(rect.stroke_width)}"' if rect.stroke else ""
    if rect.hatch:
        path = "".join(
            f"M{_number(x0)} {_number(y0)}L{_number(x1)} {_number(y1)}" for (x0, y0), (x1, y1) in hatch_lines(rect)
        )
        yield f'<rect {size} fill="{rect.fill}"/>'
        yield f'<path d="{path}" stroke="{rect.hatch}" stroke-width="{_number(HATCH.size * HATCH.solidity)}"/>'
    look = 'fill="none" pointer-events="all"' if rect.hatch else f'fill="{rect.fill}"'
    end = f"><title>{xml_text(rect.tooltip)}</title></rect>" if rect.tooltip else "/>"
    yield f"<rect {size} {look}{edge}{end}"


def xml_text(text: str) -> str:
    """Escape text. What XML does not allow at all becomes a question mark."""
    return escape(_NO_XML.sub("?", text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# -- the Gantt chart as PNG, drawn with Pillow and the font that Pillow carries -----------------

SCALE = 2  # pixels of the file per pixel of the drawing: sharp on dense screens and in print
MAX_PIXELS = 100_000_000
_ANCHOR = {"start": "ls", "middle": "ms", "end": "rs"}
# Replacements for letters that the font lacks.
_PLAIN = {"µ": "u", "μ": "u", "×": "x", "–": "-", "−": "-"}


def to_png(plan: Plan, pipeline: int | None = None) -> bytes:
    """Export as PNG. pipeline: show only its rows. Raises PlannerError where Pillow is not installed, and as `gantt`
    does."""
    return draw_png(gantt(plan, pipeline))


def draw_png(picture: Picture) -> bytes:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise PlannerError("png needs the package pillow, which is not installed; svg needs none") from None
    size = round(picture.width * SCALE), round(picture.height * SCALE)
    if size[0] * size[1] > MAX_PIXELS:
        raise PlannerError(f"the picture would have {size[0]:,} x {size[1]:,} pixels; use svg, which has no such limit")
    image = Image.new("RGB", size, picture.background)
    canvas = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Raster):
            (x0, y0), (x1, y1) = _scaled((shape.x, shape.y)), _scaled((shape.x + shape.width, shape.y + shape.height))
            place = round(x0), round(y0), round(x1), round(y1)
            pixels = Image.open(io.BytesIO(shape.png)).convert("RGB")
            size = place[2] - place[0], place[3] - place[1]
            image.paste(pixels.resize(size, Image.Resampling.NEAREST), place)
        else:
            _draw(canvas, shape)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def raster_png(image: NDArray[np.uint8], colours: Colours) -> bytes:
    """Encode a raster of planner.plans.drawing.raster, with one pixel per cell. Raises PlannerError where Pillow is not
    installed."""
    try:
        from PIL import Image
    except ImportError:
        raise PlannerError("large plans are drawn with the package pillow, which is not installed") from None

    made = Image.fromarray(image).convert("P")
    made.putpalette([int(fill[i : i + 2], 16) for fill in raster_fills(colours) for i in (1, 3, 5)])
    out = io.BytesIO()
    made.save(out, format="PNG", optimize=False, compress_level=3)
    return out.getvalue()


def _draw(canvas: ImageDraw, shape: Rect | Line | Text) -> None:
    match shape:
        case Rect():
            _png_rect(canvas, shape)
        case Line():
            _line(canvas, shape)
        case Text():
            x, y = _scaled((shape.x, shape.y + 0.35 * shape.size))
            text = "".join(_PLAIN.get(c, c if " " <= c <= "~" or c == "·" else "?") for c in shape.text)
            weight = SCALE * shape.size / 60 if shape.bold else 0
            font = _font(round(shape.size * SCALE))
            canvas.text(
                (x, y), text, shape.colour, font, anchor=_ANCHOR[shape.anchor], stroke_width=weight,
                stroke_fill=shape.colour,
            )  # fmt: skip


def _png_rect(canvas: ImageDraw, rect: Rect) -> None:
    (x0, y0), (x1, y1) = _scaled((rect.x, rect.y)), _scaled((rect.x + rect.width, rect.y + rect.height))
    box = (round(x0), round(y0), max(round(x0), round(x1) - 1), max(round(y0), round(y1) - 1))
    canvas.rectangle(box, fill=rect.fill)
    if rect.hatch:
        for start, end in hatch_lines(rect):
            canvas.line(
                [_scaled(start), _scaled(end)], fill=rect.hatch, width=round(HATCH.size * HATCH.solidity * SCALE)
            )
    if rect.stroke:
        canvas.rectangle(box, outline=rect.stroke, width=max(1, round(rect.stroke_width * SCALE)))


def _line(canvas: ImageDraw, line: Line) -> None:
    width = max(1, round(line.width * SCALE))
    (x0, y0), (x1, y1) = line.start, line.end
    length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    on, off = line.dash or (length, 0)
    at = 0.0
    while at < length:
        a, b = at / length, min(length, at + on) / length
        piece = [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in (a, b)]
        canvas.line([_scaled(point) for point in piece], fill=line.colour, width=width)
        at += on + off


def _scaled(point: Point) -> Point:
    return point[0] * SCALE, point[1] * SCALE


@cache
def _font(size: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)  # type: ignore[return-value]
