"""The Planner page's own pieces of HTML. Every text that comes from outside is escaped here."""

from __future__ import annotations

from html import escape

import streamlit as st

from openrecycle.app.plans.solving import Solve
from openrecycle.app.ui import text, url_state
from openrecycle.app.ui.facts import Card, gap_words


def field_error(words: str) -> None:
    """Below the field that it speaks of, as wide as that."""
    url_state.field_error(words, "stretch")


def example_steps(items: list[tuple[str, str, Solve | None, bool]]) -> None:
    """The paper's steps side by side. items: name, about, what is made of it, is it the one shown below?"""
    st.html('<div class="or-steps">' + "".join(_step(*item) for item in items) + "</div>")


def _step(name: str, about: str, solve: Solve | None, chosen: bool) -> str:
    value, note = "–", "not planned yet"
    good = ""
    if solve is not None and solve.plan is not None:
        unit, metrics = solve.plan.job.time_unit, solve.plan.metrics
        value = text.planned(metrics.period, unit)
        share = f" · {text.percent(metrics.slowdown_vs_1f1b, sign=True)}" if solve.plan.failed else ""
        note = f"bound {text.planned(metrics.lower_bound, unit)}, {gap_words(solve.plan)}{share}"
        good = " or-good" if metrics.gap <= 0 else ""
    elif solve is not None:
        note = solve.error or (
            "waits its turn" if solve.state == "waiting" else f"{text.seconds(solve.elapsed)} so far"
        )
        if solve.points and solve.points[-1].incumbent is not None:
            value = f"{text.planned(solve.points[-1].incumbent, 'slot')} …"
    return (
        f'<div class="or-step{" or-chosen" if chosen else ""}"><div class="or-label">{escape(name)}</div>'
        f'<div class="or-value">{escape(value)}</div><div class="or-note{good}">{escape(note)}</div>'
        f'<div class="or-note">{escape(about)}</div></div>'
    )


def log(lines: list[str]) -> None:
    """Oldest first, in a list that scrolls by itself."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    st.html(f'<ol class="or-log" tabindex="0" aria-label="What the solvers reported">{items}</ol>')


def log_lines(solve: Solve, unit: str) -> list[str]:
    """What the search reported, in words: one line for each better plan, bound or other solver."""
    lines = []
    for point in solve.points:
        best = "no plan yet" if point.incumbent is None else f"period {text.planned(point.incumbent, unit)}"
        gap = ""
        if point.incumbent is not None and point.bound > 0:
            gap = f", gap {text.percent(max(0.0, point.incumbent / point.bound - 1))}"
        lines.append(f"{point.elapsed:8.2f} s  {point.solver}: {best}, bound {text.planned(point.bound, unit)}{gap}")
    if solve.plan is not None and solve.plan.solver.message:
        lines.append(f"{solve.elapsed:8.2f} s  {solve.plan.solver.message}")
    return lines


def search_cards(solve: Solve, unit: str) -> list[Card]:
    """Where a search stands."""
    last = solve.points[-1] if solve.points else None
    limit = solve.request.timeout
    if last is None or last.incumbent is None:
        best = [Card("Best so far", "–", "no plan yet"), Card("Proven bound", "–"), Card("Gap", "–")]
    else:
        gap = max(0.0, last.incumbent / last.bound - 1) if last.bound else 0.0
        best = [
            Card("Best so far", text.planned(last.incumbent, unit), f"by {last.solver}"),
            Card("Proven bound", text.planned(last.bound, unit), "no plan can be shorter"),
            Card("Gap", text.percent(gap), "closed" if gap == 0 else "between the two"),
        ]
    return [*best, Card("Time", text.seconds(solve.elapsed), f"{text.seconds(limit)} at most")]
