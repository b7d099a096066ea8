"""Decides who is in a job's generation, and when the next one opens. No I/O, no clock, no threads.

    step(state, event, now, ladder) -> Step(state, decisions, reason)

Here: who comes, what they report of a generation, and how the job ends. app.coordination.liveness: who is lost.
app.coordination.generations: what follows from either. app.coordination.choosing: what operators and the advisor say to
it.
app.coordination.freezing: a plan that is to stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openrecycle.agent.protocol import WorkerState
from openrecycle.app.coordination import choosing, fencing, freezing, generations, liveness
from openrecycle.app.coordination.choices import Chosen, DrainAsked, ModeSet, Offered, PlanFrozen, UsePlan
from openrecycle.app.coordination.events import (
    Acknowledged,
    ConsoleRestarted,
    Decision,
    Event,
    Exited,
    Finished,
    Heard,
    IterationsCommitted,
    Meanwhile,
    Note,
    PlanReady,
    PlanRefused,
    Raised,
    Registered,
    Stalled,
    Step,
    Tick,
    TransferBroken,
)
from openrecycle.app.coordination.fencing import fence, fenced_text, holder, no_such_worker, refuse
from openrecycle.app.coordination.generations import reconsider
from openrecycle.app.coordination.ladder import Ladder
from openrecycle.app.coordination.membership import ACK_ORDER, PRESENT, State
from openrecycle.planner.words import names

RUNNING, FAILED = WorkerState.RUNNING, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED


def step(state: State, event: Event, now: float, ladder: Ladder) -> Step:
    """Pure: the same arguments give the same Step. A refused event leaves `state` as it is."""
    return _HANDLERS[type(event)](state, event, now, ladder)


def _registered(state: State, event: Registered, now: float, ladder: Ladder) -> Step:
    member = state.members.get(event.worker)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over or member.state is FINISHED:
        return refuse(state, "job_over", f"{event.worker}: the job is {state.over or 'past its last iteration'}")
    if event.incarnation in member.retired or (event.incarnation == member.incarnation and member.state is FAILED):
        return refuse(state, "fenced", fenced_text(member, event.incarnation))
    if event.incarnation == member.incarnation:
        return Step(state, reason=f"{event.worker} had registered already")
    if event.worker in state.links.barred:
        return refuse(state, "fenced", f"{event.worker} may not re-join: its links broke again after it had")
    if state.current and (elsewhere := fencing.place_of(state.members, event.incarnation)) is not None:
        # The network brought it late, or twice: since then the process was given another place.
        if fencing.counts(elsewhere, event.incarnation):
            return Step(state, reason=f"{event.worker} had registered already, and is {elsewhere.name} now")
        return refuse(state, "fenced", fenced_text(elsewhere, event.incarnation))

    arrived = replace(
        member,
        state=STARTING if state.current is None else REJOINING,
        incarnation=event.incarnation,
        retired=member.incarnations,
        generation=0,
        acknowledged="",
        last_heard=now,
        draining=False,
        detail="",
        leaving=False,
    )
    notes: list[Decision] = []
    if state.current and member.state in PRESENT:
        text = f"{member.name} was started anew while its earlier process was still in the job"
        notes.append(Note("error", "failure", text, member.name))
        reason = f"{member.name} was started anew"
    elif state.current:
        notes.append(Note("info", "worker", f"{member.name} is back and asks to re-join", member.name))
        reason = f"{member.name} re-joins"
    else:
        notes.append(Note("info", "worker", f"{member.name} registered", member.name))
        reason = "all workers have registered"
    return reconsider(state.with_member(arrived), reason, notes, now)


def _acknowledged(state: State, event: Acknowledged, now: float, ladder: Ladder) -> Step:
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if fenced := fence(state, member, event.incarnation):
        return fenced
    if event.generation > state.generation:
        return refuse(
            state, "invalid", f"generation: got {event.generation}, expected at most {state.generation}, the newest"
        )
    if event.generation < state.generation or state.over:
        return Step(state, reason=f"generation {event.generation} is over")
    if member.generation != state.generation:
        return refuse(
            state, "not_member", f"{member.name} is not in generation {event.generation}; it waits for a later one"
        )
    if ACK_ORDER.index(event.state) <= ACK_ORDER.index(member.acknowledged):
        return Step(state, reason="known already")
    notes: list[Decision] = []
    now_in = replace(member, acknowledged=event.state)
    if event.state == "resumed" and member.state is REJOINING:
        now_in = replace(now_in, state=RUNNING)
        moved = {to: source for source, to in state.current.moves} if state.current else {}
        source = moved.get(member.name)
        text = f"{source}'s process trains as {member.name}" if source else f"{member.name} has re-joined the job"
        notes.append(Note("info", "recovery", text, member.name))
    state = state.with_member(now_in)
    if event.state == "resumed" and state.settled:
        living = len(state.current.living) if state.current else 0
        text = f"generation {state.generation}: all {living:,} workers have committed an iteration"
        notes.append(Note("info", "recovery" if state.generation > 1 else "job", text))
        if not state.frozen_by and (back := freezing.returned(state)):
            return reconsider(state, f"{names(back)} re-join" + ("s" if len(back) == 1 else ""), notes, now)
    return Step(state, tuple(notes), f"{member.name} {event.state} generation {event.generation}")


def _iterations_committed(state: State, event: IterationsCommitted, now: float, ladder: Ladder) -> Step:
    if event.count <= state.committed:
        return Step(state, reason="known already")
    return Step(replace(state, committed=event.count), reason=f"{event.count} iterations are committed")


def _meanwhile(state: State, event: Meanwhile, now: float, ladder: Ladder) -> Step:
    if state.current is None or event.generation != state.generation or state.over:
        return Step(state, reason=f"generation {event.generation} is not in force")
    if unknown := [name for name in event.interim.failed if name not in state.members]:
        return refuse(state, "invalid", f"failed: got {unknown[0]!r}, expected workers of the job's grid")
    current = replace(state.current, interim=event.interim)
    text = f"a plan without {names(event.interim.failed)} is run until all have their state"
    return Step(replace(state, current=current), reason=text)


def _finished(state: State, event: Finished, now: float, ladder: Ladder) -> Step:
    if state.over:
        return Step(state, reason=f"the job is {state.over} already")
    present = PRESENT | {STARTING}
    members = {n: replace(m, state=FINISHED) if m.state in present else m for n, m in state.members.items()}
    text = f"job {event.state}" + (f": {event.reason}" if event.reason else "")
    over = replace(
        state, members=members, pending=None, broken=None, halted="", over=event.state, over_reason=event.reason
    )
    return Step(over, (Note("info", "job", text),), text)


def _console_restarted(state: State, event: ConsoleRestarted, now: float, ladder: Ladder) -> Step:
    if state.over:
        return Step(state)
    members = {n: m if m.last_heard is None else replace(m, last_heard=now) for n, m in state.members.items()}
    # Moves are done already, and the launcher has not been told of them; a broken connection is reported once.
    pending = state.pending if state.pending and state.pending.moves else None
    broken = replace(state.broken, since=now) if state.broken else None
    state = replace(state, members=members, pending=pending, broken=broken)
    return reconsider(state, event.reason, [Note("info", "console", event.reason)], now)


_HANDLERS: dict[type, Callable[[State, Any, float, Ladder], Step]] = {
    Registered: _registered,
    Heard: liveness.heard,
    Exited: liveness.exited,
    TransferBroken: liveness.transfer_broken,
    Raised: liveness.raised,
    Tick: liveness.tick,
    Stalled: liveness.stalled,
    PlanReady: generations.plan_ready,
    PlanRefused: generations.plan_refused,
    Acknowledged: _acknowledged,
    IterationsCommitted: _iterations_committed,
    Meanwhile: _meanwhile,
    Finished: _finished,
    ConsoleRestarted: _console_restarted,
    Offered: choosing.offered,
    Chosen: choosing.chosen,
    ModeSet: choosing.mode_set,
    PlanFrozen: freezing.plan_frozen,
    DrainAsked: choosing.drain_asked,
    UsePlan: choosing.use_plan,
}
