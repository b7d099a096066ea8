"""The Gantt chart as PNG, drawn with Pillow and the font that Pillow carries: alike on every machine."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.export.picture import Line, Picture, Point, Polygon, Rect, Shape, Text, gantt, hatch_lines
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.drawing import HATCH, Colours, raster_fills
from openrecycle.planner.plans.plan import Plan

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

SCALE = 2  # pixels of the file per pixel of the drawing: sharp on dense screens and in print
MAX_PIXELS = 100_000_000
_ANCHOR = {"start": "ls", "middle": "ms", "end": "rs"}
# Letters that the font lacks.
_PLAIN = {"µ": "u", "μ": "u", "×": "x", "–": "-", "−": "-"}


def to_png(plan: Plan, pipeline: int | None = None) -> bytes:
    """pipeline: only its rows. Raises PlannerError where Pillow is not installed, and as
    planner.export.picture does."""
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
        _draw(canvas, shape)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def raster_png(image: NDArray[np.uint8], colours: Colours) -> bytes:
    """image: as of planner.plans.drawing.raster; a pixel of the file for each of its cells."""
    from PIL import Image

    made = Image.fromarray(image).convert("P")
    made.putpalette([int(fill[i : i + 2], 16) for fill in raster_fills(colours) for i in (1, 3, 5)])
    out = io.BytesIO()
    made.save(out, format="PNG", optimize=False, compress_level=3)
    return out.getvalue()


def _draw(canvas: ImageDraw, shape: Shape) -> None:
    match shape:
        case Rect():
            _rect(canvas, shape)
        case Polygon():
            canvas.polygon([_scaled(point) for point in shape.points], fill=shape.fill)
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


def _rect(canvas: ImageDraw, rect: Rect) -> None:
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
    if line.dash is None:
        canvas.line([_scaled(line.start), _scaled(line.end)], fill=line.colour, width=width)
        return
    (x0, y0), (x1, y1) = line.start, line.end
    length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
    on, off = line.dash
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
