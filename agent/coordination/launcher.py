"""The interface between a launcher and what decides on generations, which is a console or, without one, the launcher's
own state machine (`local`). It takes reports without blocking, and hands out decisions as events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from openrecycle.agent.messages.protocol import (
    Command,
    Deployment,
    Iteration,
    Recovery,
    Relayout,
    Restart,
    ValidationReport,
)
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan

if TYPE_CHECKING:
    from openrecycle.agent.messages.client import Offset


FROM_START = ""


@dataclass(frozen=True)
class Deploy:
    """A new generation: its members and the plan that they run.

    restore: the checkpoint that all members first load; FROM_START: they load nothing and begin anew; None: each goes
    on with the state that it has.
    """

    deployment: Deployment
    plan: Plan
    restore: str | None = None

    @cached_property
    def places(self) -> dict[str, Worker]:
        """The place of each process, by its incarnation."""
        return {incarnation: Worker.parse(name) for name, incarnation in self.deployment.incarnations.items()}

    def has(self, worker: Worker, incarnation: str) -> bool:
        """Says whether this process belongs at this place: it is told of the generation then."""
        name = str(worker)
        return name in self._told and self.deployment.incarnations.get(name, incarnation) == incarnation

    @cached_property
    def _told(self) -> frozenset[str]:
        return frozenset((*self.deployment.living, *self.deployment.leaving))

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage that the plan is for; (): the model's stages can't be cut."""
        return self.plan.partition


@dataclass(frozen=True)
class Halt:
    """The job can't go on, even if more workers come; `reason` says why.

    lacks: the worker whose end before training began is the cause. A process that is started in its place may change
    that. None: there is another cause.
    """

    reason: str
    lacks: Worker | None = None


CHECKPOINT_SECONDS = 60.0
"""How long a folder of checkpoints may be unreadable, such as one on a machine that is starting again."""


def restore_point(
    checkpoint: Callable[[], str | None],
    reason: str,
    pause: Callable[[float], object],
    retry_seconds: float = CHECKPOINT_SECONDS,
) -> str | Halt:
    """Returns the checkpoint that all workers go back to, or a Halt if there is none.

    checkpoint: returns it, or None. It is called again while it raises OSError, with `pause` in between, for
    `retry_seconds` in all. reason: why all go back, in words.
    """
    wait, waited = 0.1, 0.0
    while True:
        try:
            found = checkpoint()
            return Halt(f"{reason}; and there is no whole checkpoint yet") if found is None else found
        except OSError as error:
            if waited >= retry_seconds:
                return Halt(f"{reason}; and no checkpoint could be read for {retry_seconds:g} s ({error})")
        except Exception as error:
            return Halt(f"{reason}; and no checkpoint could be read ({type(error).__name__}: {error})")
        pause(wait)
        waited, wait = waited + wait, min(2 * wait, 5.0)


@dataclass(frozen=True)
class LauncherWarning:
    """A warning for people. refused: the newcomer that may not join for this reason; None: nobody is refused."""

    text: str
    refused: Worker | None = None


@dataclass(frozen=True)
class Measure:
    """All workers are to record the ops of this iteration, which has not begun yet."""

    iteration: int


@dataclass(frozen=True)
class ProcessFenced:
    """This process no longer counts, and must end."""

    incarnation: str


Event = Deploy | Halt | Command | LauncherWarning | Measure | ProcessFenced


class Failure(NamedTuple):
    """What went wrong in a worker. `cause` is one of:

    exit: its process has ended. transfer: it could not exchange data in `generation`. exception: an op of a micro-batch
    raised in it in `generation`, and all must form anew. state-lost: the state of its stage is lost, though workers of
    that stage live.

    peer: the worker with which a transfer failed; "": unknown. spare: the ranks that had to end because another rank of
    the worker had. now: monotonic seconds; None: those of the last `poll`.
    """

    cause: Literal["exit", "transfer", "exception", "state-lost"]
    worker: Worker
    incarnation: str
    generation: int = 0
    detail: str = ""
    peer: str = ""
    spare: Sequence[int] = ()
    now: float | None = None


Step = Literal["adopted", "formed", "resumed"]
"""How far a worker is in taking up a generation, as in agent.messages.protocol.Acknowledgement."""


class Coordination:
    """Takes the launcher's reports, and returns from `poll` what the launcher is to do. No method blocks. Reports that
    a subclass has no use for do nothing here.

    wake_fd: a file descriptor that becomes readable when `poll` has something to return. None: that is only so after a
    report.
    """

    wake_fd: int | None = None
    judges_silence: bool = False
    """Whether it fences silent workers by itself, however long the launcher would wait for them."""

    @property
    def stands(self) -> str:
        """Why the job can't go on before more workers are back; "": it can, or the console decides that."""
        return ""

    def ready(
        self,
        worker: Worker,
        incarnation: str,
        host: str,
        pids: Sequence[int],
        made_of: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Reports that a worker process has started and waits for a generation. pids: one for each of its ranks.
        made_of: the spare ranks, as (incarnation, rank), that its ranks were made from."""

    def said(self, worker: Worker, incarnation: str, message: Mapping[str, Any], clock: Offset) -> None:
        """Passes on what a worker says for people to see: `alive`, `log` and `measured`. clock: the offset from the
        worker's clock to this process's."""

    def lives(self, worker: Worker, incarnation: str) -> None:
        """Reports that a silent worker lives. The launcher knows it since the worker computes, or since others go on,
        which they could not do without it."""

    def failed(self, failure: Failure) -> None: ...

    def restarts(self, worker: Worker, incarnation: str, restart: Restart) -> None:
        """Reports what the launcher does about a process that is gone: whether and when the worker is started again.
        The end of that process is known from an earlier report, or was decided here."""

    def opened(self, generation: int, incarnations: Iterable[str]) -> None:
        """Reports that members of `generation` have been told of it. incarnations: those that have all of their stage's
        state."""

    def acknowledged(
        self,
        state: Step,
        worker: Worker,
        incarnation: str,
        generation: int,
        iteration: int = 0,
    ) -> None:
        """Reports how far a worker is in taking up `generation`. adopted: it has left the generation before, with
        `iteration` iterations committed. formed: its process groups have formed, and all have agreed on `iteration`.
        resumed: it has committed that iteration."""

    def meanwhile(self, generation: int, plan: Plan) -> None:
        """Reports the plan that the members of `generation` run until all have their state."""

    def committed(self, iterations: Iterable[Iteration]) -> None: ...

    def report(self, message: Relayout | Recovery | ValidationReport) -> None: ...

    def finished(self, state: str, reason: str) -> None: ...

    def lead_changed(self, lost: Mapping[Worker, str], detail: str, now: float) -> None:
        """Reports that this launcher leads from now on. lost: by worker, the incarnations that ended with the leader
        before. detail: the same in words. now: monotonic seconds."""

    def saved(self) -> dict[str, Any]:
        """Returns what another launcher needs to go on in this one's place, as JSON."""
        return {}

    def poll(self, now: float) -> list[Event]:
        """Returns what was decided since the last call, in order. now: monotonic seconds."""
        return []

    def close(self, hurried: Callable[[], bool]) -> None: ...
