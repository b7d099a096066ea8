"""What the coordinator knows of a job: its workers, its generations, what it waits for, and whose report counts.

Plain immutable data. `now` and every time in here are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from openrecycle.agent.coordination.blame import Complaint, Links
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs.errors import InputError

# -- limits and modes -------------------------------------------------------------------------

LOST_SECONDS = 3600.0
UNHEARD = "halted: no worker has been heard for "
"""Begins the text of a halt that ends with the first heartbeat."""


@dataclass(frozen=True)
class FailureTimeouts:
    """When silence means what, in seconds. Each time-out must lie above the one before.

    heartbeat: how often a worker reports. suspect: silence after which it is marked. dead: silence
    after which the job goes on without it. transfer_grace: how long a broken transfer may wait for
    the exit or the time-out that explains it. Raises InputError.
    """

    heartbeat: float = 1.0
    suspect: float = 5.0
    dead: float = 20.0
    transfer_grace: float = 2.0

    def __post_init__(self) -> None:
        if not 0.05 <= self.heartbeat <= 3600:
            raise InputError("heartbeat", self.heartbeat, "0.05 to 3600 seconds")
        if not self.suspect >= 2 * self.heartbeat:
            raise InputError("suspect", self.suspect, f"at least two heartbeats ({2 * self.heartbeat:g} s)")
        if not self.suspect < self.dead <= 86400:
            raise InputError("dead", self.dead, f"more than suspect ({self.suspect:g} s), at most a day")
        if not 0 < self.transfer_grace < self.dead:
            raise InputError("transfer_grace", self.transfer_grace, f"above 0, below dead ({self.dead:g} s)")

    @property
    def lost(self) -> float:
        """Silence of all workers, after which the job counts as halted; whenever they are heard again, it goes on."""
        return max(self.dead, LOST_SECONDS)

    def check_above(self, transfer: float | None, group: float | None) -> None:
        """The time-outs that a job's agents have said they wait on. Raises InputError."""
        if transfer is not None and transfer <= self.dead:
            expected = f"more than dead ({self.dead:g} s), the silence after which this console takes a worker out"
            raise InputError("transfer_timeout", transfer, expected)
        if group is not None and transfer is not None and group <= transfer:
            raise InputError("group_timeout", group, f"more than transfer_timeout ({transfer:g} s)")


CHOICE_TIMEOUT = 60.0
LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT = 1.0, 86_400.0


class Mode(StrEnum):
    """AUTOMATIC: the coordinator decides at once. MANUAL: when workers are lost, the job waits for an
    operator to choose how it goes on, and the first option is taken when nobody does."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True)
class Candidate:
    """One option, called as in planner.simulation.policy. failed: the places that are empty under it; moves: (from,
    to) of workers that change their stage; partition: layers per stage, () where none move.

    rate: samples per second by its plan; share: of the fault-free plan's, slowdown_vs_1f1b: against
    fault-free 1F1B. pause: seconds until it trains. samples: until the expected repair. plan: its
    fingerprint, "" where it is not made yet. text: what it does and brings, in a sentence without its full stop.
    """

    name: str
    failed: tuple[str, ...]
    moves: tuple[tuple[str, str], ...] = ()
    rate: float = 0.0
    share: float = 0.0
    slowdown_vs_1f1b: float = 0.0
    pause: float = 0.0
    samples: float = 0.0
    plan: str = ""
    text: str = ""
    partition: tuple[int, ...] = ()


@dataclass(frozen=True)
class Offer:
    """failed: the workers that were out when it was made. candidates: best first. better: the name of
    one that is clearly better than re-routing, which is what the job does anyway; "": none is."""

    failed: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    better: str = ""

    def find(self, name: str) -> Candidate | None:
        return next((c for c in self.candidates if c.name == name), None)


# -- members and generations ------------------------------------------------------------------

AckState = Literal["", "adopted", "formed", "resumed"]
ACK_ORDER: tuple[AckState, ...] = ("", "adopted", "formed", "resumed")

MOST_RETIRED = 64
"""Of a place; what an older process says is that of a stranger, which does not count either."""

# Members that count as there: in the generation, or able to enter the next one.
PRESENT = frozenset({WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.REJOINING})


@dataclass(frozen=True)
class Member:
    """One cell of the grid.

    incarnation: of the process that now counts; retired: the newest of those that came before it, fenced for
    good. generation: the newest one that this incarnation is in (0: none yet). acknowledged: how far it
    came in taking up that generation. draining: it says that its work is done, unless another failure
    calls it back. detail: why it is FAILED. leaving: it is out because it was asked to go, and its
    process may not have gone yet.
    """

    name: str
    stage: int
    state: WorkerState = WorkerState.STARTING
    incarnation: str | None = None
    retired: tuple[str, ...] = ()
    generation: int = 0
    acknowledged: AckState = ""
    last_heard: float | None = None
    draining: bool = False
    detail: str = ""
    leaving: bool = False

    def heard_at(self, at: float, draining: bool) -> Member:
        """With its newest heartbeat. As dataclasses.replace, at a tenth of its price: this is done for every worker
        every second."""
        twin = object.__new__(Member)
        twin.__dict__.update(self.__dict__, last_heard=at, draining=draining)
        return twin

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The newest that there were, the present one last."""
        return self.retired if self.incarnation is None else self.and_retired(self.incarnation)

    def and_retired(self, incarnation: str) -> tuple[str, ...]:
        """`retired`, and another one. Of a place that has had many nobody remembers the oldest: each is written anew
        with every newcomer."""
        return (*self.retired, incarnation)[-MOST_RETIRED:]


