"""A plan that an operator has frozen, and what waits until it is not. Pure.

Frozen, the plan in force stays for as long as the workers that run it do. What would replace it by
choice waits: a better plan, a better option, a worker that has come back. What makes it impossible is
handled as ever, and its plan is frozen in turn: a failure, a worker that was asked to leave. A generation
that has to open anyway takes in whoever has come back by then.
"""

from __future__ import annotations

from dataclasses import replace

from openrecycle.agent.protocol import WorkerState
from openrecycle.app.coordination.choices import Mode, PlanFrozen
from openrecycle.app.coordination.choosing import out, take_better
from openrecycle.app.coordination.events import Decision, Note, Step
from openrecycle.app.coordination.fencing import refuse
from openrecycle.app.coordination.generations import reconsider
from openrecycle.app.coordination.ladder import Ladder
from openrecycle.app.coordination.membership import State
from openrecycle.planner.words import names


def plan_frozen(state: State, event: PlanFrozen, now: float, ladder: Ladder) -> Step:
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    if event.frozen:
        return _freeze(state, event.actor)
    return _unfreeze(state, event.actor, now)


def _freeze(state: State, actor: str) -> Step:
    if state.frozen_by:
        return Step(state, reason=f"{state.frozen_by} has frozen the plan already")
    text = (
        f"{actor} froze the plan: it stays while its workers do; better plans and workers that come back wait, "
        "and a failure is handled as ever"
    )
    return Step(replace(state, frozen_by=actor), (Note("warning", "operator", text),), text)


def _unfreeze(state: State, actor: str, now: float) -> Step:
    """What has waited is done now, in this order: workers that are back, then the better option."""
    if not state.frozen_by:
        return Step(state, reason="the plan is not frozen")
    text = f"{actor} unfroze the plan"
    notes: list[Decision] = [Note("warning", "operator", text)]
    state = replace(state, frozen_by="")
    if state.settled and (back := returned(state)):
        return reconsider(state, f"{text}: {names(back)} re-join" + ("s" if len(back) == 1 else ""), notes, now)
    if state.mode is Mode.AUTOMATIC and state.offer and out(state) == state.offer.failed:
        return take_better(state, state.offer, notes)
    return Step(state, tuple(notes), text)


def returned(state: State) -> list[str]:
    """Workers that are back, and in no generation yet."""
    return [
        m.name for m in state.members.values() if m.state is WorkerState.REJOINING and m.generation != state.generation
    ]
