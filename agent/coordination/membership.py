"""The coordinator's data, all immutable: the state of a job, the events that can happen to it, and the decisions.

`State` holds the job's workers, its generations, what the job waits for, and whose reports count. `now` and every other
time in this file are seconds of one monotonic clock, which the caller reads.

The file also says which node leads the job, as its console sees it. The nodes elect their leader themselves
(agent.nodes.succession). Where too few nodes hear each other for an election, as with two nodes, the console decides.
The console takes nothing from a launcher of an earlier term. So a launcher that has lost the lead and does not know it
does no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from openrecycle.agent.coordination.blame import Complaint, Links
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs.errors import InputError

# -- who leads a job of several nodes, as its console has it ------------------------------------


@dataclass(frozen=True)
class LeadTerm:
    """A leadership: its number, and the node that leads in it. Term 0 means that no node has led yet."""

    term: int = 0
    node: int = 0

    def __str__(self) -> str:
        """Returns the text that a launcher sends with each of its requests to a console."""
        return f"{self.term}/{self.node}"

    @classmethod
    def parse(cls, text: str) -> LeadTerm:
        """Reads what `str` has written. Raises ValueError for any other text."""
        term, slash, node = text.partition("/")
        if not (slash and text.isascii() and term.isdigit() and node.isdigit() and len(text) <= 20):
            raise ValueError(f"got {text[:40]!r}, expected TERM/NODE such as 2/1")
        return cls(int(term), int(node))


def may_speak_as_lead(newest: LeadTerm, sender: LeadTerm) -> tuple[bool, str]:
    """Says whether a launcher's report counts, and why. A launcher of a later term was elected by the nodes: it leads
    from now on."""
    if sender == newest or sender.term > newest.term:
        return True, f"node {sender.node} leads in term {sender.term}"
    return False, f"node {newest.node} leads the job in term {newest.term}: node {sender.node} leads it no more"


def may_take_lead(newest: LeadTerm, wanted: LeadTerm, after: int, unheard: float, borne: float) -> tuple[bool, str]:
    """Says whether the console gives the lead to a node that has too few followers to be elected, and why.

    wanted: the term and the node that asks. after: the newest term that this node knows of. unheard: seconds since the
    newest leader was heard. borne: seconds of silence for which that leader keeps the lead.
    """
    if wanted == newest:
        return True, f"node {wanted.node} has the lead already"  # the answer was lost
    if newest.term >= wanted.term or (newest.term > after and newest.node != wanted.node):
        return False, f"node {newest.node} leads in term {newest.term}"
    if newest.term > after:
        return True, f"node {wanted.node} was given the lead in term {newest.term}, and does not know it"
    if unheard < borne:
        return False, f"node {newest.node}, which leads, was heard {unheard:.1f} s ago"
    return True, f"node {newest.node}, which led, was not heard for {unheard:.1f} s"


# -- limits and modes -------------------------------------------------------------------------

LOST_SECONDS = 3600.0


@dataclass(frozen=True)
class FailureTimeouts:
    """What a worker's silence means after how many seconds. Raises InputError for values that contradict each other.

    heartbeat: the interval at which a worker reports. suspect: the silence after which a worker is marked as suspect,
    at least two heartbeats. dead: the longer silence after which the job goes on without the worker; up to a heartbeat
    longer, where others that fell silent at the same time are lost with it. transfer_grace:
    how long a broken transfer waits for the exit or the silence that explains it, less than `dead`.
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
        """Seconds of silence of all workers after which the job counts as halted, until one is heard again."""
        return max(self.dead, LOST_SECONDS)

    def check_above(self, transfer: float | None, group: float | None) -> None:
        """Raises InputError where a time-out of the job's agents, in seconds, is not above the ones that it must
        outlast. None: the agents have not named it."""
        if transfer is not None and transfer <= self.dead:
            expected = f"more than dead ({self.dead:g} s), the silence after which this console takes a worker out"
            raise InputError("transfer_timeout", transfer, expected)
        if group is not None and transfer is not None and group <= transfer:
            raise InputError("group_timeout", group, f"more than transfer_timeout ({transfer:g} s)")


CHOICE_TIMEOUT = 60.0
LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT = 1.0, 86_400.0


CHECKPOINT, START = "the newest checkpoint", "the start"