class Interim(NamedTuple):
    """A plan that is run for a while. plan_fingerprint: "" where the console has not got it. failed: whom it goes
    without, those who take their state among them."""

    plan_fingerprint: str
    failed: tuple[str, ...]


@dataclass(frozen=True)
class Generation:
    """A deployment that has been opened.

    joining: those of `living` that take state from a peer first. moves: (from, to) of workers that
    have taken an empty place on another stage. restore: all go back to the newest checkpoint. interim: what it runs
    until all of `living` have their state, and their layers. partition: layers per stage that its plan is for; (): the
    model's stages can't be cut.
    """

    number: int
    living: tuple[str, ...]
    failed: tuple[str, ...]
    joining: tuple[str, ...]
    plan_fingerprint: str
    reason: str
    moves: tuple[tuple[str, str], ...] = ()
    restore: bool = False
    interim: Interim | None = None
    partition: tuple[int, ...] = ()

    @cached_property
    def lives_in(self) -> frozenset[str]:
        """`living`, to ask for one of thousands."""
        return frozenset(self.living)


@dataclass(frozen=True)
class PendingGeneration:
    """The generation to be opened as soon as the plan for `failed`, with layers cut as `partition` says, is there.

    until: in manual mode, how long an operator may choose another way; None: nobody is asked.
    """

    living: tuple[str, ...]
    failed: tuple[str, ...]
    joining: tuple[str, ...]
    reason: str
    moves: tuple[tuple[str, str], ...] = ()
    restore: bool = False
    until: float | None = None
    partition: tuple[int, ...] = ()


@dataclass(frozen=True)
class Broken:
    """Transfers that broke in the generation in force, the first of them here; nobody may have died. Its workers wait
    for the next generation, and say so once. complaints: of all who have said so."""

    since: float
    reporter: str
    worker: str
    detail: str
    complaints: tuple[Complaint, ...] = ()


class Tally(NamedTuple):
    """Of members that are waited for. unready: before the first generation, those that have not registered. unsettled:
    those of the generation in force that have not resumed yet."""

    unready: int
    unsettled: int


