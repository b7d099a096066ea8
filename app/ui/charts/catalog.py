"""A catalog by number of failures: period against the linear and the proven bound, gap, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from openrecycle.app.catalogs.contents import CatalogReport, CountLine
from openrecycle.app.ui import text
from openrecycle.app.ui.theme import LEGEND, Palette, fixed, lower_axis, note, style

# Above so many counts, markers would run into one another.
MARKED = 60


def catalog_curves(report: CatalogReport, colours: Palette, *, revision: str) -> go.Figure:
    """Three panels over one axis of failures. A point of the longest plans carries its count in customdata."""
    lines = [line for line in report.lines if line.plans]
    unit = text.plural(report.question.job.time_unit)
    figure = go.Figure()
    x = [line.failures for line in lines]
    mode = "lines+markers" if len(lines) <= MARKED else "lines"
    if report.by_pattern:
        _spread(figure, lines, x, colours)
    figure.add_scatter(
        x=[line.failures for line in report.lines if line.linear is not None],
        y=[line.linear for line in report.lines if line.linear is not None],
        name="Linear: fault-free × workers / living",
        mode="lines",
        line={"color": colours.muted, "width": 1.5, "dash": "dash"},
        hovertemplate=f"%{{y:,.5g}} {unit} if throughput fell as workers do<extra></extra>",
    )
    figure.add_scatter(
        x=x,
        y=[line.worst.period for line in lines if line.worst],
        name="Longest plan" if report.by_pattern else "Plan",
        mode=mode,
        line={"color": colours.accent, "width": 2.5},
        marker={"size": 9},
        customdata=x,
        hovertext=[_sentence(line, unit) for line in lines],
        hoverinfo="text",
    )
    figure.add_scatter(
        x=x,
        y=[line.worst.bound for line in lines if line.worst],
        name="Proven lower bound",
        mode="lines",
        line={"color": colours.good, "width": 2, "dash": "dot"},
        hoverinfo="skip",  # it often lies on the plans, which say it too
    )
    _reference(figure, report, colours, unit)
    figure.add_bar(
        x=x,
        y=[100 * (line.gap or 0.0) for line in lines],
        yaxis="y2",
        marker={"color": colours.ops["W"], "line": {"width": 0}},
        showlegend=False,
        hovertemplate="at most %{y:.2f} % above the best<extra></extra>",
    )
    figure.add_bar(
        x=x,
        y=[line.peak for line in lines],
        yaxis="y3",
        marker={"color": colours.ops["I"], "line": {"width": 0}},
        showlegend=False,
        hovertemplate="%{y} activations at most on one worker<extra></extra>",
    )
    style(figure, colours, height=560, revision=revision)
    figure.update_layout(
        margin={"l": 62, "r": 12, "t": 40, "b": 44},
        clickmode="event+select",
        bargap=0.35 if len(lines) <= MARKED else 0,
        legend=LEGEND,
        xaxis={
            "title": {"text": "failed workers"},
            "anchor": "y3",
            "showgrid": False,
            "range": [-0.5, report.lines[-1].failures + 0.5],
            "dtick": 1 if len(report.lines) <= 16 else None,
            "tickformat": "d",
        },
        yaxis={"title": {"text": f"period ({unit})"}, "domain": [0.46, 1], "rangemode": "normal", "tickformat": ","},
        yaxis2=lower_axis("gap (%)", colours, [0.24, 0.39], 4),
        yaxis3=lower_axis("activations", colours, [0, 0.17], 4),
    )
    muted = colours.muted
    if not any(line.gap for line in lines):
        figure.update_layout(yaxis2={"range": [0, 1], "showgrid": False})
        note(figure, "every plan is proven optimal", muted, x=0.5, xref="x domain", y=0.5, yref="y2 domain")
    if report.limit is not None:
        figure.add_hline(y=report.limit, yref="y3", line={"color": colours.text, "width": 1.25, "dash": "dot"})
        figure.update_layout(yaxis3={"range": [0, 1.35 * max([report.limit, *(line.peak or 0 for line in lines)])]})
        right: dict[str, Any] = {"x": 1, "xref": "x domain", "xanchor": "right"}
        note(figure, f"limit {report.limit}", muted, y=report.limit, yref="y3", yanchor="bottom", **right)
    return fixed(figure)


def _spread(figure: go.Figure, lines: Sequence[CountLine], x: list[int], colours: Palette) -> None:
    """From the shortest to the longest plan of a count."""
    for name, y, fill in (
        ("Shortest plan", [line.best.period for line in lines if line.best], None),
        ("", [line.worst.period for line in lines if line.worst], "tonexty"),
    ):
        figure.add_scatter(
            x=x,
            y=y,
            name=name,
            mode="lines",
            line={"color": colours.accent, "width": 1 if name else 0},
            fill=fill,
            fillcolor="rgba(71, 113, 197, 0.16)",
            showlegend=bool(name),
            hoverinfo="skip",
        )


def _sentence(line: CountLine, unit: str) -> str:
    worst, best = line.worst, line.best
    assert worst is not None and best is not None
    failed = text.count(line.failures, "failed worker")
    names = worst.words()
    words, longest = f"<b>{failed if line.failures else 'fault-free'}</b>", text.planned(worst.period, unit)
    if len(line.plans) > 1:
        words += f" · {len(line.plans):,} plans, {text.planned(best.period, unit)} to {longest}"
    words += f"<br>longest: {longest}" if len(line.plans) > 1 else f"<br>{longest}"
    if names:
        words += f" without {names}"
    proof = "proven optimal" if worst.gap <= 0 else f"no plan can be below {text.planned(worst.bound, unit)}"
    return f"{words}<br>{proof}<br>click: open on Schedule"


def _reference(figure: go.Figure, report: CatalogReport, colours: Palette, unit: str) -> None:
    """Where fault-free 1F1B is."""
    if report.reference is None:
        return
    figure.add_hline(y=report.reference, line={"color": colours.text, "width": 1, "dash": "dot"})
    note(
        figure,
        f"fault-free 1F1B: {text.planned(report.reference, unit)}",
        colours.text,
        x=0,
        xref="x domain",
        xanchor="left",
        y=report.reference,
        yanchor="bottom",
        bgcolor=colours.background,  # on narrow screens the curves pass behind it
        opacity=0.85,
    )