def back_to(checkpoints: bool, max_restarts: int) -> str:
    """Says, in words, what all workers go back to when a stage's weights are lost; "": nothing, so the job halts.

    checkpoints: whether the job writes checkpoints. A job that has not written its first one counts as one without.
    """
    return CHECKPOINT if checkpoints else START if max_restarts else ""


class Mode(StrEnum):
    """Who decides how the job goes on when workers are lost.

    AUTOMATIC: the coordinator decides at once. MANUAL: the job waits for an operator to choose; when nobody does in
    time, the coordinator takes the first option.
    """

    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True)
class Candidate:
    """One way to go on after workers are lost. `name` is its name in planner.simulation.policy.

    failed: the places that are empty under this option. moves: (from, to) of each worker that changes its stage.
    partition: layers per stage; (): no layers move.
    rate: samples per second with its plan. share: that rate as a share of the fault-free plan's. slowdown_vs_1f1b: the
    same against fault-free 1F1B. pause: seconds until training goes on. samples: samples until the expected repair.
    plan: the plan's fingerprint; "": the plan is not made yet. text: what the option does and brings, as a sentence
    without its full stop.
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
    """The options that the advisor has compared.

    failed: the workers that were out when the offer was made. candidates: the best one first. better: the name of the
    candidate that is clearly better than re-routing, which the job does anyway; "": there is none.
    """

    failed: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    better: str = ""

    def find(self, name: str) -> Candidate | None:
        return next((c for c in self.candidates if c.name == name), None)


# -- members and generations ------------------------------------------------------------------

AckState = Literal["", "adopted", "formed", "resumed"]
ACK_ORDER: tuple[AckState, ...] = ("", "adopted", "formed", "resumed")

MOST_RETIRED = 64
"""How many earlier incarnations of a place are remembered. An older one is treated as a stranger, whose reports do not
count either."""

LEFT, STATELESS = -1, -2
"""Special values of `Member.generation`. LEFT: the process has left, as it was asked to, or with its work done.
STATELESS: the process is there without its stage's state, and nobody was lost by that: the state of the whole stage is
gone, or the process has come after one that had closed."""

# Members that count as there: in the generation, or able to enter the next one.
PRESENT = frozenset({WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.REJOINING})


class Release(NamedTuple):
    """Why a worker was let go. Either the operator `actor` asked it to leave, or it stands by with the rest of its
    pipeline, because the workers `lost` of that pipeline are gone."""

    actor: str = ""
    stands_by: bool = False
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """One cell of the grid, and the process that holds it.

    incarnation: names the process that counts now. retired: the newest of the earlier incarnations, which are fenced
    for good. generation: the newest generation that this incarnation is in (0: none yet), or LEFT, or STATELESS.
    acknowledged: how far the worker has come in taking up that generation. last_heard: monotonic seconds; None: its
    silence says nothing. draining: the worker reports that its work is done, unless another failure calls it back.
    detail: why it is FAILED, in words. let_go: set where it is FAILED because somebody wanted it out, until another
    process comes. leaving: its launcher may not have been told yet that the worker is to leave.
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
    let_go: Release | None = None

    @property
    def goes(self) -> bool:
        """Whether the worker was asked to leave and its process has not ended yet, as far as is known."""
        return self.leaving and self.generation != LEFT

    @property
    def closed(self) -> bool:
        """Whether its process has said that it has done its work and leaves. Unlike one that is FINISHED for its
        silence, it is not there any more."""
        return self.state is WorkerState.FINISHED and self.generation == LEFT

    def heard_at(self, at: float, draining: bool) -> Member:
        """Returns a copy with the newest heartbeat. This runs for every worker every second, and takes a tenth of the
        time of dataclasses.replace."""
        twin = object.__new__(Member)
        twin.__dict__.update(self.__dict__, last_heard=at, draining=draining)
        return twin

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The newest incarnations of this place, the present one last."""
        return self.retired if self.incarnation is None else self.and_retired(self.incarnation)

    def and_retired(self, incarnation: str) -> tuple[str, ...]:
        """Returns `retired` with one more incarnation. The oldest are dropped, since all of them are written to the
        database again with every newcomer."""
        return (*self.retired, incarnation)[-MOST_RETIRED:]


class Interim(NamedTuple):
    """A plan that is run while some workers take state from a peer. failed: the workers that it does without, including
    those that still take their state."""

    plan_fingerprint: str
    failed: tuple[str, ...]


class LetGo(NamedTuple):
    """A worker of the generation before that is out because somebody wanted it. stands_by: it stands by with the rest
    of its pipeline; otherwise a person has asked it to leave."""

    worker: str
    stands_by: bool


@dataclass(frozen=True)
class Generation:
    """A membership of the job that has been opened.

    joining: those of `living` that first take state from a peer. moves: (from, to) of those that take the state of
    another place than they had. incarnations: the process at each place of `living`. restore: all workers go back to a
    checkpoint or to the start (see `back_to`). interim: the plan that is run until all of `living` have their state and
    their layers. partition: layers per stage that the plan is for; (): the model's stages can't be cut. let_go: members
    of the generation before that are out because somebody wanted it. lost: members of the generation before whose
    process has died or was given up; another process of the same place may be among `joining`.
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
    let_go: tuple[LetGo, ...] = ()
    lost: tuple[str, ...] = ()
    incarnations: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def lives_in(self) -> frozenset[str]:
        """`living` as a set, for quick look-ups among thousands of names."""
        return frozenset(self.living)


