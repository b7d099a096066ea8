"""What charts that follow a running job have in common.

They are Vega-Lite, since Streamlit hands new rows to a Vega view and keeps its zoom; a
Plotly chart is torn down and built anew for every change of its data (measured: a blank frame
each), so Plotly is left to the schedules, which stand still.

The rows go as a data set of their own name. Those of a chart's one unnamed data set Streamlit gives to the view
when it has been drawn, empty, and of an empty one Vega warns in the browser's console that no axis has an extent.

Each row has a number, by which Vega knows it again when it is given new rows: what it has drawn for the row of a
number is drawn anew in its place. Without one every row of every refresh is new to it, and of each mark it keeps
10,000 that have gone before it lets go of them: hundreds of megabytes on a page that stays open. To Vega-Lite such
a key means a line for each row, so lines go without.

No row is derived from another in the browser: Vega makes a copy of each, and keeps a trace of it for as long as the
page is open, 20 MiB an hour and chart at one refresh a second. Vega-Lite has it done to turn what a line goes along
into numbers, unless it is told that they are.
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
# Of the part that is shown of a chart that can be moved.
ZOOM = "zoom"
# Marks of which one goes through many rows.
PATHS = ("line", "area")
# A column of so few different words is sent as numbers of a byte each.
MOST_WORDS = 100


@dataclass(frozen=True)
class LiveChart:
    """A Vega-Lite spec of layers that stays the same while the job runs, the rows that change, and the colours that
    are not of a layer. It is as wide as its place."""

    spec: dict[str, Any]
    rows: Columns
    colours: Palette

    def whole(self) -> dict[str, Any]:
        """The spec with its rows, as `st.vega_lite_chart` takes them."""
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
    """The rows as an Arrow stream; NaN becomes null. By way of pandas it would take several times as long."""
    table = pa.table({name: _column(values) for name, values in rows.items()})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return bytes(stream.getvalue())


def _column(values: Any) -> pa.Array:
    column = pa.array(values, from_pandas=True)
    if pa.types.is_string(column.type):
        coded = column.dictionary_encode()
        if len(coded.dictionary) <= MOST_WORDS:  # thousands of rows say one of a few words
            return coded.cast(pa.dictionary(pa.int8(), pa.string()))
    return column


def y_axis(field: str, scale: dict[str, Any]) -> dict[str, Any]:
    """Without a line of its own, and with so much room for its numbers, whichever they are, that charts above each
    other begin at one place."""
    axis = {
        "title": None,
        "tickCount": 4,
        "domain": False,
        "ticks": False,
        "minExtent": 54,  # for 123,456.5 or 0.0012345
        # Of values that are all the same Vega gives every digit; of those that differ by little, what they differ by.
        "labelExpr": "abs(datum.value) < 1e6 && length(datum.label) < 10 ? datum.label : format(datum.value, "
        "abs(datum.value) < 1e-3 || abs(datum.value) >= 1e6 ? '.6~s' : abs(datum.value) < 1 ? '.7~f' : ',.7~g')",
    }
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _config(colours: Palette) -> dict[str, Any]:
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
