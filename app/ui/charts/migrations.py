"""Migrations drawn: the grid of workers, the dead, and who takes whose place with whose weights."""

from __future__ import annotations

import plotly.graph_objects as go

from openrecycle.app.plans.solving_child import Migrations
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
