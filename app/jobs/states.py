"""The states of processes and roles in a job, and one sentence about what the coordinator does or waits for, and why.
Pure.

A worker process (host, process id, since when) holds a role (a place of the grid, such as stage 2 of pipeline 1). A
role can be given to another process, and a process can end or take another role, so each has a state of its own.
Everything that shows the state of a worker takes it from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from openrecycle.agent.coordination.coordinator import nobody_heard, step
from openrecycle.agent.coordination.membership import Exited, FailureTimeouts, Member, State, peer_of, returned
from openrecycle.agent.messages.protocol import JobState, Restart, WorkerState
from openrecycle.planner.jobs.words import counts, layers_move, layers_moved, names, percent, whole_sentence


class RoleState(StrEnum):
    """The state of a role or of a process.

    RUNNING: the process trains. REROUTED: it also runs micro-batches of other pipelines; it has committed an iteration
    by such a plan. SLOW: it trains, but takes longer than its peers. WAITING: for a person to choose how the job goes
    on, or because the job is halted. PAUSED: it waits because an operator has paused the job. SUSPECT: its heartbeats
    are overdue. JOINING: it has registered and does not train yet. LEAVING: it was asked to go, and has not gone yet.
    FINISHED: it left after the last iteration. ENDED: the job was stopped before that.
    A role that nobody holds is DRAINED or FAILED, as its last process ended; MOVED if that process holds another role;
    EMPTY if no process has held it yet, or its process moved on and has ended since.
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
    ENDED = "ended"


# Nobody trains in a role of these states.
OUT = frozenset({RoleState.LEAVING, RoleState.MOVED, RoleState.DRAINED, RoleState.FAILED, RoleState.EMPTY})
# The process of such a role has the weights of its stage.
HOLDING = frozenset(
    {RoleState.RUNNING, RoleState.REROUTED, RoleState.SLOW, RoleState.WAITING, RoleState.PAUSED, RoleState.SUSPECT}
)
# The process of such a role can be killed.
ALIVE = HOLDING | {RoleState.JOINING}


class Condition(StrEnum):
    """The condition of a job, in the word that stands first wherever the job is shown.

    DEGRADED: the plan goes without some workers. SILENT: heartbeats of workers that the plan needs are overdue, so that
    nobody knows whether they train."""

    STARTING = "starting"
    RUNNING = "running"
    SILENT = "workers silent"
    DEGRADED = "degraded"
    PAUSING = "pausing"
    PAUSED = "paused"
    WAITING = "waiting for you"
    RECOVERING = "recovering"
    HALTED = "halted"
    FINISHED = "finished"
    STOPPED = "stopped"


class Arrival(NamedTuple):
    """What a process reports of itself when it registers; the fields are those of ProcessState."""

    host: str = ""
    pid: int = 0
    ranks: tuple[int, ...] = ()
    made_of: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PlannedRestart:
    """What a launcher does by itself about a process that has ended: agent.messages.protocol.Restart, with the time of
    the restart (`at`, POSIX seconds)."""

    number: int
    most: int
    at: float
    node: int | None = None

    @classmethod
    def of(cls, said: Restart, at: float) -> PlannedRestart:
        return cls(said.number, said.most, at + said.seconds, said.node)

    @property
    def comes(self) -> bool:
        """Whether another process is started; not if the launcher has used up its restarts."""
        return self.number <= self.most

    def words(self, now: float) -> str:
        seconds = min(max(0.0, self.at - now), 1e9)
        return Restart(number=self.number, most=self.most, seconds=seconds, node=self.node).words


@dataclass(frozen=True)
class ProcessState:
    """A worker's process, living or ended.

    held: the roles that it was given, oldest first, and since when (POSIX seconds; 0: not known). ended: how it left
    the job; "": it has not left, or ended with the job. detail: why it left, in words. stands_by: it was drained with
    the rest of its pipeline. restart: what its launcher does about its end.

    For a worker of several ranks, ranks: their process ids (pid is that of rank 0). spare: once the worker has ended,
    the ranks that had to end only because another rank had. made_of: the spare ranks, as (incarnation, number), whose
    places its own ranks took."""

    incarnation: str
    host: str
    pid: int
    held: tuple[tuple[str, float], ...]
    ended: Literal["", "failed", "drained"] = ""
    detail: str = ""
    ranks: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()
    made_of: tuple[tuple[str, int], ...] = ()
    restart: PlannedRestart | None = None
    stands_by: bool = False

    @property
    def slot(self) -> str:
        """The place that the process was started for by its host's launcher."""
        return self.held[0][0]

    @property
    def role(self) -> str:
        """The role that the process holds, or held last."""
        return self.held[-1][0]

    @property
    def name(self) -> str:
        """The process's name for people: the place that it was started for, and its role if that is another one."""
        return self.slot if self.role == self.slot else f"{self.slot} (as {self.role})"

    @property
    def since(self) -> float:
        return self.held[0][1]


