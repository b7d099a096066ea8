"""Two to four schedules below each other on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from openrecycle.app.ui import text
from openrecycle.app.ui.charts import bars
from openrecycle.app.ui.charts.bars import Sheet
from openrecycle.app.ui.charts.gantt import DENSE_OPS_PER_ROW, HOVER
from openrecycle.app.ui.charts.overview import MAX_BARS, picture
from openrecycle.app.ui.charts.rows import Rows
from openrecycle.app.ui.theme import Palette, style
from openrecycle.planner.job import Worker
from openrecycle.planner.plan import Plan
from openrecycle.planner.schedule import Schedule

TOP, BOTTOM, BETWEEN = 34, 46, 38
PICTURE_HEIGHT = 220
# Of the time axis where the plans' units differ.
RELATIVE = "fault-free 1F1B iterations of its own job"


@dataclass(frozen=True)
class Strip:
    """One of the schedules. workers: its rows. out: why the job that runs it goes without a worker, where known."""

    name: str
    plan: Plan
    schedule: Schedule
    workers: tuple[Worker, ...]
    out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ops(self) -> int:
        return sum(self.schedule.op_counts.get(w, 0) for w in self.workers)


def comparison(
    strips: Sequence[Strip],
    colours: Palette,
    *,
    shown: tuple[float, float] | None = None,
    revision: str = "compare",
) -> go.Figure:
    """The first one is the baseline: its period is drawn through all of them.

    Above bars.MAX_NODES ops in all, bars have no numbers; above MAX_BARS, each is a picture. Where time units differ,
    each plan's times are shares of its own job's fault-free 1F1B iteration. shown: from and to of the time axis, all
    else can be moved to (default: all).
    """
    factors = time_factors([s.plan for s in strips])
    ops = sum(s.ops for s in strips)
    as_pictures, shapes = ops > MAX_BARS, ops > bars.MAX_NODES
    sheets = [
        Sheet(s.schedule, Rows.of(s.workers), colours, factor, f"y{i + 1}" if i else "y")
        for i, (s, factor) in enumerate(zip(strips, factors, strict=True))
    ]
    heights = [PICTURE_HEIGHT if as_pictures else sheet.rows.extent * _row_pixels(sheets) for sheet in sheets]
    whole = sum(heights) + BETWEEN * (len(strips) - 1)
    end = last_time(strips) * 1.03
    figure = go.Figure()
    style(figure, colours, height=round(whole + TOP + BOTTOM), revision=revision)
    top = whole
    for strip, sheet, height in zip(strips, sheets, heights, strict=True):
        _axis(figure, sheet, ((top - height) / whole, top / whole), pictured=as_pictures)
        if as_pictures:
            _add_picture(figure, strip, sheet)
        else:
            _add_bars(figure, sheet, strip, end / sheet.factor * sheet.job.ticks_per_unit, shapes=shapes)
        _add_title(figure, strip, sheet, top / whole)
        top -= height + BETWEEN
    _add_baseline(figure, sheets[0], end)
    figure.update_layout(
        barmode="overlay",
        bargap=0,
        dragmode="zoom",
        margin={"l": 62, "r": 14, "t": TOP, "b": BOTTOM},
        showlegend=False,
        uniformtext={"mode": "hide", "minsize": 7} if _dense(strips) else None,
        hoverdistance=HOVER if shapes else None,
    )
    figure.update_xaxes(
        title_text=f"time ({_axis_unit(strips)})",
        tickformat=",",
        range=list(shown or (0, end)),
        anchor=sheets[-1].axis,
        layer="below traces",
    )
    figure.update_xaxes(showgrid=not as_pictures)  # lines over a picture look like part of it
    return figure


def time_factors(plans: Sequence[Plan]) -> list[float]:
    """By what each plan's times are multiplied, so that they have one axis."""
    if len({plan.job.time_unit for plan in plans}) == 1:
        return [1.0] * len(plans)
    return [(1 + plan.metrics.slowdown_vs_1f1b) / plan.metrics.period for plan in plans]


def last_time(strips: Sequence[Strip]) -> float:
    """Where the longest of them ends on the common axis."""
    factors = time_factors([s.plan for s in strips])
    return max(f * s.schedule.problem.job.units(_end(s.schedule)) for f, s in zip(factors, strips, strict=True))


