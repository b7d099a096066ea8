"""What every solver shares: it takes one problem and returns one schedule with a proven bound."""

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
    """The state of a search. elapsed: seconds; incumbent (None: no schedule yet) and bound: ticks of the period."""

    solver: str
    elapsed: float
    incumbent: int | None
    bound: int


class ChosenLayout(Protocol):
    """The layout that a problem was cut and staffed by (`layers.partition.Layout`). No plan of any layout that it was
    chosen from is shorter than `bound`."""

    @property
    def bound(self) -> Bound: ...
    @property
    def over(self) -> Over: ...


ProgressCallback = Callable[[SolverProgress], None]
Cancelled = Callable[[], bool]


@dataclass
class Run:
    """One search, which starts now: its time limit in seconds, how it is cancelled, and where it reports progress."""

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
        """Has the search been cancelled? Once true, it stays true."""
        self._stopped = self._stopped or bool(self.cancelled and self.cancelled())
        return self._stopped

    @property
    def left(self) -> float:
        """Seconds left; 0 when stopped."""
        return 0.0 if self.stopped else max(0.0, self.time_limit - self.elapsed)

    @property
    def over(self) -> bool:
        return self.elapsed > self.time_limit or self.stopped

    def part(self, seconds: float) -> Run:
        """Starts a search within this one."""
        return Run(seconds, self.cancelled, self.on_progress)

    def quiet(self) -> Run:
        """Starts a step of this search that has the rest of its time and reports no progress."""
        return Run(self.time_limit - self.elapsed, self.cancelled)

    def tell(self, solver: str, incumbent: int | None, bound: int) -> None:
        """Reports progress, unless it is what was reported last."""
        if self.on_progress and self._told != (solver, incumbent, bound):
            self._told = solver, incumbent, bound
            self.on_progress(SolverProgress(solver, self.elapsed, incumbent, bound))


@dataclass(frozen=True)
class Solution:
    """The best schedule a solver found.

    bound: proven lower bound of the period, in ticks; over: which set it covers. seconds: wall time spent. message: a
    sentence for the user where something needs saying ("time limit reached"), else empty.
    """

    schedule: Schedule
    bound: int
    solver: str
    seconds: float
    message: str = ""
    over: Over = "schedules"

    @property
    def optimal(self) -> bool:
        """Is it proven that no schedule is shorter?"""
        return self.schedule.period <= self.bound


class Solver(Protocol):
    """Looks for a schedule with a shorter period than a given one. The problem's technique must leave a choice.

    `solve` returns about when `run` is over, with the best schedule known, which is never worse than `warm_start`. It
    reports to `run` whenever incumbent or bound improve. Raises InputError for a problem of a size or kind that the
    solver doesn't handle.
    """

    name: str

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution: ...
