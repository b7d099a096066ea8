"""Who decides on generations, as the launcher sees it: the console, or this process when there is none.

Both take reports without blocking and hand out what was decided as events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from openrecycle.agent.blame import Complaint, Limits, Links, judge
from openrecycle.agent.clock import Offset
from openrecycle.agent.protocol import Command, Deployment, Iteration, Recovery, VerdictReport
from openrecycle.planner.catalog import Catalog
from openrecycle.planner.errors import PlannerError
from openrecycle.planner.failures import failures_per_stage
from openrecycle.planner.job import Worker
from openrecycle.planner.migration import normalize
from openrecycle.planner.plan import Plan


@dataclass(frozen=True)
class Deploy:
    """A new generation: its members and the plan they run.

    moves: (from, to) for each worker that takes a place on another stage; what it held is given up.
    restore: the checkpoint that everybody takes up first; None: everybody goes on with what it has.
    """

    deployment: Deployment
    plan: Plan
    moves: tuple[tuple[Worker, Worker], ...] = ()
    restore: str | None = None


@dataclass(frozen=True)
class Halt:
    """The job can't go on; the sentence says why."""

    reason: str


@dataclass(frozen=True)
class Remark:
    """A warning for people. refused: the newcomer that it is about, which may not join; None: nobody is refused."""

    text: str
    refused: Worker | None = None


@dataclass(frozen=True)
class Measure:
    """An iteration, not begun yet, whose ops all workers are to record."""

    iteration: int


@dataclass(frozen=True)
class Fenced:
    """That process no longer counts, and must end."""

    incarnation: str


Event = Deploy | Halt | Command | Remark | Measure | Fenced


class Coordination(Protocol):
    """Takes the launcher's reports; `poll` returns what is to be done. None of them blocks."""

    def ready(self, worker: Worker, incarnation: str, host: str, pid: int) -> None:
        """A worker process is up and waits for a generation."""

    def said(self, worker: Worker, incarnation: str, message: Mapping[str, Any], clock: Offset) -> None:
        """What a worker says for people to see: `alive`, `log`, `measured`, and that it has `resumed`. clock: from
        its to this process's."""

    def exited(self, worker: Worker, incarnation: str, detail: str) -> None:
        """A worker process has ended."""

    def broken(
        self, worker: Worker, incarnation: str, generation: int, now: float, peer: str = "", detail: str = ""
    ) -> None:
        """A worker could not exchange data in `generation`, with `peer`; "": it can't tell with whom."""

    def raised(self, worker: Worker, incarnation: str, generation: int, text: str) -> None:
        """An op of a micro-batch raised in a worker, in `generation`: all must form anew."""

    def opened(self, generation: int, incarnations: Iterable[str]) -> None:
        """Members of `generation` have been told of it. incarnations: those with all of their stage's state."""

    def adopted(self, worker: Worker, incarnation: str, generation: int, iteration: int) -> None:
        """A worker has left what it was at, for `generation`, with so many iterations committed."""

    def formed(self, worker: Worker, incarnation: str, generation: int, iteration: int) -> None:
        """A worker is in the groups of `generation`, with `iteration` agreed on."""

    def meanwhile(self, generation: int, plan: Plan) -> None:
        """What the members of `generation` run until those who take their state from a peer have it."""

    def committed(self, iterations: Iterable[Iteration]) -> None: ...

    def recovered(self, recovery: Recovery) -> None: ...

    def verdict(self, report: VerdictReport) -> None: ...

    def finished(self, state: str, reason: str) -> None: ...

    def poll(self, now: float) -> list[Event]: ...

    def close(self, hurried: Callable[[], bool]) -> None: ...


