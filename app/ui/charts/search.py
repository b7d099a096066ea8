"""How a search closes its gap: the best period so far and the proven bound over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from openrecycle.app.plans.solving import Solve
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.vega import LiveChart, config
from openrecycle.app.ui.theme import Palette

HEIGHT = 190


def search_chart(solve: Solve, unit: str, colours: Palette) -> LiveChart:
    """Steps: what was known stays so until the next report. Between the two lines lies the gap."""
    known = [p for p in solve.points if p.incumbent is not None]
    if known and solve.elapsed > known[-1].elapsed:
        known = [*known, known[-1]._replace(elapsed=solve.elapsed)]
    rows = {
        "seconds": np.array([p.elapsed for p in known], dtype=np.float32),
        "incumbent": np.array([p.incumbent for p in known], dtype=np.float64),
        "bound": np.array([p.bound for p in known], dtype=np.float64),
        "solver": [p.solver for p in known],
    }
    x = {
        "field": "seconds",
        "type": "quantitative",
        "scale": {"zero": True, "nice": False, "padding": 4},
        "axis": {"title": "seconds", "grid": False, "tickCount": 8},
    }
    scale = {"zero": False, "nice": True, "padding": 12}
    axis = {"title": None, "tickCount": 4, "domain": False, "ticks": False, "minExtent": 34}
    return LiveChart(
        {
            "title": f"Best period and proven bound ({text.plural(unit)})",
            "height": HEIGHT,
            "width": "container",
            "autosize": {"type": "fit-x", "contains": "padding"},
            "transform": [
                {"joinaggregate": [{"op": "max", "field": "seconds", "as": "last"}]},
                {"calculate": "datum.seconds === datum.last ? 'best ' + datum.incumbent : ''", "as": "best_label"},
                {"calculate": "datum.seconds === datum.last ? 'bound ' + datum.bound : ''", "as": "bound_label"},
            ],
            "encoding": {"x": x},
            "layer": [
                {
                    "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.12, "color": colours.accent},
                    "encoding": {
                        "y": {"field": "incumbent", "type": "quantitative", "scale": scale, "axis": axis},
                        "y2": {"field": "bound"},
                    },
                },
                _line("incumbent", colours.accent, [1, 0]),
                _line("bound", colours.good, [5, 3]),
                _label("incumbent", "best_label", colours.accent, -6),
                _label("bound", "bound_label", colours.good, 14),
            ],
            "config": config(colours),
        },
        rows,
    )


def search_words(solve: Solve, unit: str) -> str:
    """The chart for those who can't see it."""
    known = [(p.incumbent, p.bound) for p in solve.points if p.incumbent is not None]
    if not known:
        return "Best period and bound over time; there is no plan yet."
    first, last = ([text.planned(value, unit) for value in known[i]] for i in (0, -1))
    return (
        f"Best period and proven bound over {text.seconds(solve.elapsed)}: from {first[0]} and {first[1]} "
        f"to {last[0]} and {last[1]}."
    )


def _line(field: str, colour: str, dash: list[int]) -> dict[str, Any]:
    return {
        "mark": {
            "type": "line",
            "interpolate": "step-after",
            "color": colour,
            "strokeWidth": 2,
            "strokeDash": dash,
            "point": {"color": colour, "filled": True, "size": 22},
        },
        "encoding": {
            "y": {"field": field, "type": "quantitative"},
            "tooltip": [
                {"field": "seconds", "format": ".2f"},
                {"field": "incumbent", "title": "best period"},
                {"field": "bound"},
                {"field": "solver"},
            ],
        },
    }


def _label(field: str, words: str, colour: str, dy: int) -> dict[str, Any]:
    return {
        "mark": {"type": "text", "align": "right", "dy": dy, "dx": -2, "color": colour},
        "encoding": {"y": {"field": field, "type": "quantitative"}, "text": {"field": words}},
    }
