"""Which generation opens next, when, and who takes which place in it. Pure.

It opens in two moves: a change of membership makes a Pending and asks for a plan (NeedPlan); PlanReady
for the same failed workers opens it (OpenGeneration). A failure in between replaces the Pending, so that
generations only rise and each has one plan. In manual mode an operator has time to choose in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from openrecycle.agent.coordination.events import (
    Decision,
    NeedPlan,
    Note,
    OpenGeneration,
    PlanReady,
    PlanRefused,
    Transition,
)
from openrecycle.agent.coordination.membership import (
    PRESENT,
    FailureTimeouts,
    Generation,
    Member,
    Mode,
    PendingGeneration,
    State,
)
from openrecycle.agent.messages.protocol import Deployment, WorkerState
from openrecycle.planner.jobs.words import encodable, names

RUNNING, SUSPECT, FAILED = WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED


def lose(state: State, causes: dict[str, str], notes: list[Decision], now: float, *, anew: bool = False) -> Transition:
    """Takes workers out. causes: worker -> why, as in `its process ended`. anew: as of `reconsider`."""
    members = dict(state.members)
    for name, cause in causes.items():
        members[name] = replace(members[name], state=FAILED, acknowledged="", detail=cause)
        notes.append(Note("error", "failure", f"{name} failed: {cause}", name))
    reason = "; ".join(f"{name}: {cause}" for name, cause in list(causes.items())[:3])
    if len(causes) > 3:
        reason += f"; and {len(causes) - 3} more"
    return reconsider(replace(state, members=members), reason, notes, now, anew=anew)


def reconsider(state: State, reason: str, notes: list[Decision], now: float, *, anew: bool = False) -> Transition:
    """Asks for a new generation if the membership calls for one. anew: even with the same members."""
    moves: tuple[tuple[str, str], ...] = ()
    restore = state.restoring or bool(state.pending and state.pending.restore)
    current = state.current
    if current is None:
        if state.tally.unready:
            return Transition(replace(state, pending=None) if state.pending else state, tuple(notes), reason)
    elif (lost := _lost_stages(state)) and state.checkpoints and _present(state):
        state, moves = staff(state)
        restore = True
        moved = [(b, f"{a} gives up its stage and takes the place of {b}") for a, b in moves]
        notes += [Note("warning", "recovery", text, worker) for worker, text in moved]
        reason = f"{reason}; stage {lost[0]} lost its weights: all go back to the newest checkpoint"
    elif lost:
        text = _halt_text(state, lost)
        if text != state.halted:
            notes.append(Note("error", "job", text))
        return Transition(replace(state, pending=None, broken=None, halted=text), tuple(notes), text)
    else:
        in_generation = (state.members[name] for name in current.living)
        died = any(
            (m.state is not FINISHED and m.generation != state.generation) or m.state is FAILED for m in in_generation
        )
        wait = any(m.generation != state.generation for m in _present(state))
        wait = wait and not state.tally.unsettled and not state.frozen_by
        halted = state.halted and not state.unheard  # which no generation would end
        if not (anew or died or wait or state.pending or halted):
            return Transition(state, tuple(notes), reason)

    pending = pend(state, reason, moves, restore=restore)
    if not restore and (lost_now := _lost_now(state, pending)):
        return _let_choose(state, pending, lost_now, notes, now)
    return ask(state, pending, notes)


def pend(
    state: State,
    reason: str,
    moves: tuple[tuple[str, str], ...] = (),
    *,
    restore: bool = False,
    partition: tuple[int, ...] = (),
) -> PendingGeneration:
    """The generation of all who are present. moves: those that have just been decided. partition: layers per stage,
    where those change; one that no generation has opened with is given up when the membership changes."""
    present = [m for m in state.members.values() if m.state in (PRESENT if state.current else {STARTING})]
    living = tuple(m.name for m in present)
    living_set = frozenset(living)
    return PendingGeneration(
        living=living,
        failed=tuple(name for name in state.members if name not in living_set),
        joining=tuple(m.name for m in present if m.state is REJOINING),
        reason=reason,
        moves=still_valid(state, (*_unknown_moves(state), *moves)),
        restore=restore,
        partition=partition or (state.current.partition if state.current else state.held),
    )


def ask(state: State, pending: PendingGeneration, notes: list[Decision]) -> Transition:
    """Asks for the plan of the generation to be."""
    state = replace(state, pending=replace(pending, until=None), halted="")
    return Transition(state, (*notes, NeedPlan(pending.failed, pending.partition)), pending.reason)


def _present(state: State) -> list[Member]:
    return [m for m in state.members.values() if m.state in PRESENT]


def _lost_now(state: State, pending: PendingGeneration) -> list[str]:
    """Those whose loss an operator should be asked about: out since the generation in force, not by request."""
    if state.mode is not Mode.MANUAL or state.current is None:
        return []
    known = frozenset(state.current.failed)
    return [name for name in pending.failed if name not in known and not state.members[name].leaving]


def _let_choose(
    state: State, pending: PendingGeneration, lost: list[str], notes: list[Decision], now: float
) -> Transition:
    """Manual mode: nothing is planned until an operator has chosen, or `choice_timeout` is over."""
    before = state.pending
    if before is not None and before.until is not None and before.failed == pending.failed:
        until = before.until
    else:
        until = now + state.choice_timeout
        text = (
            f"manual mode: the job waits {state.choice_timeout:g} s for an operator to choose how it goes on without "
        )
        notes.append(Note("warning", "operator", text + names(lost)))
    pending = replace(pending, until=until)
    return Transition(replace(state, pending=pending, halted=""), tuple(notes), pending.reason)


def _unknown_moves(state: State) -> tuple[tuple[str, str], ...]:
    """Those that a launcher may not have been told yet: it is only ever told of the newest generation."""
    opened = state.current.moves if state.current and state.tally.unsettled else ()
    return (*opened, *(state.pending.moves if state.pending else ()))


def _lost_stages(state: State) -> list[int]:
    """Stages without a present worker that has the stage's weights."""
    stages = {m.stage for m in state.members.values()}
    held = {m.stage for m in state.members.values() if m.state in (RUNNING, SUSPECT)}
    return sorted(stages - held)


