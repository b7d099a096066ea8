"""Decides who is in a job's epoch, and when the next one opens. No I/O, no clock, no threads.

    step(state, event, now, ladder) -> Step(state, decisions, reason)

An epoch opens in two moves: a change of membership makes a Pending and asks for a plan (NeedPlan);
PlanReady for the same failed workers opens it (OpenEpoch). A failure in between replaces the
Pending, so that epochs only rise and each has one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent.protocol import WorkerState
from app import restaffing
from app.membership import (
    ACK_ORDER,
    PRESENT,
    Acknowledged,
    Broken,
    ConsoleRestarted,
    Decision,
    Epoch,
    Event,
    Exited,
    Finished,
    Heard,
    IterationsCommitted,
    Ladder,
    Member,
    NeedPlan,
    Note,
    OpenEpoch,
    Pending,
    PlanReady,
    PlanRefused,
    Refuse,
    Registered,
    Stalled,
    State,
    Step,
    Tick,
    TransferBroken,
    names,
    peer_of,
)

RUNNING, SUSPECT, FAILED = WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED


def step(state: State, event: Event, now: float, ladder: Ladder) -> Step:
    """Pure: the same arguments give the same Step. A refused event leaves `state` as it is."""
    return _HANDLERS[type(event)](state, event, now, ladder)


# -- registration -------------------------------------------------------------------------------


def _registered(state: State, event: Registered, now: float, ladder: Ladder) -> Step:
    member = state.members.get(event.worker)
    if member is None:
        return _refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over or member.state is FINISHED:
        return _refuse(state, "job_over", f"{event.worker}: the job is {state.over or 'past its last iteration'}")
    if event.incarnation in member.retired or (event.incarnation == member.incarnation and member.state is FAILED):
        return _refuse(state, "fenced", fenced_text(member, event.incarnation))
    if event.incarnation == member.incarnation:
        return Step(state, reason=f"{event.worker} had registered already")

    arrived = replace(
        member,
        state=STARTING if state.current is None else REJOINING,
        incarnation=event.incarnation,
        retired=_retire(member),
        epoch=0,
        acknowledged="",
        last_heard=now,
        draining=False,
        detail="",
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
    return _reconsider(_with(state, arrived), reason, notes)


# -- liveness -----------------------------------------------------------------------------------


def _heard(state: State, event: Heard, now: float, ladder: Ladder) -> Step:
    members, notes = dict(state.members), list[Decision]()
    for said, beat in event.beats.items():
        member = holder(members, said, beat.incarnation)
        if member is None or member.incarnation != beat.incarnation or member.state is FAILED:
            continue  # fenced: it changes nothing
        name = member.name
        heard = beat.heard if member.last_heard is None else max(beat.heard, member.last_heard)
        if member.state is SUSPECT and now - heard <= ladder.suspect:
            notes.append(Note("info", "worker", f"{name} is heard again", name))
            member = replace(member, state=RUNNING)
        members[name] = replace(member, last_heard=heard, draining=beat.draining)
    return Step(replace(state, members=members), tuple(notes), "heartbeats")


def _tick(state: State, event: Tick, now: float, ladder: Ladder) -> Step:
    if state.over:
        return Step(state)
    members, notes, dead = dict(state.members), list[Decision](), dict[str, str]()
    for name, member in state.members.items():
        if member.last_heard is None or member.state in (FAILED, FINISHED):
            continue
        age = now - member.last_heard
        if age > ladder.dead and _is_done(state, member):
            members[name] = replace(member, state=FINISHED)
        elif age > ladder.dead:
            dead[name] = f"not heard for {age:.1f} s (dead at {ladder.dead:g} s)"
        elif age > ladder.suspect and member.state is RUNNING and not _is_done(state, member):
            members[name] = replace(member, state=SUSPECT)
            text = f"{name} has not been heard for {age:.1f} s (dead at {ladder.dead:g} s)"
            notes.append(Note("warning", "worker", text, name))
    if any(members[name] is not state.members[name] for name in members):
        state = replace(state, members=members)
    if dead:
        return _lose(state, dead, notes)
    broken = state.broken
    if broken and now - broken.since >= ladder.transfer_grace:
        peer = peer_of(broken.reporter, broken.worker)
        reason = f"{broken.reporter} lost its connection to {peer}, and nobody died: all connect anew"
        notes.append(Note("warning", "epoch", reason, broken.reporter))
        return _reconsider(replace(state, broken=None), reason, notes, anew=True)
    return Step(state, tuple(notes), "time went by")


def _stalled(state: State, event: Stalled, now: float, ladder: Ladder) -> Step:
    members = {
        name: m if m.last_heard is None else replace(m, last_heard=min(now, m.last_heard + event.seconds))
        for name, m in state.members.items()
    }
    text = f"the console stood still for {event.seconds:.1f} s; that time is not held against the workers"
    return Step(replace(state, members=members), (Note("warning", "console", text),), text)


def _exited(state: State, event: Exited, now: float, ladder: Ladder) -> Step:
    member = holder(state.members, event.worker, event.incarnation)
    if member is None:
        return _refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over or event.incarnation in member.retired:
        return Step(state, reason=f"the end of that process of {event.worker} is known")
    if member.incarnation not in (None, event.incarnation):
        # Its process died before it could register: nothing but that incarnation is lost.
        retired = replace(member, retired=(*member.retired, event.incarnation))
        return Step(_with(state, retired), reason=f"a process of {event.worker} ended before it registered")
    if member.state in (FAILED, FINISHED):
        return Step(state, reason=f"{event.worker} was out already")
    if _is_done(state, member):
        return Step(
            _with(state, replace(member, state=FINISHED)), reason=f"{member.name} left after its last iteration"
        )
    if member.incarnation is None:
        state = _with(state, replace(member, incarnation=event.incarnation))
    detail = f"its process {event.detail or 'ended'}"
    return _lose(state, {member.name: detail}, [])


def _transfer_broken(state: State, event: TransferBroken, now: float, ladder: Ladder) -> Step:
    reporter = holder(state.members, event.reporter, event.incarnation)
    worker = state.members.get(event.worker)
    if reporter is None or worker is None:
        return _refuse(state, "unknown_worker", no_such_worker(state, event.worker if reporter else event.reporter))
    if fenced := _fence(state, reporter, event.incarnation):
        return fenced
    old = event.epoch != state.epoch if event.epoch else reporter.acknowledged == ""
    if state.over or state.current is None or state.pending or old:
        return Step(state, reason="that connection belongs to an epoch that is over or about to end")
    if state.broken:
        return Step(state, reason=f"waiting already since {state.broken.reporter} reported a broken connection")
    detail = f" ({event.detail})" if event.detail else ""
    text = f"{event.reporter} can't exchange data with {peer_of(event.reporter, event.worker)}{detail}"
    broken = Broken(now, event.reporter, event.worker, event.detail)
    return Step(replace(state, broken=broken), (Note("warning", "failure", text, event.reporter),), text)


# -- plans, acknowledgements, the job's end -----------------------------------------------------


def _plan_ready(state: State, event: PlanReady, now: float, ladder: Ladder) -> Step:
    pending = state.pending
    if pending is None or pending.failed != event.failed or state.over:
        return Step(state, reason="nobody waits for that plan")
    epoch = Epoch(
        state.epoch + 1,
        pending.living,
        pending.failed,
        pending.joining,
        event.fingerprint,
        pending.reason,
        pending.moves,
        pending.restore,
    )
    members = dict(state.members)
    for name in epoch.living:
        member = members[name]
        became = RUNNING if member.state is STARTING else member.state
        members[name] = replace(member, state=became, epoch=epoch.number, acknowledged="", draining=False)
    without = f" without {names(epoch.failed)}" if epoch.failed else ""
    text = f"epoch {epoch.number}{without}: {pending.reason}; plan {event.fingerprint[:8]}: {event.origin}"
    return Step(
        replace(state, members=members, current=epoch, pending=None, broken=None),
        (OpenEpoch(epoch), Note("info", "epoch", text)),
        pending.reason,
    )


def _plan_refused(state: State, event: PlanRefused, now: float, ladder: Ladder) -> Step:
    if state.pending is None or state.pending.failed != event.failed or state.over:
        return Step(state, reason="nobody waits for that plan")
    text = f"halted: there is no plan for this job{_without(event.failed)}: {event.detail}"
    return Step(replace(state, pending=None, halted=text), (Note("error", "job", text),), text)


def _acknowledged(state: State, event: Acknowledged, now: float, ladder: Ladder) -> Step:
    member = holder(state.members, event.worker, event.incarnation)
    if member is None:
        return _refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if fenced := _fence(state, member, event.incarnation):
        return fenced
    if event.epoch > state.epoch:
        return _refuse(state, "invalid", f"epoch: got {event.epoch}, expected at most {state.epoch}, the newest")
    if event.epoch < state.epoch or state.over:
        return Step(state, reason=f"epoch {event.epoch} is over")
    if member.epoch != state.epoch:
        return _refuse(state, "not_member", f"{member.name} is not in epoch {event.epoch}; it waits for a later one")
    if ACK_ORDER.index(event.state) <= ACK_ORDER.index(member.acknowledged):
        return Step(state, reason="known already")
    notes: list[Decision] = []
    now_in = replace(member, acknowledged=event.state)
    if event.state == "resumed" and member.state is REJOINING:
        now_in = replace(now_in, state=RUNNING)
        notes.append(Note("info", "recovery", f"{member.name} has re-joined the job", member.name))
    state = _with(state, now_in)
    if event.state == "resumed" and state.settled:
        living = len(state.current.living) if state.current else 0
        text = f"epoch {state.epoch}: all {living} workers have committed an iteration"
        notes.append(Note("info", "recovery" if state.epoch > 1 else "job", text))
        if back := [m.name for m in state.members.values() if m.state is REJOINING]:
            return _reconsider(state, f"{names(back)} re-join" + ("s" if len(back) == 1 else ""), notes)
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
    state = replace(state, members=members, pending=None, broken=None)
    return _reconsider(state, event.reason, [Note("info", "console", event.reason)])


_HANDLERS: dict[type, Callable[[State, Any, float, Ladder], Step]] = {
    Registered: _registered,
    Heard: _heard,
    Exited: _exited,
    TransferBroken: _transfer_broken,
    Tick: _tick,
    Stalled: _stalled,
    PlanReady: _plan_ready,
    PlanRefused: _plan_refused,
    Acknowledged: _acknowledged,
    IterationsCommitted: _iterations_committed,
    Finished: _finished,
    ConsoleRestarted: _console_restarted,
}


# -- what they share ----------------------------------------------------------------------------


def _lose(state: State, causes: dict[str, str], notes: list[Decision]) -> Step:
    """Takes workers out. causes: worker -> why, as in `its process ended`."""
    members = dict(state.members)
    for name, cause in causes.items():
        members[name] = replace(members[name], state=FAILED, acknowledged="", detail=cause)
        notes.append(Note("error", "failure", f"{name} failed: {cause}", name))
    reason = "; ".join(f"{name}: {cause}" for name, cause in list(causes.items())[:3])
    if len(causes) > 3:
        reason += f"; and {len(causes) - 3} more"
    return _reconsider(replace(state, members=members), reason, notes)


def _reconsider(state: State, reason: str, notes: list[Decision], *, anew: bool = False) -> Step:
    """Asks for a new epoch if the membership calls for one. anew: even with the same members."""
    present = [m for m in state.members.values() if m.state in PRESENT]
    moves: tuple[tuple[str, str], ...] = ()
    restore = state.restoring or bool(state.pending and state.pending.restore)
    current = state.current
    if current is None:
        ready = all(m.state is STARTING and m.incarnation for m in state.members.values())
        if not ready:
            return Step(replace(state, pending=None), tuple(notes), reason)
        present = list(state.members.values())
    elif (lost := _lost_stages(state)) and state.checkpoints and present:
        state, moves = restaffing.staff(state)
        present = [m for m in state.members.values() if m.state in PRESENT]
        restore = True
        moved = [(b, f"{a} gives up its stage and takes the place of {b}") for a, b in moves]
        notes += [Note("warning", "recovery", text, worker) for worker, text in moved]
        reason = f"{reason}; stage {lost[0]} lost its weights: all go back to the newest checkpoint"
    elif lost:
        text = _halt_text(state, lost)
        if text != state.halted:
            notes.append(Note("error", "job", text))
        return Step(replace(state, pending=None, broken=None, halted=text), tuple(notes), text)
    else:
        in_epoch = (state.members[name] for name in current.living)
        died = any((m.state is not FINISHED and m.epoch != state.epoch) or m.state is FAILED for m in in_epoch)
        wait = any(m.epoch != state.epoch for m in present) and not state.unsettled()
        if not (anew or died or wait or state.pending or state.halted):
            return Step(state, tuple(notes), reason)

    living = tuple(m.name for m in present)
    living_set = frozenset(living)
    failed = tuple(name for name in state.members if name not in living_set)
    pending = Pending(
        living=living,
        failed=failed,
        joining=tuple(m.name for m in present if m.state is REJOINING),
        reason=reason,
        moves=restaffing.still_valid(state, (*_unknown_moves(state), *moves)),
        restore=restore,
    )
    state = replace(state, pending=pending, halted="")
    return Step(state, (*notes, NeedPlan(failed)), reason)


def _unknown_moves(state: State) -> tuple[tuple[str, str], ...]:
    """Those that a launcher may not have been told yet: it is only ever told of the newest epoch."""
    opened = state.current.moves if state.current and state.unsettled() else ()
    return (*opened, *(state.pending.moves if state.pending else ()))


def _lost_stages(state: State) -> list[int]:
    """Stages without a present worker that has the stage's weights."""
    stages = {m.stage for m in state.members.values()}
    held = {m.stage for m in state.members.values() if m.state in (RUNNING, SUSPECT)}
    return sorted(stages - held)