class WorkerRole(NamedTuple):
    """A role and its state. process: the one that holds the role, or held it last. moved_to: the role that this process
    holds now instead. detail: the reason for the state, in words."""

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
    """Returns the words for a state, as a cell of the grid shows them."""
    return f"moved to {moved_to}" if state is RoleState.MOVED else state.value


def lost_name(process: ProcessState, held: bool) -> str:
    """Returns the name of a process that has left the job. held: whether another process holds the place that it was
    started for."""
    return f"{process.name}'s former process" if held else process.name


def follow(
    known: Mapping[str, ProcessState],
    states: Sequence[State],
    came: Mapping[str, Arrival],
    at: float,
    spare: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    restarts: Mapping[str, tuple[str, PlannedRestart]] = MappingProxyType({}),
) -> dict[str, ProcessState]:
    """Returns the processes that differ from `known`, by incarnation, after each of `states` has become the next.

    By incarnation, as reported in between: came: processes that registered; spare: the spare ranks of processes that
    ended; restarts: their places, and what their launchers do about their ends. at: POSIX seconds.
    """
    changed: dict[str, ProcessState] = {}

    def known_as(incarnation: str, role: str) -> ProcessState:
        found = changed.get(incarnation) or known.get(incarnation)
        if found is not None:
            return found
        host, pid, ranks, made_of = came.get(incarnation, Arrival())
        return ProcessState(incarnation, host, pid, ((role, at),), ranks=ranks, made_of=made_of)

    changes = ((m, old.members[name]) for old, new in pairwise(states) for name, m in new.members.items())
    for member, before in changes:
        if member is before:
            continue
        name = member.name
        if (incarnation := member.incarnation) is not None and incarnation != before.incarnation:
            process = known_as(incarnation, name)
            if process.role != name:
                process = replace(process, held=(*process.held, (name, at)))
            changed[incarnation] = process
        for gone in member.retired if member.retired != before.retired else ():
            if gone in before.retired:
                continue
            process = known_as(gone, name)
            registered = gone in known or gone in came or gone in changed
            if registered and not process.ended and process.role == name:
                detail = "another process was started in its place"
                changed[gone] = replace(process, ended="failed", detail=detail)
        if member.state is WorkerState.FAILED and incarnation is not None:
            process = known_as(incarnation, name)
            if not process.ended:
                ended: Literal["failed", "drained"] = "drained" if member.let_go else "failed"
                stands_by = member.let_go is not None and member.let_go.stands_by
                changed[incarnation] = replace(process, ended=ended, detail=member.detail, stands_by=stands_by)
    for incarnation, left in spare.items():
        ended_now = changed.get(incarnation) or known.get(incarnation)
        if ended_now is not None and left:
            changed[incarnation] = replace(ended_now, spare=left)
    for incarnation, (role, restart) in restarts.items():
        found, member = changed.get(incarnation) or known.get(incarnation), states[-1].members[role]
        if found is None and member.state is WorkerState.FAILED:
            # The process ended before it registered: the restart is noted at the one that held the place before.
            found = changed.get(member.incarnation or "") or known.get(member.incarnation or "")
        if found is not None:
            changed[found.incarnation] = replace(found, restart=restart)
    return changed


class RankState(StrEnum):
    """The state of one rank of a worker. RUNNING: its process is there. DEAD: it has ended. SPARE: it had to end
    because another rank of its worker had, and nothing runs in its place. USED: like SPARE, but by now a rank of
    another worker runs in its place."""

    RUNNING = "running"
    DEAD = "dead"
    SPARE = "spare"
    USED = "used"


