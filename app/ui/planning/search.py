"""A search under way: its figures, its chart, its log, and the way to end it."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.plans.solving import Solve
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import components, text
from openrecycle.app.ui.access import acting
from openrecycle.app.ui.charts.search import search_chart, search_words
from openrecycle.app.ui.planning.pieces import log, log_lines, search_cards
from openrecycle.app.ui.planning.state import PAGE, say
from openrecycle.app.ui.theme import Palette

REFRESH = 0.5


def search(console: Console, solve: Solve, unit: str, colours: Palette) -> None:
    """Follows a solve by itself until it is over; then the page is drawn anew, with the result."""
    st.fragment(_follow, run_every=REFRESH)(console, solve.id, unit, colours)


def _follow(console: Console, solve_id: str, unit: str, colours: Palette) -> None:
    try:
        solve = console.plans.solves.get(solve_id)
    except ConsoleError:
        st.rerun()
    if solve.over:
        st.rerun()
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        components.heading("Planning", _search_status(solve))
        st.button(
            "Stopping …" if solve.state == "stopping" else "Cancel",
            key="planner-cancel",
            icon=":material/stop_circle:",
            disabled=solve.state == "stopping",
            on_click=_stop,
            args=(console, solve_id),
            help="Ends the search and keeps the best plan so far.",
        )
    if solve.state == "waiting":
        components.quiet("This plan waits its turn: as many others are being made as this machine has room for.")
        return
    components.cards(search_cards(solve, unit))
    drawn(solve, unit, colours, key="planner-search")


def drawn(solve: Solve, unit: str, colours: Palette, *, key: str) -> None:
    """The chart, and the same in words."""
    if not any(p.incumbent is not None for p in solve.points):
        components.quiet("The first plan is on its way.")
        return
    if not solve.over or len(solve.points) > 1:
        chart = search_chart(solve, unit, colours)
        st.vega_lite_chart(None, chart.whole(), theme=None, key=key, alt=search_words(solve, unit))
    log(log_lines(solve, unit))


def others(console: Console, shown: Sequence[str]) -> None:
    """What else is being made, by whomever, and the way to end it. shown: ids of those the page has elsewhere."""
    for solve in console.plans.solves.all():
        if solve.over or solve.id in shown or solve.request.kind != "plan":
            continue
        job = solve.request.job
        with st.container(horizontal=True, vertical_alignment="center", key=f"planner-other-{solve.id}"):
            components.quiet(
                f"Also being planned: {job.pipelines} × {job.stages} × {job.micro_batches}, "
                f"{text.count(len(solve.request.failed), 'worker')} dead, {solve.request.technique.value} "
                f"({_search_status(solve)})."
            )
            st.button("Cancel", key=f"planner-cancel-{solve.id}", on_click=_stop, args=(console, solve.id))


def _search_status(solve: Solve) -> str:
    if solve.state == "waiting":
        return "waits its turn"
    return f"{text.seconds(solve.elapsed)} of at most {text.seconds(solve.request.timeout)}"


def _stop(console: Console, solve_id: str) -> None:
    try:
        with acting(console, "stop solve", solve_id):
            console.plans.solves.stop(solve_id)
    except ConsoleError as error:
        say(PAGE, str(error))
