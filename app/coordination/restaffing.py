"""Workers that change their stage, in their processes: who takes which empty place. Pure, as the coordinator.

The stage that has lost everybody is staffed from the one that has most left: only counts matter for a plan.
"""

from __future__ import annotations

from dataclasses import replace

from openrecycle.agent.protocol import WorkerState
from openrecycle.app.coordination.membership import PRESENT, Member, State


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


def move(members: dict[str, Member], source: str, to: str) -> None:
    """The process of `source` takes the empty place `to`, where it first needs the stage's state."""
    leaves, empty = members[source], members[to]
    members[to] = replace(
        empty,
        state=WorkerState.REJOINING,
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
        state=WorkerState.FAILED,
        incarnation=None,
        generation=0,
        acknowledged="",
        last_heard=None,
        draining=False,
        detail=f"its process took the place of {to}",
        leaving=False,
    )
