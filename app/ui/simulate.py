"""The Simulate page: what failures will cost a job, by policy. It draws throughput over time, and over the mean time
between failures, and has the same in words and as a table."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from openrecycle.app.charts import text
from openrecycle.app.charts.theme import CHART_CONFIG, LEGEND, Palette, fixed, lower_axis, style
from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.jobs.live_job import Row
from openrecycle.app.plans.simulations import (
    DRAWN,
    HISTORY,
    POLICIES,
    Simulation,
    SimulationRequest,
    parse_request,
    shapes,
)
from openrecycle.app.ui import address, components
from openrecycle.app.ui.access import say_error
from openrecycle.app.ui.facts import Card
from openrecycle.app.ui.tables import Table, rows_html
from openrecycle.planner.jobs.job import SECONDS
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.engine import ALIKE, Crossing, alike
from openrecycle.planner.simulation.traces import public_traces

SHAPE = "A model's shape"
# Names in the session: the request that is shown, and this page's own name for `Simulations`.
SHOWN, VIEWER = "simulation-shown", "simulation-viewer"
# The name in the URL of the time that a history covers, so that a link shows what its sender saw.
COVERS = "covers"
# How long to wait for the first result, which often comes at once. After that the page is drawn without it.
TIMEOUT_SECONDS = 0.5
DEFAULT_POLICIES = ["ours", "recycle", "repartition", "drop-replica", "checkpoint-restart"]


def page() -> None:
    colours = components.use_style()
    console = get_console()
    st.html(
        '<h1 class="or-title">Simulate</h1><div class="or-about">One job, one sequence of failures, '
        "and what each policy would have trained. Each throughput is that of a plan.</div>"
    )
    request = _ask(console)
    viewer = st.session_state.setdefault(VIEWER, secrets.token_hex(8))
    before = st.session_state.pop(SHOWN, None)
    if before is not None and before != request:
        console.plans.simulations.cancel(before, viewer)
    if request is None:
        return
    st.session_state[SHOWN] = request
    simulation = console.plans.simulations.get(request, viewer)
    simulation.first.wait(TIMEOUT_SECONDS)
    st.fragment(_results, run_every=None if simulation.done else 0.2)(simulation, viewer, colours)


def _ask(console: ConsoleService) -> SimulationRequest | None:
    """Draws the controls, whose state is in the URL; returns the request. None: there is nothing to simulate, and the
    page says why. Raises PlannerError."""
    jobs = components.job_names(components.jobs_to_pick(console))
    values: dict[str, Any] = {}
    with st.container(horizontal=True, vertical_alignment="bottom", key="simulate-job"):
        source = address.selectbox(
            "Job",
            [SHAPE, *jobs],
            format_func=lambda j: jobs.get(j, j),
            key="sim_job",
            width=240,
        )
        if source == SHAPE:
            values["model"] = address.selectbox("Model", shapes(), default="gpt-3-6.7b", key="model", width=160)
            for name, label, most, usual in (
                ("pipelines", "Pipelines", 1024, 6),
                ("stages", "Stages", 512, 4),
                ("micro_batches", "Micro-batches", 1024, 16),
            ):
                note = "Per pipeline." if name == "micro_batches" else None
                values[name] = address.number_input(label, 1, most, usual, key=f"sim_{name}", help=note, width=110)
        else:
            job = console.jobs.find(source)
            if job.plans.job.speeds:
                components.quiet("Some workers of this job are slower or faster. Here all count as equally fast.")
            values["job"] = job_doc(replace(job.plans.job, speeds=()))
            values["unit_seconds"] = _unit_seconds(console, source, job.plans.job.time_unit)
            values["samples"] = float(job.spec.pipelines * job.spec.micro_batches * job.spec.samples_per_micro_batch)
    traces = [DRAWN, *([HISTORY] if source != SHAPE else []), *public_traces()]
    names = {DRAWN: "Drawn at random", HISTORY: "This job's own history"}
    with st.container(horizontal=True, vertical_alignment="bottom", key="simulate-trace"):
        values["trace"] = address.selectbox(
            "Failures", traces, format_func=lambda t: names.get(t, t), key="trace", width=240
        )
        if values["trace"] == DRAWN:
            for name, label, hours, least, longest, note in (
                ("mtbf", "MTBF (h)", 100.0, 0.1, 1e6, "Mean hours between failures of one worker."),
                ("repair", "Repair (h)", 4.0, 0.0, 1e4, "Hours until a failed worker is back."),
                ("hours", "Length (h)", 72.0, 1.0, 8760.0, "Of the run."),
                ("host_mtbf", "Host MTBF (h)", 0.0, 0.0, 1e7, "Hours between failures of a whole host of 8; 0: never."),
            ):
                values[name] = address.number_input(
                    label, least, longest, hours, key=f"sim_{name}", width=130, help=note, format="%g"
                )
            values["seed"] = address.number_input("Seed", 0, 2**31, 2, key="sim_seed", width=100)
        values["dollars"] = address.number_input(
            "$ per worker-hour", 0.0, 1e4, 2.0, key="sim_dollars", width=130, format="%g"
        )
    untold = False
    if values["trace"] == HISTORY:
        values["history"], values["history_seconds"] = _history(console, source)
        untold = not values["history"]
        if untold:
            components.quiet(
                "No worker of this job failed in this time, so all policies would have trained the same. Come back "
                "after a failure, or have failures drawn at random."
            )
    else:
        st.query_params.pop(COVERS, None)
    values["policies"] = tuple(
        address.several(
            st.multiselect, "Policies", POLICIES, default=DEFAULT_POLICIES, format_func=policy_words, key="policies"
        )
    )
    if not values["policies"]:
        components.quiet("Choose at least one policy to simulate; two or more are compared.")
    if untold or not values["policies"]:
        return None
    return parse_request(**values)


def _unit_seconds(console: ConsoleService, job_id: str, unit: str) -> float | None:
    """Returns how long the unit of a job's op times is, where its name does not say so, and draws it. None: it counts
    as what its name says, or else as a second.

    It is rounded, so that the next iterations ask no other question."""
    if unit in SECONDS:
        return None
    found = console.queries.unit_seconds(job_id)
    if found is None:
        components.quiet(f"No iteration of this job tells how long one {unit} is: it counts as 1 s.")
        return None
    rounded = float(f"{found:.2g}")
    components.quiet(f"One {unit} of this job is {text.milliseconds(1000 * rounded, 2)}, by its newest iterations.")
    return rounded


def _history(console: ConsoleService, job_id: str) -> tuple[tuple[Row, ...], float]:
    """Returns the job's own failures up to when the page was opened, or the page of the link's sender:
    `?covers=<job>:<seconds>`."""

    def accept(word: str) -> float | None:
        job, _, seconds = word.partition(":")
        return float(seconds) if job == job_id and seconds.isdecimal() and len(seconds) < 10 else None

    pinned = address.read(COVERS, accept, f"{job_id}:<seconds>", "All of its history is shown.")
    rows, covered = console.queries.past_failures(job_id, pinned)
    address.say(COVERS)
    if pinned is None:
        st.query_params[COVERS] = f"{job_id}:{covered:.0f}"
    elif console.queries.past_failures(job_id)[1] > covered:
        with st.container(horizontal=True, vertical_alignment="center", key="simulate-covers"):
            components.quiet(f"The job's first {text.milliseconds(1000 * covered)}; it has gone on since.")
            st.button("Up to now", key="simulate-to-now", on_click=address.put, args=(COVERS, None))
    return rows, covered


def _results(simulation: Simulation, viewer: str, colours: Palette) -> None:
    simulation.look(viewer)
    done, steps = simulation.steps
    if not simulation.done:
        st.session_state.pop("simulation-whole", None)
    elif st.session_state.get("simulation-whole") != simulation.request:
        # The page runs once more, without the refresh that a running simulation needs. A simulation that was ended
        # while nobody looked starts anew.
        st.session_state["simulation-whole"] = simulation.request
        st.rerun()
    if simulation.error:
        say_error(simulation.error)
        return
    with st.container(key="simulate-progress"):  # in one place, so that its end moves nothing
        if simulation.done:
            components.quiet(f"Planned and simulated: all {steps} parts are there.")
        else:
            st.progress(done / steps, text=f"Planning and simulating: {done} of {steps} parts are there")
    for policy, expected in simulation.refused.items():
        st.warning(f"{policy_words(policy)} is left out. Choose {expected}.")
    if not simulation.rows:
        return
    components.cards(_cards(simulation))
    curves = {row["policy"]: simulation.curves[row["policy"]] for row in simulation.rows}
    components.heading("Throughput over time", "below it: how many workers live")
    st.plotly_chart(
        throughput_over_time(curves, simulation.living, colours, revision=str(hash(simulation.request))),
        theme=None,
        config=CHART_CONFIG,
        key="simulation-time",
        alt=time_words(simulation),
    )
    components.heading("The same in figures")
    st.html(rows_html(_table(simulation), "Figures by policy"))
    st.caption(
        "Extra worker-hours: beyond those that the fault-free job takes for the same samples. Below 0 where the "
        "workers that are left do more each. When a stage loses its last worker, a real job goes back to a checkpoint; "
        "here it does so only with the policies that always do."
    )
    if simulation.mtbf:
        components.heading("If failures were rarer or more frequent", "dotted line: as asked for")
        st.plotly_chart(
            sensitivity(simulation.mtbf, simulation.rates, colours, simulation.request.mtbf),
            theme=None,
            config=CHART_CONFIG,
            key="simulation-mtbf",
            alt=sensitivity_words(simulation),
        )
        figures = address.expander("The same in figures", key="simulation-mtbf-figures")
        if figures.open:
            figures.html(rows_html(sensitivity_table(simulation), "Figures by MTBF"))
        if simulation.crossings:
            st.markdown("\n".join(f"- {_cross(crossing)}" for crossing in simulation.crossings))


def _cross(crossing: Crossing) -> str:
    after, before = policy_words(crossing.after), policy_words(crossing.before)
    return f"**{after}** overtakes **{before}** at an MTBF of about {crossing.hours:.3g} h."


def _cards(simulation: Simulation) -> list[Card]:
    best = max(simulation.rows, key=lambda row: row["trace_samples_per_second"])
    others = [row for row in simulation.rows if row is not best]
    first, rate = simulation.rows[0], best["trace_samples_per_second"]
    as_good = [policy_words(row["policy"]) for row in others if alike(row["trace_samples_per_second"], rate)]
    cards = [
        Card(
            "Run", text.milliseconds(3_600_000 * first["hours"]), note=text.count(first["failures"], "worker") + " lost"
        ),
        Card(
            "Best here",
            policy_words(best["policy"]),
            note=f"{text.rate(rate)} samples/s on average"
            + (f"; within {100 * ALIKE:g} %: {' and '.join(as_good)}" if as_good else ""),
        ),
        Card("Goodput of the best", text.percent(best["goodput"]), note="of what the job would train without failures"),
        Card("ETTR of the best", text.percent(best["ettr"]), note="share of time in iterations that count"),
    ]
    if others:
        worst = min(others, key=lambda row: row["trace_samples_per_second"])
        ratio = ratio_words(rate, worst["trace_samples_per_second"])
        cards.append(Card("Best / worst (samples/s)", ratio, note=policy_words(worst["policy"])))
    return cards


def _table(simulation: Simulation) -> dict[str, list[Any]]:
    rows = sorted(simulation.rows, key=lambda row: -row["trace_samples_per_second"])
    return {
        "policy": [policy_words(row["policy"]) for row in rows],
        "samples/s": [round(row["trace_samples_per_second"], 3) for row in rows],
        "goodput %": [round(100 * row["goodput"], 1) for row in rows],
        "ETTR %": [round(100 * row["ettr"], 1) for row in rows],
        "iterations lost": [row["iterations_lost"] for row in rows],
        "extra worker-hours": [round(row["worker_hours_wasted"], 1) for row in rows],
        "$ per million samples": [
            None if row.get("dollars_per_million_samples") is None else round(row["dollars_per_million_samples"], 2)
            for row in rows
        ],
    }


# -- curves -----------------------------------------------------------------------------------------

Curve = Sequence[tuple[float, float]]

# The words and the dash of each policy; its colour is in the palette, under the same name.
LOOKS: dict[str, tuple[str, str]] = {
    "ours": ("Ours, best per failure", "solid"),
    "recycle": ("Re-route (ReCycle)", "solid"),
    "repartition": ("Re-partition layers", "solid"),
    "oobleck": ("Oobleck's templates", "dash"),
    "drop-replica": ("Drop the replica (fewer samples)", "solid"),
    "checkpoint-restart": ("Checkpoint and restart", "dashdot"),
    "spares": ("Spares stand by", "dash"),
    "fault-free": ("Nothing ever fails", "dot"),
}
# A curve is drawn in at most this many spans of time. Shorter events (a pause of seconds in a run of weeks) only show
# in the mean of their span.
MOST_POINTS = 700


def policy_words(name: str) -> str:
    """Returns a policy's name for people; `spares-1` is a policy with its number."""
    base, _, number = name.partition("-")
    if base == "spares":
        return f"{number or 1} spare{'' if number in ('', '1') else 's'} stand{'s' if number in ('', '1') else ''} by"
    return LOOKS[name][0] if name in LOOKS else name


