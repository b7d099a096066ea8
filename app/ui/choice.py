"""How a job goes on when workers are lost: who decides, and the ways that an operator may take."""

from __future__ import annotations

from html import escape
from typing import Any

import streamlit as st

from openrecycle.agent.coordination.membership import LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT, Mode
from openrecycle.app.console.service import Console
from openrecycle.app.console.view import JobView
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import components, text, url_state
from openrecycle.app.ui.access import actor
from openrecycle.app.ui.event_feed import say_later
from openrecycle.app.ui.facts import ready_words
from openrecycle.app.workers.states import OUT
from openrecycle.planner.jobs.words import names

WORDS = {Mode.AUTOMATIC: "Automatic", Mode.MANUAL: "Manual"}
MOST_COLUMNS = 4


def said_by_controls(choice: dict[str, Any]) -> tuple[object, ...]:
    """What the controls in the page's head say of the job. Others may change it, and workers take their time.
    choice: see Operators.choice."""
    return tuple(choice[key] for key in ("mode", "choice_timeout", "paused", "stopped", "frozen_by"))


def mode_switch(console: Console, job_id: str, choice: dict[str, Any], *, over: bool) -> None:
    """Says who decides; changing it takes effect only when it is applied. Pauses the job, and lets it go on."""
    mode, paused, stopped = Mode(choice["mode"]), bool(choice["paused"]), bool(choice["stopped"])
    said = "Paused" if stopped else "Pausing" if paused else WORDS[mode]
    with st.popover(said, icon=":material/tune:", key="mode", disabled=over):
        st.markdown("**When workers are lost**")
        wanted = st.radio(
            "Who decides",
            list(Mode),
            index=list(Mode).index(mode),
            format_func=WORDS.__getitem__,
            captions=[
                "The console takes the best option at once.",
                "The job waits for you to choose. The best way is taken when you do not in time.",
            ],
            key=f"mode-choice-{mode}",
            label_visibility="collapsed",
        )
        choice_timeout = st.number_input(
            "Seconds to choose in",
            min_value=LEAST_CHOICE_TIMEOUT,
            max_value=MOST_CHOICE_TIMEOUT,
            value=float(choice["choice_timeout"]),
            step=10.0,
            disabled=wanted is not Mode.MANUAL,
            key=f"choice_timeout-{choice['choice_timeout']}",
        )
        unchanged = wanted is mode and (wanted is Mode.AUTOMATIC or choice_timeout == choice["choice_timeout"])
        if st.button("Apply", type="primary", disabled=unchanged, key="mode-apply"):
            try:
                console.operators.set_mode(job_id, Mode(wanted), choice_timeout, actor(console))
            except ConsoleError as error:
                st.error(str(error))
                return
            st.rerun()
        st.divider()
        st.markdown(f"**The job is {said.lower()}**" if paused else "**The job**")
        st.caption(
            "All workers wait before the same iteration; resumed, they go on as if nothing had happened."
            if stopped
            else "All workers stop before the same iteration, which not all have come to yet."
            if paused
            else "Paused, all workers stop before the same iteration; nothing is redone, and no bit differs later."
        )
        if st.button("Resume" if paused else "Pause", type="primary" if paused else "secondary", key="pause"):
            try:
                (console.operators.resume if paused else console.operators.pause)(job_id, actor(console))
            except ConsoleError as error:
                st.error(str(error))
                return
            st.rerun()


def options(console: Console, view: JobView, choice: dict[str, Any]) -> None:
    """The options side by side: in full while the job waits for one, else folded up while workers are out, with which
    of them is best. While there is nothing to choose, a line in its place, so that a loss moves nothing on the page."""
    with st.container(key="ways", gap="xsmall"):
        if choice["candidates"] and choice["waiting"]:
            left = choice["seconds_left"]
            until = f"{_best(choice)} is taken in {text.seconds(left)} unless you choose" if left else ""
            components.heading("Which option?", until)
            _cards(console, view.job_id, choice, "Apply")
        elif choice["candidates"] or view.advice:
            out = choice["failed"] or [w.name for w in view.workers if w.state in OUT]
            title = f"Options with {names(out, 4)} empty" if out else "Options now that all workers are back"
            with url_state.expander(title, icon=":material/alt_route:", key="ways-folded"):
                if view.advice:
                    components.quiet(view.advice)
                _cards(console, view.job_id, choice, "Switch to it")
        elif words := ready_words(view):
            components.quiet(words)


def _best(choice: dict[str, Any]) -> str:
    return str(choice["candidates"][0]["name"])


def _cards(console: Console, job_id: str, choice: dict[str, Any], verb: str) -> None:
    ways = choice["candidates"]
    with st.container(key="ways-on"):
        for begin in range(0, len(ways), MOST_COLUMNS):
            row = ways[begin : begin + MOST_COLUMNS]
            for column, way in zip(st.columns(len(row)), row, strict=True):
                with column, st.container(border=True, height="stretch"):
                    _card(console, job_id, choice, way, verb)


def _card(console: Console, job_id: str, choice: dict[str, Any], way: dict[str, Any], verb: str) -> None:
    name, best = way["name"], way["name"] == _best(choice)
    # `in force` is the one whose plan the job runs while it trains.
    run = console.job(job_id).plan_run
    in_force = not choice["waiting"] and run is not None and run.fingerprint == way["plan"]
    badge = "in force" if in_force else "the best" if best else ""
    moves = ", ".join(f"{source} → {to}" for source, to in way["moves"])
    head = "h3" if choice["waiting"] else "h2"  # below a heading, or folded up below none
    st.html(
        f'<div class="or-way"><{head}>{escape(name)} <span class="or-aside">{badge}</span></{head}>'
        f"<p><b>{text.percent(way['share'])}</b> of fault-free · period "
        f"{text.percent(way['slowdown_vs_1f1b'], sign=True)} vs 1F1B</p>"
        + (f"<p>Moves {escape(moves)}</p>" if moves else "")
        + (f"<p>Layers per stage {text.counts(way['partition'])}</p>" if way["partition"] else "")
        + f"<p class='or-aside'>{escape(way['text'])}.</p></div>"
    )
    if way["plan"]:
        st.markdown(f"[Its plan](schedule?job={job_id}&plan=job:{job_id}:{way['plan']})")
    st.button(
        verb,
        key=f"choose-{name}",
        type="primary" if best else "secondary",
        disabled=in_force,
        width="stretch",
        on_click=_choose,
        args=(console, job_id, name, tuple(choice["failed"])),
    )


def _choose(console: Console, job_id: str, name: str, failed: tuple[str, ...]) -> None:
    try:
        console.operators.choose(job_id, name, failed, actor(console))
        say_later(f"The job goes on: {name}")
    except ConsoleError as error:
        say_later(str(error))
