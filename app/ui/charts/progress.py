"""Throughput and loss over iterations, with failures and recoveries marked."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.ui.theme import Palette, style
from app.view import EventView, IterationView, RecoveryView


@dataclass(frozen=True)
class Mark:
    """A change of membership: seen first in `iteration`. lost: failure; else a re-join or re-form."""

    iteration: int
    text: str
    lost: bool
    detail: str


def epoch_marks(
    iterations: tuple[IterationView, ...], recoveries: tuple[RecoveryView, ...], events: tuple[EventView, ...]
) -> list[Mark]:
    """One mark for each iteration whose epoch is newer than that of the one before."""
    healed = {r.epoch: r for r in recoveries}
    marks = []
    for before, after in pairwise(iterations):
        if after.epoch == before.epoch:
            continue
        epochs = range(before.epoch + 1, after.epoch + 1)
        known = [healed[e] for e in epochs if e in healed]
        lost = sorted({r.worker for r in known}) or _reported_lost(events, before, after)
        if lost or after.living < before.living:
            text = "✕ " + (", ".join(lost[:2]) + (" …" if len(lost) > 2 else "") or "failure")
            detail = f"resumed after {max(r.resumed_ms for r in known):.0f} ms" if known else "recovered"
            marks.append(Mark(after.iteration, text, True, detail))
        elif after.living > before.living:
            marks.append(Mark(after.iteration, "↺ re-join", False, f"{after.living} workers living again"))
        else:
            marks.append(Mark(after.iteration, "re-formed", False, "same workers, new groups"))
    return marks


def _reported_lost(events: tuple[EventView, ...], before: IterationView, after: IterationView) -> list[str]:
    """Workers whose death was reported between two commits, for failures whose recovery is not yet."""
    return sorted(
        {
            e.worker
            for e in events
            if e.kind == "failure" and e.severity == "error" and e.worker
            if before.committed_at <= e.at <= after.committed_at
        }
    )


def progress(
    iterations: tuple[IterationView, ...],
    colours: Palette,
    *,
    total: int,
    marks: list[Mark],
    fault_free: float | None = None,
    height: int = 330,
    revision: str = "progress",
) -> go.Figure:
    """Two panels over one axis of iterations. fault_free: samples per second, drawn dotted."""
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.2,
        subplot_titles=("Throughput (samples/s)", "Loss"),
    )
    x = [i.iteration for i in iterations]
    line = {"width": 2, "shape": "linear"}
    size = 5 if len(x) <= 120 else 3
    rates = go.Scatter(
        x=x,
        y=[i.samples_per_second for i in iterations],
        mode="lines+markers",
        line={**line, "color": colours.accent},
        marker={"size": size, "color": colours.accent},
        hovertext=[_sentence(i) for i in iterations],
        hoverinfo="text",
        name="throughput",
    )
    losses = go.Scatter(
        x=x,
        y=[i.loss for i in iterations],
        mode="lines+markers",
        line={**line, "color": colours.muted},
        marker={"size": size, "color": colours.muted},
        hovertext=[_sentence(i) for i in iterations],
        hoverinfo="text",
        name="loss",
    )
    figure.add_trace(rates, row=1, col=1)
    figure.add_trace(losses, row=2, col=1)
    if fault_free is not None:
        figure.add_hline(
            y=fault_free,
            row=1,
            col=1,
            line={"color": colours.good, "width": 1.5, "dash": "dot"},
            annotation={
                "text": "fault-free",
                "font": {"color": colours.good, "size": 12},
                "yanchor": "bottom",
                "xanchor": "right",
                "yshift": 2,
                "bgcolor": colours.background,
            },
            annotation_position="top right",
        )
    _add_marks(figure, marks, colours)
    top = max([i.samples_per_second for i in iterations] + [fault_free or 0], default=1)
    style(figure, colours, height=height, revision=revision)
    figure.update_layout(
        showlegend=False, dragmode="zoom", hovermode="closest", margin={"l": 48, "r": 12, "t": 24, "b": 38}
    )
    for title in figure.layout.annotations[:2]:
        title.update(x=0, xanchor="left", xshift=-48, font={"size": 13, "color": colours.text})
    figure.update_xaxes(range=_iteration_range(x, total), tickformat=",d", showgrid=False)
    figure.update_xaxes(title_text="iteration", title_standoff=6, row=2, col=1)
    figure.update_yaxes(range=[0, top * 1.25 or 1], nticks=4, row=1, col=1)
    figure.update_yaxes(nticks=4, row=2, col=1)
    return figure


def _add_marks(figure: go.Figure, marks: list[Mark], colours: Palette) -> None:
    labelled = {m.iteration for m in marks[-4:]}
    for mark in marks:
        colour = colours.failed if mark.lost else colours.joining
        for row in (1, 2):
            figure.add_vline(
                x=mark.iteration - 0.5,
                row=row,
                col=1,
                line={"color": colour, "width": 1.5, "dash": "solid" if mark.lost else "dash"},
            )
        if mark.iteration in labelled:
            figure.add_annotation(
                x=mark.iteration - 0.5,
                y=0.04,
                yref="y domain",
                text=mark.text,
                hovertext=mark.detail,
                showarrow=False,
                xanchor="left",
                xshift=3,
                yanchor="bottom",
                bgcolor=colours.background,
                opacity=0.92,
                font={"size": 12, "color": colours.failed_text if mark.lost else colours.joining},
            )


def _iteration_range(x: list[int], total: int) -> list[float]:
    if not x:
        return [-0.5, max(total, 1) - 0.5]
    # Widens in steps, so that the axis does not shift with every iteration.
    span = x[-1] - x[0] + 1
    room = next(s for s in (20, 50, 100, 200, 300, 400, 600, 10**12) if s >= span)
    return [x[0] - 0.8, min(x[0] + room, max(x[-1] + 1, x[0] + 20)) - 0.2 if room > 600 else x[0] + room - 0.2]


def _sentence(i: IterationView) -> str:
    return (
        f"<b>iteration {i.iteration}</b> · epoch {i.epoch}<br>"
        f"{i.samples_per_second:,.3g} samples/s · {i.seconds * 1000:,.0f} ms<br>"
        f"loss {i.loss:.4f} · {i.living} living workers"
    )
