"""Decides which workers are in a job's generation, and when the next one opens. No I/O, no clock, no threads.

    step(state, event, now, failure_timeouts) -> Transition(state, decisions, reason)

This file handles which workers come, what they report of a generation, which are lost (by silence, the end of a process
or a broken transfer), and how the job ends. agent.coordination.generations decides what follows from that, and handles
what operators and the advisor ask for. agent.coordination.blame decides whose link broke.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from openrecycle.agent.coordination import generations
from openrecycle.agent.coordination.blame import Complaint, judge
from openrecycle.agent.coordination.generations import (
    LINES_AT_ONCE,
    each_or_many,
    late,
    lose,
    lost_stages,
    moves_of,
    re_join,
    reconsider,
    take_out,
)
from openrecycle.agent.coordination.membership import (
    ACK_ORDER,
    LEFT,
    PRESENT,
    STATELESS,
    AckState,
    Broken,
    Chosen,
    ConsoleRestarted,
    Decision,
    DrainAsked,
    Event,
    Exited,
    FailureTimeouts,
    Finished,
    Generation,
    GenerationAcknowledged,
    HeartbeatsReceived,
    InterimPlanUsed,
    IterationsCommitted,
    LayersMoved,
    LeadChanged,
    Member,
    ModeSet,
    Note,
    Offered,
    OpRaised,
    PlanFrozen,
    PlanReady,
    PlanRefused,
    Refuse,
    RestartAsked,
    Stalled,
    State,
    StateLost,
    Tick,
    TransferBroken,
    Transition,
    UsePlan,
    WorkerRegistered,
    counts,
    fenced_text,
    holder,
    no_such_worker,
    peer_of,
    place_of,
    refuse,
    returned,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs import words

RUNNING, SUSPECT, FAILED = WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED


def step(state: State, event: Event, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Returns what one event leads to. Pure: the same arguments give the same Transition. A refused event leaves
    `state` as it is. now: monotonic seconds."""
    return _HANDLERS[type(event)](state, event, now, failure_timeouts)


# -- who comes, what they report, and the end -------------------------------------------------


