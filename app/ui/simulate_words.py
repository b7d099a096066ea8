"""What the Simulate page's charts say, for those who can't see them, and as a table. No Streamlit here."""

from __future__ import annotations

from openrecycle.app.plans.simulations import Simulation
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.simulation import policy_words
from openrecycle.app.ui.tables import Table


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
