"""What operators and the advisor say: which way the job goes on, who decides that, who is to leave, and whether the
plan is to stay. Pure.

In automatic mode the job re-routes at once, and takes the advisor's better way, if there is one, as
soon as all train again. In manual mode it waits for an operator first (agent.coordination.generations). Each public
function but `overdue` takes one kind of event: (state, event, now, failure_timeouts) -> Step.

Frozen, the plan in force stays for as long as the workers that run it do. What would replace it by
choice waits: a better plan, a better option, a worker that has come back. What makes it impossible is
handled as ever, and its plan is frozen in turn: a failure, a worker that was asked to leave. A generation
that has to open anyway takes in whoever has come back by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from openrecycle.agent.coordination.events import (
    Chosen,
    Decision,
    DrainAsked,
    ModeSet,
    Note,
    Offered,
    PlanFrozen,
    PlanReady,
    Transition,
    UsePlan,
    refuse,
)
from openrecycle.agent.coordination.generations import ask, holders, move, pend, plan_ready, reconsider, why_not
from openrecycle.agent.coordination.membership import (
    PRESENT,
    Candidate,
    FailureTimeouts,
    Member,
    Mode,
    Offer,
    State,
    no_such_worker,
    returned,
)
from openrecycle.agent.messages.protocol import WorkerState
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import REROUTE, names

RUNNING, FAILED = WorkerState.RUNNING, WorkerState.FAILED
STANDS_BY = "stands by for "
"""Begins the detail of a worker that was let go with the rest of its pipeline; the lost ones follow."""

# What it costs that layers move, in iterations: those who give or take any, and the groups that form anew.
MOVE_ITERATIONS = 1.0


def worth_moving(now: float, then: float, iteration_seconds: float) -> tuple[bool, str]:
    """Does an hour of the shorter period save more than it costs that layers move? now, then: periods; and a reason."""
    saved, cost = 3600 * (1 - then / now), MOVE_ITERATIONS * iteration_seconds
    return saved > cost, f"layers move: the period falls by {1 - then / now:.1%}"


def offered(state: State, event: Offered, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    pending, offer = state.pending, event.offer
    if state.over:
        return Transition(state, reason=f"the job is {state.over}")
    if pending is not None and pending.until is not None and pending.failed == event.failed:
        if offer is None:
            text = f"the options could not be compared ({event.reason}): the job re-routes"
            return ask(state, pending, [Note("warning", "plan", text)])
        text = f"options without {names(event.failed)}: " + "; ".join(f"{c.name}: {c.text}" for c in offer.candidates)
        return Transition(replace(state, offer=offer), (Note("info", "plan", text),), text)
    if offer is None or out(state) != event.failed:
        return Transition(state, reason="other workers are out by now")
    state = replace(state, offer=offer)
    if state.mode is Mode.AUTOMATIC:
        return take_better(state, offer, [])
    return Transition(state, reason="the options are known")


def chosen(state: State, event: Chosen, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    pending = state.pending
    waits = pending is not None and pending.until is not None
    failed = pending.failed if pending is not None and waits else out(state)
    back = state.offer is not None and bool(state.offer.candidates) and state.offer.failed == failed
    if failed is None or not (failed or back):
        return refuse(state, "no_choice", "there is nothing to choose: no worker is out, or the job recovers already")
    if event.failed is not None and sorted(event.failed) != sorted(failed):
        return refuse(
            state, "no_choice", f"failed: got {names(event.failed)}, expected {names(failed)}: look at the choices anew"
        )
    offer = state.offer if state.offer and state.offer.failed == failed else None
    known = [c.name for c in offer.candidates] if offer else []
    candidate = offer.find(event.name) if offer else None
    if candidate is None and event.name != REROUTE:
        return refuse(
            state, "invalid", f"name: got {event.name!r}, expected one of {', '.join(dict.fromkeys((*known, REROUTE)))}"
        )
    note = Note("warning", "operator", f"{event.actor} chose to {event.name}" + _numbers(candidate))
    if waits:
        return _resolve(state, candidate, f"{event.actor} chose to {event.name}", [note])
    if candidate is None or candidate.name == REROUTE:
        return Transition(state, reason="the job re-routes already")
    if state.frozen_by:
        return _is_frozen(state)
    return _take(state, candidate, f"{event.actor} chose to {event.name}", [note])


def mode_set(state: State, event: ModeSet, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    text = f"{event.actor} set the mode to {event.mode}"
    if event.mode is Mode.MANUAL:
        text += f": when workers are lost, the job waits up to {event.choice_timeout:g} s for a choice"
    notes: list[Decision] = [Note("warning", "operator", text)]
    state = replace(state, mode=event.mode, choice_timeout=event.choice_timeout)
    if event.mode is Mode.AUTOMATIC:
        if state.choosing:
            return overdue(state, notes, "automatic mode")
        if state.offer and out(state) == state.offer.failed:
            return take_better(state, state.offer, notes)
    return Transition(state, tuple(notes), text)


def drain_asked(state: State, event: DrainAsked, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    member = state.members.get(event.worker)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    if member.state is not RUNNING:
        how = "drained" if member.state is FAILED and member.leaving else member.state
        return refuse(state, "not_running", f"worker: {member.name} is {how}, expected one that runs")
    if not state.settled:
        return refuse(state, "no_choice", f"{member.name} can't leave while the job recovers; try again when it trains")
    if not holders(state, member.stage, {member.name}):
        text = f"worker: {member.name} is the last one that holds stage {member.stage}, expected one with a peer"
        return refuse(state, "invalid", text)
    text = f"{event.actor} asked {member.name} to leave"
    members = dict(state.members)
    _let_go(members, member.name, f"asked to leave by {event.actor}")
    notes: list[Decision] = [Note("warning", "operator", text, member.name)]
    return reconsider(replace(state, members=members), text, notes, now)


def use_plan(state: State, event: UsePlan, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Opens a generation with the same members and another plan."""
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    failed = out(state)
    if failed is None or state.current is None:
        return refuse(
            state, "no_choice", "a plan can't be put in force while the job recovers; try again when it trains"
        )
    if sorted(event.failed) != sorted(failed):
        expected = names(failed) or "none"
        return refuse(
            state,
            "invalid",
            f"failed: got {_plan_words(event.failed)}, expected {expected}",
        )
    if event.fingerprint == state.current.plan_fingerprint:
        return Transition(state, reason="that plan is in force already")
    if state.frozen_by:
        return _is_frozen(state)
    text = event.reason or f"{event.actor} put plan {event.fingerprint[:8]} in force"
    pending = pend(state, text, partition=event.partition)
    if pending.failed != failed:
        return refuse(state, "no_choice", "a worker is about to re-join; try again when it trains")
    step = plan_ready(
        replace(state, pending=pending),
        PlanReady(pending.failed, event.fingerprint, "an operator's choice" if event.actor else "made now"),
        now,
        failure_timeouts,
    )
    notes = (Note("warning", "operator", text),) if event.actor else ()
    return Transition(step.state, (*notes, *step.decisions), text)


