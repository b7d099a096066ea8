"""Who is alive, by heartbeats and their silence, ends of processes, and broken transfers. Pure.

Each function takes one kind of event: (state, event, now, ladder) -> Step.
"""

from __future__ import annotations

from dataclasses import replace

from openrecycle.agent.blame import Complaint, judge
from openrecycle.agent.protocol import WorkerState
from openrecycle.app.coordination.choosing import overdue
from openrecycle.app.coordination.events import (
    Decision,
    Exited,
    Heard,
    Note,
    Raised,
    Stalled,
    Step,
    Tick,
    TransferBroken,
)
from openrecycle.app.coordination.fencing import fence, holder, no_such_worker, refuse
from openrecycle.app.coordination.generations import lose, reconsider
from openrecycle.app.coordination.ladder import Ladder
from openrecycle.app.coordination.membership import Broken, Member, State, peer_of

RUNNING, SUSPECT = WorkerState.RUNNING, WorkerState.SUSPECT
FAILED, FINISHED = WorkerState.FAILED, WorkerState.FINISHED


def heard(state: State, event: Heard, now: float, ladder: Ladder) -> Step:
    notes, passing = list[Decision](), True
    if nobody_heard(state, now) > ladder.suspect and event.beats:
        # All were suspended, or cut off: who is woken later than the first has all of its time, too.
        waited = _waited_for(state)
        state = state.with_heard({**state.members, **{m.name: replace(m, last_heard=now) for m in waited}})
        passing = False
    members = dict(state.members)
    for said, (incarnation, heard, draining) in event.beats.items():
        member = holder(state, said, incarnation)
        if member is None or member.incarnation != incarnation or member.state is FAILED:
            continue  # fenced: it changes nothing
        member = members[member.name]  # as it is by now
        name, before = member.name, member.last_heard
        if before is not None and before > heard:
            heard = before
        if member.state is SUSPECT and now - heard <= ladder.suspect:
            notes.append(Note("info", "worker", f"{name} is heard again", name))
            member, passing = replace(member, state=RUNNING), False
        if draining != member.draining:
            passing = False
        members[name] = member.heard_at(heard, draining)
    return Step(state.with_heard(members), tuple(notes), "heartbeats", passing)


def tick(state: State, event: Tick, now: float, ladder: Ladder) -> Step:
    if state.over:
        return Step(state)
    members, notes, dead = dict(state.members), list[Decision](), dict[str, str]()
    # Where nobody is heard, nobody would be left to go on with: they are suspended together, or cut off.
    together = ladder.suspect < nobody_heard(state, now) <= ladder.lost
    for name, member in state.members.items():
        if member.last_heard is None or member.state in (FAILED, FINISHED):
            continue
        age = now - member.last_heard
        if age > ladder.dead and _is_done(state, member):
            members[name] = replace(member, state=FINISHED)
        elif age > ladder.dead and not together:
            dead[name] = f"not heard for {age:.1f} s (dead at {ladder.dead:g} s)"
        elif age > ladder.suspect and member.state is RUNNING and not _is_done(state, member):
            members[name] = replace(member, state=SUSPECT)
            text = f"{name} has not been heard for {age:.1f} s (dead at {ladder.dead:g} s)"
            notes.append(Note("warning", "worker", text, name))
    if any(members[name] is not state.members[name] for name in members):
        state = replace(state, members=members)
    if dead:
        return lose(state, dead, notes, now)
    if state.pending and state.pending.until is not None and now >= state.pending.until:
        return overdue(state, notes)
    broken = state.broken
    if broken and not state.pending and now - broken.since >= ladder.transfer_grace:
        return _blame(state, broken, notes, now)
    return Step(state, tuple(notes), "time went by")


def _blame(state: State, broken: Broken, notes: list[Decision], now: float) -> Step:
    """Nobody died: a link broke (agent.blame)."""
    holders = [m.name for m in state.members.values() if m.state in (RUNNING, SUSPECT)]
    living = state.current.living if state.current else ()
    late = [name for name in living if not state.members[name].acknowledged]
    ruling = judge(state.links, broken.complaints, committed=state.committed, holders=holders, late=late)
    state = replace(state, links=ruling.links)
    if ruling.halt:
        text = f"halted: {ruling.halt}"
        notes.append(Note("error", "job", text))
        return Step(replace(state, pending=None, broken=None, halted=text), tuple(notes), text)
    notes.append(Note("warning", "generation", ruling.text, ruling.out or broken.reporter))
    if ruling.out:
        return lose(state, {ruling.out: f"taken out: {ruling.text}"}, notes, now)
    return reconsider(state, ruling.text, notes, now, anew=True)


