"""Colours and figure defaults, light and dark. No Streamlit here: charts import it.

The colours of ops and of policies were searched for the largest smallest distance under full deutan-,
protan- and tritanomaly; wherever two states are near in colour, shape and words carry the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

FONT = '"Source Sans", "Source Sans Pro", system-ui, sans-serif'


@dataclass(frozen=True)
class Palette:
    """One theme. `ops` and `ops_text`: fill and number colour of each op kind. `policies`: of a simulation's curves."""

    name: str
    background: str
    surface: str
    text: str
    muted: str
    line: str
    track: str
    accent: str
    failed: str
    failed_text: str
    failed_strong: str
    failed_tint: str
    healthy: str
    rerouted: str
    rerouted_text: str
    suspect: str
    slow: str
    joining: str
    good: str
    ops: dict[str, str]
    ops_text: dict[str, str]
    policies: dict[str, str]


LIGHT = Palette(
    name="light",
    background="#FFFFFF",
    surface="#F6F8FA",
    text="#16222E",
    muted="#566573",
    line="#DCE3EA",
    track="#E9EDF2",
    accent="#2862B2",
    failed="#D7541F",
    failed_text="#A93D10",
    failed_strong="#BC4413",
    failed_tint="rgba(215, 84, 31, 0.16)",
    healthy="#3F9C6B",
    rerouted="#2862B2",
    rerouted_text="#2862B2",
    suspect="#D9A900",
    slow="#C07A12",
    joining="#1FA3C0",
    good="#2E7D53",
    ops={"F": "#2862B2", "I": "#50BDD6", "W": "#F2AF50", "B": "#666F35", "O": "#652742"},
    ops_text={"F": "#FFFFFF", "I": "#16222E", "W": "#16222E", "B": "#FFFFFF", "O": "#FFFFFF"},
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
    name="dark",
    background="#0F151C",
    surface="#161E27",
    text="#E8EEF4",
    muted="#9DACBA",
    line="#2B3744",
    track="#202A36",
    accent="#7FA6EA",
    failed="#D75734",
    failed_text="#F58A68",
    failed_strong="#B8431F",
    failed_tint="rgba(215, 87, 52, 0.22)",
    healthy="#52B788",
    rerouted="#4771C5",
    rerouted_text="#8DB0EE",
    suspect="#FFD866",
    slow="#F2A541",
    joining="#4CC9E8",
    good="#5CC08D",
    ops={"F": "#4771C5", "I": "#37CDA6", "W": "#EFC11D", "B": "#8C5638", "O": "#ECE2FD"},
    ops_text={"F": "#FFFFFF", "I": "#10181F", "W": "#10181F", "B": "#FFFFFF", "O": "#10181F"},
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

OP_WORDS = {
    "F": "Forward",
    "I": "Backward, input (I)",
    "W": "Backward, weight (W)",
    "B": "Backward, I + W fused (B)",
    "O": "Optimizer step",
}

# What the mode bar keeps: zoom, pan, reset and the picture's download.
CHART_CONFIG: dict[str, object] = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


def palette(theme_type: str | None) -> Palette:
    """The palette of a Streamlit theme type; light until the browser has told its own."""
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


def fixed(figure: go.Figure) -> go.Figure:
    """For a figure that shows all there is: dragging over it does nothing, and the mode bar offers no zoom."""
    figure.update_layout(dragmode=False)
    figure.update_xaxes(fixedrange=True)
    figure.update_yaxes(fixedrange=True)
    return figure
