"""What the coordinator knows of a job, what can happen to it, and what may be decided: plain immutable data.

What is known: its workers, its generations, what it waits for, whose report counts, and which node leads it. `now` and
every time in here are seconds of one monotonic clock, which is asked elsewhere.

The lead, as a console has it: the newest term, whose it is, and who may have the next. The nodes elect their lead
themselves (agent.nodes.succession). Where those that hear each other are too few for that, as with two nodes, the
console decides. It takes nothing from a launcher of an earlier term: so whoever has lost the lead, and does not know
it, does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """A leadership: its number, and the node that leads in it. 0: nobody has led yet."""

    term: int = 0
    node: int = 0

    def __str__(self) -> str:
        """As a launcher says it with whatever it asks of a console."""
        return f"{self.term}/{self.node}"

    @classmethod
    def parse(cls, text: str) -> LeadTerm:
        """Raises ValueError for what is none."""
        term, slash, node = text.partition("/")
        if not (slash and text.isascii() and term.isdigit() and node.isdigit() and len(text) <= 20):
            raise ValueError(f"got {text[:40]!r}, expected TERM/NODE such as 2/1")
        return cls(int(term), int(node))


def may_speak_as_lead(newest: LeadTerm, sender: LeadTerm) -> tuple[bool, str]:
    """Is what a launcher says to be taken? One of a later term was elected by the nodes, and leads from then on."""
    if sender == newest or sender.term > newest.term:
        return True, f"node {sender.node} leads in term {sender.term}"
    return False, f"node {newest.node} leads the job in term {newest.term}: node {sender.node} leads it no more"


def may_take_lead(newest: LeadTerm, wanted: LeadTerm, after: int, unheard: float, borne: float) -> tuple[bool, str]:
    """May a node have the lead that too few follow? after: the newest term that it knows of. unheard: seconds since the
    newest lead was heard; borne: of them it keeps the lead so many."""
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


CHECKPOINT, START = "the newest checkpoint", "the start"


def back_to(checkpoints: bool, max_restarts: int) -> str:
    """Where all go, in words, when a stage's weights are lost; "": nowhere, so the job can't go on. checkpoints: does
    the job write any? Before it has written the first, it is as without."""
    return CHECKPOINT if checkpoints else START if max_restarts else ""


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

LEFT, STATELESS = -1, -2
"""As a member's generation: its process was asked to go, and has gone; it is there, and has no state any more."""

# Members that count as there: in the generation, or able to enter the next one.
PRESENT = frozenset({WorkerState.RUNNING, WorkerState.SUSPECT, WorkerState.REJOINING})


class Release(NamedTuple):
    """Why a worker was let go: `actor` has asked it to leave; or it stands by with the rest of its pipeline, of which
    `lost` were gone."""

    actor: str = ""
    stands_by: bool = False
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """One cell of the grid.

    incarnation: of the process that now counts; retired: the newest of those that came before it, fenced for
    good. generation: the newest one that this incarnation is in (0: none yet), or LEFT, or STATELESS. acknowledged: how
    far it came in taking up that generation. draining: it says that its work is done, unless another failure
    calls it back. detail: why it is FAILED, in words. let_go: the same, where it is FAILED at somebody's wish, until
    another process comes. leaving: its launcher may not know of that wish yet.
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
        """Was it asked to go, and is its process there, as far as is known?"""
        return self.leaving and self.generation != LEFT

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


class LetGo(NamedTuple):
    """A worker of the generation before that is out at somebody's wish. stands_by: with the rest of its pipeline; else
    a person has asked it to leave."""

    worker: str
    stands_by: bool


@dataclass(frozen=True)
class Generation:
    """A deployment that has been opened.

    joining: those of `living` that take state from a peer first. moves: (from, to) of workers that
    have taken an empty place on another stage. restore: all go back (see `back_to`). interim: what it runs
    until all of `living` have their state, and their layers. partition: layers per stage that its plan is for; (): the
    model's stages can't be cut. let_go: of those that are out since the generation before, who is not lost. lost: whose
    process there has died or was given up; another one may be among `joining`.
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
    let_go: tuple[LetGo, ...] = ()
    lost: tuple[str, ...] = ()


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

    committed: iterations committed so far, of `iterations`. halted: why the job can't go on; unheard: it is for nothing
    but the silence of all its workers, and ends with the first heartbeat. Both are changed by `halt` and `go_on` alone.
    over: set once the launcher has said that the job ended. back_to: where all go when a stage's weights are lost (see
    `back_to`).
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
    unheard: bool = False
    over: JobState | None = None
    over_reason: str = ""
    back_to: str = ""
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
        partition: tuple[int, ...] = (),
    ) -> State:
        """partition: layers per stage at the start."""
        cells = [(f"W{p}_{s}", s) for p in range(pipelines) for s in range(stages)]
        members = {name: Member(name, stage) for name, stage in cells}
        return cls(members, iterations, back_to=back_to, held=partition)

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
        there, trains = map(self._formed, lacking), (self._formed(n) for n in current.living if n not in lacking)
        return current.interim if not all(there) and any(trains) else None

    @property
    def restoring(self) -> bool:
        """Is there a worker that may not have gone back to the checkpoint that this generation goes back to? All have
        before any of them can say that it has formed (agent.workers.recovery)."""
        current = self.current
        return current is not None and current.restore and not any(self._formed(name) for name in current.living)

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

    def hosts(self, known: Mapping[str, str]) -> list[tuple[int, str]]:
        """Of each place its stage, and on which host is who holds it, or was who held it last. known: by the
        process."""
        return [
            (member.stage, known[newest])
            for member in self.members.values()
            if (newest := next(reversed(member.incarnations), "")) in known
        ]

    def _formed(self, name: str) -> bool:
        return self.members[name].acknowledged in ("formed", "resumed")

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
    """reports: does it send heartbeats? The silence of one that does not says nothing: it is lost when it ends."""

    worker: str
    incarnation: str
    reports: bool = True


