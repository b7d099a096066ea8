"""What a launcher tells whoever decides on generations, and what it is told to do: the same with a console and without.

Both take reports without blocking and hand out what was decided as events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A new generation: its members and the plan they run.

    restore: the checkpoint that everybody takes up first; FROM_START: nothing, all begin anew; None: everybody goes on
    with what it has.
    """

    deployment: Deployment
    plan: Plan
    restore: str | None = None

    @property
    def moves(self) -> tuple[tuple[Worker, Worker], ...]:
        """(from, to) for each worker that takes a place on another stage; what it held is given up. Some of them may
        have been told with the generation before."""
        return tuple((Worker.parse(source), Worker.parse(to)) for source, to in self.deployment.moves)

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage, for which the plan is; (): the model's stages can't be cut."""
        return self.plan.partition


@dataclass(frozen=True)
class Halt:
    """The job can't go on, whoever comes; the sentence says why.

    lacks: that is so since this worker ended before training began. Whoever is started in its place may change it.
    """

    reason: str
    lacks: Worker | None = None


CHECKPOINT_SECONDS = 60.0
"""For a folder of checkpoints that can't be read, such as one on another machine that starts anew."""


def restore_point(
    checkpoint: Callable[[], str | None],
    reason: str,
    pause: Callable[[float], object],
    patience: float = CHECKPOINT_SECONDS,
) -> str | Halt:
    """The checkpoint that all are to go back to. checkpoint: asked for it, and again as long as it raises OSError, with
    `pause` in between for `patience` seconds in all. reason: why all go back."""
    wait, waited = 0.1, 0.0
    while True:
        try:
            found = checkpoint()
            return Halt(f"{reason}; and there is no whole checkpoint yet") if found is None else found
        except OSError as error:
            if waited >= patience:
                return Halt(f"{reason}; and no checkpoint could be read for {patience:g} s ({error})")
        except Exception as error:
            return Halt(f"{reason}; and no checkpoint could be read ({type(error).__name__}: {error})")
        pause(wait)
        waited, wait = waited + wait, min(2 * wait, 5.0)


@dataclass(frozen=True)
class LauncherWarning:
    """A warning for people. refused: the newcomer that it is about, which may not join; None: nobody is refused."""

    text: str
    refused: Worker | None = None


@dataclass(frozen=True)
class Measure:
    """An iteration, not begun yet, whose ops all workers are to record."""

    iteration: int


@dataclass(frozen=True)
class ProcessFenced:
    """That process no longer counts, and must end."""

    incarnation: str


Event = Deploy | Halt | Command | LauncherWarning | Measure | ProcessFenced


class Failure(NamedTuple):
    """exit: a worker process has ended. transfer: it could not exchange data in `generation`. exception: an op of a
    micro-batch raised in it, in `generation`, and all must form anew. state-lost: the state of its stage is not there
    any more, though workers of it live.

    peer: with whom it could not; "": it can't tell. spare: of its ranks those that had to end, since another one had.
    now: monotonic seconds; None: as at the last `poll`.
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
"""As in an Acknowledgement."""


class Coordination:
    """Takes the launcher's reports; `poll` returns what is to be done. None of them blocks; what somebody has no use
    for does nothing.

    wake_fd: becomes readable when `poll` has something, where that is not only after reports.
    """

    wake_fd: int | None = None
    judges_silence: bool = False
    """Does it fence by itself who is silent, whatever the launcher bears?"""

    @property
    def stands(self) -> str:
        """Why the job can't go on before more workers are back; "": it can, or that is not for the launcher to know."""
        return ""

    def ready(
        self,
        worker: Worker,
        incarnation: str,
        host: str,
        pids: Sequence[int],
        made_of: Sequence[tuple[str, int]] = (),
    ) -> None:
        """A worker process is up and waits for a generation. pids: of its ranks. made_of: the spare ranks, as
        (incarnation, rank), in whose place they are."""

    def said(self, worker: Worker, incarnation: str, message: Mapping[str, Any], clock: Offset) -> None:
        """What a worker says for people to see: `alive`, `log` and `measured`. clock: from its to this process's."""

    def lives(self, worker: Worker, incarnation: str) -> None:
        """The launcher knows that a worker lives that says nothing itself: it computes, or others can't go on without
        it and do."""

    def failed(self, failure: Failure) -> None: ...

    def restarts(self, worker: Worker, incarnation: str, restart: Restart) -> None:
        """What the launcher does about a process that is gone, which it has said, or knows from what was decided."""

    def opened(self, generation: int, incarnations: Iterable[str]) -> None:
        """Members of `generation` have been told of it. incarnations: those with all of their stage's state."""

    def acknowledged(
        self,
        state: Step,
        worker: Worker,
        incarnation: str,
        generation: int,
        iteration: int = 0,
    ) -> None:
        """adopted: a worker has left what it was at, for `generation`, with so many iterations committed. formed: it is
        in the groups, with `iteration` agreed on. resumed: it has committed that one."""

    def meanwhile(self, generation: int, plan: Plan) -> None:
        """What the members of `generation` run until those who take their state from a peer have it."""

    def committed(self, iterations: Iterable[Iteration]) -> None: ...

    def report(self, message: Relayout | Recovery | ValidationReport) -> None: ...

    def finished(self, state: str, reason: str) -> None: ...

    def lead_changed(self, lost: Mapping[Worker, str], detail: str, now: float) -> None:
        """This launcher leads from now on. lost: the processes that went with the one before."""

    def saved(self) -> dict[str, Any]:
        """What another launcher needs to go on in this one's place, as JSON."""
        return {}

    def poll(self, now: float) -> list[Event]:
        return []

    def close(self, hurried: Callable[[], bool]) -> None: ...
