"""The plan in force in an operator's hand: frozen or not, planned again, and how it is taken up."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape

import streamlit as st

from openrecycle.app.console.service import Console
from openrecycle.app.console.view import JobView
from openrecycle.app.observing.rollout import RollOut
from openrecycle.app.plans.replanning import Replan
from openrecycle.app.plans.solving_child import MAX_SECONDS
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import text
from openrecycle.app.ui.access import acting, actor
from openrecycle.app.ui.event_feed import say_later
from openrecycle.app.ui.facts import STEPS, roll_out_words
from openrecycle.app.ui.planning.controls import SOLVER_WORDS
from openrecycle.planner.portfolio import SOLVERS

# Seconds for which the outcome of a request stands on the page; the event feed keeps it.
TOLD_FOR = 300.0
# Rows of the roll-out's table: who is last is what it is looked at for.
MOST_ROWS = 24
HEADS = ("has the plan", "in its groups", "trains")


def plan_menu(console: Console, job_id: str, *, over: bool) -> None:
    """Freezes the plan in force, and has the job planned again."""
    frozen_by = str(console.operators.choice(job_id)["frozen_by"])
    with st.popover(
        "Plan frozen" if frozen_by else "Plan",
        icon=":material/lock:" if frozen_by else ":material/route:",
        key="plan-menu",
        disabled=over,
    ):
        st.markdown(f"**Frozen by {text.plain_markdown(frozen_by)}**" if frozen_by else "**Freeze the plan in force**")
        st.caption(
            "It stays for as long as the workers that run it do: a better plan, a better option and a worker that has "
            "come back wait. A failure is handled as ever, and the plan that follows is frozen in turn."
        )
        st.button(
            "Unfreeze" if frozen_by else "Freeze",
            key="freeze",
            type="primary" if frozen_by else "secondary",
            on_click=_try,
            args=(lambda: console.operators.freeze(job_id, not frozen_by, actor(console)),),
        )
        st.divider()
        st.markdown("**Fault-free throughput**")
        known = console.job(job_id).baseline
        if known is None:
            st.caption("What throughput is measured by is not known yet.")
        else:
            st.caption(
                f"{text.rate(known.samples_per_second)} samples/s, {known.words}. It stays until it is measured anew."
            )
            st.button(
                "Measure again",
                key="measure-anew",
                disabled=known.renew is not None,
                help="It is about to be measured." if known.renew is not None else None,
                on_click=_try,
                args=(lambda: console.operators.measure_anew(job_id, actor(console)),),
            )
        st.divider()
        st.markdown("**Plan again**")
        st.caption(
            "For the workers that are out now. The new plan is put in force if it saves more than the iteration that "
            "a change costs."
        )
        solver = st.selectbox("Solver", SOLVERS, format_func=lambda s: SOLVER_WORDS.get(s, s), key="replan-solver")
        seconds = st.number_input("Seconds at most", 1.0, MAX_SECONDS, 20.0, step=10.0, key="replan-seconds")
        st.button(
            "Plan again",
            key="replan",
            disabled=bool(frozen_by),
            help="The plan is frozen." if frozen_by else None,
            on_click=_try,
            args=(lambda: console.plans.replanning.start(job_id, solver, seconds, actor(console)),),
        )


def replan_line(console: Console, view: JobView) -> None:
    """How far the search for a new plan is, or what became of it."""
    replan = console.plans.replanning.status(view.job_id)
    if replan is None:
        return
    if replan.outcome == "planning":
        with st.container(horizontal=True, vertical_alignment="center", key="replanning"):
            st.html(f'<div class="or-quiet" role="status">{escape(_searching(replan, view))}</div>', width="content")
            st.button(
                "Stop",
                key="replan-stop",
                type="tertiary",
                help="The best plan so far counts.",
                on_click=_try,
                args=(lambda: _stop(console, view.job_id),),
            )
    elif time.time() - replan.at < TOLD_FOR:
        st.html(f'<div class="or-quiet" role="status">{escape(_outcome(replan, st.context.timezone))}</div>')


def _stop(console: Console, job_id: str) -> str:
    with acting(console, "stop planning again", job_id):
        return console.plans.replanning.stop(job_id)


def _searching(replan: Replan, view: JobView) -> str:
    words = (
        f"Planning again: {text.seconds(min(replan.elapsed, replan.seconds))} of at most {text.seconds(replan.seconds)}"
    )
    if replan.elapsed > replan.seconds:
        words += "; the search is ending, and its best plan counts"
    unit = view.plan.job.time_unit if view.plan else "slot"
    if replan.best is not None:
        words += f"; best so far {text.planned(replan.best, unit)}"
        words += f", no plan can be below {text.planned(replan.bound, unit)}" if replan.bound else ""
    return words + "."


def _outcome(replan: Replan, zone: str | None) -> str:
    lead = {
        "adopted": "A new plan is in force",
        "kept": "The plan in force stays",
        "failed": "No new plan was made",
    }[replan.outcome]
    return f"Planned again, {text.clock(replan.at, zone)}. {lead}: {replan.reason}."


def roll_out_html(found: RollOut | None) -> str:
    """Who has come how far in taking up the newest generation, the last ones first. "": there is none."""
    if found is None:
        return ""
    total = len(found.workers)
    if found.done:
        last = max((w.resumed or 0.0 for w in found.workers), default=0.0)
        summary = f"all {text.count(total, 'worker')} train by it, the last after {text.milliseconds(last)}"
    else:
        summary = f"of {text.count(total, 'worker')} {roll_out_words([found.now_at(step) for step in STEPS])}"
    ordered = found.slowest_first()
    rows = "".join(
        f"<tr><th scope='row'>{escape(w.worker)}</th>"
        + "".join(f"<td>{'waits' if at is None else '+' + text.milliseconds(at)}</td>" for at in w.steps)
        + "</tr>"
        for w in ordered[:MOST_ROWS]
    )
    more = len(ordered) - MOST_ROWS
    rest = f"<tfoot><tr><td colspan='4'>and {more:,} that were quicker</td></tr></tfoot>" if more > 0 else ""
    heads = "".join(f"<th scope='col'>{head}</th>" for head in ("Worker", *HEADS))
    return (
        f'<details class="or-roll-out"{"" if found.done else " open"}><summary>Generation '
        f"{found.generation}: {summary}</summary>"
        f'<table class="or-table"><caption>Acknowledged so long after the generation was opened, the '
        f"slowest first</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>{rest}</table></details>"
    )


def _try(act: Callable[[], str]) -> None:
    """What it answers, or why it is refused, is said by the page's next run."""
    try:
        words = act()
    except ConsoleError as error:
        words = str(error)
    say_later(words[:1].upper() + words[1:])
