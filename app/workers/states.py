"""Machines and roles: which process holds which place of the grid, and in what state each of both is. Pure.

A worker process (host, process id, since when) holds a role (stage 2 of pipeline 1). Roles are given to other
processes, and processes end; neither is the other. Whatever says of a worker how it is has it from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from openrecycle.agent.coordination.membership import Member, State
from openrecycle.agent.messages.protocol import JobState, WorkerState


class RoleState(StrEnum):
    """Of a role and of a process.

    RUNNING: its process trains. REROUTED: and runs other pipelines' micro-batches beside its own. SLOW: and takes
    longer than its peers. WAITING: for a person to choose how the job goes on. PAUSED: it waits, since an operator has
    stopped the job. SUSPECT: heartbeats overdue.
    JOINING: registered, does not train yet. LEAVING: asked to go, and has not gone yet. FINISHED: left after the last
    iteration.
    Of a role that nobody holds: DRAINED, FAILED: as its last process ended. MOVED: that process holds another role.
    EMPTY: nobody has held it yet, or its process moved on and has ended since.
    """

    RUNNING = "running"
    REROUTED = "re-routed"
    SLOW = "slow"
    WAITING = "waiting"
    PAUSED = "paused"
    SUSPECT = "suspect"
    JOINING = "joining"
    LEAVING = "leaving"
    MOVED = "moved"
    DRAINED = "drained"
    FAILED = "failed"
    EMPTY = "empty"
    FINISHED = "finished"


# Nobody trains there.
OUT = frozenset({RoleState.LEAVING, RoleState.MOVED, RoleState.DRAINED, RoleState.FAILED, RoleState.EMPTY})
# Its process has the weights of its stage.
HOLDING = frozenset(
    {RoleState.RUNNING, RoleState.REROUTED, RoleState.SLOW, RoleState.WAITING, RoleState.PAUSED, RoleState.SUSPECT}
)
# Its process can be killed.
ALIVE = HOLDING | {RoleState.JOINING}


class Condition(StrEnum):
    """Of a job, in the word that stands first wherever it is spoken of."""

    STARTING = "starting"
    RUNNING = "running"
    DEGRADED = "degraded"
    PAUSING = "pausing"
    PAUSED = "paused"
    WAITING = "waiting for you"
    RECOVERING = "recovering"
    HALTED = "halted"
    FINISHED = "finished"
    STOPPED = "stopped"


class Arrival(NamedTuple):
    """What a process says of itself when it registers; see ProcessState."""

    host: str = ""
    pid: int = 0
    ranks: tuple[int, ...] = ()
    made_of: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ProcessState:
    """held: the roles that it was given, oldest first, and since when (POSIX seconds; 0: not known). ended: how it
    left the job; "": it has not, or with the job. detail: why.

    Of a worker of several ranks, ranks: the process ids of all of them, pid being that of rank 0. spare: of one that
    has ended, the ranks that had to, since another one of them had. made_of: the ranks, as (incarnation, number), that
    were spare and in whose place its own are."""

    incarnation: str
    host: str
    pid: int
    held: tuple[tuple[str, float], ...]
    ended: Literal["", "failed", "drained"] = ""
    detail: str = ""
    ranks: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()
    made_of: tuple[tuple[str, int], ...] = ()

    @property
    def slot(self) -> str:
        """The place of its host's launcher that it was started in."""
        return self.held[0][0]

    @property
    def role(self) -> str:
        """That it holds, or held last."""
        return self.held[-1][0]

    @property
    def name(self) -> str:
        """As people call it: what it was started as, and what it is by now."""
        return self.slot if self.role == self.slot else f"{self.slot} (as {self.role})"

    @property
    def since(self) -> float:
        return self.held[0][1]


class WorkerRole(NamedTuple):
    """process: that holds it, or did last. moved_to: the role that it holds now instead. detail: why it is so."""

    name: str
    stage: int
    state: RoleState
    process: ProcessState | None = None
    moved_to: str = ""
    detail: str = ""

    @property
    def words(self) -> str:
        return words_of(self.state, self.moved_to)


def words_of(state: RoleState, moved_to: str) -> str:
    """As a cell has it."""
    return f"moved to {moved_to}" if state is RoleState.MOVED else state.value


def lost_name(process: ProcessState, held: bool) -> str:
    """Of a process that has left the job. held: does another one hold the place that it was started in?"""
    return f"{process.name}'s former process" if held else process.name


