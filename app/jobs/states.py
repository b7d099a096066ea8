"""Machines and roles: which process holds which place of the grid, and in what state each of both is; and one sentence
that says what the coordinator does or waits for, and why. Pure.

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

from openrecycle.agent.coordination.coordinator import nobody_heard, step
from openrecycle.agent.coordination.membership import Exited, FailureTimeouts, Member, State, peer_of, returned
from openrecycle.agent.messages.protocol import JobState, Restart, WorkerState
from openrecycle.planner.jobs.words import counts, layers_move, layers_moved, names, percent, whole_sentence


class RoleState(StrEnum):
    """Of a role and of a process.

    RUNNING: its process trains. REROUTED: and runs other pipelines' micro-batches beside its own. SLOW: and takes
    longer than its peers. WAITING: for a person to choose how the job goes on, or in a job that is halted. PAUSED: it
    waits, since an operator has stopped the job. SUSPECT: heartbeats overdue.
    JOINING: registered, does not train yet. LEAVING: asked to go, and has not gone yet. FINISHED: left after the last
    iteration. ENDED: with its job, which was stopped before that.
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
    ENDED = "ended"


# Nobody trains there.
OUT = frozenset({RoleState.LEAVING, RoleState.MOVED, RoleState.DRAINED, RoleState.FAILED, RoleState.EMPTY})
# Its process has the weights of its stage.
HOLDING = frozenset(
    {RoleState.RUNNING, RoleState.REROUTED, RoleState.SLOW, RoleState.WAITING, RoleState.PAUSED, RoleState.SUSPECT}
)
# Its process can be killed.
ALIVE = HOLDING | {RoleState.JOINING}


class Condition(StrEnum):
    """Of a job, in the word that stands first wherever it is spoken of.

    DEGRADED: some are out of the plan. SILENT: heartbeats are overdue of workers that the plan needs, so that nobody
    knows whether they train."""

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
    """What a process says of itself when it registers; see ProcessState."""

    host: str = ""
    pid: int = 0
    ranks: tuple[int, ...] = ()
    made_of: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PlannedRestart:
    """What a launcher does by itself about a process that is gone, as agent.messages.protocol.Restart has it. at: POSIX
    seconds."""

    number: int
    most: int
    at: float
    node: int | None = None

    @classmethod
    def of(cls, said: Restart, at: float) -> PlannedRestart:
        return cls(said.number, said.most, at + said.seconds, said.node)

    @property
    def comes(self) -> bool:
        """Is another one started?"""
        return self.number <= self.most

    def words(self, now: float) -> str:
        seconds = min(max(0.0, self.at - now), 1e9)
        return Restart(number=self.number, most=self.most, seconds=seconds, node=self.node).words