def look(name: str, colours: Palette) -> tuple[str, str]:
    """Returns a policy's colour and dash. All numbers of spares have one colour and different dashes."""
    base, _, number = name.partition("-") if name.startswith("spares") else (name, "", "")
    dash = LOOKS[base][1] if base in LOOKS else "solid"
    if number not in ("", "1"):
        dash = f"{4 + 3 * int(number)}px,4px"
    return colours.policies.get(base, colours.muted), dash


def thinned(curve: Curve, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Returns a step curve as it is, or, if any step is shorter than a `most`-th of the whole, the time-weighted means
    of `most` equal spans."""
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
    """Returns the unit for a run of so many hours: its words, its sign, and how many of it make an hour."""
    if hours < 0.05:
        return "seconds", "s", 3600.0
    return ("minutes", "min", 60.0) if hours < 3 else ("hours", "h", 1.0)


def throughput_over_time(curves: Mapping[str, Curve], living: Curve, colours: Palette, *, revision: str) -> go.Figure:
    """Draws samples per second by policy, and below, on the same axis, the living workers."""
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
    """Draws average samples per second by one worker's mean time between failures (logarithmic)."""
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
    """Describes the chart of throughput over time."""
    means = "; ".join(
        f"{policy_words(row['policy'])}: {text.rate(row['trace_samples_per_second'])}" for row in simulation.rows
    )
    workers = [n for _, n in simulation.living]
    fewest = f" Workers that live: {min(workers):,} to {max(workers):,}." if workers else ""
    return f"Samples per second over time, by policy. On average {means}.{fewest} The table below has the figures."


def ratio_words(best: float, worst: float) -> str:
    """Says how many times as many samples per second the best policy has as the worst."""
    if worst <= 0:
        return "trains nothing"
    ratio = best / worst
    return f"{ratio:.2f} ×" if ratio < 100 else f"{ratio:,.0f} ×"


def sensitivity_words(simulation: Simulation) -> str:
    """Describes the chart over the mean time between failures."""
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
    """Returns one row per mean time between failures, and one column of average samples/s per policy."""
    return {
        "MTBF (h)": list(simulation.mtbf),
        **{
            f"{policy_words(name)} (samples/s)": [round(rate, 3) for rate in rates]
            for name, rates in simulation.rates.items()
        },
    }
