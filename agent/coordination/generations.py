"""Decides which generation opens next, when, and which worker takes which place in it. Also handles what operators and
the advisor ask for. Pure functions.

A generation opens in two steps. A change of membership makes a PendingGeneration and asks for a plan (NeedPlan).
PlanReady for the same failed workers opens it (OpenGeneration). A failure in between replaces the PendingGeneration,
so generation numbers only rise and each generation has one plan. In manual mode an operator can choose in between.

In automatic mode the job re-routes at once. If the advisor has a better option, the job takes it as soon as all workers
train again. In manual mode the job first waits for an operator. The functions that handle one kind of event have the
form (state, event, now, failure_timeouts) -> Transition.

A frozen plan stays in force as long as the workers that run it do. What would replace it by choice waits: a better
plan, a better option, a worker that has come back. A failure, or a worker that was asked to leave, makes the plan
impossible: this is handled as always, and the plan that follows is frozen in turn. A generation that has to open anyway
takes in the workers that have come back by then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from openrecycle.agent.coordination.membership import (
    PRESENT,
    Candidate,
    Chosen,
    Decision,
    DrainAsked,
    FailureTimeouts,
    Generation,
    LetGo,
    Member,
    Mode,
    ModeSet,
    NeedPlan,
    Note,
    Offer,
    Offered,
    OpenGeneration,
    PendingGeneration,
    PlanFrozen,
    PlanReady,
    PlanRefused,
    Release,
    RestartAsked,
    State,
    Transition,
    UsePlan,
    no_such_worker,
    refuse,
    returned,
)
from openrecycle.agent.messages.protocol import Deployment, WorkerState
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import REROUTE, STAND_BY, counts, encodable, names

RUNNING, SUSPECT, FAILED = WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED
LINES_AT_ONCE = 8
"""Up to this many workers that fall silent, are heard again, fail or come at once get a line each."""


# -- which generation opens next, when, and who takes which place in it -------------------------


def lose(state: State, causes: dict[str, str], notes: list[Decision], now: float, *, anew: bool = False) -> Transition:
    """Takes workers out of the job. causes: for each, why, as in `its process ended`. anew: as in `reconsider`."""
    state, reason = take_out(state, causes, notes)
    return reconsider(state, reason, notes, now, anew=anew)


def take_out(state: State, causes: dict[str, str], notes: list[Decision]) -> tuple[State, str]:
    """Returns the state without these workers, before it is decided what follows, and the reason."""
    members = dict(state.members)
    for name, cause in causes.items():
        members[name] = replace(members[name], state=FAILED, acknowledged="", detail=cause)
    reason = "; ".join(f"{name}: {cause}" for name, cause in list(causes.items())[:3])
    if len(causes) > 3:
        reason += f"; and {len(causes) - 3:,} more"
    lines = {name: f"{name} failed: {cause}" for name, cause in causes.items()}
    many = f"failed: {names([*causes])}: {next(iter(causes.values()), '')}"  # nearly always the same for all
    notes += each_or_many("error", "failure", lines, many)
    return replace(state, members=members), reason


def each_or_many(
    severity: Literal["info", "warning", "error"],
    kind: Literal["worker", "failure"],
    lines: Mapping[str, str],
    many: str,
) -> Iterator[Note]:
    """Says of each worker what `lines` has; of very many at once, as when a switch fails, what `many` says, in one
    line: two thousand would bury what led to it."""
    if len(lines) <= LINES_AT_ONCE:
        yield from (Note(severity, kind, text, name) for name, text in lines.items())
    else:
        yield Note(severity, kind, f"{len(lines):,} workers {many}")


def reconsider(state: State, reason: str, notes: list[Decision], now: float, *, anew: bool = False) -> Transition:
    """Asks for a new generation if the membership calls for one. anew: asks even if the members stay the same."""
    restore = state.restoring or bool(state.pending and state.pending.restore)
    current, lost = state.current, lost_stages(state) if state.current else []
    if lost and current:
        state = _call_back(state, current, lost, notes, now)
        lost = lost_stages(state)
    if current is None:
        if state.tally.unready:
            return Transition(replace(state, pending=None) if state.pending else state, tuple(notes), reason)
    elif lost and state.back_to and _present(state):
        state, staffed = staff(state)
        restore = True
        moved = [(b, f"{a} gives up its stage and takes the place of {b}") for a, b in staffed]
        notes += [Note("warning", "recovery", text, worker) for worker, text in moved]
        reason = f"{reason}; stage {lost[0]} lost its weights: all go back to {state.back_to}"
    elif lost and not anew and _ending(state, lost):
        return Transition(replace(state, pending=None), tuple(notes), reason)
    elif lost:
        text = _halt_text(state, lost)
        if text != state.halted:
            notes.append(Note("error", "job", text))
        return Transition(replace(state, pending=None, broken=None).halt(text), tuple(notes), text)
    else:
        number, in_generation = current.number, (state.members[name] for name in current.living)
        died = any((m.state is not FINISHED and m.generation != number) or m.state is FAILED for m in in_generation)
        wait = any(m.generation != number for m in _present(state))
        wait = wait and not state.tally.unsettled and not state.frozen_by
        halted = state.halted and not state.unheard  # a halt for silence ends with a heartbeat, not with a generation
        if not (anew or died or wait or state.pending or halted):
            return Transition(state, tuple(notes), reason)

    pending = pend(state, "; ".join(filter(None, (reason, *_on_request(state)))), restore=restore)
    if not restore and (lost_now := _lost_now(state, pending)):
        return _let_choose(state, pending, lost_now, notes, now)
    return ask(state, pending, notes)


def _call_back(state: State, current: Generation, lost: Collection[int], notes: list[Decision], now: float) -> State:
    """Keeps workers that were asked to leave if their stage has lost all others since. They still train as long as no
    generation without them has opened, and their launcher has not been told. Their heartbeats have not counted since
    they were asked, so their silence begins now."""

    def has_state(member: Member) -> bool:
        why = member.let_go
        if why is None or not member.goes or member.stage not in lost or member.generation != current.number:
            return False
        return not why.stands_by or member.name not in current.joining

    back = [m for m in state.members.values() if has_state(m)]
    notes += [Note("warning", "recovery", f"{m.name} stays: no other has its stage {m.stage}", m.name) for m in back]
    stay = {
        m.name: replace(
            m, state=RUNNING, detail="", leaving=False, let_go=None, last_heard=None if m.last_heard is None else now
        )
        for m in back
    }
    return replace(state, members={**state.members, **stay}) if stay else state


def _let_go_since(state: State) -> tuple[LetGo, ...]:
    """Returns the members of the generation in force that are out because somebody wanted it."""
    members = [state.members[name] for name in state.current.living] if state.current else []
    return tuple(LetGo(m.name, m.let_go.stands_by) for m in members if m.let_go is not None)


def _lost_since(state: State) -> tuple[str, ...]:
    """Returns the members of the generation in force whose process has died or was given up. Workers that have moved do
    not count, nor those that only have to join again because the state of their whole stage is gone, nor those that
    have closed, though another process has come since."""
    current = state.current
    if current is None:
        return ()
    moved = {m.incarnation for m in state.members.values() if m.state is REJOINING}

    def lost(member: Member) -> bool:
        process = current.incarnations.get(member.name)
        if process in moved or (process == member.incarnation and member.state is not FAILED):
            return False
        return member.let_go is None if member.state is FAILED else member.generation == 0

    return tuple(name for name in current.living if lost(state.members[name]))


def moves_of(state: State) -> tuple[tuple[str, str], ...]:
    """Returns (from, to) of each process that takes the state of another place than it had: since the generation in
    force, or with that one, as long as it has not had that state."""
    current, takes = state.current, [m for m in state.members.values() if m.state is REJOINING]
    if current is None or not takes:
        return ()
    stood = {incarnation: name for name, incarnation in current.incarnations.items()}
    came = {to: source for source, to in current.moves}

    def source(member: Member) -> str:
        place = stood.get(member.incarnation or "", member.name)
        return came.get(place, place) if place == member.name and member.generation == current.number else place

    return tuple((source(m), m.name) for m in takes if source(m) != m.name)


def _on_request(state: State) -> Iterator[str]:
    """Yields the sentences on workers that are out on request. They name every worker: another reason must not hide
    them."""
    out = _let_go_since(state)
    if by := [worker for worker, stands_by in out if stands_by]:
        yield f"{', '.join(by)} {'is' if len(by) == 1 else 'are'} to {STAND_BY}"
    for worker, stands_by in out:
        if (why := state.members[worker].let_go) is not None and not stands_by:
            yield _asked(why.actor, worker)


def _asked(actor: str, name: str) -> str:
    return f"{actor.replace(';', ',')} asked {name} to leave"  # reasons are joined by semicolons


def pend(state: State, reason: str, *, restore: bool = False, partition: tuple[int, ...] = ()) -> PendingGeneration:
    """Returns the generation of all workers that are present.

    partition: layers per stage, where they change. A change of membership before this generation opens gives that
    partition up.
    """
    present = [m for m in state.members.values() if m.state in (PRESENT if state.current else {STARTING})]
    living = tuple(m.name for m in present)
    living_set = frozenset(living)
    return PendingGeneration(
        living=living,
        failed=tuple(name for name in state.members if name not in living_set),
        joining=tuple(m.name for m in present if m.state is REJOINING),
        reason=reason,
        moves=moves_of(state),
        restore=restore,
        partition=partition or (state.current.partition if state.current else state.held),
        let_go=_let_go_since(state),
        lost=_lost_since(state),
    )


def ask(state: State, pending: PendingGeneration, notes: list[Decision]) -> Transition:
    """Asks for the plan of the generation to be."""
    state = replace(state.go_on(), pending=replace(pending, until=None))
    return Transition(state, (*notes, NeedPlan(pending.failed, pending.partition)), pending.reason)


def _present(state: State) -> list[Member]:
    return [m for m in state.members.values() if m.state in PRESENT]


def _lost_now(state: State, pending: PendingGeneration) -> list[str]:
    """Returns the workers whose loss an operator should be asked about: they are out since the generation in force, and
    nobody asked them to leave. Empty in automatic mode."""
    if state.mode is not Mode.MANUAL or state.current is None:
        return []
    known = frozenset(state.current.failed)
    members = [state.members[name] for name in pending.failed if name not in known]
    return [m.name for m in members if not (m.leaving or m.closed)]


def _let_choose(
    state: State, pending: PendingGeneration, lost: list[str], notes: list[Decision], now: float
) -> Transition:
    """Waits, in manual mode, until an operator has chosen or `choice_timeout` is over. Asks for no plan until then."""
    before = state.pending
    # The question is the same if those who are out in addition have left with their work done.
    if before is not None and before.until is not None and lost == _lost_now(state, before):
        until = before.until
    else:
        until = now + state.choice_timeout
        text = (
            f"manual mode: the job waits {state.choice_timeout:g} s for an operator to choose how it goes on without "
        )
        notes.append(Note("warning", "operator", text + names(lost)))
    pending = replace(pending, until=until)
    return Transition(replace(state.go_on(), pending=pending), tuple(notes), pending.reason)


def lost_stages(state: State) -> list[int]:
    """Returns the stages without a present worker that has the stage's weights. If all processes of an own loop have
    been started again, as torchrun does when one dies, they go on from a checkpoint of their own."""
    stages = {m.stage for m in state.members.values()}
    held = {m.stage for m in state.members.values() if m.state in (RUNNING, SUSPECT)}
    if not held and state.own_loop:
        held = {m.stage for m in _present(state)}
    return sorted(stages - held)


def _ending(state: State, lost: Collection[int]) -> bool:
    """Says whether an own loop is about to end: stages `lost` have no worker left, as theirs have done their work, and
    others still do theirs. Nobody needs another generation. One that does says that its transfers broke. Who had left
    before the generation in force does not count: the others have trained on since, with those that are lost now."""
    members, living = state.members.values(), state.current.lives_in if state.current else frozenset[str]()
    done = {m.stage for m in members if m.state is FINISHED and m.name in living}
    works = any(m.state in (RUNNING, SUSPECT) for m in members)
    return state.own_loop and works and not state.halted and done.issuperset(lost)


def late(state: State) -> frozenset[str]:
    """Returns the workers of an own loop that have come back although all others have left, some with their work done.
    They train only if others are started again, too."""
    states = {m.state for m in state.members.values()} if state.own_loop else set()
    alone = FINISHED in states and states.isdisjoint((STARTING, RUNNING, SUSPECT))
    return frozenset(returned(state)) if alone else frozenset()


def may_pass(state: State) -> bool:
    """Says whether workers that come back can end a halt."""
    return bool(state.back_to) or not lost_stages(state)


def _halt_text(state: State, lost: list[int]) -> str:
    gone = [m.name for m in state.members.values() if m.stage == lost[0] and m.state not in PRESENT]
    what = f"stage {lost[0]} has no living worker left ({names(gone)}), and its weights went with them"
    if len(gone) < sum(m.stage == lost[0] for m in state.members.values()):
        part = "the state" if state.own_loop else "some part of the optimizer's state"
        what = f"all workers that kept {part} of stage {lost[0]} are gone"
    if state.back_to:
        return f"halted: {what}. Once enough workers are back, all go on from {state.back_to}."
    if state.own_loop:
        return f"halted: {what}. Start all workers again: an own loop can go on from a checkpoint of its own."
    return (
        f"halted: {what}. "
        "A worker that re-joins takes weights from a peer, so it can't help. Start the job again, and with "
        "--checkpoint FOLDER: a job that writes checkpoints goes on from the newest one by itself."
    )


def plan_ready(state: State, event: PlanReady, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    pending = state.pending
    if not _awaited(state, event.failed) or pending is None:
        return Transition(state, reason="nobody waits for that plan")
    if event.moves:
        if problem := why_not(state, event.moves):
            return Transition(state, reason=f"that plan's moves are not possible: {problem}")
        members = dict(state.members)
        for source, to in event.moves:
            move(members, source, to)
        state = replace(state, members=members)
        why = "; ".join((pending.reason, *(f"{source} takes the place of {to}" for source, to in event.moves)))
        pending = pend(state, why, restore=pending.restore, partition=pending.partition)
    generation = Generation(
        state.generation + 1,
        pending.living,
        pending.failed,
        pending.joining,
        event.fingerprint,
        pending.reason,
        pending.moves,
        pending.restore,
        partition=pending.partition,
        let_go=pending.let_go,
        lost=pending.lost,
        incarnations={name: known for name in pending.living if (known := state.members[name].incarnation)},
    )
    members = dict(state.members)
    for name in generation.living:
        member = members[name]
        became = RUNNING if member.state is STARTING else member.state
        members[name] = replace(member, state=became, generation=generation.number, acknowledged="", draining=False)
    before = state.current.lives_in if state.current else ()
    for name, member in members.items():
        if member.leaving and not member.goes and name not in before:
            members[name] = replace(member, leaving=False)  # the launcher has been told
    stood = {incarnation: name for name, incarnation in state.current.incarnations.items()} if state.current else {}
    took = ((name, stood.get(process, name)) for name, process in generation.incarnations.items())
    links = state.links.moved({name: source for name, source in took if source != name})
    offer = state.offer if state.offer and state.offer.failed == generation.failed else None
    without = f" without {names(generation.failed)}" if generation.failed else ""
    text = f"generation {generation.number}{without}: {pending.reason}; plan {event.fingerprint[:8]}: {event.origin}"
    return Transition(
        replace(state, members=members, current=generation, pending=None, broken=None, offer=offer, links=links),
        (OpenGeneration(generation), Note("info", "generation", text)),
        pending.reason,
    )


def deployment_of(
    generation: Generation, leaving: tuple[str, ...] = (), origin: str = "", *, own_loop: bool = False
) -> Deployment:
    """Returns a generation in the form in which its members are told of it.

    leaving: the workers that are to leave. origin: where the plan is from, in words. own_loop: each process asks for
    it itself and none is ever moved, so thousands need not be told where all the others are.
    """
    # Without pydantic's checks: the parts have been checked already, and there may be thousands of names.
    return Deployment.model_construct(
        generation=generation.number,
        plan_fingerprint=generation.plan_fingerprint,
        living=generation.living,
        failed=generation.failed,
        joining=generation.joining,
        incarnations={} if own_loop else generation.incarnations,
        restore=generation.restore,
        leaving=leaving,
        reason=encodable("; ".join(filter(None, (generation.reason, origin)))[:2000]),
    )


def plan_refused(state: State, event: PlanRefused, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if not _awaited(state, event.failed):
        return Transition(state, reason="nobody waits for that plan")
    text = f"halted: there is no plan for this job{_without(event.failed)}: {event.detail}"
    return Transition(replace(state, pending=None, broken=None).halt(text), (Note("error", "job", text),), text)


def _awaited(state: State, failed: tuple[str, ...]) -> bool:
    """Says whether a generation waits for the plan for these failures, and for nothing else."""
    pending = state.pending
    return pending is not None and pending.until is None and pending.failed == failed and not state.over


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""


# -- workers that change their stage, in their processes --------------------------------------


def staff(state: State) -> tuple[State, tuple[tuple[str, str], ...]]:
    """Moves a worker of the fullest stage to each stage that has no present worker. Returns the new state, and (from,
    to) of each move.

    A stage with one worker left gives none, so with fewer workers than stages some stages stay empty.
    """
    members, made = dict(state.members), list[tuple[str, str]]()
    while True:
        stages: dict[int, list[Member]] = {m.stage: [] for m in members.values()}
        for member in members.values():
            if member.state in PRESENT:
                stages[member.stage].append(member)
        empty = [stage for stage, present in stages.items() if not present]
        fullest = max(stages.values(), key=len)
        if not empty or len(fullest) < 2:
            return replace(state, members=members), tuple(made)
        source = fullest[-1]
        # Not where somebody was asked to leave and is still there, if that can be.
        target = min((m for m in members.values() if m.stage == empty[0]), key=lambda member: member.goes)
        move(members, source.name, target.name)
        made.append((source.name, target.name))


def why_not(state: State, asked: Sequence[tuple[str, str]], failed: Iterable[str] = ()) -> str:
    """Says why the moves `asked`, as (from, to), can't be made while `failed` are out; "": they can. Where all workers
    go back to a checkpoint, any present worker can move, and no stage has to keep one that holds its state."""
    members, restore = state.members, bool(state.pending and state.pending.restore)
    gone = {*failed, *(source for source, _ in asked)}
    for source, to in asked:
        if members[source].state not in (PRESENT if restore else (RUNNING, SUSPECT)):
            return f"{source} is {members[source].state}"
        if members[to].state is not FAILED or members[to].goes:
            return f"{to} is not empty"
    for stage in () if restore else {m.stage for m in members.values()}:
        if not holders(state, stage, gone):
            return f"nobody would be left who holds stage {stage}"
    return ""


def holders(state: State, stage: int, gone: Collection[str] = ()) -> list[str]:
    """Returns the workers that have the state of `stage`, without those in `gone`."""
    here = (m for m in state.members.values() if m.stage == stage and m.name not in gone)
    return [m.name for m in here if m.state in (RUNNING, SUSPECT)]


def move(members: dict[str, Member], source: str, to: str) -> None:
    """Gives the empty place `to` to the process of `source`, which then needs the state of the stage there. Changes
    `members`."""
    leaves, empty = members[source], members[to]
    members[to] = replace(
        empty,
        state=REJOINING,
        incarnation=leaves.incarnation,
        retired=empty.incarnations,
        generation=0,
        acknowledged="",
        last_heard=leaves.last_heard,
        draining=False,
        detail="",
        leaving=False,
        let_go=None,
    )
    members[source] = replace(
        leaves,
        state=FAILED,
        incarnation=None,
        generation=0,
        acknowledged="",
        last_heard=None,
        draining=False,
        detail=f"its process took the place of {to}",
        leaving=False,
        let_go=None,
    )


# -- what operators and the advisor say ---------------------------------------------------------

# The cost of moving layers, in iterations: workers give and take layers, and process groups form anew.
MOVE_ITERATIONS = 1.0


def worth_moving(now: float, then: float, iteration_seconds: float, left: float = math.inf) -> tuple[bool, str]:
    """Says whether a shorter period saves more than moving the layers costs, and why. Savings count for one hour, or
    for the rest of the job if that is shorter.

    now, then: the periods before and after the move. left: iterations that are not committed yet.
    """
    hour = 3600 / iteration_seconds if iteration_seconds > 0 else math.inf
    saved = min(hour, left) * (1 - then / now)
    return saved > MOVE_ITERATIONS, f"layers move: an iteration gets {1 - then / now:.1%} shorter"


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
        return refuse(
            state, "recovering", f"{member.name} can't leave while the job recovers; try again when it trains"
        )
    if not holders(state, member.stage, {member.name}):
        text = f"worker: {member.name} is the last one that holds stage {member.stage}, expected one with a peer"
        return refuse(state, "invalid", text)
    text = _asked(event.actor, member.name)
    members = dict(state.members)
    _let_go(members, member.name, Release(event.actor), f"asked to leave by {event.actor}")
    notes: list[Decision] = [Note("warning", "operator", text, member.name)]
    return reconsider(replace(state, members=members), "", notes, now)


def restart_asked(state: State, event: RestartAsked, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Stops telling launchers that a worker is to leave which has left already. A launcher that hears it now would end
    the process that it is about to start."""
    member = state.members[event.worker]
    if member.leaving and not member.goes:
        state = state.with_member(replace(member, leaving=False))
    return Transition(state, reason=f"{event.worker} is to be started again")


