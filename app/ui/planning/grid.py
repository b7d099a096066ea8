"""The grid of workers: a click kills one, or brings it back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import streamlit as st

from openrecycle.app.plans.whatif import GRID, Checked, WhatIf, at_random
from openrecycle.app.ui import components, text
from openrecycle.app.ui.access import told
from openrecycle.app.ui.address import control, field_error
from openrecycle.app.ui.charts.worker_grid import PICKED, dead_grid
from openrecycle.app.ui.planning.state import change, now, say
from openrecycle.app.ui.theme import Palette
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan

# Up to here each worker is a button; larger grids are drawn as a heat-map, still larger ones not at all.
MAX_TILES = 64
MAX_CELLS = 4_096
SEEN = "planner-seen-clicks"


def grid(question: WhatIf, found: Checked, plan: Plan | None, colours: Palette) -> None:
    """plan: the one that answers the question, if there is one; it says who takes re-routed work."""
    cells = question.pipelines * question.stages
    components.heading("Workers", "select one to mark it dead, or alive again")
    takes = plan.rerouted() if plan is not None else {}
    _legend(question, takes)
    if cells <= MAX_TILES:
        rows = [
            [_tile(f"W{pipeline}_{stage}", question, takes) for stage in range(question.stages)]
            for pipeline in range(question.pipelines)
        ]
        components.tiles(rows, "worker-grid-planner", _toggle)
    elif cells <= MAX_CELLS:
        _heat_map(question, takes, colours)
    else:
        components.quiet(f"{cells:,} workers are too many to draw; name the dead ones below.")
    _by_hand(question, buttons=cells <= MAX_TILES)
    if found.infeasible:
        field_error(found.infeasible[:1].upper() + found.infeasible[1:] + ".", "stretch")


def _legend(question: WhatIf, takes: Mapping[str, int]) -> None:
    dead = len(question.failed)
    busy = sum(n > 0 for n in takes.values())
    cells = question.pipelines * question.stages
    entries = [("running", "Alive", cells - dead - busy)]
    if busy:
        entries.append(("re-routed", "Takes re-routed work", busy))
    if dead:
        entries.append(("failed", "Dead", dead))
    keys = "".join(
        f'<span class="or-key"><i class="or-shape or-look-{look}"></i>{words} <b>{count:,}</b></span>'
        for look, words, count in entries
    )
    counts = Counter(Worker.parse(name).stage for name in question.failed)
    worst = "".join(
        f'<span class="or-key">stage {stage}: <b>{question.pipelines - count:,} of {question.pipelines:,}</b> live'
        "</span>"
        for stage, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:4]
    )
    st.html(f'<div class="or-legend">{keys}{worst}</div>')


def _tile(name: str, question: WhatIf, takes: Mapping[str, int]) -> components.Tile:
    moved = takes.get(name, 0)
    if name in question.failed:
        return components.Tile(name, "failed", "dead", "Bring it back to life")
    look, words = ("re-routed", f"+{moved} re-routed") if moved else ("running", "alive")
    return components.Tile(name, look, words, "Mark it dead")


def _toggle(name: str) -> None:
    change(now().toggled(name))


def _heat_map(question: WhatIf, takes: Mapping[str, int], colours: Palette) -> None:
    # A new theme draws the chart anew, without the clicks of the old one.
    key = f"planner-map-{colours.name}-{question.pipelines}x{question.stages}"
    if key not in st.session_state:  # first drawn, or after a visit to another page: nothing is selected in it
        st.session_state[SEEN] = {}
    components.live_chart(
        dead_grid(question, takes, colours),
        key,
        "Worker grid: pipelines across, stages down. The list below names the dead ones.",
        on_select=partial(_mapped, key),
        selection_mode=PICKED,
    )


def _mapped(key: str) -> None:
    clicked = _clicked(key, st.session_state[key])
    if clicked:
        change(now().with_failed(set(now().failed) ^ clicked))


def _clicked(key: str, state: Mapping[str, Any]) -> set[str]:
    """Workers that were clicked since the last look. The chart keeps a set, into and out of which each click
    takes one; a chart that was drawn anew has none, and that is no click."""
    picked = {str(point["worker"]) for point in state["selection"].get(PICKED) or []}
    seen: set[str] = st.session_state.get(SEEN, {}).get(key, set())
    st.session_state[SEEN] = {key: picked}
    return set() if not picked and len(seen) > 1 else picked ^ seen


def _by_hand(question: WhatIf, *, buttons: bool) -> None:
    """The dead by name, for large grids and for keyboards; and some at random."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-dead"):
        if not buttons:
            draw = partial(st.text_input, "Dead workers", placeholder="W3_5, W20_9", width=330, max_chars=200_000)
            control(draw, "planner-dead-names", ", ".join(question.failed), _named)
        with st.popover("At random", key="planner-random"):
            most = question.stages * (question.pipelines - 1)
            st.number_input("How many", 0, max(most, 0), min(1, most), key="planner-random-count")
            st.number_input("Seed", 0, 2**31, 0, key="planner-random-seed", help="The same seed, the same workers.")
            st.button("Mark them dead", key="planner-random-go", on_click=_random, disabled=most < 1)
        st.button(
            "All alive",
            key="planner-revive",
            on_click=_revive,
            disabled=not question.failed,
            help=f"Brings back {text.count(len(question.failed), 'worker')}." if question.failed else None,
        )


def _named(words: str) -> None:
    question = now()
    with told(partial(say, GRID)):
        names = {str(Worker.parse(part, field="dead workers")) for part in words.replace(",", " ").split()}
        made = question.with_failed(names)
        if left_out := sorted(names - set(made.failed)):
            last = Worker(question.pipelines - 1, question.stages - 1)
            raise InputError("dead workers", left_out[0], f"workers of the grid, W0_0 to {last}")
        change(made)


def _random() -> None:
    noise = random.Random(int(st.session_state["planner-random-seed"]))
    change(at_random(now(), int(st.session_state["planner-random-count"]), noise))


def _revive() -> None:
    change(now().with_failed(set()))