def _halt_text(state: State, lost: list[int]) -> str:
    gone = [m.name for m in state.members.values() if m.stage == lost[0] and m.state not in PRESENT]
    what = f"stage {lost[0]} has no living worker left ({names(gone)}), and its weights went with them"
    if len(gone) < sum(m.stage == lost[0] for m in state.members.values()):
        what = f"all workers that kept some part of the optimizer's state of stage {lost[0]} are gone"
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
        pending = pend(state, why, event.moves, restore=pending.restore, partition=pending.partition)
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
    )
    members = dict(state.members)
    for name in generation.living:
        member = members[name]
        became = RUNNING if member.state is STARTING else member.state
        members[name] = replace(member, state=became, generation=generation.number, acknowledged="", draining=False)
    offer = state.offer if state.offer and state.offer.failed == generation.failed else None
    without = f" without {names(generation.failed)}" if generation.failed else ""
    text = f"generation {generation.number}{without}: {pending.reason}; plan {event.fingerprint[:8]}: {event.origin}"
    return Transition(
        replace(state, members=members, current=generation, pending=None, broken=None, offer=offer),
        (OpenGeneration(generation), Note("info", "generation", text)),
        pending.reason,
    )


def deployment_of(generation: Generation, leaving: tuple[str, ...] = (), origin: str = "") -> Deployment:
    """As its members are told. origin: where its plan is from."""
    # What it is made of has been checked, and there may be thousands of names.
    return Deployment.model_construct(
        generation=generation.number,
        plan_fingerprint=generation.plan_fingerprint,
        living=generation.living,
        failed=generation.failed,
        joining=generation.joining,
        moves=generation.moves,
        restore=generation.restore,
        leaving=leaving,
        reason=encodable("; ".join(filter(None, (generation.reason, origin)))[:2000]),
    )


def plan_refused(state: State, event: PlanRefused, now: float, failure_timeouts: FailureTimeouts) -> Transition:
    if not _awaited(state, event.failed):
        return Transition(state, reason="nobody waits for that plan")
    text = f"halted: there is no plan for this job{_without(event.failed)}: {event.detail}"
    return Transition(replace(state, pending=None, broken=None, halted=text), (Note("error", "job", text),), text)


def _awaited(state: State, failed: tuple[str, ...]) -> bool:
    """Does a generation wait for the plan for these failures, and for nothing else?"""
    pending = state.pending
    return pending is not None and pending.until is None and pending.failed == failed and not state.over


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""


# -- workers that change their stage, in their processes --------------------------------------


def still_valid(state: State, moves: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The moves that a launcher may still have to make: of those that it may not know, the ones that
    led to a worker that is present, with a move of a move as one."""
    chained: dict[str, str] = {}
    for source, to in moves:
        before = next((first for first, last in chained.items() if last == source), source)
        # A place that is given a second time is so because the first process there is gone.
        chained = {first: last for first, last in chained.items() if last != to}
        chained[before] = to
    return tuple((a, b) for a, b in chained.items() if state.members[b].state in PRESENT)


def staff(state: State) -> tuple[State, tuple[tuple[str, str], ...]]:
    """Gives each stage without a present worker one of the fullest stage; also (from, to) of each move.

    A stage with one worker left gives none, so that with fewer workers than stages some stay empty.
    """
    members, moves = dict(state.members), list[tuple[str, str]]()
    while True:
        stages: dict[int, list[Member]] = {m.stage: [] for m in members.values()}
        for member in members.values():
            if member.state in PRESENT:
                stages[member.stage].append(member)
        empty = [stage for stage, present in stages.items() if not present]
        fullest = max(stages.values(), key=len)
        if not empty or len(fullest) < 2:
            return replace(state, members=members), tuple(moves)
        source = fullest[-1]
        target = next(m for m in members.values() if m.stage == empty[0])
        move(members, source.name, target.name)
        moves.append((source.name, target.name))


def why_not(state: State, moves: Sequence[tuple[str, str]], failed: Iterable[str] = ()) -> str:
    """Why those moves can't be made while `failed` are out; "": they can. Where all go back to a checkpoint, whoever
    is present can go, and nobody has to stay."""
    members, restore = state.members, bool(state.pending and state.pending.restore)
    gone = {*failed, *(source for source, _ in moves)}
    for source, to in moves:
        if members[source].state not in (PRESENT if restore else (RUNNING, SUSPECT)):
            return f"{source} is {members[source].state}"
        if members[to].state is not FAILED or members[to].leaving:
            return f"{to} is not empty"
    for stage in () if restore else {m.stage for m in members.values()}:
        if not holders(state, stage, gone):
            return f"nobody would be left who holds stage {stage}"
    return ""


def holders(state: State, stage: int, gone: Collection[str] = ()) -> list[str]:
    """Who has the state of `stage`, but for those who are to go."""
    here = (m for m in state.members.values() if m.stage == stage and m.name not in gone)
    return [m.name for m in here if m.state in (RUNNING, SUSPECT)]


def move(members: dict[str, Member], source: str, to: str) -> None:
    """The process of `source` takes the empty place `to`, where it first needs the stage's state."""
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
    )