def _plan_words(failed: tuple[str, ...]) -> str:
    return f"a plan without {names(failed)}" if failed else "a plan for all workers"


def overdue(state: State, notes: list[Decision], why: str = "") -> Transition:
    """The job waits for a choice no longer: the best way that is known is taken."""
    pending = state.pending
    assert pending is not None
    best = state.offer.candidates[0] if state.offer and state.offer.failed == pending.failed else None
    name = best.name if best else REROUTE
    why = why or f"nobody chose within {state.choice_timeout:g} s"
    notes.append(Note("warning", "operator", f"{why}: the job goes on with the first option, {name}" + _numbers(best)))
    return _resolve(state, best, f"{why}: {name}", notes)


def out(state: State) -> tuple[str, ...] | None:
    """Who is out, once the others train with the layers that they are to have; None while that is not settled, or when
    the job can't go on."""
    if state.over or state.halted or not state.settled or state.current is None or state.moving:
        return None
    return state.current.failed


# -- a plan that is to stay -------------------------------------------------------------------


def plan_frozen(state: State, event: PlanFrozen, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    if event.frozen:
        return _freeze(state, event.actor)
    return _unfreeze(state, event.actor, now)


def _freeze(state: State, actor: str) -> Transition:
    if state.frozen_by:
        return Transition(state, reason=f"{state.frozen_by} has frozen the plan already")
    text = (
        f"{actor} froze the plan: it stays while its workers do; better plans and workers that come back wait, "
        "and a failure is handled as ever"
    )
    return Transition(replace(state, frozen_by=actor), (Note("warning", "operator", text),), text)


def _unfreeze(state: State, actor: str, now: float) -> Transition:
    """What has waited is done now, in this order: workers that are back, then the better option."""
    if not state.frozen_by:
        return Transition(state, reason="the plan is not frozen")
    text = f"{actor} unfroze the plan"
    notes: list[Decision] = [Note("warning", "operator", text)]
    state = replace(state, frozen_by="")
    if state.settled and (back := returned(state)):
        return reconsider(state, f"{text}: {names(back)} re-join" + ("s" if len(back) == 1 else ""), notes, now)
    if state.mode is Mode.AUTOMATIC and state.offer and out(state) == state.offer.failed:
        return take_better(state, state.offer, notes)
    return Transition(state, tuple(notes), text)


# -- taking a way -------------------------------------------------------------------------------


def _resolve(state: State, candidate: Candidate | None, why: str, notes: list[Decision]) -> Transition:
    """Ends the wait for a choice. None: re-route."""
    pending = state.pending
    assert pending is not None
    if candidate is None or candidate.name == REROUTE:
        return ask(state, replace(pending, reason=f"{pending.reason}; {why}"), notes)
    return _take(state, candidate, f"{pending.reason}; {why}", notes)


def take_better(state: State, offer: Offer, notes: list[Decision]) -> Transition:
    """Takes the option that is clearly better than re-routing, if there is one and the plan is not frozen."""
    candidate = offer.find(offer.better) if offer.better else None
    if candidate is None:
        return Transition(state, tuple(notes), "re-routing is the best option")
    if candidate.partition and candidate.partition == state.unmovable:
        text = f"{candidate.name} would be better, and layers could not move when it was tried"
        return Transition(state, (*notes, Note("info", "plan", text)), text)
    if state.frozen_by:
        text = f"{candidate.name} would be better, and waits: {state.frozen_by} has frozen the plan"
        return Transition(state, (*notes, Note("info", "plan", text)), text)
    why = candidate.text
    if candidate.partition:
        why = f"layers per stage become {', '.join(map(str, candidate.partition))}"
    return _take(state, candidate, f"{candidate.name}: {why}", notes)


def _take(state: State, candidate: Candidate, why: str, notes: list[Decision]) -> Transition:
    """Asks for the generation in which the job goes on by `candidate`; where workers have changed since it was
    worked out, by re-routing."""
    if problem := _is_moving(state, candidate) or why_not(state, candidate.moves, candidate.failed):
        notes.append(Note("warning", "plan", f"{candidate.name} is not possible any more: {problem}"))
        if state.pending is not None:
            return ask(state, state.pending, notes)
        return Transition(state, tuple(notes), problem)
    members = dict(state.members)
    for source, to in candidate.moves:
        move(members, source, to)
        text = f"{source} gives up its stage and takes the place of {to}, with the state of a peer"
        notes.append(Note("warning", "recovery", text, to))
    for name in candidate.failed:
        if members[name].state in PRESENT:
            pipeline = Worker.parse(name).pipeline
            lost = [m for m in candidate.failed if Worker.parse(m).pipeline == pipeline and not _is_present(state, m)]
            _let_go(members, name, _stands_by(lost, candidate.name))
    state = replace(state, members=members)
    return ask(state, pend(state, why, candidate.moves, partition=candidate.partition), notes)


def _is_moving(state: State, candidate: Candidate) -> str:
    """Why its layers can't be had now; "": they can. Some workers may have gone over to those of the generation in
    force, and others not: which of them the next ones are taken from nobody could say."""
    current = state.current
    if candidate.partition and state.moving and current is not None and candidate.partition != current.partition:
        return f"layers per stage are about to become {', '.join(map(str, current.partition))}"
    return ""


def coming_back(state: State) -> tuple[str, ...]:
    """Who is to be started again: they stood by for workers of their pipeline, one of which is back."""
    if state.over:
        return ()
    return tuple(
        member.name
        for member in state.members.values()
        if member.state is FAILED
        and not member.leaving
        and any(_is_present(state, name) for name in _stood_by_for(member))
    )


def _is_present(state: State, name: str) -> bool:
    return name in state.members and state.members[name].state in PRESENT


def _stands_by(lost: Iterable[str], way: str) -> str:
    """The detail of a worker that is let go, by a candidate of this name, with the lost ones of its pipeline."""
    return f"{STANDS_BY}{', '.join(lost)} ({way})"


def _stood_by_for(member: Member) -> list[str]:
    if not member.detail.startswith(STANDS_BY):
        return []
    return member.detail.removeprefix(STANDS_BY).rpartition(" (")[0].split(", ")


def _is_frozen(state: State) -> Transition:
    return refuse(state, "frozen", f"{state.frozen_by} has frozen the plan; unfreeze it first")


def _let_go(members: dict[str, Member], name: str, detail: str) -> None:
    members[name] = replace(members[name], state=FAILED, acknowledged="", detail=detail, leaving=True)


def _numbers(candidate: Candidate | None) -> str:
    return f": {candidate.text}" if candidate and candidate.text else ""