@dataclass(frozen=True)
class State:
    """All that the coordinator knows of one job. members: in grid order.

    committed: iterations committed so far, of `iterations`. halted: why the job can't go on.
    over: set once the launcher has said that the job ended. checkpoints: does the job write any?
    choice_timeout: seconds that an operator has for a choice in manual mode. offer: the newest one.
    frozen_by: the operator who has frozen the plan; "": nobody. links: what is remembered of links that broke.
    held: layers per stage as the workers have them; (): the model's stages can't be cut. moved: the generation and the
    iteration from which on they have; zeros: from the start. unmovable: layers per stage that they could not take when
    they were to: nobody asks for them again but a person.
    """

    members: Mapping[str, Member]
    iterations: int
    current: Generation | None = None
    pending: PendingGeneration | None = None
    broken: Broken | None = None
    committed: int = 0
    halted: str = ""
    over: JobState | None = None
    over_reason: str = ""
    checkpoints: bool = False
    mode: Mode = Mode.AUTOMATIC
    choice_timeout: float = CHOICE_TIMEOUT
    offer: Offer | None = None
    frozen_by: str = ""
    links: Links = field(default_factory=Links)
    held: tuple[int, ...] = ()
    moved: tuple[int, int] = (0, 0)
    unmovable: tuple[int, ...] = ()

    @classmethod
    def new(
        cls,
        pipelines: int,
        stages: int,
        iterations: int,
        *,
        checkpoints: bool = False,
        partition: tuple[int, ...] = (),
    ) -> State:
        """partition: layers per stage at the start."""
        cells = [(f"W{p}_{s}", s) for p in range(pipelines) for s in range(stages)]
        members = {name: Member(name, stage) for name, stage in cells}
        return cls(members, iterations, checkpoints=checkpoints, held=partition)

    @property
    def generation(self) -> int:
        """The newest generation's number; 0 before the first."""
        return self.current.number if self.current else 0

    @property
    def unheard(self) -> bool:
        """Is it halted for nothing but the silence of all its workers?"""
        return self.halted.startswith(UNHEARD)

    @property
    def moving(self) -> bool:
        """Are layers on their way to other stages?"""
        return self.current is not None and self.current.partition != self.held and not (self.over or self.halted)

    @property
    def interim(self) -> Interim | None:
        """What the workers run while some of them take state or layers from a peer; None: nobody does, or all wait."""
        current = self.current
        if current is None or current.interim is None or self.over or self.halted:
            return None
        if self.moving:
            return current.interim
        lacking = current.lives_in.intersection(current.interim.failed)
        there = [self.members[name].acknowledged in ("formed", "resumed") for name in lacking]
        trains = (self.members[n].acknowledged in ("formed", "resumed") for n in current.living if n not in lacking)
        return current.interim if not all(there) and any(trains) else None

    @property
    def restoring(self) -> bool:
        """Is there a worker that may not have gone back to the checkpoint that this generation goes back to?"""
        return self.current is not None and self.current.restore and bool(self.tally.unsettled)

    @property
    def choosing(self) -> bool:
        """Does the job wait for an operator to choose how it goes on?"""
        return self.pending is not None and self.pending.until is not None

    @property
    def settled(self) -> bool:
        """Have all of the current generation's members committed an iteration in it?"""
        return self.current is not None and self.pending is None and not self.tally.unsettled

    def unsettled(self) -> list[Member]:
        """Members of the current generation that have not resumed yet, in grid order."""
        return [self.members[name] for name in (self.current.living if self.current else ()) if self._waits(name)]

    @cached_property
    def tally(self) -> Tally:
        """Counted once; `with_member` keeps it up, so that thousands who report one after the other are not counted
        anew for each."""
        members = self.members.values()
        return Tally(sum(_unready(m) for m in members), len(self.unsettled()))

    @cached_property
    def present_at(self) -> Mapping[str | None, Member]:
        """By the process that holds the place: thousands of strangers may ask, and each is looked for."""
        return {member.incarnation: member for member in self.members.values()}

    def _waits(self, name: str) -> bool:
        member = self.members[name]
        return member.acknowledged != "resumed" and member.state is not WorkerState.FINISHED

    def with_member(self, member: Member) -> State:
        name = member.name
        new = replace(self, members={**self.members, name: member})
        if known := self.__dict__.get("tally"):
            unready = known.unready + _unready(member) - _unready(self.members[name])
            in_generation = self.current is not None and name in self.current.lives_in
            unsettled = known.unsettled + (new._waits(name) - self._waits(name) if in_generation else 0)
            new.__dict__["tally"] = Tally(unready, unsettled)
        return new

    def with_heard(self, members: Mapping[str, Member]) -> State:
        """With these, of whom some have been heard: that changes nobody's part in a generation, so the tally holds."""
        new = replace(self, members=members)
        new.__dict__["tally"] = self.tally
        return new

    @property
    def job_state(self) -> JobState:
        if self.over:
            return self.over
        if self.halted:
            return JobState.HALTED
        if self.current is None:
            return JobState.STARTING
        if self.settled:
            return JobState.RUNNING
        return JobState.STARTING if self.current.number == 1 and not self.pending else JobState.RECOVERING


def _unready(member: Member) -> bool:
    """Is it one that the first generation waits for?"""
    return member.state is not WorkerState.STARTING or not member.incarnation


def peer_of(reporter: str, worker: str) -> str:
    """Whom a transfer failed with; a reporter that can't tell names itself."""
    return "another worker" if worker == reporter else worker


def returned(state: State) -> list[str]:
    """Workers that are back, and in no generation yet."""
    return [
        m.name for m in state.members.values() if m.state is WorkerState.REJOINING and m.generation != state.generation
    ]


# -- whose report it is, and whether it counts: a process that is out of the job changes nothing


def holder(state: State, worker: str, incarnation: str) -> Member | None:
    """Whom a report of `worker` comes from: a process that was given another place may not know it yet."""
    member = state.members.get(worker)
    if member is None or member.incarnation == incarnation or incarnation in member.retired:
        return member
    return state.present_at.get(incarnation, member)


def place_of(members: Mapping[str, Member], incarnation: str) -> Member | None:
    """Whose process it is, or was; None: nobody has heard of it."""
    return next((m for m in members.values() if incarnation in m.incarnations), None)


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


def no_such_worker(state: State, name: str) -> str:
    cells = list(state.members)
    return f"worker: got {name!r}, expected a worker of the job's grid, {cells[0]} to {cells[-1]}"
