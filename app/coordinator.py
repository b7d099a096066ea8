"""Decides who is in a job's epoch, and when the next one opens. No I/O, no clock, no threads.

    step(state, event, now, ladder) -> Step(state, decisions, reason)

Here: who comes, what they report of an epoch, and how the job ends. app.coordination.liveness: who is lost.
app.coordination.epochs: what follows from either. app.coordination.choosing: what operators and the advisor say to it.
app.coordination.freezing: a plan that is to stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agent.protocol import WorkerState
from app.coordination import choosing, epochs, fencing, freezing, liveness
from app.coordination.choices import Chosen, DrainAsked, ModeSet, Offered, PlanFrozen, UsePlan
from app.coordination.epochs import reconsider
from app.coordination.events import (
    Acknowledged,
    ConsoleRestarted,
    Decision,
    Event,
    Exited,
    Finished,
    Heard,
    IterationsCommitted,
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
from app.coordination.fencing import fence, fenced_text, holder, no_such_worker, refuse
from app.coordination.ladder import Ladder
from app.coordination.membership import ACK_ORDER, PRESENT, State, names

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
        epoch=0,
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
    if event.epoch > state.epoch:
        return refuse(state, "invalid", f"epoch: got {event.epoch}, expected at most {state.epoch}, the newest")
    if event.epoch < state.epoch or state.over:
        return Step(state, reason=f"epoch {event.epoch} is over")
    if member.epoch != state.epoch:
        return refuse(state, "not_member", f"{member.name} is not in epoch {event.epoch}; it waits for a later one")
    if ACK_ORDER.index(event.state) <= ACK_ORDER.index(member.acknowledged):
        return Step(state, reason="known already")
    notes: list[Decision] = []
    now_in = replace(member, acknowledged=event.state)
    if event.state == "resumed" and member.state is REJOINING:
        now_in = replace(now_in, state=RUNNING)
        notes.append(Note("info", "recovery", f"{member.name} has re-joined the job", member.name))
    state = state.with_member(now_in)
    if event.state == "resumed" and state.settled:
        living = len(state.current.living) if state.current else 0
        text = f"epoch {state.epoch}: all {living:,} workers have committed an iteration"
        notes.append(Note("info", "recovery" if state.epoch > 1 else "job", text))
        if not state.frozen_by and (back := freezing.returned(state)):
            return reconsider(state, f"{names(back)} re-join" + ("s" if len(back) == 1 else ""), notes, now)
    return Step(state, tuple(notes), f"{member.name} {event.state} epoch {event.epoch}")


def _iterations_committed(state: State, event: IterationsCommitted, now: float, ladder: Ladder) -> Step:
    if event.count <= state.committed:
        return Step(state, reason="known already")
    return Step(replace(state, committed=event.count), reason=f"{event.count} iterations are committed")


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
    PlanReady: epochs.plan_ready,
    PlanRefused: epochs.plan_refused,
    Acknowledged: _acknowledged,
    IterationsCommitted: _iterations_committed,
    Finished: _finished,
    ConsoleRestarted: _console_restarted,
    Offered: choosing.offered,
    Chosen: choosing.chosen,
    ModeSet: choosing.mode_set,
    PlanFrozen: freezing.plan_frozen,
    DrainAsked: choosing.drain_asked,
    UsePlan: choosing.use_plan,
}