def short_unit(strips: Sequence[Strip]) -> str:
    """Of the common axis, for beside a field."""
    return "iterations" if _relative(strips) else text.plural(strips[0].plan.job.time_unit)


def _axis_unit(strips: Sequence[Strip]) -> str:
    return RELATIVE if _relative(strips) else text.plural(strips[0].plan.job.time_unit)


def _relative(strips: Sequence[Strip]) -> bool:
    return len({s.plan.job.time_unit for s in strips}) > 1


def _dense(strips: Sequence[Strip]) -> bool:
    return any(strip.ops > DENSE_OPS_PER_ROW * max(1, len(strip.workers)) for strip in strips)


def _row_pixels(sheets: Sequence[Sheet]) -> int:
    rows = sum(len(sheet.rows.workers) for sheet in sheets)
    return 26 if rows <= 16 else 24 if rows <= 48 else 20 if rows <= 64 else 16  # in 20, numbers are 9 px


def _end(schedule: Schedule) -> int:
    return max(schedule.period, schedule.end)


def _axis(figure: go.Figure, sheet: Sheet, domain: tuple[float, float], *, pictured: bool) -> None:
    rows = sheet.rows
    workers = rows.workers
    if pictured:
        step = max(1, len(workers) // 4)
        ticks: list[float] = list(range(0, len(workers), step))
        words = [str(w) for w in workers[::step]]
        span = [len(workers) - 0.5, -0.5]
    else:
        ticks, words = [rows.at[w] for w in workers], [str(w) for w in workers]
        span = [rows.extent + 0.05, -0.05]
    figure.update_layout(
        {
            sheet.axis.replace("y", "yaxis"): {
                "domain": [max(0.0, domain[0]), min(1.0, domain[1])],
                "anchor": "x",
                "tickvals": ticks,
                "ticktext": words,
                "ticksuffix": " ",
                "tickfont": {"size": 11, "color": sheet.colours.text},
                "range": span,
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "showline": False,
            }
        }
    )


def _add_bars(figure: go.Figure, sheet: Sheet, strip: Strip, end: float, *, shapes: bool) -> None:
    figure.add_trace(bars.track(sheet, 0, end))
    figure.add_traces(bars.ghost(sheet, 0, end, shapes=shapes))
    figure.add_traces((bars.op_shapes if shapes else bars.op_bars)(sheet, sheet.ops()))
    bars.mark_out(figure, sheet, strip.out)


def _add_picture(figure: go.Figure, strip: Strip, sheet: Sheet) -> None:
    length = strip.schedule.end
    figure.add_layout_image(
        source=picture(strip.schedule, strip.workers, sheet.colours, strip.out),
        xref="x",
        yref=sheet.axis,
        x=0,
        y=-0.5,
        sizex=sheet.x(length),
        sizey=len(strip.workers),
        sizing="stretch",
        layer="below",
    )
    # A y axis without points is not drawn.
    figure.add_trace(
        go.Scatter(x=[0], y=[0], yaxis=sheet.axis, mode="markers", marker={"opacity": 0}, hoverinfo="skip", meta={})
    )


def _add_title(figure: go.Figure, strip: Strip, sheet: Sheet, top: float) -> None:
    """The plan's name and its period above its rows, in one line, so that neither runs into the other; and a line where
    the period ends."""
    period = text.planned(sheet.job.units(sheet.schedule.period), sheet.job.time_unit)
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=top, yref="paper", yanchor="bottom", yshift=2, showarrow=False,
        text=f"<b>{_plain(strip.name)}</b> · period {_plain(period)}", font={"size": 13, "color": sheet.colours.text},
    )  # fmt: skip
    x = sheet.x(sheet.schedule.period)
    line = {"color": sheet.colours.text, "width": 2}
    figure.add_shape(type="line", x0=x, x1=x, yref=f"{sheet.axis} domain", y0=0, y1=1, line=line)


def _add_baseline(figure: go.Figure, sheet: Sheet, end: float) -> None:
    x = sheet.x(sheet.schedule.period)
    line = {"color": sheet.colours.accent, "width": 1.5, "dash": "dot"}
    figure.add_shape(type="line", x0=x, x1=x, yref="paper", y0=0, y1=1, line=line, name="baseline")


def _plain(text: str) -> str:
    """Plotly reads some HTML in annotations; names come from people."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