@dataclass(frozen=True)
class PendingGeneration:
    """The generation that opens as soon as there is a plan for `failed` and `partition`. Its fields are those of
    `Generation`.

    until: the time at which an operator's choice ends in manual mode; None: nobody is asked.
    """

    living: tuple[str, ...]
    failed: tuple[str, ...]
    joining: tuple[str, ...]
    reason: str
    moves: tuple[tuple[str, str], ...] = ()
    restore: bool = False
    until: float | None = None
    partition: tuple[int, ...] = ()
    let_go: tuple[LetGo, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Broken:
    """Transfers that broke in the generation in force, perhaps without a death. The workers wait for the next
    generation, and each complains once.

    since: when the first complaint came. reporter, worker, detail: who complained first, of whom, and why. complaints:
    those of all workers that have complained.
    """

    since: float
    reporter: str
    worker: str
    detail: str
    complaints: tuple[Complaint, ...] = ()


class Tally(NamedTuple):
    """Counts of the members that the job waits for. unready: those that have not registered, before the first
    generation. unsettled: those of the generation in force that have not resumed yet."""

    unready: int
    unsettled: int


@dataclass(frozen=True)
class State:
    """All that the coordinator knows of one job. members: in grid order.

    committed: iterations committed so far, of `iterations`. halted: why the job can't go on. unheard: the only reason
    for the halt is the silence of all workers, so it ends with the first heartbeat. Only `halt` and `go_on` change
    these two. over: set once the launcher has said that the job ended. back_to: what all workers go back to when a
    stage's weights are lost (see the function `back_to`). own_loop: the job keeps its own training loop, which may have
    checkpoints that nobody else knows of.
    choice_timeout: seconds that an operator has for a choice in manual mode. offer: the newest one.
    frozen_by: the operator who has frozen the plan; "": nobody. links: what is remembered of links that broke.
    held: layers per stage as the workers have them; (): the model's stages can't be cut. moved: the generation and the
    iteration since which they have them; zeros: since the start. unmovable: layers per stage that the workers could not
    take when they were asked to. Only a person asks for these again.
    """

    members: Mapping[str, Member]
    iterations: int
    current: Generation | None = None
    pending: PendingGeneration | None = None
    broken: Broken | None = None
    committed: int = 0
    halted: str = ""
    unheard: bool = False
    over: JobState | None = None
    over_reason: str = ""
    back_to: str = ""
    own_loop: bool = False
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
        back_to: str = "",
        own_loop: bool = False,
        partition: tuple[int, ...] = (),
    ) -> State:
        """Returns the state before any worker has registered. partition: layers per stage at the start."""
        cells = [(f"W{p}_{s}", s) for p in range(pipelines) for s in range(stages)]
        members = {name: Member(name, stage) for name, stage in cells}
        return cls(members, iterations, back_to=back_to, own_loop=own_loop, held=partition)

    @property
    def generation(self) -> int:
        """The newest generation's number; 0 before the first."""
        return self.current.number if self.current else 0

    def halt(self, text: str, *, unheard: bool = False) -> State:
        return replace(self, halted=text, unheard=unheard)

    def go_on(self) -> State:
        return replace(self, halted="", unheard=False) if self.halted else self

    @property
    def moving(self) -> bool:
        """Whether layers are on their way to other stages."""
        return self.current is not None and self.current.partition != self.held and not (self.over or self.halted)

    @property
    def interim(self) -> Interim | None:
        """The plan that workers run while others take state or layers from a peer; None: nobody takes any, or all
        wait."""
        current = self.current
        if current is None or current.interim is None or self.over or self.halted:
            return None
        if self.moving:
            return current.interim
        lacking = current.lives_in.intersection(current.interim.failed)
        there, trains = map(self._formed, lacking), (self._formed(n) for n in current.living if n not in lacking)
        return current.interim if not all(there) and any(trains) else None

    @property
    def restoring(self) -> bool:
        """Whether some worker may not have gone back yet to the checkpoint of this generation. No worker says that it
        has formed before all have gone back (agent.workers.recovery)."""
        current = self.current
        return current is not None and current.restore and not any(self._formed(name) for name in current.living)

    @property
    def choosing(self) -> bool:
        """Whether the job waits for an operator to choose how it goes on."""
        return self.pending is not None and self.pending.until is not None

    @property
    def settled(self) -> bool:
        """Whether all members of the current generation have committed an iteration in it, and no other one is due."""
        return self.current is not None and self.pending is None and not self.tally.unsettled

    @property
    def without(self) -> tuple[str, ...]:
        """The workers that the current generation goes without: also those that have failed since, where an own loop is
        about to end, and no other generation is to open."""
        current = self.current
        if current is None:
            return ()
        return current.failed + tuple(n for n in current.living if self.members[n].state is WorkerState.FAILED)

    def unsettled(self) -> list[Member]:
        """Returns the members of the current generation that have not resumed yet, in grid order."""
        return [self.members[name] for name in (self.current.living if self.current else ()) if self._waits(name)]

    @cached_property
    def tally(self) -> Tally:
        """The counts of who is waited for. They are counted once, and `with_member` updates them: thousands of workers
        report one after the other, and a new count for each would take too long."""
        members = self.members.values()
        return Tally(sum(_unready(m) for m in members), len(self.unsettled()))

    @cached_property
    def present_at(self) -> Mapping[str | None, Member]:
        """The members by their incarnation. It is kept, since thousands of processes may be looked up."""
        return {member.incarnation: member for member in self.members.values()}

    def hosts(self, known: Mapping[str, str]) -> list[tuple[int, str]]:
        """Returns (stage, host) of each place whose newest process is in `known`, which has the host of each
        incarnation."""
        return [
            (member.stage, known[newest])
            for member in self.members.values()
            if (newest := next(reversed(member.incarnations), "")) in known
        ]

    def _formed(self, name: str) -> bool:
        return self.members[name].acknowledged in ("formed", "resumed")

    def _waits(self, name: str) -> bool:
        member = self.members[name]
        # Who has failed stays in the last generation of an own loop. A job that has halted is not settled by that.
        gone = member.state is WorkerState.FINISHED or (member.state is WorkerState.FAILED and not self.halted)
        return member.acknowledged != "resumed" and not gone

    def with_member(self, member: Member) -> State:
        """Returns a state with this member in place of the one of the same name."""
        name = member.name
        new = replace(self, members={**self.members, name: member})
        if known := self.__dict__.get("tally"):
            unready = known.unready + _unready(member) - _unready(self.members[name])
            in_generation = self.current is not None and name in self.current.lives_in
            unsettled = known.unsettled + (new._waits(name) - self._waits(name) if in_generation else 0)
            new.__dict__["tally"] = Tally(unready, unsettled)
        return new

    def with_heard(self, members: Mapping[str, Member]) -> State:
        """Returns a state with these members, of whom some have been heard. Heartbeats change nobody's part in a
        generation, so the tally stays as it is."""
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
    """Says whether the first generation waits for this member."""
    return member.state is not WorkerState.STARTING or not member.incarnation


