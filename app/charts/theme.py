"""Colours and figure defaults, light and dark.

The colours of policies, like those of ops (planner.plans.drawing), were chosen by a search for the largest minimal
distance under full deutan-, protan- and tritanomaly. Wherever two states are near in colour, shape and words show the
difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from openrecycle.planner.plans import drawing

FONT = '"Source Sans", "Source Sans Pro", system-ui, sans-serif'


@dataclass(frozen=True)
class Palette(drawing.Colours):
    """The colours of one theme, for schedules and pages. policies: for a simulation's curves. op_lines: for the lines
    of op kinds, which have no edge or number like bars, and must stand out from the page by themselves."""

    failed_strong: str
    healthy: str
    rerouted: str
    rerouted_text: str
    suspect: str
    slow: str
    joining: str
    joining_text: str
    good: str
    op_lines: dict[str, str]
    policies: dict[str, str]


LIGHT = Palette(
    **vars(drawing.LIGHT),
    failed_strong="#BC4413",
    healthy="#3F9C6B",
    rerouted="#2862B2",
    rerouted_text="#2862B2",
    suspect="#D9A900",
    slow="#C07A12",
    joining="#1FA3C0",
    joining_text="#12748B",
    good="#2E7D53",
    op_lines={**drawing.LIGHT.ops, "I": "#3F8EA4", "W": "#B08546"},
    policies={
        "ours": "#2862B2",
        "recycle": "#2DA569",
        "repartition": "#879600",
        "oobleck": "#783C0F",
        "drop-replica": "#FF4B5A",
        "checkpoint-restart": "#C300B4",
        "spares": "#1E4BF0",
        "fault-free": "#566573",
    },
)

DARK = Palette(
    **vars(drawing.DARK),
    failed_strong="#B8431F",
    healthy="#52B788",
    rerouted="#4771C5",
    rerouted_text="#8DB0EE",
    suspect="#FFD866",
    slow="#F2A541",
    joining="#4CC9E8",
    joining_text="#4CC9E8",
    good="#5CC08D",
    op_lines=drawing.DARK.ops,
    policies={
        "ours": "#7FA6EA",
        "recycle": "#009669",
        "repartition": "#D2F000",
        "oobleck": "#E1E196",
        "drop-replica": "#FF782D",
        "checkpoint-restart": "#A55AFF",
        "spares": "#B45AA5",
        "fault-free": "#9DACBA",
    },
)

# A legend in one line above the chart.
LEGEND = {"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "font": {"size": 12}}
# Plotly's mode bar keeps zoom, pan, reset and the picture's download.
CHART_CONFIG: dict[str, object] = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


def palette(theme_type: str | None) -> Palette:
    """Returns the palette of a Streamlit theme type; light until the browser has reported its own."""
    return DARK if theme_type == "dark" else LIGHT


def style(figure: go.Figure, colours: Palette, *, height: int, revision: str) -> go.Figure:
    """Applies the common layout. `revision`: zoom and pan survive redraws while it is the same."""
    figure.update_layout(
        height=height,
        uirevision=revision,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 13, "color": colours.text},
        hoverlabel={
            "bgcolor": colours.surface,
            "bordercolor": colours.line,
            "font": {"family": FONT, "size": 13, "color": colours.text},
            "align": "left",
        },
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": colours.muted, "activecolor": colours.accent},
    )
    axis = {
        "gridcolor": colours.line,
        "zeroline": False,
        "linecolor": colours.line,
        "tickfont": {"size": 12, "color": colours.muted},
        "title": {"font": {"size": 13, "color": colours.muted}},
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def lower_axis(title: str, colours: Palette, domain: list[float], ticks: int) -> dict[str, object]:
    """Returns the y axis of a panel below the first one, starting at 0."""
    return {
        "title": {"text": title, "font": {"size": 13, "color": colours.muted}},
        "tickfont": {"size": 12, "color": colours.muted},
        "gridcolor": colours.line,
        "zeroline": False,
        "domain": domain,
        "rangemode": "tozero",
        "nticks": ticks,
    }


def note(figure: go.Figure, words: str, colour: str, size: int = 12, **place: Any) -> None:
    """Adds words to a figure. place: Plotly's arguments for their position."""
    figure.add_annotation(text=words, showarrow=False, font={"size": size, "color": colour}, **place)


def fixed(figure: go.Figure) -> go.Figure:
    """Fixes a figure that shows all its data: dragging does nothing, and the mode bar offers no zoom."""
    figure.update_layout(dragmode=False)
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(fixedrange=True)
    return figure
