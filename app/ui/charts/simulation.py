"""What a simulated run looks like: throughput over time by policy, and over the rarity of failures; and what these
charts say for those who can't see them, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go

from openrecycle.app.plans.simulations import Simulation
from openrecycle.app.ui import text
from openrecycle.app.ui.tables import Table
from openrecycle.app.ui.theme import LEGEND, Palette, fixed, lower_axis, style

Curve = Sequence[tuple[float, float]]

# Words and dash of each policy; the palette has its colour under the same name.
POLICIES: dict[str, tuple[str, str]] = {
    "ours": ("Ours, best per failure", "solid"),
    "recycle": ("Re-route (ReCycle)", "solid"),
    "repartition": ("Re-partition layers", "solid"),
    "oobleck": ("Oobleck's templates", "dash"),
    "drop-replica": ("Drop the replica (fewer samples)", "solid"),
    "checkpoint-restart": ("Checkpoint and restart", "dashdot"),
    "spares": ("Spares stand by", "dash"),
    "fault-free": ("Nothing ever fails", "dot"),
}
# A curve is drawn in at most so many spans of time; what is shorter (a pause of seconds in a run of
# weeks) shows by what it takes off its span's mean.
MOST_POINTS = 700


def policy_words(name: str) -> str:
    """For people; `spares-1` is a policy with its number."""
    base, _, number = name.partition("-")
    if base == "spares":
        return f"{number or 1} spare{'' if number in ('', '1') else 's'} stand{'s' if number in ('', '1') else ''} by"
    return POLICIES[name][0] if name in POLICIES else name


def look(name: str, colours: Palette) -> tuple[str, str]:
    """Colour and dash; one colour for any number of spares, whose dashes tell them apart."""
    base, _, number = name.partition("-") if name.startswith("spares") else (name, "", "")
    dash = POLICIES[base][1] if base in POLICIES else "solid"
    if number not in ("", "1"):
        dash = f"{4 + 3 * int(number)}px,4px"
    return colours.policies.get(base, colours.muted), dash


def thinned(curve: Curve, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """The step curve, or the time-weighted means of `most` equal spans where a step is shorter than those."""
    if len(curve) < 2:
        return list(curve)
    begin, end = curve[0][0], curve[-1][0]
    span = (end - begin) / most
    if all(after - before >= span for (before, _), (after, _) in pairwise(curve)):
        return list(curve)
    sums = [0.0] * most
    for (at, rate), (until, _) in pairwise(curve):
        first, last = int((at - begin) / span), int((until - begin) / span)
        for i in range(min(first, most - 1), min(last, most - 1) + 1):
            low, high = begin + i * span, begin + (i + 1) * span
            sums[i] += rate * max(0.0, min(until, high) - max(at, low))
    points = [(begin + i * span, total / span) for i, total in enumerate(sums)]
    return [*points, (end, points[-1][1])]


def _unit(hours: float) -> tuple[str, str, float]:
    """In which a run of so many hours reads well: its words, its sign, and how many make an hour."""
    if hours < 0.05:
        return "seconds", "s", 3600.0
    return ("minutes", "min", 60.0) if hours < 3 else ("hours", "h", 1.0)


def throughput_over_time(curves: Mapping[str, Curve], living: Curve, colours: Palette, *, revision: str) -> go.Figure:
    """Samples per second by policy; beneath, on the same axis, the living workers."""
    figure = go.Figure()
    unit, short, of_hour = _unit(living[-1][0] - living[0][0] if living else 0.0)
    for name, curve in curves.items():
        colour, dash = look(name, colours)
        points = thinned(curve)
        figure.add_scatter(
            x=[of_hour * x for x, _ in points],
            y=[y for _, y in points],
            name=policy_words(name),
            mode="lines",
            line={"color": colour, "dash": dash, "width": 2.5 if name == "ours" else 1.75, "shape": "hv"},
            hovertemplate="%{y:.3~g} samples/s at %{x:.3~g} " + short + "<extra>" + policy_words(name) + "</extra>",
        )
    points = thinned(living)
    figure.add_scatter(
        x=[of_hour * x for x, _ in points],
        y=[y for _, y in points],
        name="Living workers",
        mode="lines",
        line={"color": colours.muted, "width": 1.25, "shape": "hv"},
        fill="tozeroy",
        fillcolor=colours.track,
        yaxis="y2",
        showlegend=False,
        hovertemplate="%{y:,.0f} workers live at %{x:.3~g} " + short + "<extra></extra>",
    )
    style(figure, colours, height=430, revision=revision)
    figure.update_layout(
        margin={"l": 54, "r": 12, "t": 34, "b": 44},
        legend=LEGEND,
        xaxis={"title": {"text": unit}, "anchor": "y2", "showgrid": False},
        yaxis={"title": {"text": "samples/s"}, "domain": [0.3, 1], "rangemode": "tozero"},
        yaxis2=lower_axis("workers", colours, [0, 0.2], 3),
    )
    return fixed(figure)


def sensitivity(
    mtbf: Sequence[float], rates: Mapping[str, Sequence[float]], colours: Palette, here: float
) -> go.Figure:
    """Average samples per second by one worker's mean time between failures (logarithmic)."""
    figure = go.Figure()
    for name, values in rates.items():
        colour, dash = look(name, colours)
        figure.add_scatter(
            x=list(mtbf),
            y=list(values),
            name=policy_words(name),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2.5 if name == "ours" else 1.75},
            marker={"size": 6},
            hovertemplate="%{y:.3~g} samples/s at an MTBF of %{x:.3~g} h<extra>" + policy_words(name) + "</extra>",
        )
    figure.add_vline(x=here, line={"color": colours.muted, "width": 1, "dash": "dot"})
    style(figure, colours, height=340, revision="sensitivity")
    figure.update_layout(
        margin={"l": 54, "r": 12, "t": 34, "b": 44},
        legend=LEGEND,
        xaxis={
            "title": {"text": "MTBF of one worker (hours, logarithmic)"},
            "type": "log",
            "tickvals": list(mtbf),
            "ticktext": [f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}" for value in mtbf],
            "showgrid": False,
        },
        yaxis={"title": {"text": "samples/s, average"}},
    )
    return fixed(figure)


