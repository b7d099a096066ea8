"""The list scheduler: any size, no time limit needed, always a valid schedule.

It runs the event loop of `dispatch` under a number of rules and keeps the best result. Which
rules, and how many, depends on the problem alone, never on the clock or on chance: every agent
that plans for the same failures gets the same plan.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.baseline import one_forward_one_backward, reference_period
from planner.bounds import period_bound
from planner.job import MemoryLimit, Problem
from planner.schedule import Schedule
from planner.solvers.base import Cancelled, Progress, ProgressCallback, Solution
from planner.solvers.rules import rules
from planner.solvers.table import Result, Settings, Table

# Above so many items a second look at who must split takes longer than it is worth.
SELECTIVE_ITEMS = 30_000


class ListScheduler:
    """The Solver of this module. `time_limit` only cuts the number of rules short.

    compiled: use machine code or not; by default where it pays and can be had.
    """

    name = "list"

    def __init__(self, *, compiled: bool | None = None) -> None:
        self._compiled = compiled

    def solve(
        self,
        problem: Problem,
        *,
        time_limit: float = float("inf"),
        warm_start: Schedule | None = None,
        on_progress: ProgressCallback | None = None,
        cancelled: Cancelled | None = None,
    ) -> Solution:
        begin = time.perf_counter()
        bound = period_bound(problem)
        if not problem.technique.reroutes:
            # Its order of ops is given, so nothing that may be called fault-free is shorter.
            schedule = one_forward_one_backward(problem)
            return Solution(schedule, schedule.period, self.name, time.perf_counter() - begin)
        table = Table(problem, compiled=self._compiled)
        target = min(bound, warm_start.period) if warm_start else bound
        best: Result | None = None
        settings: Settings | None = None
        for rule in rules(problem):
            tried = rule.settings(problem, bound)
            result = table.run(tried)
            if best is None or result.rank < best.rank:
                best, settings = result, tried
                if on_progress:
                    on_progress(Progress(self.name, time.perf_counter() - begin, best.period, bound))
            if best.period <= target or time.perf_counter() - begin > time_limit or (cancelled and cancelled()):
                break
        assert best is not None and settings is not None
        schedule = table.schedule(_less_split(table, best, settings))
        if not problem.failed and best.period > reference_period(problem.job) and _admits_1f1b(problem):
            schedule = one_forward_one_backward(problem)
        if warm_start is not None and warm_start.period <= schedule.period:
            schedule = warm_start
        return Solution(schedule, bound, self.name, time.perf_counter() - begin)


def _less_split(table: Table, best: Result, settings: Settings) -> Result:
    """The same with fewer workers that split B, where that costs nothing.

    I and W apart take a little longer than B on a real device, and more memory.
    """
    if table.items > SELECTIVE_ITEMS or settings.split != "all":
        return best
    for split in ("none", "peers") if table.problem.failed else ("none",):
        result = table.run(replace(settings, split=split))
        if result.period <= best.period:
            return result
    return best


def _admits_1f1b(problem: Problem) -> bool:
    needed = MemoryLimit("1f1b").limits(problem.job)
    pairs = zip(problem.limits, needed, strict=True)
    return all(limit is None or held is None or limit >= held for limit, held in pairs)
