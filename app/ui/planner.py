"""Planner: what if these workers were dead? Asked by clicking, answered with a proven bound."""

from __future__ import annotations

from functools import partial

import streamlit as st

from openrecycle.app.console.service import ConsoleService, get_console
from openrecycle.app.plans.introduction import STEPS, step_of
from openrecycle.app.plans.solving import PlanAsked, Solve
from openrecycle.app.plans.whatif import PARAMS, Checked, WhatIf, checked
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import components, text
from openrecycle.app.ui.access import acting, told
from openrecycle.app.ui.planning import controls, state
from openrecycle.app.ui.planning.grid import grid
from openrecycle.app.ui.planning.profile import profile
from openrecycle.app.ui.planning.result import example_steps, migrations, others, result, search
from openrecycle.app.ui.url_state import control
from openrecycle.planner.plans.plan import Plan


def page() -> None:
    colours = components.use_style()
    console = get_console()
    console.plans.solves.warm()
    saved = _saved(console)
    question, misread = state.current(console.plans.profiles.kept)
    found = checked(question)
    solve = console.plans.solves.find(found.asked) if found.asked is not None else None
    # Looked at once, and before the plan: it may be done at any moment, and the page must not be of two minds.
    running = solve is not None and not solve.over
    plan = None if running else _answer(found.asked, saved, solve)
    with st.container(horizontal=True, vertical_alignment="bottom", key="page-head"):
        st.html(
            '<h1 class="or-title">Planner</h1><div class="or-about">Mark workers dead and see what it costs, '
            "before it happens. The link in the address bar says the whole question.</div>"
        )
        controls.sources(console)
    for error in misread:
        st.error(f"{error}. The default is used instead.")
    if words := state.said(state.PAGE):
        st.error(words)
    if state.EXAMPLE in st.query_params:
        _example(console, question)
    left, right = st.columns([3, 2], gap="medium")
    with left, st.container(gap="xsmall"):
        controls.sizes(question, found)
        if found.job is not None:
            grid(question, found, plan, colours)
    with right, st.container(gap="xsmall"):
        components.heading("What may be used")
        controls.techniques(question, found)
        controls.limits(question, found)
        profile(console, question, found)
        _go(console, found, solve, plan, running=running)
    steps = [step.question for step in STEPS] if state.EXAMPLE in st.query_params else [question]
    others(console, [step.asked().id for step in steps] if found.asked else [])
    if solve is not None and running and found.job is not None:
        search(console, solve, found.job.time_unit, colours)
    elif plan is not None:
        result(console, question, plan, solve if plan is not saved else None, colours)
    elif solve is not None and solve.error:
        st.error(solve.error[:1].upper() + solve.error[1:] + ".")
    if question.failed and found.job is not None and question.technique.reroutes and (plan or found.infeasible):
        migrations(console, question, found.job, colours)


def _saved(console: ConsoleService) -> Plan | None:
    """The plan that a link names. Without a question beside it, the question is the plan's."""
    fingerprint = st.query_params.get(state.SAVED)
    if fingerprint is None:
        return None
    try:
        plan = console.plans.library.saved_plan(fingerprint)
    except ConsoleError:
        st.error(f"saved: got {fingerprint!r}, expected the fingerprint of a plan that is kept. Plan it anew instead.")
        return None
    if not any(name in st.query_params for name in PARAMS):
        state.change(WhatIf.of_plan(plan), saved=fingerprint)
    return plan


def _answer(asked: PlanAsked | None, saved: Plan | None, solve: Solve | None) -> Plan | None:
    """What answers the question: the saved plan that the link names, or what has been made."""
    if saved is not None and asked is not None:
        same = (saved.job, saved.failed, saved.technique, saved.memory)
        if same == (asked.job, asked.failed, asked.technique, asked.memory):
            return saved
    return solve.plan if solve is not None else None


def _go(console: ConsoleService, found: Checked, solve: Solve | None, plan: Plan | None, *, running: bool) -> None:
    """Plan; before that, what can be said at once."""
    answered = not running and solve is not None and solve.plan is not None and not solve.stopped
    with st.container(horizontal=True, vertical_alignment="center", key="planner-go"):
        st.button(
            "Planning …" if running else "Plan again" if plan is not None and not answered else "Plan",
            type="primary",
            key="planner-plan",
            icon=":material/play_arrow:",
            disabled=not found.plannable or running or answered,
            help="It is planned already: see below. More time or another solver asks anew." if answered else None,
            on_click=_plan,
            args=(console,),
            width=150,
        )
        if found.bound is not None and found.job is not None and plan is None and not running:
            least = text.planned(found.job.units(found.bound.ticks), found.job.time_unit)
            components.quiet(f"No plan can be shorter than {least}: {found.bound.reason}.")
        elif found.errors or found.infeasible:
            components.quiet("What is marked ✕ stands in the way of a plan.")


def _plan(console: ConsoleService) -> None:
    question = state.now()
    with told(partial(state.say, state.PAGE)), acting(console, "plan"):
        console.plans.solves.start(question.asked())
        if question.failed:
            console.plans.solves.start(question.migrations_asked())


def _example(console: ConsoleService, question: WhatIf) -> None:
    """The paper's example: its steps side by side, one of them shown in full below."""
    solves = [console.plans.solves.find(step.question.asked()) for step in STEPS]
    chosen = step_of(question)
    going = any(s is not None and not s.over for s in solves)
    components.heading("The paper's worked example", "3 × 4 workers, 6 micro-batches each; F = I = W = 1 slot")
    st.fragment(_steps, run_every=0.5 if going else None)(console, chosen.name if chosen else None, going)
    with st.container(horizontal=True, vertical_alignment="center", key="planner-steps"):
        names = [step.name for step in STEPS]
        control(
            lambda value, **rest: st.segmented_control("Shown in full below", names, default=value, wrap=True, **rest),
            "planner-step",
            chosen.name if chosen else None,
            _choose_step,
        )
        if any(s is None for s in solves):
            st.button("Plan all four", key="planner-example-go", on_click=controls.example, args=(console,))


def _steps(console: ConsoleService, chosen: str | None, going: bool) -> None:
    solves = [console.plans.solves.find(step.question.asked()) for step in STEPS]
    if going and all(s is None or s.over for s in solves):
        st.rerun()
    example_steps([(s.name, s.about, made, s.name == chosen) for s, made in zip(STEPS, solves, strict=True)])


def _choose_step(name: str | None) -> None:
    chosen = next((s for s in STEPS if s.name == name), None)
    state.change(chosen.question if chosen else state.now(), example=True)