def follow(
    known: Mapping[str, ProcessState],
    old: State,
    new: State,
    came: Mapping[str, Arrival],
    at: float,
    spare: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[str, ProcessState]:
    """The processes, by incarnation, that are other than in `known` once `old` has become `new`. came: those that have
    registered in between. at: POSIX seconds. spare: of those whose end was reported in between, the ranks that are
    spare."""
    changed: dict[str, ProcessState] = {}

    def known_as(incarnation: str, role: str) -> ProcessState:
        found = changed.get(incarnation) or known.get(incarnation)
        if found is not None:
            return found
        host, pid, ranks, made_of = came.get(incarnation, Arrival())
        return ProcessState(incarnation, host, pid, ((role, at),), ranks=ranks, made_of=made_of)

    for name, member in new.members.items():
        before = old.members[name]
        if member is before:
            continue
        if (incarnation := member.incarnation) is not None and incarnation != before.incarnation:
            process = known_as(incarnation, name)
            if process.role != name:
                process = replace(process, held=(*process.held, (name, at)))
            changed[incarnation] = process
        for gone in member.retired[len(before.retired) :]:
            process = known_as(gone, name)
            registered = gone in known or gone in came or gone in changed
            if registered and not process.ended and process.role == name:
                detail = "another process was started in its place"
                changed[gone] = replace(process, ended="failed", detail=detail)
        if member.state is WorkerState.FAILED and incarnation is not None:
            process = known_as(incarnation, name)
            if not process.ended:
                ended: Literal["failed", "drained"] = "drained" if member.leaving else "failed"
                changed[incarnation] = replace(process, ended=ended, detail=member.detail)
    for incarnation, left in spare.items():
        ended_now = changed.get(incarnation) or known.get(incarnation)
        if ended_now is not None and left:
            changed[incarnation] = replace(ended_now, spare=left)
    return changed


class RankState(StrEnum):
    """Of one rank of a worker. RUNNING: its process is there. DEAD: it has ended. SPARE: it had to end since another
    one of its worker had, and nothing runs in its place. USED: a rank of another worker does by now."""

    RUNNING = "running"
    DEAD = "dead"
    SPARE = "spare"
    USED = "used"


class Rank(NamedTuple):
    """One of a worker's processes. used_by: the worker whose rank is in its place now."""

    number: int
    pid: int
    host: str
    state: RankState
    used_by: str = ""


@dataclass(frozen=True)
class WorkerStates:
    """waiting: does the job wait for a person's choice? paused: has an operator stopped it? stopped: the roles whose
    processes have said that they wait for that. rerouted: micro-batches of other pipelines that a role runs in an
    iteration, by the plan in force. slow: how many times its peers' op times a role takes."""

    state: State
    known: Mapping[str, ProcessState]
    paused: bool = False
    rerouted: Mapping[str, int] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)
    stopped: frozenset[str] = frozenset()
    waiting: bool = False

    @cached_property
    def roles(self) -> dict[str, WorkerRole]:
        """In grid order."""
        return {name: self.role(member) for name, member in self.state.members.items()}

    def count(self) -> Counter[RoleState]:
        """How many roles are in each state: in 10 ms for 16,384, of which `roles` takes 40."""
        counts = Counter(self._held(m) for m in self.state.members.values() if m.state is not WorkerState.FAILED)
        counts.update(self.role(m).state for m in self.state.members.values() if m.state is WorkerState.FAILED)
        return counts

    def heard(self) -> list[float]:
        """When each process that should speak was heard last, by the console's clock."""
        members = ((m, m.last_heard) for m in self.state.members.values())
        return [at for m, at in members if at is not None and self._held(m) in ALIVE]

    @cached_property
    def processes(self) -> dict[str, RoleState]:
        """By incarnation, those that came first first."""
        return {incarnation: self._of(process) for incarnation, process in self.known.items()}

    def ranks(self, process: ProcessState) -> tuple[Rank, ...]:
        """Of a worker of several, in order."""
        out = []
        for number, pid in enumerate(process.ranks):
            state, used_by = RankState.RUNNING, ""
            if process.ended or self.state.over:
                state = RankState.SPARE if number in process.spare and not self.state.over else RankState.DEAD
            if state is RankState.SPARE and (user := self._spares_used.get((process.incarnation, number))):
                state, used_by = RankState.USED, user.role
            out.append(Rank(number, pid, process.host, state, used_by))
        return tuple(out)

    @cached_property
    def spares(self) -> tuple[Rank, ...]:
        """The ranks that run nothing since another one of their worker has ended."""
        ended = (process for process in self.known.values() if process.spare)
        return tuple(rank for process in ended for rank in self.ranks(process) if rank.state is RankState.SPARE)

    @cached_property
    def _spares_used(self) -> dict[tuple[str, int], ProcessState]:
        """By (incarnation, number), the process in whose place a rank of which is."""
        return {rank: process for process in self.known.values() for rank in process.made_of}

    @cached_property
    def missing(self) -> tuple[ProcessState, ...]:
        """The processes that the empty roles are empty for: those that have ended, and that no other has replaced.
        A role whose process took the place of a lost one is empty for the lost one."""
        empty = (self.role(m) for m in self.state.members.values() if m.state is WorkerState.FAILED)
        lost = (self._lost_for(role) for role in empty)
        return tuple({process.incarnation: process for process in lost if process is not None}.values())

    @cached_property
    def moved(self) -> tuple[ProcessState, ...]:
        """The processes that hold another role than that which they were started for."""
        return tuple(p for p in self.known.values() if p.role != p.slot and self._of(p) in ALIVE)

    def why_out(self, names: Iterable[str]) -> dict[str, str]:
        """Of roles that the plan goes without: in words, how each is."""
        return {name: self.roles[name].words for name in names}

    @property
    def condition(self) -> Condition:
        state = self.state
        if state.over or state.halted:
            return Condition(state.job_state.value)
        if state.choosing:
            return Condition.WAITING
        if self.paused and state.current is not None:
            return Condition.PAUSING if self.running_on else Condition.PAUSED
        if state.job_state is JobState.RUNNING and state.current is not None and state.current.failed:
            return Condition.DEGRADED
        return Condition(state.job_state.value)

    @cached_property
    def running_on(self) -> tuple[str, ...]:
        """Of a job that an operator has asked to pause: who is in it, and has not said that it waits."""
        current = self.state.current
        there = (name for name in (current.living if current else ()) if name not in self.stopped)
        gone = (WorkerState.FAILED, WorkerState.FINISHED)
        return tuple(name for name in there if self.state.members[name].state not in gone)

    def role(self, member: Member) -> WorkerRole:
        name, process = member.name, self.known.get(member.incarnation or "")
        state, moved_to, detail = self._held(member), "", member.detail
        if state is RoleState.EMPTY and member.state is WorkerState.FAILED:
            process = self._last_of(name)
            now = self.state.present_at.get(process.incarnation) if process else None
            if process is not None and now is not None and now.state is not WorkerState.FAILED:
                state, moved_to = RoleState.MOVED, now.name
                detail = f"its process holds {now.name} now"
            elif process is not None:
                detail = f"its process moved to {process.role}, and {process.ended or 'ended'} there"
        return WorkerRole(name, member.stage, state, process, moved_to, detail)

    # -- details ----------------------------------------------------------------------------

    def _held(self, member: Member) -> RoleState:
        """EMPTY: nobody holds the role, whatever became of its last process."""
        match member.state:
            case WorkerState.STARTING:
                return RoleState.EMPTY if member.incarnation is None else RoleState.JOINING
            case WorkerState.REJOINING:
                return RoleState.JOINING
            case WorkerState.SUSPECT:
                return RoleState.SUSPECT
            case WorkerState.FINISHED:
                return RoleState.FINISHED
            case WorkerState.FAILED:
                if member.incarnation is None:
                    return RoleState.EMPTY
                process = self.known.get(member.incarnation)
                if process is not None and process.ended == "drained":
                    return RoleState.LEAVING if member.leaving and not self.state.over else RoleState.DRAINED
                return RoleState.FAILED
        if self.paused and member.name in self.stopped and not self.state.over:
            return RoleState.PAUSED
        if self.waiting:
            return RoleState.WAITING
        if self.slow.get(member.name):
            return RoleState.SLOW
        return RoleState.REROUTED if self.rerouted.get(member.name) else RoleState.RUNNING

    def _of(self, process: ProcessState) -> RoleState:
        member = self.state.present_at.get(process.incarnation)
        if member is not None:
            return self._held(member)
        return RoleState.DRAINED if process.ended == "drained" else RoleState.FAILED

    @cached_property
    def _holders(self) -> dict[str, list[tuple[float, ProcessState]]]:
        """Of each role, oldest first."""
        found: dict[str, list[tuple[float, ProcessState]]] = {}
        for process in self.known.values():
            for role, since in process.held:
                found.setdefault(role, []).append((since, process))
        for holders in found.values():
            holders.sort(key=lambda held: held[0])
        return found

    def _last_of(self, role: str) -> ProcessState | None:
        holders = self._holders.get(role)
        return holders[-1][1] if holders else None

    def _lost_for(self, role: WorkerRole) -> ProcessState | None:
        """None: nobody has held it."""
        name, process = role.name, role.process
        for _ in range(len(self.known) + 1):
            if process is None or process.role == name:
                return process
            # It went from here to a place that was empty, for the process that had held that before.
            left = max(i for i, (held, _) in enumerate(process.held) if held == name)
            name, since = process.held[left + 1]
            before = [p for at, p in self._holders[name] if at < since and p is not process]
            process = before[-1] if before else None
        return None
