"""What the charts that follow a running job have in common (`LiveChart`).

They are Vega-Lite, since Streamlit passes new rows to a Vega view and keeps its zoom. A Plotly chart is torn down and
built anew for every change of its data (measured: a blank frame each), so Plotly is only used for schedules, which do
not change.

The rows are sent as a named data set. Streamlit gives the rows of an unnamed one to the view only after it has drawn
the chart empty, and for an empty chart Vega warns in the browser's console that no axis has an extent.

Each row has a number, by which Vega recognises it among new rows and redraws its mark in place. Without the number
every row of every refresh is new to Vega, which keeps 10,000 old marks of each kind before it frees any: hundreds of
megabytes on a page that stays open. Lines go without the number, since Vega-Lite would make a line of each row.

No row is derived from another in the browser: Vega copies each such row, and keeps a trace of it as long as the page is
open, 20 MiB an hour and chart at one refresh a second. Vega-Lite has that done to turn a line's x values into numbers,
unless it is told that they are numbers (`parse` below).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from openrecycle.app.charts.theme import FONT, Palette

# Column name to its values, all of one length.
Columns = dict[str, Any]
ROWS, NUMBER = "rows", "row"
# The name of the selection that holds which part of a chart is shown.
ZOOM = "zoom"
# Kinds of marks that go through many rows.
PATHS = ("line", "area")
# A text column with at most this many different words is sent as numbers of one byte.
MOST_WORDS = 100


@dataclass(frozen=True)
class LiveChart:
    """A chart of a running job. spec: a Vega-Lite spec of layers, which stays the same. rows: the data, which changes.
    colours: for everything outside the layers. The chart is as wide as its container."""

    spec: dict[str, Any]
    rows: Columns
    colours: Palette

    def whole(self) -> dict[str, Any]:
        """Returns the spec with its rows, as `st.vega_lite_chart` takes it."""
        count = len(next(iter(self.rows.values()), ()))
        rows = {**self.rows, NUMBER: np.arange(count, dtype=np.int32)}
        layers = list(map(_keyed, self.spec["layer"]))
        x = self.spec["encoding"]["x"]
        as_it_is = {"parse": {name: None for name in rows if x["type"] != "temporal" or name != x["field"]}}
        data = {"name": ROWS, "format": as_it_is}
        return {
            "width": "container",
            "autosize": {"type": "fit-x", "contains": "padding"},
            "config": _config(self.colours),
            **self.spec,
            "layer": layers,
            "data": data,
            "datasets": {ROWS: arrow(rows)},
        }


def _keyed(layer: dict[str, Any]) -> dict[str, Any]:
    if layer["mark"]["type"] in PATHS:
        return layer
    return {**layer, "encoding": {**layer["encoding"], "key": {"field": NUMBER}}}


def arrow(rows: Columns) -> bytes:
    """Returns the rows as an Arrow stream; NaN becomes null. This takes a fraction of the time that pandas would
    take."""
    table = pa.table({name: _column(values) for name, values in rows.items()})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return bytes(stream.getvalue())


def _column(values: Any) -> pa.Array:
    column = pa.array(values, from_pandas=True)
    if pa.types.is_string(column.type):
        coded = column.dictionary_encode()
        if len(coded.dictionary) <= MOST_WORDS:  # thousands of rows may have one of a few words each
            return coded.cast(pa.dictionary(pa.int8(), pa.string()))
    return column


def y_axis(field: str, scale: dict[str, Any]) -> dict[str, Any]:
    """Returns a y axis without a line, and with enough room for any numbers, so that charts above each other are
    aligned.
    """
    axis = {
        "title": None,
        "tickCount": 4,
        "domain": False,
        "ticks": False,
        "minExtent": 54,  # for 123,456.5 or 0.0012345
        # For values that are all the same Vega shows every digit; for values that differ little, only the difference.
        "labelExpr": "abs(datum.value) < 1e6 && length(datum.label) < 10 ? datum.label : format(datum.value, "
        "abs(datum.value) < 1e-3 || abs(datum.value) >= 1e6 ? '.6~s' : abs(datum.value) < 1 ? '.7~f' : ',.7~g')",
    }
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _config(colours: Palette) -> dict[str, Any]:
    """Returns Vega's configuration in the theme's colours."""
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
