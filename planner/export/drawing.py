"""What a picture is made of, before it is SVG or PNG: both back ends draw the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]
# Mean width of a character in common sans-serif fonts, as a share of the size.
DIGIT_WIDTH = 0.6
PROSE_WIDTH = 0.52


@dataclass(frozen=True, slots=True)
class Rect:
    """stroke is drawn inside the edge. hatch: colour of 45 degree lines over the fill."""

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
class Polygon:
    points: tuple[Point, ...]
    fill: str
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    start: Point
    end: Point
    colour: str
    width: float = 1.0
    dash: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """x, y: of the anchor on the vertical middle of the letters."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Rect | Polygon | Line | Text


@dataclass(frozen=True)
class Drawing:
    """Sizes in pixels. title and description: for those who can't see it."""

    width: float
    height: float
    background: str
    title: str
    description: str
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float, *, character: float = DIGIT_WIDTH) -> float:
    """Pixels that `text` takes, near enough to decide whether it fits."""
    return len(text) * size * character


def hatch_lines(rect: Rect, spacing: float = 6.0) -> Iterator[tuple[Point, Point]]:
    """45 degree lines across `rect`, cut off at its edges."""
    left, right = rect.x, rect.x + rect.width
    bottom = rect.y + rect.height
    foot = left - rect.height + spacing / 2
    while foot < right:
        x0, x1 = max(foot, left), min(foot + rect.height, right)
        if x1 > x0:
            yield (x0, bottom - (x0 - foot)), (x1, bottom - (x1 - foot))
        foot += spacing