def _registered(state: State, event: WorkerRegistered, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    member = state.members.get(event.worker)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    # One that has closed is gone for certain, so whoever comes now is another process, with work to do.
    if state.over or (member.state is FINISHED and not member.closed):
        return refuse(state, "job_over", f"{event.worker}: the job is {state.over or 'past its last iteration'}")
    if event.incarnation in member.retired or (event.incarnation == member.incarnation and member.state is FAILED):
        return refuse(state, "fenced", fenced_text(member, event.incarnation))
    if event.incarnation == member.incarnation:
        return Transition(state, reason=f"{event.worker} had registered already")
    if event.worker in state.links.barred and not event.of_spares:
        return refuse(state, "fenced", f"{event.worker} may not re-join: its links broke again after it had")
    if state.current and (elsewhere := place_of(state.members, event.incarnation)) is not None:
        # The registration came late or twice over the network: since then the process was given another place.
        if counts(elsewhere, event.incarnation):
            return Transition(state, reason=f"{event.worker} had registered already, and is {elsewhere.name} now")
        return refuse(state, "fenced", fenced_text(elsewhere, event.incarnation))

    member = _room_for(state, member)
    another = event.of_spares or member.name != event.worker
    if another and member.name not in {source for source, _ in moves_of(state)}:
        # It is no successor of the process that was there, and does not run where that one ran. If that one is about to
        # move, what is remembered goes with it once the generation opens.
        state = replace(state, links=state.links.without({member.name}))
    arrived = replace(
        member,
        state=STARTING if state.current is None else REJOINING,
        incarnation=event.incarnation,
        retired=member.incarnations,
        generation=STATELESS if member.closed else 0,
        acknowledged="",
        last_heard=now if event.reports else None,
        draining=False,
        detail="",
        leaving=False,
        let_go=None,
    )
    notes: list[Decision] = []
    if event.reports:
        state = _awake(state, notes, now, failure_timeouts)
    if state.current and member.state in PRESENT:
        text = f"{member.name} was started anew while its earlier process was still in the job"
        notes.append(Note("error", "failure", text, member.name))
        reason = f"{member.name} was started anew"
    elif state.current:
        line = f"{member.name} is back and asks to re-join"
        notes += _one_more(member.name, len(returned(state)), line, "more workers are back and ask to re-join")
        reason = f"{member.name} re-joins"
    else:
        registered = len(state.members) - state.tally.unready
        notes += _one_more(member.name, registered, f"{member.name} registered", "more workers registered")
        reason = "all workers have registered"
    return reconsider(state.with_member(arrived), reason, notes, now)


def _room_for(state: State, member: Member) -> Member:
    """Returns the place for a process that asks for that of `member`. Where another process has been given it since,
    and may not have been told, that is an empty one. The launcher does the same where one stands in another's way.

    A process that the launcher itself started there, and that is in the way, has ended: that is known by now. An own
    loop, whose processes are never moved, has nobody who says so."""
    if state.own_loop or member.state is not REJOINING or member.acknowledged:
        return member
    came = (state.members[source] for source, to in moves_of(state) if to == member.name)
    empty = (place for place in (*came, *state.members.values()) if place.state is FAILED and not place.goes)
    return next(empty, member)


def _one_more(name: str, before: int, line: str, many: str) -> list[Note]:
    """Says that a worker has come while `before` others wait. Of very many only the first ones have a line each; the
    generation that takes them in says how many they are."""
    if before < LINES_AT_ONCE:
        return [Note("info", "worker", line, name)]
    return [Note("info", "worker", many)] if before == LINES_AT_ONCE else []


def _acknowledged(
    state: State, event: GenerationAcknowledged, now: float, failure_timeouts: FailureTimeouts
) -> Transition:
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if fenced := _fence(state, member, event.incarnation):
        return fenced
    if event.generation > state.generation:
        return refuse(
            state, "invalid", f"generation: got {event.generation}, expected at most {state.generation}, the newest"
        )
    if event.generation < state.generation or state.over:
        return Transition(state, reason=f"generation {event.generation} is over")
    if member.generation != state.generation:
        return refuse(
            state, "not_member", f"{member.name} is not in generation {event.generation}; it waits for a later one"
        )
    if ACK_ORDER.index(event.state) <= ACK_ORDER.index(member.acknowledged):
        return Transition(state, reason="known already")
    if member.state is FAILED:
        return Transition(state, reason=f"{member.name} is about to leave")
    notes: list[Decision] = []
    now_in = replace(member, acknowledged=event.state)
    if _has_state(event.state) and member.state is REJOINING:
        now_in = replace(now_in, state=RUNNING)
    state = state.with_member(now_in)
    if now_in.state is not member.state and state.current:
        notes += _joined(state, state.current, member.name)
    if now_in.state is not member.state and state.halted and not state.unheard:
        return reconsider(state, f"{member.name} has all of its state", notes, now)
    if event.state == "resumed" and state.settled:
        living = len(state.current.living) if state.current else 0
        text = f"generation {state.generation}: all {living:,} workers have committed an iteration"
        notes.append(Note("info", "recovery" if state.generation > 1 else "job", text))
        if not state.frozen_by and (back := returned(state)):
            return reconsider(state, re_join(back), notes, now)
    return Transition(state, tuple(notes), f"{member.name} {event.state} generation {event.generation}")


def _joined(state: State, current: Generation, name: str) -> Iterator[Note]:
    """Says that a worker has all of its state; where very many join, in one line when all have."""
    joining = current.joining
    if len(joining) <= LINES_AT_ONCE:
        source = {to: source for source, to in current.moves}.get(name)
        text = f"{source}'s process trains as {name}" if source else f"{name} has re-joined the job"
        yield Note("info", "recovery", text, name)
    elif all(state.members[other].state is not REJOINING for other in joining):
        there = [other for other in joining if state.members[other].state in PRESENT]
        yield Note("info", "recovery", f"{len(there):,} workers have re-joined the job: {words.names(there)}")


def _has_state(acknowledged: AckState) -> bool:
    """Says whether a worker that joined has all of its stage's state. Only then does it say that it has formed."""
    return acknowledged in ("formed", "resumed")


def _iterations_committed(
    state: State, event: IterationsCommitted, now: float, failure_timeouts: FailureTimeouts
) -> Transition:
    if event.count <= state.committed:
        return Transition(state, reason="known already")
    return Transition(replace(state, committed=event.count), reason=f"{event.count} iterations are committed")


def _meanwhile(state: State, event: InterimPlanUsed, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.current is None or event.generation != state.generation or state.over:
        return Transition(state, reason=f"generation {event.generation} is not in force")
    if unknown := [name for name in event.interim.failed if name not in state.members]:
        return refuse(state, "invalid", f"failed: got {unknown[0]!r}, expected workers of the job's grid")
    current = replace(state.current, interim=event.interim)
    text = f"a plan without {words.names(event.interim.failed)} is run until all have their state"
    return Transition(replace(state, current=current), reason=text)


def _layers_moved(state: State, event: LayersMoved, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.current is None or event.generation > state.generation:
        return refuse(state, "invalid", f"generation {event.generation} has not begun")
    if event.problem:
        return _layers_stay(state, state.current, event, now)
    if event.generation == state.generation and event.partition != state.current.partition:
        expected = f"the layers per stage of generation {event.generation}: {state.current.partition}"
        return refuse(state, "invalid", f"partition: got {event.partition}, expected {expected}")
    if event.iteration > state.iterations:
        return refuse(state, "invalid", f"iteration: got {event.iteration}, expected at most {state.iterations}")
    # A late report, of a generation after which layers have moved again, was true when it was sent.
    if state.over or event.generation < state.moved[0] or event.partition == state.held:
        return Transition(state, reason="known already")
    text = f"layers per stage are {words.counts(event.partition)} from here on"
    notes = (Note("info", "recovery", "; ".join(filter(None, (text, event.text)))),)
    return Transition(replace(state, held=event.partition, moved=(event.generation, event.iteration)), notes, text)


def _layers_stay(state: State, current: Generation, event: LayersMoved, now: float) -> Transition:
    if state.over or event.generation != state.generation or not state.moving:
        return Transition(state, reason="known already")
    if event.partition != state.held:
        return refuse(state, "invalid", f"partition: got {event.partition}, expected that which all have: {state.held}")
    if state.pending is not None:
        return Transition(state, reason="another generation is about to open, in which it is tried again")
    text = f"layers stay where they are: {event.problem}"
    state = replace(state, current=replace(current, partition=state.held), unmovable=current.partition)
    return _form_anew(state, min(current.living), text, [Note("warning", "recovery", text)], now)


def _finished(state: State, event: Finished, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    return _end_job(state, event)


def _end_job(state: State, event: Finished) -> Transition:
    if state.over:
        return Transition(state, reason=f"the job is {state.over} already")
    present = PRESENT | {STARTING}
    members = {n: replace(m, state=FINISHED) if m.state in present else m for n, m in state.members.items()}
    text = f"job {event.state}" + (f": {event.reason}" if event.reason else "")
    state = replace(state.go_on(), members=members, pending=None, broken=None)
    over = replace(state, over=event.state, over_reason=event.reason)
    return Transition(over, (Note("info", "job", text),), text)


def _console_restarted(
    state: State, event: ConsoleRestarted, now: float, failure_timeouts: FailureTimeouts
) -> Transition:
    if state.over:
        return Transition(state)
    # The pending moves are in the state already, and the launcher has not been told of them. A broken connection is
    # reported only once. Who was asked to choose has as long as before.
    asked = event.listened and state.choosing
    state = replace(state, pending=state.pending if state.pending and (state.pending.moves or asked) else None)
    if not event.listened:
        members = {n: m if m.last_heard is None else replace(m, last_heard=now) for n, m in state.members.items()}
        state = replace(state, members=members, broken=replace(state.broken, since=now) if state.broken else None)
    return reconsider(state, event.reason, [Note("info", "console", event.reason)], now)


def _lead_changed(state: State, event: LeadChanged, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Opens a generation in which all form anew: a decision of the leader before may have reached some workers only."""
    if state.over or state.current is None:
        return Transition(state)
    reporter = state.current.living[0]
    state = replace(_none_finished(state, now), broken=None)  # all connect anew, so it doesn't matter what broke
    dead = dict[str, str]()
    for name, incarnation in event.lost.items():
        member = holder(state, name, incarnation)
        if member is None or incarnation in member.retired:
            continue
        if member.incarnation == incarnation and member.state is not FAILED:
            dead[member.name] = event.detail
        elif member.incarnation != incarnation:
            state = state.with_member(replace(member, retired=member.and_retired(incarnation)))
    notes: list[Decision] = [Note("warning", "failure", event.detail)]
    if dead:
        return lose(state, dead, notes, now, anew=True)
    return _form_anew(state, reporter, event.detail, notes, now)


def _form_anew(state: State, reporter: str, reason: str, notes: list[Decision], now: float) -> Transition:
    """Opens a generation even if the members stay the same. Until it opens, the state remembers this as it remembers a
    broken link. Otherwise a console that is restarted while the plan is made would not know of it, and all workers
    would wait for ever."""
    complaint = Complaint(reporter, detail=reason)
    broken = state.broken or Broken(now, reporter, reporter, reason, (complaint,))
    return reconsider(replace(state, broken=broken), reason, notes, now, anew=True)


def _fence(state: State, member: Member, incarnation: str) -> Transition | None:
    """Returns the refusal of a report whose process does not count; None: it counts."""
    if counts(member, incarnation):
        return None
    return refuse(state, "fenced", fenced_text(member, incarnation))


# -- who is lost ------------------------------------------------------------------------------


def _heard(state: State, event: HeartbeatsReceived, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    notes, before_all = list[Decision](), state
    if event.beats:
        state = _awake(state, notes, now, failure_timeouts)
    passing, counted = state is before_all, True
    members, again = dict(state.members), list[str]()
    for said, (incarnation, heard, draining) in event.beats.items():
        member = holder(state, said, incarnation)
        if member is None or member.incarnation != incarnation or member.state is FAILED or member.closed:
            continue  # it is fenced, or was sent before the process left, and changes nothing
        member = members[member.name]  # with what earlier heartbeats of this event have changed
        name, before = member.name, member.last_heard
        if before is not None and before > heard:
            heard = before
        if member.state is SUSPECT and now - heard <= failure_timeouts.suspect:
            again.append(name)
            member, passing = replace(member, state=RUNNING), False
        if member.state is FINISHED and not state.over and now - heard <= failure_timeouts.suspect:
            member, passing, counted = _unfinished(state, member), False, False
        if draining != member.draining:
            passing = False
        members[name] = member.heard_at(heard, draining)
    lines = {name: f"{name} is heard again" for name in again}
    notes += each_or_many("info", "worker", lines, f"are heard again: {words.names(again)}")
    after = state.with_heard(members) if counted else replace(state, members=members)
    waits = after.halted or after.pending or (after.current and after.without != after.current.failed)
    if not counted and waits and not lost_stages(after):
        # Workers that are still there were taken for finished. So the job may have halted, or an own loop may have gone
        # on without those that failed, or a generation may be about to open without them. It goes on once every stage
        # has a worker.
        return reconsider(after, "workers that had nothing left to do are heard again", notes, now)
    return Transition(after, tuple(notes), "heartbeats", passing)


def _unfinished(state: State, member: Member) -> Member:
    """Returns the member as it was before it was taken for finished, when it was silent and had no work left. It is
    still there: it may be writing the weights, and all others wait for that."""
    current = state.current
    if current is None:
        return replace(member, state=STARTING)
    here = member.generation == current.number
    has_state = here and (_has_state(member.acknowledged) or member.name not in current.joining)
    return replace(member, state=RUNNING if has_state else REJOINING)


def _none_finished(state: State, now: float) -> State:
    """Takes no worker for finished any more. A launcher has reported that one ended before the job did, so the launcher
    still waits for all of them."""
    finished = [m for m in state.members.values() if m.state is FINISHED and not m.closed]
    back = {m.name: replace(_unfinished(state, m), last_heard=now) for m in finished}
    return replace(state, members={**state.members, **back}) if back else state


def _awake(state: State, notes: list[Decision], now: float, failure_timeouts: FailureTimeouts) -> State:
    """Handles the first sign of life after all workers were suspended or cut off. The silence of all of them starts
    again at zero, so that a worker that wakes later than the first one also has its full time."""
    if nobody_heard(state, now) > failure_timeouts.suspect:
        waited = _waited_for(state)
        state = state.with_heard({**state.members, **{m.name: replace(m, last_heard=now) for m in waited}})
    if state.unheard:
        state = state.go_on()
        notes.append(Note("info", "job", "workers are heard again: the job goes on where it was"))
    return state


def _tick(state: State, event: Tick, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if state.over:
        return Transition(state)
    members, notes, done = dict(state.members), list[Decision](), False
    dead, silent = dict[str, str](), dict[str, float]()
    # If no worker is heard, they are suspended together or cut off. To take them out would leave nobody to go on with.
    nobody = nobody_heard(state, now)
    together = nobody > failure_timeouts.suspect
    too_late = _too_late(state)  # they can't go on by themselves
    for name, member in state.members.items():
        if member.last_heard is None or member.state in (FAILED, FINISHED):
            continue
        age = now - member.last_heard
        if age > failure_timeouts.dead and _is_done(state, member):
            members[name], done = replace(member, state=FINISHED), True
        elif age > failure_timeouts.dead and (not together or name in too_late):
            dead[name] = f"not heard for {age:.1f} s (dead at {failure_timeouts.dead:g} s)"
        elif age > failure_timeouts.suspect and member.state is RUNNING and not _is_done(state, member):
            members[name] = replace(member, state=SUSPECT)
            silent[name] = age
    if any(members[name] is not state.members[name] for name in members):
        state = replace(state, members=members)
    first = min((members[name].last_heard or 0.0 for name in dead), default=now)
    if others_follow := bool(dead) and _others_follow(state, first, now, failure_timeouts):
        dead.clear()
    limit = f"(dead at {failure_timeouts.dead:g} s)"
    lines = {name: f"{name} has not been heard for {age:.1f} s {limit}" for name, age in silent.items()}
    shortest = min(silent.values(), default=0.0)
    many = f"have not been heard for {shortest:.1f} s or longer {limit}: {words.names([*silent])}"
    notes += each_or_many("warning", "worker", lines, many)
    if dead:
        return _lose(state, dead, notes, now)
    if done and _none_works(state):
        over = _end_job(state, Finished(JobState.FINISHED, NONE_WORKS))
        return replace(over, decisions=(*notes, *over.decisions))
    if done and late(state):
        return reconsider(state, "all others were silent with their work done", notes, now)
    if state.pending and state.pending.until is not None and now >= state.pending.until:
        return generations.overdue(state, notes)
    if nobody > failure_timeouts.lost and not state.pending and not state.halted:
        # Nobody is fenced: the workers may train while only this console does not hear them.
        text = (
            f"halted: no worker has been heard for {failure_timeouts.lost / 3600:.3g} h. Their launcher has ended, is "
            "suspended, or can't reach this console. If they still train, the job goes on as soon as one of them is "
            "heard; if not, it can be deleted."
        )
        notes.append(Note("error", "job", text))
        return Transition(state.halt(text, unheard=True), tuple(notes), text)
    # No link is to blame for what those broke who are about to be lost.
    broken = None if others_follow else state.broken
    if broken and not state.pending and not state.unheard and now - broken.since >= failure_timeouts.transfer_grace:
        return _blame(state, broken, notes, now)
    return Transition(state, tuple(notes), "time went by")


def _others_follow(state: State, first: float, now: float, failure_timeouts: FailureTimeouts) -> bool:
    """Says whether other workers are about to be lost that fell silent together with the one last heard at `first`, as
    behind a switch that fails: their last heartbeats lie up to an interval apart. One generation without all of them is
    opened within the time in which otherwise each tick would open one."""
    ages = (now - (m.last_heard or 0.0) for m in _waited_for(state))
    oldest, newest = failure_timeouts.dead, now - first - failure_timeouts.heartbeat
    return any(max(newest, failure_timeouts.suspect) < age <= oldest for age in ages)


def _blame(state: State, broken: Broken, notes: list[Decision], now: float) -> Transition:
    """Decides what follows when transfers broke and nobody died: a link broke (agent.coordination.blame)."""
    holders = [m.name for m in state.members.values() if m.state in (RUNNING, SUSPECT)]
    living = state.current.living if state.current else ()
    if closed := [name for name in living if state.members[name].closed]:
        whose, whom = ("its reporter", "it") if len(closed) == 1 else ("their reporters", "them")
        text = f"{words.names(closed)} closed {whose} while others still exchanged data with {whom}"
        notes.append(Note("warning", "generation", text))
        return reconsider(state, text, notes, now, anew=True)
    if lost_stages(state):  # an own loop was about to end without those that failed, and it is no link's fault
        return reconsider(state, "a worker needs others that are gone", notes, now, anew=True)
    slow = [name for name in living if not state.members[name].acknowledged]
    decision = judge(state.links, broken.complaints, committed=state.committed, holders=holders, late=slow)
    state = replace(state, links=decision.links)
    if decision.halt:
        text = f"halted: {decision.halt}"
        notes.append(Note("error", "job", text))
        return Transition(replace(state, pending=None, broken=None).halt(text), tuple(notes), text)
    notes.append(Note("warning", "generation", decision.text, decision.out or broken.reporter))
    if decision.out:
        # The worker may stay a member where its launcher still needs it (Launcher._kept).
        return lose(state, {decision.out: f"taken out: {decision.text}"}, notes, now, anew=True)
    return reconsider(state, decision.text, notes, now, anew=True)


def _stalled(state: State, event: Stalled, now: float, failure_timeouts: FailureTimeouts) -> Transition:
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
    return Transition(state, (Note("warning", "console", text),), text)


def _exited(state: State, event: Exited, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    after, (refusal,) = all_exited(state, [event], now)
    return refuse(state, refusal.code, refusal.detail) if refusal else after


def all_exited(state: State, events: Iterable[Exited], now: float) -> tuple[Transition, list[Refuse | None]]:
    """Takes processes that ended together, as `step` would take each of them. But none of them is given a place that
    another one leaves, and thousands of members are looked through only once. Returns what follows, and for each event
    why it was refused; None: it was not."""
    dead, refused, after = dict[str, str](), list[Refuse | None](), Transition(state)
    for event in events:
        after = _end(after.state, event, now, dead)
        refused.append(after.refusal)
    if dead:
        return _lose(after.state, dead, [], now), refused
    return _settled_without(state, after.state, after.reason, now), refused


def _settled_without(before: State, state: State, reason: str, now: float) -> Transition:
    """Decides what follows when workers have left with their work done: nothing, unless a generation is about to open,
    which must do without them, or workers that are back wait for them, or have come too late. With the last of an own
    loop's workers the job ends: the one that should say so may not have reached the console."""
    left = any(m.closed and not before.members[name].closed for name, m in state.members.items())
    if left and _none_works(state):
        return _end_job(state, Finished(JobState.FINISHED, NONE_WORKS))
    if left and (state.pending or late(state) or (state.settled and returned(state) and not lost_stages(state))):
        return reconsider(state, reason, [], now)
    return Transition(state, reason=reason)


def _lose(state: State, dead: dict[str, str], notes: list[Decision], now: float) -> Transition:
    """Takes out workers that have died. With the last that has come back too late an own loop ends, as it would have
    without it."""
    if not _too_late(state).issuperset(dead):
        return lose(state, dead, notes, now)
    state, reason = take_out(state, dead, notes)
    if not _none_works(state):
        return reconsider(state, reason, notes, now)
    over = _end_job(state, Finished(JobState.FINISHED, NONE_WORKS))
    return replace(over, decisions=(*notes, *over.decisions))


def _too_late(state: State) -> frozenset[str]:
    """Returns the workers that have come back to an own loop that is over for all others: all of the generation in
    force have left with their work done."""
    living = state.current.living if state.current else ()
    done = state.own_loop and all(state.members[name].state is FINISHED for name in living)
    return late(state) if done else frozenset()


NONE_WORKS = "all workers have closed their reporters, or were silent with their work done"


def _none_works(state: State) -> bool:
    """Says whether this is an own loop all of whose workers have left, with their work done or lost. A worker that
    can't reach the console as it leaves is silent, and nobody else says that it has left."""
    return state.own_loop and all(m.state in (FINISHED, FAILED) for m in state.members.values())


def _end(state: State, event: Exited, now: float, dead: dict[str, str]) -> Transition:
    """Takes the end of a process, however near the job's end: a launcher does not report the end of a worker that it no
    longer needs. Adds the worker to `dead`, with the cause, if it is lost by that."""
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if state.over or event.incarnation in member.retired:
        return Transition(state, reason=f"the end of that process of {event.worker} is known")
    if member.incarnation not in (None, event.incarnation) or (member.incarnation is None and member.state is FAILED):
        # The process died before it could register, so only its incarnation is lost.
        retired = replace(member, retired=member.and_retired(event.incarnation))
        return Transition(state.with_member(retired), reason=f"a process of {event.worker} ended before it registered")
    if member.leaving:
        # The launcher hears of this only with the generation without the worker, and would have started another process
        # by then.
        gone = replace(member, generation=LEFT)
        return Transition(state.with_member(gone), reason=f"{event.worker} has left, as asked")
    if member.state is FAILED or member.name in dead:
        return Transition(state, reason=f"{event.worker} was out already")
    if member.closed:
        return Transition(state, reason=f"{event.worker} has left already, with its work done")
    if state.current is None and event.done:
        # The first plan is made for all. To leave this worker out now would have the job wait for another one.
        return Transition(state, reason=f"{event.worker} has left before the first plan")
    # Once all iterations are recorded, all have reduced for the last step: who lacks that takes it alone.
    if event.done or (state.own_loop and state.committed >= state.iterations):
        left = replace(member, state=FINISHED, incarnation=event.incarnation, generation=LEFT, acknowledged="")
        return Transition(state.with_member(left), reason=f"{event.worker} has left, with its work done")
    if member.state is FINISHED and not state.own_loop:
        state = _none_finished(state, now)
    if member.incarnation is None:
        state = state.with_member(replace(member, incarnation=event.incarnation))
    dead[member.name] = f"its process {event.detail or 'ended'}"
    return Transition(state, reason=f"{member.name}: {dead[member.name]}")


def _transfer_broken(state: State, event: TransferBroken, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    reporter = holder(state, event.reporter, event.incarnation)
    worker = state.members.get(event.worker)
    if reporter is None or worker is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker if reporter else event.reporter))
    if fenced := _fence(state, reporter, event.incarnation):
        return fenced
    old = event.generation != state.generation if event.generation else reporter.acknowledged == ""
    # Each worker complains once, and the generation that would help it may be given up where an own loop ends.
    helped = state.pending and not state.own_loop
    if state.over or state.current is None or helped or old:
        return Transition(state, reason="that connection belongs to a generation that is over or about to end")
    if state.halted and not state.unheard:  # no link is to blame for what broke with the workers that are gone
        return Transition(state, reason="the job is halted, and its workers connect anew when it goes on")
    complaint = Complaint(reporter.name, "" if event.worker == event.reporter else event.worker, event.detail)
    if state.broken:
        known = state.broken
        if all(c.reporter != reporter.name for c in known.complaints):
            state = replace(state, broken=replace(known, complaints=(*known.complaints, complaint)))
        return Transition(state, reason=f"waiting already since {known.reporter} reported a broken connection")
    detail = f" ({event.detail})" if event.detail else ""
    text = f"{event.reporter} can't exchange data with {peer_of(event.reporter, event.worker)}{detail}"
    broken = Broken(now, event.reporter, event.worker, event.detail, (complaint,))
    return Transition(replace(state, broken=broken), (Note("warning", "failure", text, event.reporter),), text)


def nobody_heard(state: State, now: float) -> float:
    """Returns for how many seconds none of the workers that should speak has been heard; 0: there is no such worker."""
    waited = _waited_for(state)
    return now - max(m.last_heard or 0.0 for m in waited) if waited else 0.0


def _waited_for(state: State) -> list[Member]:
    """Returns the workers in the job that are expected to send heartbeats."""
    out = (FAILED, FINISHED)
    return [
        m for m in state.members.values() if m.last_heard is not None and m.state not in out and not _is_done(state, m)
    ]


def _raised(state: State, event: OpRaised, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Has all workers form anew after an op raised. The worker lives, and its launcher tells all how to go on."""
    member = _reporter(state, event)
    if isinstance(member, Transition):
        return member
    notes: list[Decision] = [Note("warning", "failure", event.detail, member.name)]
    if state.pending or event.generation != state.generation:
        return Transition(state, tuple(notes), "that generation is over or about to end")
    return _form_anew(state, member.name, event.detail, notes, now)


def _reporter(state: State, event: OpRaised | StateLost) -> Member | Transition:
    """Returns the member that reports the event, or the transition that says why nothing follows."""
    member = holder(state, event.worker, event.incarnation)
    if member is None:
        return refuse(state, "unknown_worker", no_such_worker(state, event.worker))
    if fenced := _fence(state, member, event.incarnation):
        return fenced
    if state.over or state.current is None:
        return Transition(state, reason="the job does not train")
    return member


def _state_lost(state: State, event: StateLost, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Marks the workers of a stage whose state is lost: they live, and need a state as workers that join do."""
    member = _reporter(state, event)
    if isinstance(member, Transition):
        return member
    if state.pending or event.generation != state.generation:
        return Transition(state, reason="that generation is over or about to end")
    members = {
        name: replace(m, state=WorkerState.REJOINING, generation=STATELESS, acknowledged="")
        if m.stage == member.stage and m.state in (RUNNING, SUSPECT)
        else m
        for name, m in state.members.items()
    }
    notes: list[Decision] = [Note("error", "failure", event.detail, member.name)]
    return reconsider(replace(state, members=members), event.detail, notes, now, anew=True)


def _is_done(state: State, member: Member) -> bool:
    """Says whether the worker has nothing left to do, so that its silence is no failure."""
    return member.draining or state.committed >= state.iterations


_HANDLERS: dict[type, Callable[[State, Any, float, FailureTimeouts], Transition]] = {
    WorkerRegistered: _registered,
    HeartbeatsReceived: _heard,
    Exited: _exited,
    TransferBroken: _transfer_broken,
    OpRaised: _raised,
    StateLost: _state_lost,
    Tick: _tick,
    Stalled: _stalled,
    PlanReady: generations.plan_ready,
    PlanRefused: generations.plan_refused,
    GenerationAcknowledged: _acknowledged,
    IterationsCommitted: _iterations_committed,
    InterimPlanUsed: _meanwhile,
    LayersMoved: _layers_moved,
    Finished: _finished,
    ConsoleRestarted: _console_restarted,
    LeadChanged: _lead_changed,
    Offered: generations.offered,
    Chosen: generations.chosen,
    ModeSet: generations.mode_set,
    PlanFrozen: generations.plan_frozen,
    DrainAsked: generations.drain_asked,
    RestartAsked: generations.restart_asked,
    UsePlan: generations.use_plan,
}