def peer_of(reporter: str, worker: str) -> str:
    """Returns, in words, whom a transfer failed with. A reporter that can't tell names itself as the worker."""
    return "another worker" if worker == reporter else worker


def returned(state: State) -> list[str]:
    """Returns the workers that are back and are not in the current generation."""
    return [
        m.name for m in state.members.values() if m.state is WorkerState.REJOINING and m.generation != state.generation
    ]


# -- whose report it is, and whether it counts: reports of a process that is out of the job change nothing


def holder(state: State, worker: str, incarnation: str) -> Member | None:
    """Returns the member that a report comes from. The report names `worker`, and its process may not know yet that it
    was given another place. None: no such worker."""
    member = state.members.get(worker)
    if member is None or member.incarnation == incarnation or incarnation in member.retired:
        return member
    return state.present_at.get(incarnation, member)


def place_of(members: Mapping[str, Member], incarnation: str) -> Member | None:
    """Returns the member that this process holds or has held; None: the process is unknown."""
    return next((m for m in members.values() if incarnation in m.incarnations), None)


def counts(member: Member, incarnation: str) -> bool:
    """Says whether this process is the one of this place. One that was asked to leave counts until it has ended."""
    return member.incarnation == incarnation and (member.state is not WorkerState.FAILED or member.goes)


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


