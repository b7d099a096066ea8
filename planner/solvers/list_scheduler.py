"""The list scheduler: any size, no time limit needed, always a valid schedule.

It runs the event loop of `dispatch` under a number of rules and keeps the best result. Which
rules, and how many, depends on the problem alone, never on the clock or on chance: every agent
that plans for the same failures gets the same plan.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.baseline import Timed, one_forward_one_backward, references, timed_schedule
from planner.bounds import period_bound
from planner.job import Problem
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
        best = _less_split(table, best, settings)
        schedule = table.schedule(best)
        if not problem.failed and best.period > bound:
            reference = min(references(problem), key=lambda r: r.period, default=None)
            if reference is not None and reference.period < best.period:
                schedule = _as_schedule(table, reference)
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


def _as_schedule(table: Table, reference: Timed) -> Schedule:
    """A reference on the whole grid; in the table's form where one pipeline stands for all."""
    problem = table.problem
    if problem.job.speeds:
        return timed_schedule(problem, reference)
    m = problem.job.micro_batches
    starts: dict[str, list[int]] = {"F": [], "I": [], "W": []}
    for row in reference.starts:
        own: dict[str, list[int]] = {kind: [0] * m for kind in starts}
        for kind, j, start, _ in row:
            own["I" if kind == "B" else kind][j] = start
        for kind, times in starts.items():
            times += own[kind] * problem.job.pipelines
    splits = any(kind == "W" for kind, _ in reference.orders[0])
    return table.schedule(table.timed(starts["F"], starts["I"], starts["W"], "all" if splits else "none"))