def time_words(simulation: Simulation) -> str:
    """The chart of throughput over time."""
    means = "; ".join(
        f"{policy_words(row['policy'])}: {text.rate(row['trace_samples_per_second'])}" for row in simulation.rows
    )
    workers = [n for _, n in simulation.living]
    fewest = f" Workers that live: {min(workers):,} to {max(workers):,}." if workers else ""
    return f"Samples per second over time, by policy. On average {means}.{fewest} The table below has the figures."


def ratio_words(best: float, worst: float) -> str:
    """How many times the worst one's samples per second the best one's are."""
    if worst <= 0:
        return "trains nothing"
    ratio = best / worst
    return f"{ratio:.2f} ×" if ratio < 100 else f"{ratio:,.0f} ×"


def sensitivity_words(simulation: Simulation) -> str:
    """The chart over the mean time between failures."""
    hours = simulation.mtbf
    spans = "; ".join(
        f"{policy_words(name)}: {text.rate(rates[0])} to {text.rate(rates[-1])}"
        for name, rates in simulation.rates.items()
    )
    return (
        f"Average samples per second where a worker fails every {hours[0]:,.4g} to {hours[-1]:,.4g} hours, by policy. "
        f"{spans}. The table below has the figures."
    )


def sensitivity_table(simulation: Simulation) -> Table:
    """One row per mean time between failures, one column of average samples/s per policy."""
    return {
        "MTBF (h)": list(simulation.mtbf),
        **{
            f"{policy_words(name)} (samples/s)": [round(rate, 3) for rate in rates]
            for name, rates in simulation.rates.items()
        },
    }