def use_plan(state: State, event: UsePlan, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    """Opens a generation with the same members and another plan."""
    if state.over:
        return refuse(state, "job_over", f"the job is {state.over}")
    failed = out(state)
    if failed is None or state.current is None:
        return refuse(
            state, "recovering", "a plan can't be put in force while the job recovers; try again when it trains"
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
        return refuse(state, "recovering", "a worker is about to re-join; try again when it trains")
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
    """Ends the wait for an operator's choice, and takes the best option that is known. why: the reason in words; "":
    the time for the choice is over."""
    pending = state.pending
    assert pending is not None
    best = state.offer.candidates[0] if state.offer and state.offer.failed == pending.failed else None
    name = best.name if best else REROUTE
    why = why or f"nobody chose within {state.choice_timeout:g} s"
    notes.append(Note("warning", "operator", f"{why}: the job goes on with the first option, {name}" + _numbers(best)))
    return _resolve(state, best, f"{why}: {name}", notes)


def out(state: State) -> tuple[str, ...] | None:
    """Returns the workers that are out, once all others train with the layers that they are to have. None: that is not
    settled yet, or the job can't go on."""
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
    """Does what has waited while the plan was frozen: takes in workers that are back, or else the better option."""
    if not state.frozen_by:
        return Transition(state, reason="the plan is not frozen")
    text = f"{actor} unfroze the plan"
    notes: list[Decision] = [Note("warning", "operator", text)]
    state = replace(state, frozen_by="")
    if state.settled and (back := returned(state)):
        return reconsider(state, f"{text}: {re_join(back)}", notes, now)
    if state.mode is Mode.AUTOMATIC and state.offer and out(state) == state.offer.failed:
        return take_better(state, state.offer, notes)
    return Transition(state, tuple(notes), text)


# -- taking an option ---------------------------------------------------------------------------


def _resolve(state: State, candidate: Candidate | None, why: str, notes: list[Decision]) -> Transition:
    """Ends the wait for a choice with this candidate; None: the job re-routes."""
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
        why = f"layers per stage become {counts(candidate.partition)}"
    return _take(state, candidate, f"{candidate.name}: {why}", notes)


def _take(state: State, candidate: Candidate, why: str, notes: list[Decision]) -> Transition:
    """Asks for the generation in which the job goes on by `candidate`. If workers have changed so that this is no
    longer possible, the job re-routes."""
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
            mates = [m for m in candidate.failed if Worker.parse(m).pipeline == pipeline]
            lost = tuple(m for m in mates if not _is_present(state, m))
            detail = f"stands by for {', '.join(lost)} ({candidate.name})"
            _let_go(members, name, Release(stands_by=True, lost=lost), detail)
    state = replace(state, members=members)
    why = "; ".join((why, *(words for words in _on_request(state) if words not in why)))
    return ask(state, pend(state, why, partition=candidate.partition), notes)


def _is_moving(state: State, candidate: Candidate) -> str:
    """Says why the layers of this candidate can't move now; "": they can. While another move is under way, some workers
    have the new layers and others the old ones, so nobody knows which of them the next move would start from."""
    current = state.current
    if candidate.partition and state.moving and current is not None and candidate.partition != current.partition:
        return f"layers per stage are about to become {counts(current.partition)}"
    return ""


def coming_back(state: State) -> tuple[str, ...]:
    """Returns the workers to start again: they stood by for lost workers of their pipeline, one of which is back."""
    if state.over:
        return ()
    return tuple(
        member.name
        for member in state.members.values()
        if member.state is FAILED
        and not member.goes
        and member.let_go is not None
        and any(_is_present(state, name) for name in member.let_go.lost)
    )


def _is_present(state: State, name: str) -> bool:
    return name in state.members and state.members[name].state in PRESENT


def re_join(back: Sequence[str]) -> str:
    """Says, in words, that these workers re-join."""
    return f"{names(back)} re-join" + ("s" if len(back) == 1 else "")


def _is_frozen(state: State) -> Transition:
    return refuse(state, "frozen", f"{state.frozen_by} has frozen the plan; unfreeze it first")


def _let_go(members: dict[str, Member], name: str, why: Release, detail: str) -> None:
    members[name] = replace(members[name], state=FAILED, acknowledged="", detail=detail, leaving=True, let_go=why)


def _numbers(candidate: Candidate | None) -> str:
    return f": {candidate.text}" if candidate and candidate.text else ""