class Rank(NamedTuple):
    """One of a worker's processes. used_by: the role of the worker whose rank is in its place now."""

    number: int
    pid: int
    host: str
    state: RankState
    used_by: str = ""


@dataclass(frozen=True)
class WorkerStates:
    """The states of all roles and processes of one job at one moment.

    state: the membership. known: the processes, by incarnation. paused: an operator has paused the job. stopped: the
    roles whose processes have reported that they wait for that. rerouted: by role, how many micro-batches of other
    pipelines it runs in an iteration by the plan in force. slow: by role, how many times its peers' op times it takes.
    waiting: the job waits for a person's choice. now: POSIX seconds."""

    state: State
    known: Mapping[str, ProcessState]
    paused: bool = False
    rerouted: Mapping[str, int] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)
    stopped: frozenset[str] = frozenset()
    waiting: bool = False
    now: float = 0.0

    @cached_property
    def roles(self) -> dict[str, WorkerRole]:
        """All roles by name, in grid order."""
        return {name: self.role(member) for name, member in self.state.members.items()}

    def count(self) -> Counter[RoleState]:
        """Counts the roles in each state. Takes 10 ms for 16,384 roles; to make `roles` takes 40."""
        counts = Counter(self._held(m) for m in self.state.members.values() if m.state is not WorkerState.FAILED)
        counts.update(self.role(m).state for m in self.state.members.values() if m.state is WorkerState.FAILED)
        return counts

    def alive(self) -> list[Member]:
        """Returns the members whose processes should send heartbeats."""
        return [m for m in self.state.members.values() if self._held(m) in ALIVE]

    def ranks(self, process: ProcessState) -> tuple[Rank, ...]:
        """Returns the ranks of a worker, in order; none for a worker of one rank."""
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
        """The ranks that had to end because another rank of their worker had, and in whose places nothing runs."""
        ended = (process for process in self.known.values() if process.spare)
        return tuple(rank for process in ended for rank in self.ranks(process) if rank.state is RankState.SPARE)

    @cached_property
    def _spares_used(self) -> dict[tuple[str, int], ProcessState]:
        """By the (incarnation, number) of a spare rank: the process that has a rank in its place."""
        return {rank: process for process in self.known.values() for rank in process.made_of}

    @cached_property
    def missing(self) -> tuple[ProcessState, ...]:
        """The processes that have ended and that no other has replaced, so that roles are empty. A role whose process
        took the place of a lost one is empty for the lost one."""
        empty = (self.role(m) for m in self.state.members.values() if m.state is WorkerState.FAILED)
        lost = (self._lost_for(role) for role in empty)
        return tuple({process.incarnation: process for process in lost if process is not None}.values())

    @cached_property
    def moved(self) -> tuple[ProcessState, ...]:
        """The living processes that hold another role than the one that they were started for."""
        return tuple(p for p in self.known.values() if p.role != p.slot and self.of(p) in ALIVE)

    def why_out(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the state of each of these roles in words. names: roles that the plan goes without."""
        return {name: self.roles[name].words for name in names}

    @property
    def condition(self) -> Condition:
        state = self.state
        if state.over or state.halted:
            return Condition(state.job_state.value)
        if state.choosing:
            return Condition.WAITING
        if (current := state.current) is None:
            return Condition(state.job_state.value)
        settled = state.job_state is JobState.RUNNING
        if settled and any(state.members[name].state is WorkerState.SUSPECT for name in current.living):
            return Condition.SILENT
        if self.paused:
            return Condition.PAUSING if self.running_on else Condition.PAUSED
        return Condition.DEGRADED if settled and state.without else Condition(state.job_state.value)

    @property
    def waits_for_operator(self) -> bool:
        """Whether nobody trains until a person does something."""
        state = self.state
        paused = self.paused and state.current is not None and not self.running_on
        return bool(paused or state.halted or state.choosing) and not state.over

    @cached_property
    def running_on(self) -> tuple[str, ...]:
        """Once an operator has paused the job: the workers in its generation that have not reported that they wait."""
        current = self.state.current
        there = (name for name in (current.living if current else ()) if name not in self.stopped)
        gone = (WorkerState.FAILED, WorkerState.FINISHED)
        return tuple(name for name in there if self.state.members[name].state not in gone)

    def role(self, member: Member) -> WorkerRole:
        name, process = member.name, self.known.get(member.incarnation or "")
        state, moved_to, detail = self._held(member), "", member.detail
        if state is RoleState.EMPTY and member.state is WorkerState.FAILED:
            holders = self._holders.get(name)
            process = holders[-1][1] if holders else None
            now = self.state.present_at.get(process.incarnation) if process else None
            if process is not None and now is not None and now.state is not WorkerState.FAILED:
                state, moved_to = RoleState.MOVED, now.name
                detail = f"its process holds {now.name} now"
            elif process is not None:
                detail = f"its process moved to {process.role}, and {process.ended or 'ended'} there"
        elif state is RoleState.FAILED and process is not None and process.restart is not None:
            detail += f"; it is {process.restart.words(self.now)}"
        return WorkerRole(name, member.stage, state, process, moved_to, detail)

    # -- details ----------------------------------------------------------------------------

    def _held(self, member: Member) -> RoleState:
        """Returns a role's state without a look at former holders: EMPTY whenever nobody holds it."""
        match member.state:
            case WorkerState.STARTING:
                return RoleState.EMPTY if member.incarnation is None else RoleState.JOINING
            case WorkerState.REJOINING:
                return RoleState.JOINING
            case WorkerState.SUSPECT:
                return RoleState.SUSPECT
            case WorkerState.FINISHED:
                return RoleState.ENDED if self.state.over is JobState.STOPPED else RoleState.FINISHED
            case WorkerState.FAILED:
                if member.incarnation is None:
                    return RoleState.EMPTY
                process = self.known.get(member.incarnation)
                if process is not None and process.ended == "drained":
                    return RoleState.LEAVING if member.goes and not self.state.over else RoleState.DRAINED
                return RoleState.FAILED
        if self.paused and member.name in self.stopped and not self.state.over:
            return RoleState.PAUSED
        if self.waiting or (self.state.halted and not self.state.unheard):
            return RoleState.WAITING
        if self.slow.get(member.name):
            return RoleState.SLOW
        takes = member.acknowledged == "resumed" and self.rerouted.get(member.name)
        return RoleState.REROUTED if takes else RoleState.RUNNING

    def of(self, process: ProcessState) -> RoleState:
        member = self.state.present_at.get(process.incarnation)
        if member is not None:
            return self._held(member)
        return RoleState.DRAINED if process.ended == "drained" else RoleState.FAILED

    @cached_property
    def _holders(self) -> dict[str, list[tuple[float, ProcessState]]]:
        """By role, its holders and since when, oldest first."""
        found: dict[str, list[tuple[float, ProcessState]]] = {}
        for process in self.known.values():
            for role, since in process.held:
                found.setdefault(role, []).append((since, process))
        for holders in found.values():
            holders.sort(key=lambda held: held[0])
        return found

    def _lost_for(self, role: WorkerRole) -> ProcessState | None:
        """Returns the lost process for which a role is empty; None: no process has held it."""
        name, process = role.name, role.process
        for _ in range(len(self.known) + 1):
            if process is None or process.role == name:
                return process
            # The process left this role for a place that was empty: the lost one is the last that held that place.
            left = max(i for i, (held, _) in enumerate(process.held) if held == name)
            name, since = process.held[left + 1]
            before = [p for at, p in self._holders[name] if at < since and p is not process]
            process = before[-1] if before else None
        return None


class Loss(NamedTuple):
    """What the coordinator would do if a worker ended. halts: the job could not go on before other workers are back.
    restore: all workers would go back to a checkpoint or the start. by: the worker of another stage that would take its
    place; "": none. share: the share of the fault-free plan's throughput that would be left; None: not planned yet."""

    halts: bool = False
    restore: bool = False
    by: str = ""
    share: float | None = None


def loss_of(state: State, worker: str, now: float, failure_timeouts: FailureTimeouts) -> Loss:
    """Asks the coordinator's own step what it would do if `worker` were lost now, in a job that has begun."""
    gone = Exited(worker, state.members[worker].incarnation or "", "launcher")
    after = step(state, gone, now, failure_timeouts).state
    if after.pending is None:
        return Loss(bool(after.halted))
    stage_of = {name: member.stage for name, member in after.members.items()}
    # The job would halt without a worker for each stage, since no plan exists then.
    empty = set(stage_of.values()) - {stage_of[name] for name in after.pending.living}
    # Only moves of this very step count: the pending generation may also hold older ones.
    places = {member.incarnation: name for name, member in state.members.items() if member.incarnation is not None}
    came = {m.name: places.get(m.incarnation or "", m.name) for m in after.members.values()}
    by = [source for to, source in came.items() if source != to and stage_of[to] == stage_of[worker]]
    return Loss(bool(empty), after.pending.restore, "".join(by[-1:]))


MOST_MOVES = 4
TRAINING_ALONE = "Training goes on, unless a worker dies: then the others wait for a console."
"""Shown while no console is known to lead, or the one that leads stands still."""


def sentence(
    worker_states: WorkerStates,
    now: float,
    failure_timeouts: FailureTimeouts,
    *,
    share: float | None = None,
    stood_still: float = 0.0,
    unstorable: str = "",
) -> str:
    """Returns one sentence about what the job does or waits for.

    share: the share of the fault-free throughput at which it has trained of late; None: not known. stood_still: seconds
    for which the console has not looked at the job; they count as no worker's silence. unstorable: why the database
    takes nothing, in words."""
    said = _sentence(worker_states, now - stood_still, failure_timeouts, share)
    state = worker_states.state
    if state.over or (stood_still <= failure_timeouts.suspect and not unstorable):
        return said
    silence = _silence(state, now - stood_still, failure_timeouts)
    if state.settled and not (state.halted or state.broken or worker_states.paused or silence):
        said = TRAINING_ALONE  # anything more may have changed meanwhile
    if unstorable:
        return f"The console can decide nothing, and what is shown may be old: {whole_sentence(unstorable)} {said}"
    return (
        f"The console has been stuck for {stood_still:.0f} s: its database does not answer, or the machine is very "
        f"busy. What is shown is as old as that. {said}"
    )


def _sentence(worker_states: WorkerStates, now: float, failure_timeouts: FailureTimeouts, share: float | None) -> str:
    """Returns the sentence of a console that runs without a break."""
    state = worker_states.state
    if not worker_states.paused or state.over:
        return whole_sentence(_text(worker_states, now, failure_timeouts, share))
    held = "paused: all workers wait before the same iteration until somebody resumes the job."
    if worker_states.running_on:
        held = f"pausing: waiting for {names(worker_states.running_on)} to finish the iteration in hand."
    if state.halted or not state.settled:
        return whole_sentence(f"{held} {whole_sentence(_text(worker_states, now, failure_timeouts, None))}")
    silence = _silence(state, now, failure_timeouts)
    return whole_sentence(" ".join(part for part in (held, silence or _who_is_out(worker_states)) if part))


def over_sentence(state: JobState, reason: str) -> str:
    """Returns the sentence for a job that has ended."""
    ended = f"The job has {'been stopped' if state is JobState.STOPPED else 'finished'}"
    return whole_sentence(f"{ended}: {reason}" if reason else ended)


def _text(worker_states: WorkerStates, now: float, failure_timeouts: FailureTimeouts, share: float | None) -> str:
    state = worker_states.state
    if state.over:
        return over_sentence(state.over, state.over_reason)
    if state.halted:
        return state.halted
    if silence := _silence(state, now, failure_timeouts):
        return silence
    if state.pending and state.pending.until is not None:
        return _waiting_for_a_choice(state, state.pending.until - now)
    if state.pending:
        without = f" without {names(state.pending.failed)}" if state.pending.failed else ""
        return f"Making the plan for generation {state.generation + 1}{without}: {state.pending.reason}."
    if state.current is None:
        return _before_the_first_generation(worker_states)
    if state.broken:
        peer = peer_of(state.broken.reporter, state.broken.worker)
        left = max(0.0, state.broken.since + failure_timeouts.transfer_grace - now)
        return (
            f"{state.broken.reporter} can't exchange data with {peer}: waiting {left:.1f} s more "
            "for an exit or a time-out that explains it, then all connect anew."
        )
    return _in_a_generation(worker_states, share)


def _silence(state: State, now: float, failure_timeouts: FailureTimeouts) -> str:
    """Says which workers are silent, and what will come of it; "": all heartbeats are in time."""
    if (nobody := nobody_heard(state, now)) > failure_timeouts.suspect:
        return (
            f"Waiting for all workers: none has been heard for {nobody:.0f} s. Look at their launcher: it has ended, "
            f"is suspended, or can't reach this console. After {failure_timeouts.lost / 3600:.3g} h the job counts as "
            "halted; no worker is removed for it."
        )
    if silent := _overdue(state, now, failure_timeouts):
        first, others = silent[0], len(silent) - 1
        also = f" and {others:,} other worker{'' if others == 1 else 's'}" if others else ""
        age = now - (first.last_heard or now)
        return f"Waiting for {first.name}{also}: last heard {age:.1f} s ago, dead at {failure_timeouts.dead:g} s."
    return ""


def _waiting_for_a_choice(state: State, left: float) -> str:
    assert state.pending is not None
    # Long times are in minutes: a screen reader reads the sentence whenever it changes.
    failed, seconds = state.pending.failed, f"{max(0.0, left):.0f} s" if left < 120 else f"{left / 60:.0f} min"
    offer = state.offer if state.offer and state.offer.failed == failed else None
    if offer is None:
        return f"Waiting for you: the options without {names(failed)} are being compared; the job goes on in {seconds}."
    count, best = len(offer.candidates), offer.candidates[0].name
    ways = "1 option" if count == 1 else f"{count} options"
    return f"Waiting for you: {ways} to go on without {names(failed)}; the best ({best}) is taken in {seconds}."


def _before_the_first_generation(worker_states: WorkerStates) -> str:
    state = worker_states.state
    failed = [worker_states.role(m) for m in state.members.values() if m.state is WorkerState.FAILED]
    if failed:
        # For workers that launchers start again by themselves, the role's detail says when.
        left = [role for role in failed if not (role.process and role.process.restart and role.process.restart.comes)]
        if left:
            who = names([role.name for role in left])
            return f"Waiting for you to restart {who}, without which training does not begin: {left[0].detail}."
        return f"Waiting for {names([role.name for role in failed])} to be started again: {failed[0].detail}."
    missing = [m.name for m in state.members.values() if m.incarnation is None]
    return f"Waiting for {len(missing):,} of {len(state.members):,} workers to register: {names(missing)}."


def _in_a_generation(worker_states: WorkerStates, share: float | None) -> str:
    state = worker_states.state
    assert state.current is not None
    closed = [name for name in state.current.living if state.members[name].closed]
    failed = [name for name in state.without if name in state.current.lives_in]
    waiting, living = state.unsettled(), len(state.current.living) - len(closed) - len(failed)
    if waiting and state.moving and state.interim is not None:
        return f"Training with {living:,} of {len(state.members):,} workers; {_moving(state)}"
    if waiting:
        steps = {"": "to take up the plan", "adopted": "to form its groups", "formed": "to commit its first iteration"}
        slowest = min(waiting, key=lambda m: list(steps).index(m.acknowledged))
        alike = [m.name for m in waiting if m.acknowledged == slowest.acknowledged]
        return (
            f"Generation {state.generation} ({state.current.reason}): {living - len(waiting):,} of "
            f"{living:,} workers train by it; "
            f"waiting for {names(alike)} {steps[slowest.acknowledged]}."
        )
    everyone = "all" if living == len(state.members) else f"{living:,} of"
    text = f"Training in generation {state.generation} with {everyone} {len(state.members):,} workers"
    if living < len(state.members) and share is not None:
        text += f", at {percent(share, 0)} of the fault-free throughput"
    out = _who_is_out(worker_states)
    work = "The other workers do the work." if out else ""
    moving = _moving(state) if state.moving else ""
    frozen = _frozen(state) if state.frozen_by else ""
    done = _done(closed)
    return " ".join(part for part in (f"{text}.", moving, done and f"{done}.", out, work, frozen) if part)


def _done(closed: Sequence[str]) -> str:
    return f"{names(closed, last=' and ')} {'has' if len(closed) == 1 else 'have'} finished" if closed else ""


def _moving(state: State) -> str:
    assert state.current is not None
    then = state.current.partition
    what = layers_move(layers_moved(state.held, then))
    return f"{what}, beside the training; from then on stages hold {counts(then)}."


def _who_is_out(worker_states: WorkerStates) -> str:
    """Says which processes are gone, and which others took their places."""
    state, missing = worker_states.state, worker_states.missing
    if state.current is None or not state.without:
        return ""
    named = {p: lost_name(p, p.slot in state.current.lives_in.difference(state.without)) for p in missing}
    failed, left = ([name for p, name in named.items() if p.ended == how] for how in ("failed", "drained"))
    standbys = [named[p] for p in missing if p.stands_by]
    drained = [name for name in left if name not in standbys]
    gone = [f"{names(failed, last=' and ')} failed"] if failed else []
    gone += [f"{names(drained, last=' and ')} {'was' if len(drained) == 1 else 'were'} drained"] if drained else []
    gone += [f"{names(standbys, last=' and ')} stand{'s' if len(standbys) == 1 else ''} by"] if standbys else []
    empty, back = state.without, [name for name in returned(state) if name in state.without]
    gone += [f"{names(back, last=' and ')} {'is' if len(back) == 1 else 'are'} back"] if back else []
    gone += [done] if (done := _done([name for name in empty if state.members[name].closed])) else []
    text = "; ".join(gone) or f"{names(empty)} {'is' if len(empty) == 1 else 'are'} empty"
    moved = [f"{p.slot}'s process holds {p.role} now" for p in worker_states.moved if p.role in state.current.lives_in]
    if len(moved) > MOST_MOVES:
        moved = [*moved[:MOST_MOVES], f"and {len(moved) - MOST_MOVES:,} more have moved"]
    sentences = [text, ", ".join(moved), *_restarts(worker_states, named), _spare(worker_states)]
    return ". ".join(part for part in sentences if part) + "."


def _restarts(worker_states: WorkerStates, named: Mapping[ProcessState, str]) -> list[str]:
    """Says what launchers do by themselves about failed processes, with one sentence for all that share the same fate.
    named: all missing processes, with their names."""
    said: dict[str, list[str]] = {}
    for process, name in named.items():
        if process.ended == "failed" and process.restart is not None:
            said.setdefault(process.restart.words(worker_states.now), []).append(name)
    return [f"{names(who, last=' and ')} {'is' if len(who) == 1 else 'are'} {words}" for words, who in said.items()]


def _spare(worker_states: WorkerStates) -> str:
    """Says which hosts have spare ranks, and how many ranks make a worker."""
    on = Counter(rank.host for rank in worker_states.spares)
    if not on:
        return ""
    ranks = max(len(process.ranks) for process in worker_states.known.values())
    total, (first, *others) = on.total(), sorted(on)
    where = names([f"{on[host]} on {host}" for host in sorted(on)]) if others else f"on {first}"
    left = "1 rank is" if total == 1 else f"{total} ranks are"
    return f"{left} spare ({where}); {ranks} on one node become a worker again"


def _frozen(state: State) -> str:
    text = f"The plan is frozen by {state.frozen_by}"
    if back := returned(state):
        there = "is back, and joins" if len(back) == 1 else "are back, and join"
        return f"{text}: {names(back)} {there} when somebody unfreezes the plan."
    return f"{text}: a better plan waits until somebody unfreezes it."


def _overdue(state: State, now: float, failure_timeouts: FailureTimeouts) -> list[Member]:
    """Returns the members whose heartbeats are overdue, the longest silent first.

    RUNNING members are left out. For these the coordinator decides (SUSPECT), since it knows when it was late itself,
    for example because its database was locked; the heartbeat's age alone would blame the worker for that.
    """
    overdue = [
        m
        for m in state.members.values()
        if m.state not in (WorkerState.RUNNING, WorkerState.FAILED, WorkerState.FINISHED)
        and not m.draining
        and m.last_heard is not None
        and now - m.last_heard > failure_timeouts.suspect
    ]
    return sorted(overdue, key=lambda m: m.last_heard or 0.0)


@dataclass(frozen=True)
class JobSummary:
    """One line of the list of jobs. created_at: POSIX seconds. living: workers in the generation whose processes have
    not ended; workers: size of the grid. condition: finer than `state`, in the word that the pages use."""

    job_id: str
    name: str
    state: JobState
    sentence: str
    created_at: float
    generation: int
    living: int
    workers: int
    condition: Condition