# -- what can happen ----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerRegistered:
    """A new process asks for the place `worker`. reports: it sends heartbeats. The silence of one that does not says
    nothing: such a worker is lost only when its process ends. of_spares: all its ranks run in the place of spare ranks.
    """

    worker: str
    incarnation: str
    reports: bool = True
    of_spares: bool = False


def all_were_spare(ranks: Collection[int], made_of: Collection[tuple[str, int]]) -> bool:
    """Says whether all ranks of a worker run in the place of spare ranks. ranks: their process ids. made_of: those
    spare ranks, as (incarnation, rank)."""
    return 0 < len(ranks) == len(made_of)


class LastHeartbeat(NamedTuple):
    """heard: when it came, in monotonic seconds. draining: the worker says that its work is done."""

    incarnation: str
    heard: float
    draining: bool = False


@dataclass(frozen=True)
class HeartbeatsReceived:
    """The heartbeats that came since the last such event: the newest one of each worker, by its name."""

    beats: Mapping[str, LastHeartbeat]


@dataclass(frozen=True)
class Exited:
    """A launcher saw the process of `worker` end, or that process says itself that it leaves. done: with its work done,
    so that it is no failure."""

    worker: str
    incarnation: str
    reporter: str
    detail: str = ""
    done: bool = False


@dataclass(frozen=True)
class TransferBroken:
    """`reporter`, with this incarnation, could not exchange data with `worker` (its best guess).

    generation: the one in which it saw that; 0 when it did not say.
    """

    reporter: str
    incarnation: str
    worker: str
    generation: int = 0
    detail: str = ""


@dataclass(frozen=True)
class OpRaised:
    """An op of a micro-batch raised an exception in `worker`. detail: which op, and what the launcher does about it."""

    worker: str
    incarnation: str
    generation: int
    detail: str


@dataclass(frozen=True)
class StateLost:
    """`worker` and its peers have found that a part of their stage's state is lost: only workers that are gone had it.
    detail: the same in a sentence."""

    worker: str
    incarnation: str
    generation: int
    detail: str


@dataclass(frozen=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True)
class Stalled:
    """The console itself stood still for so long, so silence in that time says nothing about the workers."""

    seconds: float


@dataclass(frozen=True)
class PlanReady:
    """There is a plan for the generation without `failed`. origin: where the plan is from, in words. moves: (from, to)
    of workers that change their stage first, which makes the plan shorter."""

    failed: tuple[str, ...]
    fingerprint: str
    origin: str
    moves: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PlanRefused:
    """There is no plan for these failures. detail: why."""

    failed: tuple[str, ...]
    detail: str


@dataclass(frozen=True)
class GenerationAcknowledged:
    worker: str
    incarnation: str
    generation: int
    state: AckState


@dataclass(frozen=True)
class IterationsCommitted:
    """count: iterations committed so far."""

    count: int


@dataclass(frozen=True)
class InterimPlanUsed:
    """The members of `generation` run another plan until newcomers have their state, as the launcher has said."""

    generation: int
    interim: Interim


