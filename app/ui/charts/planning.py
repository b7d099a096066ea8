"""Charts of the Planner page: how a search closes its gap, the best period so far and the proven bound over time; and
migrations, the grid of workers with the dead, and who takes whose place with whose weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from openrecycle.app.plans.solving import Migrations, Solve
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.vega import LiveChart, y_axis
from openrecycle.app.ui.theme import Palette, style
from openrecycle.planner.jobs.job import Job, Worker

# Rows (pipelines) beyond these are left out unless something moves there.
MAX_ROWS = 16


def migrations_chart(job: Job, failed: list[str], found: Migrations, colours: Palette) -> go.Figure:
    """x: stage, y: pipeline. A solid arrow: a worker leaves its place; a dotted one: where the weights come from."""
    dead = {Worker.parse(name) for name in failed}
    moves = [
        (Worker.parse(m.worker), Worker.parse(m.takes), Worker.parse(m.source) if m.source else None)
        for m in found.migrations
    ]
    touched = {w.pipeline for move in moves for w in move if w is not None} | {w.pipeline for w in dead}
    pipelines = range(job.pipelines) if job.pipelines <= MAX_ROWS else sorted(touched)[: 2 * MAX_ROWS]
    row = {pipeline: i for i, pipeline in enumerate(pipelines)}
    cells = [Worker(p, s) for p in row for s in range(job.stages)]
    leaving = {worker for worker, _, _ in moves}
    figure = go.Figure()
    for name, shown, symbol, fill in (
        ("alive", [c for c in cells if c not in dead and c not in leaving], "square", colours.healthy),
        ("moves", [c for c in cells if c in leaving], "square", colours.joining),
        ("dead", [c for c in cells if c in dead], "x", colours.failed),
    ):
        figure.add_scatter(
            x=[c.stage for c in shown],
            y=[row[c.pipeline] for c in shown],
            mode="markers+text" if len(cells) <= 64 else "markers",
            text=[str(c) for c in shown],
            textposition="bottom center",
            textfont={"size": 11, "color": colours.muted},
            marker={"symbol": symbol, "size": 17 if len(cells) <= 64 else 9, "color": fill},
            hovertext=[f"{c}: {name}" for c in shown],
            hoverinfo="text",
            meta=name,
        )
    for worker, takes, source in moves:
        if worker.pipeline in row and takes.pipeline in row:
            _arrow(figure, row, worker, takes, colours.joining, "solid")
        if source is not None and source.pipeline in row and takes.pipeline in row:
            _arrow(figure, row, source, takes, colours.muted, "dot")
    style(figure, colours, height=90 + 58 * max(1, len(row)), revision=found.reason)
    figure.update_layout(margin={"l": 62, "r": 14, "t": 12, "b": 44}, showlegend=False, dragmode=False)
    figure.update_xaxes(
        title_text="stage", dtick=1, range=[-0.5, job.stages - 0.5], showgrid=False, fixedrange=True, showline=False
    )
    figure.update_yaxes(
        tickvals=list(row.values()),
        ticktext=[f"pipeline {p}" for p in row],
        range=[len(row) - 0.4, -0.6],
        showgrid=False,
        fixedrange=True,
        showline=False,
    )
    return figure


def _arrow(figure: go.Figure, row: dict[int, int], start: Worker, end: Worker, colour: str, dash: str) -> None:
    """From cell to cell, ending short of the marks. Plotly's arrows have no dashes: dotted ones get a line below."""
    x0, y0, x1, y1 = start.stage, row[start.pipeline], end.stage, row[end.pipeline]
    if dash == "dot":
        figure.add_shape(
            type="line", x0=x0, y0=y0, x1=x1, y1=y1, layer="below", line={"color": colour, "dash": "dot", "width": 2}
        )
        return
    figure.add_annotation(
        x=x1,
        y=y1,
        ax=x0,
        ay=y0,
        xref="x",
        yref="y",
        axref="x",
        ayref="y",
        text="",
        arrowhead=2,
        arrowwidth=2.5,
        arrowcolor=colour,
        standoff=11,
        startstandoff=11,
    )


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
    return LiveChart(
        {
            "title": f"Best period and proven bound ({text.plural(unit)})",
            "height": HEIGHT,
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
                        "y": y_axis("incumbent", {"zero": False, "nice": True, "padding": 12}),
                        "y2": {"field": "bound"},
                    },
                },
                _line("incumbent", colours.accent, [1, 0]),
                _line("bound", colours.good, [5, 3]),
                _label("incumbent", "best_label", colours.accent, -6),
                _label("bound", "bound_label", colours.good, 14),
            ],
        },
        rows,
        colours,
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
