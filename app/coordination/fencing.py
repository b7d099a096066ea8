"""Whose report it is, and whether it counts: a process that is out of the job changes nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrecycle.agent.protocol import WorkerState
from openrecycle.app.coordination.events import Refuse, Step
from openrecycle.app.coordination.membership import Member, State


def holder(state: State, worker: str, incarnation: str) -> Member | None:
    """Whom a report of `worker` comes from: a process that was given another place may not know it yet."""
    member = state.members.get(worker)
    if member is None or member.incarnation == incarnation or incarnation in member.retired:
        return member
    return state.present_at.get(incarnation, member)


def place_of(members: Mapping[str, Member], incarnation: str) -> Member | None:
    """Whose process it is, or was; None: nobody has heard of it."""
    return next((m for m in members.values() if incarnation in m.incarnations), None)


def fence(state: State, member: Member, incarnation: str) -> Step | None:
    """The refusal of a report from a process that does not count; None: it counts."""
    if counts(member, incarnation):
        return None
    return refuse(state, "fenced", fenced_text(member, incarnation))


def counts(member: Member, incarnation: str) -> bool:
    """Is it the process of this place? One that was asked to leave counts until it has left."""
    return member.incarnation == incarnation and (member.state is not WorkerState.FAILED or member.leaving)


def fenced_text(member: Member, incarnation: str) -> str:
    if member.incarnation is None:
        return f"{member.name}: incarnation {incarnation!r} has not registered"
    if member.incarnation == incarnation:
        return (
            f"{member.name}: incarnation {incarnation!r} is out of the job ({member.detail}); "
            "it may only re-join, as a new incarnation"
        )
    return f"{member.name}: incarnation: got {incarnation!r}, expected {member.incarnation!r}, the newest"


def refuse(state: State, code: Any, detail: str) -> Step:
    return Step(state, (Refuse(code, detail),), detail)


def no_such_worker(state: State, name: str) -> str:
    cells = list(state.members)
    return f"worker: got {name!r}, expected a worker of the job's grid, {cells[0]} to {cells[-1]}"