class LastHeartbeat(NamedTuple):
    incarnation: str
    heard: float
    draining: bool = False


@dataclass(frozen=True)
class HeartbeatsReceived:
    """Heartbeats since the last time, the newest of each worker."""

    beats: Mapping[str, LastHeartbeat]


@dataclass(frozen=True)
class Exited:
    """A launcher saw the process of `worker` end."""

    worker: str
    incarnation: str
    reporter: str
    detail: str = ""


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
    """An op of a micro-batch raised in `worker`, in `generation`; detail: which, and what the launcher makes of it."""

    worker: str
    incarnation: str
    generation: int
    detail: str


@dataclass(frozen=True)
class StateLost:
    """In `generation`, `worker` and its peers have found that the state of their stage is not there any more: only
    workers that are gone had some of it. detail: the same in a sentence."""

    worker: str
    incarnation: str
    generation: int
    detail: str


@dataclass(frozen=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True)
class Stalled:
    """The console itself did not run for so long: silence in that time says nothing about workers."""

    seconds: float


@dataclass(frozen=True)
class PlanReady:
    """The plan for a generation without `failed`, once `moves` are made: (from, to) of workers that change their stage,
    so that the plan is shorter."""

    failed: tuple[str, ...]
    fingerprint: str
    origin: str
    moves: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PlanRefused:
    """No plan exists for these failures, and why."""

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
    """The launcher has the members of `generation` run another plan until newcomers have their state."""

    generation: int
    interim: Interim


@dataclass(frozen=True)
class LayersMoved:
    """The workers have so many layers per stage from `iteration` on, in `generation`; text: what that took. problem:
    why they could not take those of `generation`, and keep what they have."""

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
    """The state was read back from the database; nobody was heard in between. reason: why it was."""

    reason: str = "the console was restarted and took the job up again"


@dataclass(frozen=True)
class LeadChanged:
    """Another launcher leads, and goes on from what it knows (agent.nodes); all form anew. lost: by worker, the
    processes that went with the one before."""

    lost: Mapping[str, str]
    detail: str


@dataclass(frozen=True)
class Offered:
    """The options have been worked out. None: they could not be, for the reason given."""

    failed: tuple[str, ...]
    offer: Offer | None
    reason: str = ""


@dataclass(frozen=True)
class Chosen:
    """An operator picked a candidate. failed: the workers that were out in what they saw; None: not said."""

    name: str
    actor: str
    failed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModeSet:
    """choice_timeout: seconds that the job waits for an operator in manual mode."""

    mode: Mode
    choice_timeout: float
    actor: str


@dataclass(frozen=True)
class PlanFrozen:
    """An operator wants the plan in force to stay (agent.coordination.generations), or, not frozen, no longer."""

    frozen: bool
    actor: str


@dataclass(frozen=True)
class DrainAsked:
    """An operator wants `worker` to leave at the next boundary."""

    worker: str
    actor: str


@dataclass(frozen=True)
class RestartAsked:
    """Somebody wants a process for `worker` again: the launcher is about to be told."""

    worker: str


@dataclass(frozen=True)
class UsePlan:
    """The plan of this fingerprint is to be in force, with the same workers. failed: those that it does
    without. actor: the operator who wants it; "": the console does, for the reason given. partition: layers per stage
    that it is for; (): they stay."""

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
    """partition: layers per stage that it is to be for; (): the model's stages can't be cut."""

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
    """The event does not count, and nothing changed. code: as in agent.messages.protocol.Problem."""

    code: Literal["unknown_worker", "fenced", "not_member", "job_over", "invalid", "no_choice", "not_running", "frozen"]
    detail: str


Decision = NeedPlan | OpenGeneration | Note | Refuse


@dataclass(frozen=True)
class Transition:
    """What one event led to. reason: a sentence for people. passing: nothing of it is to be stored, as when
    workers were last heard."""

    state: State
    decisions: tuple[Decision, ...] = ()
    reason: str = ""
    passing: bool = False

    @property
    def refusal(self) -> Refuse | None:
        return next((d for d in self.decisions if isinstance(d, Refuse)), None)


def refuse(state: State, code: Any, detail: str) -> Transition:
    return Transition(state, (Refuse(code, detail),), detail)
