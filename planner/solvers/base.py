"""What every solver is: one problem in, one schedule with a proven bound out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from openrecycle.planner.jobs.job import Over, Problem
from openrecycle.planner.plans.bounds import Bound
from openrecycle.planner.plans.schedule import Schedule


@dataclass(frozen=True)
class SolverProgress:
    """Where a solver stands. elapsed: seconds; incumbent (None: no schedule yet), bound: ticks."""

    solver: str
    elapsed: float
    incumbent: int | None
    bound: int


class ChosenLayout(Protocol):
    """By which a problem was cut and staffed (`layers.partition.Layout`): no plan is shorter than `bound`, over
    all that it was chosen from."""

    @property
    def bound(self) -> Bound: ...
    @property
    def over(self) -> Over: ...


ProgressCallback = Callable[[SolverProgress], None]
Cancelled = Callable[[], bool]


@dataclass
class Run:
    """One search, from now on: how many seconds it has, who may end it, and who is told how it stands."""

    time_limit: float = math.inf
    cancelled: Cancelled | None = None
    on_progress: ProgressCallback | None = None
    _begin: float = field(init=False, default_factory=time.monotonic)
    _stopped: bool = field(init=False, default=False)
    _told: tuple[str, int | None, int] | None = field(init=False, default=None)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    @property
    def stopped(self) -> bool:
        """Once `cancelled` has said so, for good."""
        self._stopped = self._stopped or bool(self.cancelled and self.cancelled())
        return self._stopped

    @property
    def left(self) -> float:
        """Seconds; 0 when stopped."""
        return 0.0 if self.stopped else max(0.0, self.time_limit - self.elapsed)

    @property
    def over(self) -> bool:
        return self.elapsed > self.time_limit or self.stopped

    def part(self, seconds: float) -> Run:
        """A search within this one."""
        return Run(seconds, self.cancelled, self.on_progress)

    def quiet(self) -> Run:
        """What is left of this one, for a step of it that nobody is told of."""
        return Run(self.time_limit - self.elapsed, self.cancelled)

    def tell(self, solver: str, incumbent: int | None, bound: int) -> None:
        """Says nothing twice."""
        if self.on_progress and self._told != (solver, incumbent, bound):
            self._told = solver, incumbent, bound
            self.on_progress(SolverProgress(solver, self.elapsed, incumbent, bound))


@dataclass(frozen=True)
class Solution:
    """The best schedule a solver found.

    bound: proven lower bound of the period, in ticks. seconds: wall time spent. message: one
    sentence for the user where something needs saying ("time limit reached"), else empty. over: what the bound is over.
    """

    schedule: Schedule
    bound: int
    solver: str
    seconds: float
    message: str = ""
    over: Over = "schedules"

    @property
    def optimal(self) -> bool:
        """Is it proven that no schedule is better?"""
        return self.schedule.period <= self.bound


class Solver(Protocol):
    """Looks for a schedule of shorter period than one that is there, of a problem whose technique leaves a choice.

    `solve` returns when `run` is about over, with the best schedule known, never worse than `warm_start`; tells it
    whenever incumbent or bound improve. Raises InputError for a problem of a size or kind that it doesn't handle.
    """

    name: str

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution: ...
