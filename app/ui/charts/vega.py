"""What charts that follow a running job have in common.

They are Vega-Lite, since Streamlit hands new rows to a standing Vega view and keeps its zoom; a
Plotly chart is torn down and built anew for every change of its data (measured: a blank frame
each), so Plotly is left to the schedules, which stand still. Streamlit makes the view first and hands it its
rows then: of the empty one in between Vega warns in the browser's console that no axis has an extent,
which Streamlit lets no option of a chart (`embedOptions`) keep quiet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.ui.theme import FONT, Palette

# Column name to its values, all of one length.
Columns = dict[str, Any]


@dataclass(frozen=True)
class LiveChart:
    """A Vega-Lite spec that stays the same while the job runs, and the rows that change."""

    spec: dict[str, Any]
    rows: Columns


def config(colours: Palette) -> dict[str, Any]:
    """Vega's configuration in the theme's colours."""
    text = {"labelFont": FONT, "titleFont": FONT, "labelColor": colours.muted, "titleColor": colours.muted}
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            **text,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "domainColor": colours.line,
            "tickColor": colours.line,
            "gridColor": colours.line,
        },
        "title": {
            "font": FONT,
            "fontSize": 13,
            "fontWeight": "normal",
            "color": colours.text,
            "anchor": "start",
            "frame": "bounds",
            "offset": 6,
        },
        "text": {"font": FONT, "fontSize": 12},
    }
