"""The Gantt chart as SVG, drawn without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from xml.sax.saxutils import escape

from openrecycle.planner.export.picture import Line, Picture, Polygon, Rect, Shape, Text, gantt, hatch_lines
from openrecycle.planner.plans.drawing import HATCH
from openrecycle.planner.plans.plan import Plan

FONT = "'Source Sans 3', 'Source Sans Pro', Helvetica, Arial, 'DejaVu Sans', sans-serif"
# What XML 1.0 has no place for, escaped or not.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_svg(plan: Plan, pipeline: int | None = None) -> str:
    """pipeline: only its rows. Bars have a tooltip each. See planner.export.picture for refusals."""
    return draw_svg(gantt(plan, pipeline))


def draw_svg(picture: Picture) -> str:
    width, height = _number(picture.width), _number(picture.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}" role="img">',
        f"<title>{_text(picture.title)}</title>",
        f"<desc>{_text(picture.description)}</desc>",
        f'<rect width="100%" height="100%" fill="{picture.background}"/>',
    )
    return "\n".join(chain(head, chain.from_iterable(map(_element, picture.shapes)), ("</svg>", "")))


def _element(shape: Shape) -> Iterator[str]:
    match shape:
        case Rect():
            yield from _rect(shape)
        case Polygon():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
            yield _closed(f'<polygon points="{points}" fill="{shape.fill}"', "polygon", shape.tooltip)
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
                f'font-size="{_number(shape.size)}" fill="{shape.colour}"{anchor}{bold}>{_text(shape.text)}</text>'
            )


def _rect(rect: Rect) -> Iterator[str]:
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
        yield _closed(f'<rect {size} fill="none" pointer-events="all"{edge}', "rect", rect.tooltip)
    else:
        yield _closed(f'<rect {size} fill="{rect.fill}"{edge}', "rect", rect.tooltip)


def _closed(opening: str, tag: str, tooltip: str) -> str:
    return f"{opening}><title>{_text(tooltip)}</title></{tag}>" if tooltip else f"{opening}/>"


def _text(text: str) -> str:
    return escape(_NO_XML.sub("?", text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
