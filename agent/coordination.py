"""Who decides on epochs, as the launcher sees it: the console, or this process when there is none.

Both take reports without blocking and hand out what was decided as events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.protocol import Command, Deployment, Iteration, Recovery
from planner.catalog import Catalog
from planner.errors import PlannerError
from planner.job import Worker
from planner.plan import Plan


@dataclass(frozen=True)
class Deploy:
    """A new epoch: its members and the plan they run."""

    deployment: Deployment
    plan: Plan


@dataclass(frozen=True)
class Halt:
    """The job can't go on; the sentence says why."""

    reason: str


Event = Deploy | Halt | Command


class Coordination(Protocol):
    """Takes the launcher's reports; `poll` returns what is to be done. None of them blocks."""

    def ready(self, worker: Worker, incarnation: str) -> None:
        """A worker process is up and waits for an epoch."""

    def exited(self, worker: Worker, incarnation: str, detail: str) -> None:
        """A worker process has ended."""

    def broken(self, worker: Worker, epoch: int, now: float) -> None:
        """A worker could not exchange data in `epoch`."""

    def formed(self, worker: Worker, epoch: int) -> None:
        """A worker is in the groups of `epoch`."""

    def committed(self, iterations: Iterable[Iteration]) -> None: ...

    def recovered(self, recovery: Recovery) -> None: ...

    def finished(self, state: str, reason: str) -> None: ...

    def poll(self, now: float) -> list[Event]: ...

    def close(self) -> None: ...


class LocalCoordination:
    """Decides alone, for a job without a console. A pure state machine: no clock, no I/O.

    grace: seconds that a broken transfer waits for the exit that explains it, before the same
    members form anew.
    """

    def __init__(self, catalog: Catalog, *, grace: float = 2.0) -> None:
        self._catalog = catalog
        self._grace = grace
        self._epoch = 0
        self._waiting_for = set(catalog.job.workers())
        self._failed: set[Worker] = set()
        self._back: set[Worker] = set()
        """Newcomers that wait until all others are in the newest epoch: then nothing is interrupted."""
        self._unformed: set[Worker] = set()
        self._re_form_at: float | None = None
        self._events: list[Event] = []

    def ready(self, worker: Worker, incarnation: str) -> None:
        if self._epoch == 0:
            self._waiting_for.discard(worker)
            if not self._waiting_for:
                self._open("all workers are ready")
        elif worker in self._failed:
            self._back.add(worker)
            self._let_in()

    def formed(self, worker: Worker, epoch: int) -> None:
        if epoch == self._epoch:
            self._unformed.discard(worker)
            self._let_in()

    def exited(self, worker: Worker, incarnation: str, detail: str) -> None:
        self._back.discard(worker)
        if worker in self._failed:
            return
        self._failed.add(worker)
        self._waiting_for.discard(worker)
        if self._epoch:
            self._open(f"{worker} {detail}")
        else:
            self._events.append(Halt(f"{worker} {detail} before training began"))

    def broken(self, worker: Worker, epoch: int, now: float) -> None:
        if epoch == self._epoch and self._re_form_at is None:
            self._re_form_at = now + self._grace

    def committed(self, iterations: Iterable[Iteration]) -> None:
        pass

    def recovered(self, recovery: Recovery) -> None:
        pass

    def finished(self, state: str, reason: str) -> None:
        pass

    def poll(self, now: float) -> list[Event]:
        if self._re_form_at is not None and now >= self._re_form_at:
            self._open("a transfer broke though nobody died: the same workers form anew")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pass

    def _let_in(self) -> None:
        if self._back and not self._unformed:
            names = ", ".join(map(str, sorted(self._back)))
            self._open(f"{names} {'is' if len(self._back) == 1 else 'are'} back, to take state from a peer")

    def _open(self, reason: str) -> None:
        """Opens the next epoch: with all who live, and all who are back."""
        self._re_form_at = None
        joining, self._back = sorted(self._back), set()
        self._failed.difference_update(joining)
        try:
            plan, source = self._catalog.plan_for(self._failed)
        except PlannerError as error:
            self._events.append(Halt(f"{reason}; {error}"))
            return
        self._epoch += 1
        living = [w for w in self._catalog.job.workers() if w not in self._failed]
        self._unformed = set(living)
        deployment = Deployment(
            epoch=self._epoch,
            plan_fingerprint=plan.fingerprint,
            living=tuple(map(str, living)),
            failed=tuple(map(str, sorted(self._failed))),
            joining=tuple(map(str, joining)),
            reason=f"{reason}; {source}",
        )
        self._events.append(Deploy(deployment, plan))