def _halt_text(state: State, lost: list[int]) -> str:
    gone = [m.name for m in state.members.values() if m.stage == lost[0]]
    return (
        f"halted: stage {lost[0]} has no living worker left ({names(gone)}), and its weights went with them. "
        "A worker that re-joins takes weights from a peer, so it can't help. Start the job again, and with "
        "--checkpoint FOLDER: a job that writes checkpoints goes on from the newest one by itself."
    )


def _is_done(state: State, member: Member) -> bool:
    """Has the worker nothing left to do, so that its going is no failure?"""
    return member.draining or state.committed >= state.iterations


def holder(members: Mapping[str, Member], worker: str, incarnation: str) -> Member | None:
    """Whom a report of `worker` comes from: a process that was given another place may not know it yet."""
    member = members.get(worker)
    if member is None or member.incarnation == incarnation or incarnation in member.retired:
        return member
    return next((m for m in members.values() if m.incarnation == incarnation), member)


def _fence(state: State, member: Member, incarnation: str) -> Step | None:
    if member.incarnation == incarnation and member.state is not FAILED:
        return None
    return _refuse(state, "fenced", fenced_text(member, incarnation))


def fenced_text(member: Member, incarnation: str) -> str:
    if member.incarnation is None:
        return f"{member.name}: incarnation {incarnation!r} has not registered"
    if member.incarnation == incarnation:
        return (
            f"{member.name}: incarnation {incarnation!r} is out of the job ({member.detail}); "
            "it may only re-join, as a new incarnation"
        )
    return f"{member.name}: incarnation: got {incarnation!r}, expected {member.incarnation!r}, the newest"


def _refuse(state: State, code: Any, detail: str) -> Step:
    return Step(state, (Refuse(code, detail),), detail)


def _retire(member: Member) -> tuple[str, ...]:
    return member.retired if member.incarnation is None else (*member.retired, member.incarnation)


def _with(state: State, member: Member) -> State:
    return replace(state, members={**state.members, member.name: member})


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""


def no_such_worker(state: State, name: str) -> str:
    cells = list(state.members)
    return f"worker: got {name!r}, expected a worker of the job's grid, {cells[0]} to {cells[-1]}"
