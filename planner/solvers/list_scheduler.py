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
from planner.failures import levelled
from planner.job import Problem, Worker
from planner.schedule import Op, Schedule
from planner.solvers.base import Cancelled, Progress, ProgressCallback, Solution
from planner.solvers.rules import rules
from planner.solvers.table import Result, Settings, Table

# Above so many items a second look at who must split, and at more failures than there are, takes longer than
# it is worth.
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
        if not problem.failed:
            reference = None if best.period <= bound else min(references(problem), key=lambda r: r.period, default=None)
            if reference is not None and reference.period < best.period:
                schedule = _as_schedule(table, reference)
        elif (
            best.period > bound
            and table.items <= SELECTIVE_ITEMS
            and time.perf_counter() - begin <= time_limit
            and not (cancelled and cancelled())
        ):
            schedule = _of_references(_of_levelled(schedule, compiled=self._compiled))
        if warm_start is not None and warm_start.period <= schedule.period:
            schedule = warm_start
        return Solution(schedule, bound, self.name, time.perf_counter() - begin)


def _of_levelled(schedule: Schedule, *, compiled: bool | None) -> Schedule:
    """The plan for as many failures on every stage, which is one for these too, where it is shorter."""
    problem = schedule.problem
    more = replace(problem, failed=levelled(problem.failed, problem.job))
    if more.failed == problem.failed or period_bound(more) >= schedule.period:
        return schedule
    other = ListScheduler(compiled=compiled).solve(more).schedule.for_fewer(problem)
    return other if other.period < schedule.period else schedule


def _of_references(schedule: Schedule) -> Schedule:
    """The best of the references on the pipelines without failures, which share all micro-batches, where it is
    shorter. Whatever lives in the other pipelines stays idle."""
    problem = schedule.problem
    job = problem.job
    whole = sorted(set(range(job.pipelines)) - {worker.pipeline for worker in problem.failed})
    if not whole or job.speeds:
        return schedule
    homes = [(p, j) for j in range(job.micro_batches) for p in range(job.pipelines)]
    shares = [homes[place :: len(whole)] for place in range(len(whole))]
    alone = replace(job, pipelines=1, micro_batches=len(shares[0]))
    fault_free = Problem(alone, technique=problem.technique, memory=problem.memory)
    reference = min(references(fault_free), key=lambda r: r.period, default=None)
    if reference is None or reference.period >= schedule.period:
        return schedule
    ops = (
        Op(kind, *share[j], stage, Worker(pipeline, stage), start, length)
        for pipeline, share in zip(whole, shares, strict=True)
        for stage, row in enumerate(reference.starts)
        for kind, j, start, length in row
        if j < len(share)
    )
    other = Schedule.build(problem, ops)
    return other if other.period < schedule.period else schedule


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