@dataclass(frozen=True)
class LayersMoved:
    """The workers of `generation` have the layers of `partition` from `iteration` on.

    text: what the move took, in words. problem: why the layers could not move, so that the workers keep what they have;
    "": they have moved.
    """

    generation: int
    iteration: int
    partition: tuple[int, ...]
    text: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Finished:
    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class ConsoleRestarted:
    """The console has read the state back from the database. reason: why, in words. listened: it has heard workers all
    the time, so that their silence counts; else it has heard nobody meanwhile."""

    reason: str = "the console was restarted and took the job up again"
    listened: bool = False


@dataclass(frozen=True)
class LeadChanged:
    """Another launcher leads now, and goes on from what it knows (agent.nodes), so all workers form anew. lost: the
    incarnations that ended with the leader before, by worker."""

    lost: Mapping[str, str]
    detail: str


@dataclass(frozen=True)
class Offered:
    """The advisor has compared the options for when `failed` are out. offer: None: it could not, for `reason`."""

    failed: tuple[str, ...]
    offer: Offer | None
    reason: str = ""


@dataclass(frozen=True)
class Chosen:
    """The operator `actor` picked the candidate `name`. failed: the workers that were out in what the operator saw;
    None: not said."""

    name: str
    actor: str
    failed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModeSet:
    """An operator set the mode. choice_timeout: seconds that the job waits for an operator in manual mode."""

    mode: Mode
    choice_timeout: float
    actor: str


@dataclass(frozen=True)
class PlanFrozen:
    """An operator freezes the plan in force, or unfreezes it (see agent.coordination.generations)."""

    frozen: bool
    actor: str


@dataclass(frozen=True)
class DrainAsked:
    """An operator wants `worker` to leave the job with the next generation."""

    worker: str
    actor: str


@dataclass(frozen=True)
class RestartAsked:
    """Somebody wants a process for `worker` again, and the launcher is about to be told."""

    worker: str


@dataclass(frozen=True)
class UsePlan:
    """The plan of this fingerprint is to be in force with the same workers.

    failed: the workers that the plan does without. actor: the operator who wants it; "": nobody asked, and `reason`
    says why. partition: layers per stage that the plan is for; (): they stay.
    """

    fingerprint: str
    failed: tuple[str, ...]
    actor: str
    reason: str = ""
    partition: tuple[int, ...] = ()


Event = (
    WorkerRegistered
    | HeartbeatsReceived
    | Exited
    | TransferBroken
    | OpRaised
    | StateLost
    | Tick
    | Stalled
    | PlanReady
    | PlanRefused
    | GenerationAcknowledged
    | IterationsCommitted
    | InterimPlanUsed
    | LayersMoved
    | Finished
    | ConsoleRestarted
    | LeadChanged
    | Offered
    | Chosen
    | ModeSet
    | PlanFrozen
    | DrainAsked
    | RestartAsked
    | UsePlan
)


# -- what may be decided ------------------------------------------------------------------------


@dataclass(frozen=True)
class NeedPlan:
    """A plan without `failed` is needed. partition: layers per stage that it is to be for; (): the model's stages can't
    be cut."""

    failed: tuple[str, ...]
    partition: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpenGeneration:
    generation: Generation


@dataclass(frozen=True)
class Note:
    """A line for the event feed."""

    severity: Literal["info", "warning", "error"]
    kind: Literal["worker", "failure", "generation", "recovery", "plan", "job", "console", "operator", "step"]
    text: str
    worker: str | None = None


@dataclass(frozen=True)
class Refuse:
    """The event does not count, and changes nothing. code: as in agent.messages.protocol.ProblemDetails; `recovering`
    passes when the job trains."""

    code: Literal["unknown_worker", "fenced", "job_over", "invalid", "no_choice", "not_running", "frozen", "recovering"]
    detail: str


Decision = NeedPlan | OpenGeneration | Note | Refuse


@dataclass(frozen=True)
class Transition:
    """What one event led to. reason: a sentence for people. passing: nothing in the new state is worth storing, as with
    the times at which workers were last heard."""

    state: State
    decisions: tuple[Decision, ...] = ()
    reason: str = ""
    passing: bool = False

    @property
    def refusal(self) -> Refuse | None:
        return next((d for d in self.decisions if isinstance(d, Refuse)), None)


def refuse(state: State, code: Any, detail: str) -> Transition:
    return Transition(state, (Refuse(code, detail),), detail)
