"""A schedule's figure as a picture, which is on the page before the browser has read Plotly's code and drawn with it.

That takes it a second and more; the picture takes it nothing. It has the bars, their numbers, the memory held and the
words between and beside the rows, each where Plotly puts it. What is left to Plotly: hatches, the numbers of the time
axis, and all that answers to the pointer. The style sheet has it in the chart's place until there is one (console.css).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape, unescape
from itertools import groupby
from typing import Any

import plotly.graph_objects as go

# The plot area's width, in the units of the pictures' paths; in pixels it is the browser's.
WIDTH = 10_000
# A number is there where its bar has so many parts of the width: 20 pixels of a chart of 1,000.
LEAST_FOR_NUMBER = 200
# Half the height of a line, and from the chart's bottom to its title's middle.
HALF_LINE, TITLE = 9, 8
_TAG = re.compile(r"(<[^>]*>)")
_DASHES = {"dot": ' stroke-dasharray="2 3"', "dash": ' stroke-dasharray="6 4"'}
_BOLD = {"<b>": '<tspan font-weight="600">', "</b>": "</tspan>"}
# What no XML document may have in it.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

Document = dict[str, Any]


@dataclass(frozen=True)
class Area:
    """Where a figure's values are. left, right: its time axis. Pixels count from the figure's top."""

    layout: Document
    left: float
    right: float
    top: float
    height: float

    @classmethod
    def of(cls, layout: Document) -> Area:
        """Its time axis must have a range, and it a height and margins."""
        left, right = layout["xaxis"]["range"]
        margin = layout["margin"]
        return cls(layout, left, right, margin["t"], layout["height"] - margin["t"] - margin["b"])

    def x(self, value: float) -> int:
        """In parts of WIDTH."""
        return round(WIDTH * (value - self.left) / (self.right - self.left))

    def y(self, value: float, axis: str) -> float:
        """axis: a row axis' name, or `paper`; with ` domain`, a share of that axis."""
        low, high, share = 0.0, 1.0, value
        if axis != "paper":
            name, _, domain = axis.partition(" ")
            of = self.layout[name.replace("y", "yaxis")]
            low, high = of.get("domain", (0.0, 1.0))
            if not domain:
                bottom, top = of["range"]
                share = (value - bottom) / (top - bottom)
        return self.top + (1 - low - share * (high - low)) * self.height


def chart_placeholder(figure: go.Figure) -> str:
    """HTML of the picture of a figure of bars in rows; empty where it has none."""
    whole = figure.to_dict()
    traces, layout = whole["data"], whole["layout"]
    if not any(trace["type"] == "bar" for trace in traces):
        return ""
    area, margin, height = Area.of(layout), layout["margin"], layout["height"]
    drawn = "".join([*_failed(area), *(path for trace in traces for path in _trace(area, trace)), *_lines(area)])
    stretched = f'<svg width="100%" height="{height}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">'
    inside = f"{stretched}{drawn}</svg>" + "".join([*_numbers(area, traces), *_notes(area), _title(area)])
    pictures = (
        ("left", _svg("".join(_names(area, margin["l"] - 3)), "end")),
        ("middle", _svg(inside, "middle")),
        ("right", _svg("".join(_notes(area, beside=True)), "start")),
    )
    images = "".join(f'<img class="or-first-{where}" alt="" src="{data}">' for where, data in pictures)
    return (
        '<div class="or-first" aria-hidden="true" '
        f'style="height:{height}px;--left:{margin["l"]}px;--right:{margin["r"]}px">{images}</div>'
    )


def _svg(inside: str, anchor: str) -> str:
    """As a data URL."""
    whole = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="100%" font-family="Source Sans,system-ui,'
        f'sans-serif" font-size="12" text-anchor="{anchor}" dominant-baseline="central">{inside}</svg>'
    )
    return "data:image/svg+xml;base64," + base64.b64encode(whole.encode()).decode()


def _trace(area: Area, trace: Document) -> Iterator[str]:
    return _bars(area, trace) if trace["type"] == "bar" else _curve(area, trace)


def _bars(area: Area, trace: Document) -> Iterator[str]:
    """A path for each colour of its bars."""
    fills, line = trace["marker"]["color"], trace["marker"]["line"]
    look = f' stroke="{line["color"]}" stroke-width="{line["width"]}"' if line["width"] else ""
    look += f' opacity="{trace["opacity"]}"' if trace.get("opacity") is not None else ""
    colours = [fills] * len(trace["x"]) if isinstance(fills, str) else fills
    half, axis = trace["width"] / 2, trace.get("yaxis", "y")
    edges = {row: [f"{area.y(row + side, axis):.1f}" for side in (-half, half)] for row in set(trace["y"])}
    bars = sorted(zip(colours, trace["base"], trace["x"], trace["y"], strict=True))
    for fill, same in groupby(bars, key=lambda bar: bar[0]):
        if steps := "".join(_bar(area, base, length, *edges[row]) for _, base, length, row in same):
            yield f'<path vector-effect="non-scaling-stroke" fill="{_paint(fill)}"{look} d="{steps}"/>'


