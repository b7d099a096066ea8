"""Would it pay to move a failure to another stage? Drawn, with what it saves and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.plans.solving_child import Migrations
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import components, text
from openrecycle.app.ui.access import acting
from openrecycle.app.ui.charts.migrations import migrations_chart
from openrecycle.app.ui.facts import Card
from openrecycle.app.ui.planning.pieces import field_error
from openrecycle.app.ui.planning.search import search
from openrecycle.app.ui.planning.state import PAGE, change, entered, now, say, shown
from openrecycle.app.ui.theme import CHART_CONFIG, Palette
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job

COSTS = (
    ("state_gb", "Weights of a stage (GB)", "Weights and optimizer state that a copy moves. 0: as the profile says."),
    ("copy_gbs", "Copy (GB/s)", "How fast weights go from one worker to another."),
    ("heals_in", "Back in (s)", "Seconds until the dead workers are expected back. 0: they are not."),
)


def migrations(console: Console, question: WhatIf, job: Job, colours: Palette) -> None:
    components.heading("Migrations", "a living worker may take a dead one's place, with a copy of its peers' weights")
    with st.container(horizontal=True, vertical_alignment="bottom", key="planner-costs"):
        for name, label, note in COSTS:
            value = float(getattr(question, name))
            key = shown(f"planner-{name}", value)
            least = 0.001 if name == "copy_gbs" else 0.0
            st.number_input(
                label,
                least,
                1e6,
                value,
                key=key,
                format="%g",
                help=note,
                width=170,
                on_change=_price,
                args=(console, name),
            )
        known = console.plans.solves.find(question.migrations_asked())
        if known is None or (known.over and known.migrations is None):
            st.button("Look for migrations", key="planner-look", on_click=look, args=(console,))
    if not question.state_gb and not any(p.weight_bytes + p.optimizer_bytes for p in job.profiles):
        st.caption(
            "The profile says nothing of weights, so copies count as free; give their size to see what they cost."
        )
    if known is None:
        return
    if not known.over:
        search(console, known, job.time_unit, colours)
    elif known.migrations is None:
        field_error(known.error)
    else:
        _found(question, job, known.migrations, colours)


def look(console: Console) -> None:
    """Begins to look, in the background."""
    try:
        with acting(console, "look for migrations"):
            console.plans.solves.start(now().migrations_asked())
    except (ConsoleError, PlannerError) as error:
        say(PAGE, str(error))


def _price(console: Console, name: str) -> None:
    changes: dict[str, Any] = {name: float(entered(f"planner-{name}"))}
    change(replace(now(), **changes))
    look(console)


def _found(question: WhatIf, job: Job, found: Migrations, colours: Palette) -> None:
    st.markdown(f"{found.reason[:1].upper()}{found.reason[1:]}.")
    if not found.migrations:
        return
    unit = job.time_unit
    before = "there is none where they are"
    if found.period_now is not None:
        saved = text.percent(found.period / found.period_now - 1, sign=True)
        before = f"{text.planned(found.period_now, unit)} where they are; {saved}"
    gained = "–" if found.gained is None else f"{found.gained:,.3g}"
    components.cards(
        [
            Card("Period, list scheduler", text.planned(found.period, unit), before),
            Card("Pause for the copies", text.milliseconds(1000 * found.pause), "nobody trains meanwhile"),
            Card(
                "Iterations gained",
                gained,
                f"in {text.seconds(question.heals_in)}" if question.heals_in else "set “Back in”",
            ),
        ]
    )
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.plotly_chart(
            migrations_chart(job, list(question.failed), found, colours),
            theme=None,
            key="planner-migrations",
            config={**CHART_CONFIG, "displayModeBar": False},
            alt="; ".join(_sentence(m.worker, m.takes, m.source) for m in found.migrations[:8]),
        )
    with right:
        st.dataframe(
            {
                "worker": [m.worker for m in found.migrations],
                "takes the place of": [m.takes for m in found.migrations],
                "weights from": [m.source or "the last checkpoint" for m in found.migrations],
            },
            hide_index=True,
            key="planner-migrations-table",
            alt="Migrations",
        )
        dead, left_over = (
            ", ".join(f"stage {s}: {n}" for s, n in enumerate(c) if n) for c in (found.present, found.counts)
        )
        st.caption(f"Dead by stage: {dead}; afterwards {left_over}.")
        st.button(
            "Apply the migrations to the question",
            key="planner-migrate",
            on_click=_migrate,
            args=(found.failed,),
            help="Then the places that are empty afterwards are dead. No job is touched.",
        )


def _migrate(failed: list[str]) -> None:
    change(now().with_failed(set(failed)))


def _sentence(worker: str, takes: str, source: str | None) -> str:
    return f"{worker} takes the place of {takes}, with the weights of {source or 'the last checkpoint'}"
