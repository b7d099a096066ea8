"""Which epoch opens next, and when. Pure.

It opens in two moves: a change of membership makes a Pending and asks for a plan (NeedPlan); PlanReady
for the same failed workers opens it (OpenEpoch). A failure in between replaces the Pending, so that
epochs only rise and each has one plan.
"""

from __future__ import annotations

from dataclasses import replace

from agent.protocol import WorkerState
from app import restaffing
from app.membership import (
    PRESENT,
    Decision,
    Epoch,
    Ladder,
    NeedPlan,
    Note,
    OpenEpoch,
    Pending,
    PlanReady,
    PlanRefused,
    State,
    Step,
    names,
)

RUNNING, SUSPECT, FAILED = WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.FAILED
REJOINING, STARTING, FINISHED = WorkerState.REJOINING, WorkerState.STARTING, WorkerState.FINISHED


def lose(state: State, causes: dict[str, str], notes: list[Decision]) -> Step:
    """Takes workers out. causes: worker -> why, as in `its process ended`."""
    members = dict(state.members)
    for name, cause in causes.items():
        members[name] = replace(members[name], state=FAILED, acknowledged="", detail=cause)
        notes.append(Note("error", "failure", f"{name} failed: {cause}", name))
    reason = "; ".join(f"{name}: {cause}" for name, cause in list(causes.items())[:3])
    if len(causes) > 3:
        reason += f"; and {len(causes) - 3} more"
    return reconsider(replace(state, members=members), reason, notes)


def reconsider(state: State, reason: str, notes: list[Decision], *, anew: bool = False) -> Step:
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


def plan_ready(state: State, event: PlanReady, now: float, ladder: Ladder) -> Step:
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


def plan_refused(state: State, event: PlanRefused, now: float, ladder: Ladder) -> Step:
    if state.pending is None or state.pending.failed != event.failed or state.over:
        return Step(state, reason="nobody waits for that plan")
    text = f"halted: there is no plan for this job{_without(event.failed)}: {event.detail}"
    return Step(replace(state, pending=None, halted=text), (Note("error", "job", text),), text)


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""