def _bar(area: Area, base: float, length: float, top: str, bottom: str) -> str:
    """One of a path's bars; nothing where it lies outside."""
    left, right = area.x(base), area.x(base + length)
    return "" if right < 0 or left > WIDTH else f"M{left} {top}h{right - left}V{bottom}h{left - right}z"


def _curve(area: Area, trace: Document) -> Iterator[str]:
    """Areas and lines, broken where there is no value."""
    line = trace.get("line") or {}
    if not trace.get("fill") and not line.get("width"):
        return
    rows: dict[float, str] = {}
    steps, pen, axis = [], "M", trace.get("yaxis", "y")
    for x, y in zip(trace["x"], trace["y"], strict=True):
        if x is None:
            pen = "M"
            continue
        if y not in rows:
            rows[y] = f"{area.y(y, axis):.1f}"
        steps.append(f"{pen}{area.x(x)} {rows[y]}")
        pen = "L"
    look = f'fill="{_paint(trace["fillcolor"])}"' if trace.get("fill") else _stroke(line)
    look += f' opacity="{trace["opacity"]}"' if trace.get("opacity") is not None else ""
    if steps and look:
        yield f'<path {look} d="{"".join(steps)}"/>'


def _stroke(line: Document | None) -> str:
    if not line:
        return ""
    dash = _DASHES.get(line.get("dash", ""), "")
    look = f'stroke="{line["color"]}" stroke-width="{line["width"]}"{dash}'
    return f'fill="none" vector-effect="non-scaling-stroke" {look}'


def _paint(colour: str) -> str:
    return "none" if colour == "rgba(0,0,0,0)" else colour


def _failed(area: Area) -> Iterator[str]:
    """The tints behind rows of workers that are out."""
    for shape in area.layout.get("shapes", ()):
        if shape["type"] == "rect":
            top, bottom = sorted(area.y(value, shape["yref"]) for value in (shape["y0"], shape["y1"]))
            yield f'<path fill="{shape["fillcolor"]}" d="M0 {top:.1f}h{WIDTH}V{bottom:.1f}H0z"/>'


def _lines(area: Area) -> Iterator[str]:
    for shape in area.layout.get("shapes", ()):
        if shape["type"] == "line":
            x, ends = area.x(shape["x0"]), [area.y(value, shape["yref"]) for value in (shape["y0"], shape["y1"])]
            yield f'<path {_stroke(shape["line"])} d="M{x} {ends[0]:.1f}V{ends[1]:.1f}"/>'


def _numbers(area: Area, traces: list[Document]) -> Iterator[str]:
    """In the bars, where they are wide enough."""
    least = LEAST_FOR_NUMBER * (area.right - area.left) / WIDTH
    for trace in traces:
        if trace.get("text") is None:
            continue
        font, axis = {"color": trace["textfont"]["color"], "opacity": trace.get("opacity")}, trace.get("yaxis", "y")
        for words, base, length, row in zip(trace["text"], trace["base"], trace["x"], trace["y"], strict=True):
            middle = area.x(base + length / 2)
            if length >= least and 0 <= middle <= WIDTH:
                yield _text(f"{middle / WIDTH:.2%}", area.y(row, axis), words, font)


def _notes(area: Area, *, beside: bool = False) -> Iterator[str]:
    """The words between the rows, or those beside them, at the right."""
    for note in area.layout.get("annotations", ()):
        x, from_left = note["x"], note.get("xanchor") == "left"
        across = x if note.get("xref", "x") in ("paper", "x domain") else area.x(x) / WIDTH
        if beside != (from_left and across == 1) or not 0 <= across <= 1:
            continue
        y = area.y(note["y"], note["yref"])
        if note.get("yanchor") == "bottom":
            y -= HALF_LINE + note.get("yshift", 0)
        at = str(note.get("xshift", 0)) if beside else f"{across:.2%}"
        yield _text(at, y, note["text"], note["font"], "" if beside else note.get("xanchor", ""))


def _title(area: Area) -> str:
    """Of the time axis."""
    title = area.layout["xaxis"]["title"]
    return _text("50%", area.layout["height"] - TITLE, title["text"], title["font"])


def _names(area: Area, right: float) -> Iterator[str]:
    """Of the rows."""
    for name, axis in area.layout.items():
        if name.startswith("yaxis"):
            for row, words in zip(axis["tickvals"], axis["ticktext"], strict=True):
                yield _text(str(right), area.y(row, name.replace("axis", "")), words, axis["tickfont"])


def _text(x: str, y: float, words: str, font: Document, anchor: str = "") -> str:
    """words: as Plotly takes them, with tags."""
    size = f' font-size="{font["size"]}"' if "size" in font else ""
    faint = "" if font.get("opacity") is None else f' opacity="{font["opacity"]}"'
    side = {"left": ' text-anchor="start"', "right": ' text-anchor="end"'}.get(anchor, "")
    inside = "".join(
        _BOLD.get(part, "") if _TAG.fullmatch(part) else escape(unescape(part)) for part in _TAG.split(words)
    )
    return f'<text x="{x}" y="{y:.1f}"{size}{side}{faint} fill="{font["color"]}">{_FORBIDDEN.sub("", inside)}</text>'