@dataclass(frozen=True)
class ProcessState:
    """held: the roles that it was given, oldest first, and since when (POSIX seconds; 0: not known). ended: how it
    left the job; "": it has not, or with the job. stands_by: it was drained with the rest of its pipeline. detail: why.

    Of a worker of several ranks, ranks: the process ids of all of them, pid being that of rank 0. spare: of one that
    has ended, the ranks that had to, since another one of them had. made_of: the ranks, as (incarnation, number), that
    were spare and in whose place its own are. restart: of one that has ended, what its launcher does about it."""

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
    restarts: Mapping[str, tuple[str, PlannedRestart]] = MappingProxyType({}),
) -> dict[str, ProcessState]:
    """The processes, by incarnation, that are other than in `known` once `old` has become `new`. came: those that have
    registered in between. at: POSIX seconds. spare: of those whose end was reported in between, the ranks that are
    spare; restarts: their places, and what is done about them."""
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
        found, member = changed.get(incarnation) or known.get(incarnation), new.members[role]
        if found is None and member.state is WorkerState.FAILED:
            # That one has ended before it registered: it is about the one before.
            found = changed.get(member.incarnation or "") or known.get(member.incarnation or "")
        if found is not None:
            changed[found.incarnation] = replace(found, restart=restart)
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
    iteration, by the plan in force. slow: how many times its peers' op times a role takes. now: POSIX seconds."""

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
        """In grid order."""
        return {name: self.role(member) for name, member in self.state.members.items()}

    def count(self) -> Counter[RoleState]:
        """How many roles are in each state: in 10 ms for 16,384, of which `roles` takes 40."""
        counts = Counter(self._held(m) for m in self.state.members.values() if m.state is not WorkerState.FAILED)
        counts.update(self.role(m).state for m in self.state.members.values() if m.state is WorkerState.FAILED)
        return counts

    def alive(self) -> list[Member]:
        """Those whose process should speak."""
        return [m for m in self.state.members.values() if self._held(m) in ALIVE]

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
        return tuple(p for p in self.known.values() if p.role != p.slot and self.of(p) in ALIVE)

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
        if (current := state.current) is None:
            return Condition(state.job_state.value)
        settled = state.job_state is JobState.RUNNING
        if settled and any(state.members[name].state is WorkerState.SUSPECT for name in current.living):
            return Condition.SILENT
        if self.paused:
            return Condition.PAUSING if self.running_on else Condition.PAUSED
        return Condition.DEGRADED if settled and current.failed else Condition(state.job_state.value)

    @property
    def waits_for_operator(self) -> bool:
        """Does nobody train, until a person does something?"""
        state = self.state
        paused = self.paused and state.current is not None and not self.running_on
        return bool(paused or state.halted or state.choosing) and not state.over

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
        elif state is RoleState.FAILED and process is not None and process.restart is not None:
            detail += f"; it is {process.restart.words(self.now)}"
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
        return RoleState.REROUTED if self.rerouted.get(member.name) else RoleState.RUNNING

    def of(self, process: ProcessState) -> RoleState:
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


class Loss(NamedTuple):
    """What the coordinator would do about a worker's end. halts: can nobody go on before others are back? restore: do
    all go back? by: the worker of another stage that takes its place then, "": none, as where they go back for
    something else. share: of the fault-free plan's throughput, that is left; None: not planned yet."""

    halts: bool = False
    restore: bool = False
    by: str = ""
    share: float | None = None


def loss_of(state: State, worker: str, now: float, failure_timeouts: FailureTimeouts) -> Loss:
    """By the coordinator itself. worker: who is lost now, of a job that has begun."""
    gone = Exited(worker, state.members[worker].incarnation or "", "launcher")
    after = step(state, gone, now, failure_timeouts).state
    if after.pending is None:
        return Loss(bool(after.halted))
    stage_of = {name: member.stage for name, member in after.members.items()}
    # Without a worker for each stage there is no plan, and the job halts for that.
    empty = set(stage_of.values()) - {stage_of[name] for name in after.pending.living}
    # Of those that go there by this step alone: an older move may be in the pending generation, too.
    places = {member.incarnation: name for name, member in state.members.items() if member.incarnation is not None}
    came = {m.name: places.get(m.incarnation or "", m.name) for m in after.members.values()}
    by = [source for to, source in came.items() if source != to and stage_of[to] == stage_of[worker]]
    return Loss(bool(empty), after.pending.restore, "".join(by[-1:]))


MOST_MOVES = 4
TRAINING_ALONE = "Training goes on, unless a worker dies: then the others wait for a console."
"""While no console is known to lead, or that one does not get on."""