class LocalCoordination:
    """Decides alone, for a job without a console. A state machine without a clock.

    grace: seconds that a broken transfer waits for the exit that explains it, before a link is blamed
    (agent.blame) and all form anew. migrate: move a failure to another stage whenever a shorter plan follows; in
    any case a worker moves to a stage that nobody lives on. checkpoint: asked for the checkpoint to
    go back to when a stage's state is lost; None: there is none.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        grace: float = 2.0,
        migrate: bool = False,
        checkpoint: Callable[[], str | None] = lambda: None,
        limits: Limits | None = None,
    ) -> None:
        self._limits, self._links, self._committed = limits or Limits(), Links(), 0
        self._complaints: dict[str, Complaint] = {}
        self._catalog, self._grace, self._migrate, self._checkpoint = catalog, grace, migrate, checkpoint
        self._generation = 0
        self._waiting_for = set(catalog.job.workers())
        self._failed: set[Worker] = set()
        self._back: set[Worker] = set()
        """Newcomers that wait until all others are in the newest generation: then nothing is interrupted."""
        self._unformed: set[Worker] = set()
        self._late: set[Worker] = set()
        """Members that have not taken up the newest generation."""
        self._holders: set[Worker] = set()
        """Living workers that have their stage's state, as far as is known."""
        self._cells: dict[str, Worker] = {}
        """The place of each incarnation, which moves may have changed."""
        self._restoring = False
        self._re_form_at: float | None = None
        self._events: list[Event] = []

    def ready(self, worker: Worker, incarnation: str, host: str = "", pid: int = 0) -> None:
        self._cells[incarnation] = worker
        if str(worker) in self._links.barred:
            self._events.append(Remark(f"{worker} may not re-join: its links broke again after it had", worker))
        elif self._generation == 0:
            self._waiting_for.discard(worker)
            self._holders.add(worker)  # the initial state follows from the seed
            if not self._waiting_for:
                self._open("all workers are ready")
        elif worker in self._failed:
            self._back.add(worker)
            self._let_in()

    def said(self, worker: Worker, incarnation: str, message: Mapping[str, Any], clock: Offset) -> None:
        """Nobody looks."""

    def opened(self, generation: int, incarnations: Iterable[str]) -> None:
        """It is known."""

    def adopted(self, worker: Worker, incarnation: str, generation: int, iteration: int = 0) -> None:
        if generation == self._generation:
            self._late.discard(worker)

    def formed(self, worker: Worker, incarnation: str, generation: int, iteration: int = 0) -> None:
        if generation == self._generation:
            self._unformed.discard(worker)
            self._holders.add(worker)
            self._restoring = self._restoring and bool(self._unformed)
            self._let_in()

    def exited(self, worker: Worker, incarnation: str, detail: str) -> None:
        worker = self._cells.pop(incarnation, worker)
        self._back.discard(worker)
        if worker in self._failed:
            return
        self._failed.add(worker)
        self._holders.discard(worker)
        self._waiting_for.discard(worker)
        if self._generation:
            self._open(f"{worker} {detail}")
        else:
            self._events.append(Halt(f"{worker} {detail} before training began"))

    def broken(
        self, worker: Worker, incarnation: str, generation: int, now: float, peer: str = "", detail: str = ""
    ) -> None:
        if generation == self._generation:
            self._complaints.setdefault(str(worker), Complaint(str(worker), peer, detail))
            self._re_form_at = now + self._grace if self._re_form_at is None else self._re_form_at

    def raised(self, worker: Worker, incarnation: str, generation: int, text: str) -> None:
        if generation == self._generation:
            self._open(text)

    def committed(self, iterations: Iterable[Iteration]) -> None:
        self._committed = max((self._committed, *(i.iteration + 1 for i in iterations)))

    def meanwhile(self, generation: int, plan: Plan) -> None:
        """Nobody looks."""

    def recovered(self, recovery: Recovery) -> None:
        pass

    def verdict(self, report: VerdictReport) -> None:
        pass

    def finished(self, state: str, reason: str) -> None:
        pass

    def poll(self, now: float) -> list[Event]:
        if self._re_form_at is not None and now >= self._re_form_at:
            self._blame()
        events, self._events = self._events, []
        return events

    def close(self, hurried: Callable[[], bool]) -> None:
        """There is nobody to tell."""

    def _blame(self) -> None:
        """Nobody died: a link broke."""
        holders = {str(w) for w in self._holders - self._failed}
        ruling = judge(
            self._links,
            self._complaints.values(),
            committed=self._committed,
            holders=holders,
            late=set(map(str, self._late)),
            limits=self._limits,
        )
        self._links = ruling.links
        if ruling.halt:
            self._re_form_at = None
            self._events.append(Halt(ruling.halt))
            return
        self._events.append(Remark(f"generation {self._generation}: {ruling.text}"))
        if ruling.out:
            out = Worker.parse(ruling.out)
            self._failed.add(out)
            self._holders.discard(out)
        self._open(ruling.text)

    def _let_in(self) -> None:
        if self._back and not self._unformed:
            names = ", ".join(map(str, sorted(self._back)))
            self._open(f"{names} {'is' if len(self._back) == 1 else 'are'} back, to take state from a peer")

    def _open(self, reason: str) -> None:
        """Opens the next generation: with all who live, and all who are back."""
        self._re_form_at, self._complaints = None, {}
        joining, self._back = set(self._back), set()
        self._failed -= joining
        lost = self._lost_stages()
        restore = self._checkpoint() if lost or self._restoring else None
        if lost and restore is None:
            self._events.append(
                Halt(
                    f"{reason}; stage {lost[0]} has no living worker left, and its weights went with the last one. "
                    "With --checkpoint FOLDER a job goes on from its last checkpoint"
                )
            )
            return
        try:
            moves = self._moves(bool(restore))
            for source, to in moves:
                self._failed = self._failed - {to} | {source}
                self._holders.discard(source)
                joining = joining - {source} | {to}
                self._cells = {i: to if cell == source else cell for i, cell in self._cells.items()}
                reason += f"; {source} takes the place of {to}"
            plan, origin = self._catalog.plan_for(self._failed)
        except PlannerError as error:
            self._events.append(Halt(f"{reason}; {error}"))
            return
        if restore is not None:
            reason += f"; all go back to {restore}"
        self._generation += 1
        self._restoring = restore is not None
        living = [w for w in self._catalog.job.workers() if w not in self._failed]
        if restore is None:  # those that are still at it, too
            joining |= set(living) - self._holders
        self._unformed, self._late = set(living), set(living)
        deployment = Deployment(
            generation=self._generation,
            plan_fingerprint=plan.fingerprint,
            living=tuple(map(str, living)),
            failed=tuple(map(str, sorted(self._failed))),
            joining=tuple(map(str, sorted(joining))),
            reason=f"{reason}; {origin}"[:2000],
        )
        self._events.append(Deploy(deployment, plan, moves, restore))

    def _lost_stages(self) -> list[int]:
        """Stages whose state no living worker has."""
        return sorted(set(range(self._catalog.job.stages)) - {w.stage for w in self._holders})

    def _moves(self, restored: bool) -> tuple[tuple[Worker, Worker], ...]:
        """Workers that change their stage, by the planner's normalization of failures.

        restored: all take their state from a checkpoint, so that anybody may go. Raises PlannerError
        when a stage stands empty and nobody can be spared.
        """
        job = self._catalog.job
        empty = max(failures_per_stage(self._failed, job)) == job.pipelines
        if not self._failed or not (empty or self._migrate):
            return ()
        normal = normalize(job, self._failed, technique=self._catalog.technique, memory=self._catalog.memory)
        left = self._holders - {m.worker for m in normal.migrations}
        if not restored and len({w.stage for w in left}) < job.stages:
            return ()  # a stage would be left to a newcomer that has no state yet
        return tuple((m.worker, m.takes) for m in normal.migrations)
