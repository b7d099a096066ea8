"""The list scheduler: any size, no time limit needed, always a valid schedule.

It runs the event loop of `dispatch` under a number of rules and keeps the best result. Which
rules, and how many, depends on the problem alone, never on the clock or on chance: every agent
that plans for the same failures gets the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from openrecycle.planner.jobs.failures import levelled
from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.plans.baseline import Timed, one_forward_one_backward, references, timed_schedule
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Cancelled, ProgressCallback, Solution, SolverProgress
from openrecycle.planner.solvers.rules import rules
from openrecycle.planner.solvers.table import DispatchSettings, Result, Table

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
        settings: DispatchSettings | None = None
        for rule in rules(problem):
            tried = rule.settings(problem, bound)
            result = table.run(tried)
            if best is None or result.rank < best.rank:
                best, settings = result, tried
                if on_progress:
                    on_progress(SolverProgress(self.name, time.perf_counter() - begin, best.period, bound))
            if best.period <= target or time.perf_counter() - begin > time_limit or (cancelled and cancelled()):
                break
        assert best is not None and settings is not None
        best = _less_split(table, best, settings)
        schedule = table.schedule(best)
        if not problem.failed:
            reference = None if best.period <= bound else min(references(problem), key=lambda r: r.period, default=None)
            if reference is not None and reference.period < best.period:
                schedule = _as_schedule(table, reference)
        elif best.period > bound and time.perf_counter() - begin <= time_limit and not (cancelled and cancelled()):
            if table.items <= SELECTIVE_ITEMS:
                schedule = _of_levelled(schedule, compiled=self._compiled)
            for other in rerouted_references(problem, below=schedule.period, compiled=self._compiled):
                schedule = min(schedule, other.for_fewer(problem), key=lambda s: s.period)
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


def rerouted_references(problem: Problem, *, below: int, compiled: bool | None = None) -> Iterator[Schedule]:
    """The references that may take less than `below` ticks, on the pipelines without failures, which share all
    micro-batches: schedules of a problem in which whatever lives in the other pipelines has failed as well."""
    job = problem.job
    broken = {worker.pipeline for worker in problem.failed}
    if len(broken) == job.pipelines or job.speeds:
        return
    share = -(-job.pipelines * job.micro_batches // (job.pipelines - len(broken)))
    if share * max(ticks.work for ticks in job.ticks) >= below:
        return
    alone = Problem(replace(job, pipelines=1, micro_batches=share), technique=problem.technique, memory=problem.memory)
    shorter = [reference for reference in references(alone) if reference.period < below]
    if not shorter:
        return
    idle = frozenset(Worker(p, s) for p in broken for s in range(job.stages))
    table = Table(replace(problem, failed=idle), compiled=compiled)
    for reference in sorted(shorter, key=lambda r: r.period):
        yield table.schedule(reference_result(table, reference))


def _less_split(table: Table, best: Result, settings: DispatchSettings) -> Result:
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
    if table.problem.job.speeds:
        return timed_schedule(table.problem, reference)
    return table.schedule(reference_result(table, reference))


def reference_result(table: Table, reference: Timed) -> Result:
    """A reference of one pipeline on each of the table's pipelines that live as a whole: each runs what is routed to
    it, micro-batch by micro-batch, in the reference's order. No speeds; the other pipelines have failed as a whole."""
    job, n = table.problem.job, table.n
    own: dict[str, list[list[int]]] = {kind: [] for kind in "FIW"}
    for row in reference.starts:
        for kind in own:
            own[kind].append([0] * job.micro_batches * job.pipelines)
        for kind, j, start, _ in row:
            own["I" if kind == "B" else kind][-1][j] = start
    taken = [0] * job.pipelines
    place = [0] * n  # of each micro-batch among those of the worker that runs it, the same on all stages
    for m in sorted(range(n), key=lambda m: (m % job.micro_batches, m)):
        host = int(table.route[m])
        place[m] = taken[host]
        taken[host] += 1
    starts = [[own[kind][s][k] for s in range(job.stages) for k in place] for kind in "FIW"]
    splits = any(kind == "W" for kind, _ in reference.orders[0])
    return table.timed(starts[0], starts[1], starts[2], "all" if splits else "none")