def sentence(
    worker_states: WorkerStates,
    now: float,
    failure_timeouts: FailureTimeouts,
    *,
    share: float | None = None,
    stood_still: float = 0.0,
    unstorable: str = "",
) -> str:
    """share: of the fault-free throughput, that it trains at of late; None: not known. stood_still: seconds for which
    the console has not looked at the job, which are nobody's silence. unstorable: why the database takes nothing."""
    said = _sentence(worker_states, now - stood_still, failure_timeouts, share)
    state = worker_states.state
    if state.over or (stood_still <= failure_timeouts.suspect and not unstorable):
        return said
    silence = _silence(state, now - stood_still, failure_timeouts)
    if state.settled and not (state.halted or state.broken or worker_states.paused or silence):
        said = TRAINING_ALONE  # what else there is to say may have changed
    if unstorable:
        return f"The console can decide nothing, and what is shown may be old: {whole_sentence(unstorable)} {said}"
    return (
        f"The console has been stuck for {stood_still:.0f} s: its database does not answer, or the machine is very "
        f"busy. What is shown is as old as that. {said}"
    )


def _sentence(worker_states: WorkerStates, now: float, failure_timeouts: FailureTimeouts, share: float | None) -> str:
    """See `sentence`."""
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
    """Of a job that has ended."""
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
    """Who is not heard, and what will come of it; "": heartbeats of all are in time."""
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
    # In minutes while there are many: the sentence is read out whenever it changes.
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
        # Of those that are started again by themselves, the detail says when.
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
    waiting, living = state.unsettled(), len(state.current.living)
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
    return " ".join(part for part in (f"{text}.", moving, out, work, frozen) if part)


def _moving(state: State) -> str:
    assert state.current is not None
    then = state.current.partition
    what = layers_move(layers_moved(state.held, then))
    return f"{what}, beside the training; from then on stages hold {counts(then)}."


def _who_is_out(worker_states: WorkerStates) -> str:
    """Which processes are gone, and who took their places."""
    state, missing = worker_states.state, worker_states.missing
    if state.current is None or not state.current.failed:
        return ""
    named = {p: lost_name(p, p.slot in state.current.lives_in) for p in missing}
    failed, left = ([name for p, name in named.items() if p.ended == how] for how in ("failed", "drained"))
    standbys = [named[p] for p in missing if p.stands_by]
    drained = [name for name in left if name not in standbys]
    gone = [f"{names(failed, last=' and ')} failed"] if failed else []
    gone += [f"{names(drained, last=' and ')} {'was' if len(drained) == 1 else 'were'} drained"] if drained else []
    gone += [f"{names(standbys, last=' and ')} stand{'s' if len(standbys) == 1 else ''} by"] if standbys else []
    empty = state.current.failed
    text = "; ".join(gone) or f"{names(empty)} {'is' if len(empty) == 1 else 'are'} empty"
    moved = [f"{p.slot}'s process holds {p.role} now" for p in worker_states.moved if p.role in state.current.lives_in]
    if len(moved) > MOST_MOVES:
        moved = [*moved[:MOST_MOVES], f"and {len(moved) - MOST_MOVES:,} more have moved"]
    sentences = [text, ", ".join(moved), *_restarts(worker_states, named), _spare(worker_states)]
    return ". ".join(part for part in sentences if part) + "."


def _restarts(worker_states: WorkerStates, named: Mapping[ProcessState, str]) -> list[str]:
    """What launchers do by themselves about those that have failed, in a sentence for all of whom the same is true.
    named: all that are missing."""
    said: dict[str, list[str]] = {}
    for process, name in named.items():
        if process.ended == "failed" and process.restart is not None:
            said.setdefault(process.restart.words(worker_states.now), []).append(name)
    return [f"{names(who, last=' and ')} {'is' if len(who) == 1 else 'are'} {words}" for words, who in said.items()]


def _spare(worker_states: WorkerStates) -> str:
    """Which ranks run nothing, and what for."""
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
    """Whose heartbeats are, the longest silent first. Of a running one the coordinator says so, which knows when it was
    late itself (its database was locked): its age alone would put that on the worker."""
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
    not ended; workers: size of the grid. condition: how it is, in the word that the pages use: also whether it is
    degraded, paused, or waits for a person, and whether workers that it needs are silent."""

    job_id: str
    name: str
    state: JobState
    sentence: str
    created_at: float
    generation: int
    living: int
    workers: int
    condition: Condition