def stalled(state: State, event: Stalled, now: float, ladder: Ladder) -> Step:
    members = {
        name: m if m.last_heard is None else replace(m, last_heard=min(now, m.last_heard + event.seconds))
        for name, m in state.members.items()
    }
    text = f"the console stood still for {event.seconds:.1f} s; that time is not held against the workers"
    pending, broken = state.pending, state.broken
    if pending and pending.until is not None:
        pending = replace(pending, until=pending.until + event.seconds)  # nobody could choose meanwhile
    if broken:  # nor say who died
        broken = replace(broken, since=min(now, broken.since + event.seconds))
    state = replace(state, members=members, pending=pending, broken=broken)
    return Step(state, (Note("warning", "console", text),), text)


def exited(state: State, event: Exited, now: float, ladder: Ladder) -> Step:
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over or event.incarnation in member.retired:
        return Step(state, reason=f"the end of that process of {event.worker} is known")
    if member.incarnation not in (None, event.incarnation) or (member.incarnation is None and member.state is FAILED):
        # Its process died before it could register: nothing but that incarnation is lost.
        retired = replace(member, retired=(*member.retired, event.incarnation))
        return Step(state.with_member(retired), reason=f"a process of {event.worker} ended before it registered")
    if member.leaving:
        return Step(state.with_member(replace(member, leaving=False)), reason=f"{event.worker} has left, as asked")
    if member.state in (FAILED, FINISHED):
        return Step(state, reason=f"{event.worker} was out already")
    if _is_done(state, member):
        return Step(
            state.with_member(replace(member, state=FINISHED)), reason=f"{member.name} left after its last iteration"
        )
    if member.incarnation is None:
        state = state.with_member(replace(member, incarnation=event.incarnation))
    detail = f"its process {event.detail or 'ended'}"
    return lose(state, {member.name: detail}, [], now)


def transfer_broken(state: State, event: TransferBroken, now: float, ladder: Ladder) -> Step:
    reporter = holder(state, event.reporter, event.incarnation)
    worker = state.members.get(event.worker)
    if reporter is None or worker is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker if reporter else event.reporter))
    if fenced := fence(state, reporter, event.incarnation):
        return fenced
    old = event.generation != state.generation if event.generation else reporter.acknowledged == ""
    if state.over or state.current is None or state.pending or old:
        return Step(state, reason="that connection belongs to a generation that is over or about to end")
    complaint = Complaint(reporter.name, "" if event.worker == event.reporter else event.worker, event.detail)
    if state.broken:
        known = state.broken
        if all(c.reporter != reporter.name for c in known.complaints):
            state = replace(state, broken=replace(known, complaints=(*known.complaints, complaint)))
        return Step(state, reason=f"waiting already since {known.reporter} reported a broken connection")
    detail = f" ({event.detail})" if event.detail else ""
    text = f"{event.reporter} can't exchange data with {peer_of(event.reporter, event.worker)}{detail}"
    broken = Broken(now, event.reporter, event.worker, event.detail, (complaint,))
    return Step(replace(state, broken=broken), (Note("warning", "failure", text, event.reporter),), text)


def nobody_heard(state: State, now: float) -> float:
    """For how many seconds none of several workers that should speak has been heard; 0 where one has, or is alone."""
    waited = _waited_for(state)
    return now - max(m.last_heard or 0.0 for m in waited) if len(waited) > 1 else 0.0


def _waited_for(state: State) -> list[Member]:
    """Workers in the job, whose word is waited for."""
    out = (FAILED, FINISHED)
    return [
        m for m in state.members.values() if m.last_heard is not None and m.state not in out and not _is_done(state, m)
    ]


def raised(state: State, event: Raised, now: float, ladder: Ladder) -> Step:
    """The worker lives; all form anew, with what its launcher has them do about it."""
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if fenced := fence(state, member, event.incarnation):
        return fenced
    if state.over or state.current is None:
        return Step(state, reason="the job does not train")
    notes: list[Decision] = [Note("warning", "failure", event.detail, member.name)]
    if state.pending or event.generation != state.generation:
        return Step(state, tuple(notes), "that generation is over or about to end")
    return reconsider(state, event.detail, notes, now, anew=True)


def _is_done(state: State, member: Member) -> bool:
    """Has the worker nothing left to do, so that its going is no failure?"""
    return member.draining or state.committed >= state.iterations
