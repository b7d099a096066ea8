"""What one worker reported over time: op times beside the plan's, and memory. Gaps are where it was silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrecycle.app.console.worker_history import Series, Values
from openrecycle.app.ui.charts.vega import Columns, LiveChart, config
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.plans.drawing import OP_WORDS

PANEL_HEIGHT = 150
MIB = 1 << 20
# A line is broken where so many steps in a row have no heartbeat.
SILENT_STEPS = 3


def op_times(series: Series, planned: Mapping[str, float], colours: Palette) -> LiveChart:
    """Milliseconds by op kind. planned: of the plan in force, by kind; drawn dashed."""
    kinds = [kind for kind in OP_WORDS if kind in series.metrics]
    rows: Columns = {"at": [], "milliseconds": [], "planned": [], "op": []}
    for kind in kinds:
        at, values = broken(series, series.metrics[kind].mean)
        rows["at"] += at
        rows["milliseconds"] += values
        rows["planned"] += [planned.get(kind)] * len(at)
        rows["op"] += [kind] * len(at)
    scale = {"domain": kinds, "range": [colours.ops[kind] for kind in kinds]}
    legend = {"orient": "top", "title": None, "labelColor": colours.muted, "symbolType": "stroke"}
    colour = {"field": "op", "type": "nominal", "scale": scale, "legend": legend}
    dashed = [
        {"mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5}, "encoding": {"y": _y("planned")}},
    ]
    layers = [
        *(dashed if any(kind in planned for kind in kinds) else []),
        {
            "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 12}},
            "encoding": {
                "y": _y("milliseconds"),
                "tooltip": [
                    _TIME,
                    {"field": "op"},
                    {"field": "milliseconds", "format": ".1f"},
                    {"field": "planned", "title": "plan, ms", "format": ".1f"},
                ],
            },
        },
    ]
    words = "Op times (ms)" + (", dashed: the plan's" if dashed and planned else "")
    return _chart(words, layers, rows, colours, {"color": colour})


def memory(series: Series, colours: Palette) -> LiveChart:
    """Resident memory in MiB, the highest of each step."""
    at, values = broken(series, series.metrics["resident_bytes"].high)
    rows: Columns = {"at": at, "mebibytes": [None if v is None else v / MIB for v in values]}
    layer = {
        "mark": {"type": "line", "strokeWidth": 2, "color": colours.accent, "point": {"size": 12}},
        "encoding": {
            "y": _y("mebibytes"),
            "tooltip": [_TIME, {"field": "mebibytes", "title": "MiB", "format": ",.0f"}],
        },
    }
    return _chart("Memory in use (MiB)", [layer], rows, colours, {})


def broken(series: Series, values: Values) -> tuple[list[int], list[float | None]]:
    """Milliseconds since 1970 and values, with an empty row in each gap, so that no line is drawn across it."""
    at: list[int] = []
    out: list[float | None] = []
    for i, (second, value) in enumerate(zip(series.at, values, strict=True)):
        if i and second - series.at[i - 1] > SILENT_STEPS * series.step:
            at.append(1000 * (series.at[i - 1] + series.step))
            out.append(None)
        at.append(1000 * second)
        out.append(value)
    return at, out


# As the console writes times everywhere; Vega's own would be `03 PM` and `:15`.
_CLOCK = {"seconds": "%H:%M:%S", "minutes": "%H:%M", "hours": "%H:%M", "day": "%-d %b", "date": "%-d %b"}
_TIME = {"field": "at", "type": "temporal", "title": "time", "format": "%H:%M:%S"}


def _y(field: str) -> dict[str, Any]:
    axis = {"title": None, "tickCount": 4, "domain": False, "ticks": False, "minExtent": 34}
    return {"field": field, "type": "quantitative", "scale": {"zero": True, "nice": True}, "axis": axis}


def _chart(
    title: str, layers: list[dict[str, Any]], rows: Columns, colours: Palette, encoding: dict[str, Any]
) -> LiveChart:
    axis = {"grid": False, "title": None, "tickCount": 6, "labelOverlap": True, "format": _CLOCK}
    return LiveChart(
        {
            "title": title,
            "height": PANEL_HEIGHT,
            "width": "container",
            "autosize": {"type": "fit-x", "contains": "padding"},
            "encoding": {"x": {"field": "at", "type": "temporal", "axis": axis}, **encoding},
            "layer": layers,
            "config": config(colours),
        },
        rows,
    )
