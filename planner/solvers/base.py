"""What every solver is: one problem in, one schedule with a proven bound out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from openrecycle.planner.jobs.job import Over, Problem
from openrecycle.planner.plans.schedule import Schedule


@dataclass(frozen=True)
class SolverProgress:
    """Where a solver stands. elapsed: seconds; incumbent (None: no schedule yet), bound: ticks."""

    solver: str
    elapsed: float
    incumbent: int | None
    bound: int


ProgressCallback = Callable[[SolverProgress], None]
Cancelled = Callable[[], bool]


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
    """Finds a schedule of short period.

    `solve` returns within about `time_limit` seconds with the best schedule known, never worse
    than `warm_start`; calls `on_progress` whenever incumbent or bound improve; polls `cancelled`
    and, once it is true, returns what it has. Raises InputError for a problem of a size or kind
    that it doesn't handle and InfeasibleError when no schedule exists.
    """

    name: str

    def solve(
        self,
        problem: Problem,
        *,
        time_limit: float,
        warm_start: Schedule | None = None,
        on_progress: ProgressCallback | None = None,
        cancelled: Cancelled | None = None,
    ) -> Solution: ...
