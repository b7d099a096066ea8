"""What can happen to a job, and what the coordinator may decide.

Plain immutable data. Every time in here is seconds of the clock of agent.coordination.membership.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from openrecycle.agent.coordination.membership import AckState, Generation, Interim, Mode, Offer, State
from openrecycle.agent.messages.protocol import JobState

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
    """An operator wants the plan in force to stay (agent.coordination.choosing), or, not frozen, no longer."""

    frozen: bool
    actor: str


@dataclass(frozen=True)
class DrainAsked:
    """An operator wants `worker` to leave at the next boundary."""

    worker: str
    actor: str


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
