"""Local search over the list scheduler's settings, for grids too large to be solved exactly.

The event loop plans a whole iteration in milliseconds, so its settings can be tried by the
thousand: how far each stage runs ahead, how many W's it may leave open, how long it waits. A
change is kept when period, or at equal period the sum of the stages' spans, is no worse.

Where nothing failed the search is on one pipeline, as pipelines then don't meet: what is best for
one is best for all, and is found in a fraction of the time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from openrecycle.planner.jobs.job import Problem
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run, Solution
from openrecycle.planner.solvers.list_scheduler import ORDERS, ListScheduler, rules
from openrecycle.planner.solvers.table import ALWAYS, UNLIMITED, DispatchSettings, Result, Table

POOL = 4  # settings that are improved side by side
MAX_WAITS = (0, 30, 100, 300, ALWAYS)
TARGETS = (0.98, 1.0, 1.01, 1.02, 1.05, 1.1)
# Ops and seconds from which so many runs repay the time that loading compiled loops takes.
COMPILED_OPS, COMPILED_SECONDS = 1_500, 3.0


class Tuner:
    """The Solver of this module: uses all of its time unless the gap closes."""

    name = "list+tuning"

    def solve(self, problem: Problem, run: Run | None = None, *, warm_start: Schedule | None = None) -> Solution:
        run = run or Run()
        bound = period_bound(problem)
        if not problem.technique.reroutes:
            return ListScheduler().solve(problem, run, warm_start=warm_start)
        table = _table(searched(problem), run.time_limit)
        pool = self._pool(table, bound, run)
        best, chosen = pool[0]
        noise = random.Random(0)
        while best.period > bound and not run.over:
            k = noise.randrange(len(pool))
            result, settings = pool[k]
            changed = _change(settings, bound, noise, reorder=bool(problem.failed))
            tried = table.run(changed)
            if tried.rank <= result.rank:
                pool[k] = (tried, changed)
            if tried.rank < best.rank:
                if tried.period < best.period:
                    run.tell(self.name, tried.period, bound)
                best, chosen = tried, changed
        if table.problem is not problem:
            table = Table(problem)
            best = table.run(chosen)
        schedule = table.schedule(best)
        if warm_start is not None and warm_start.period <= schedule.period:
            schedule = warm_start
        return Solution(schedule, bound, self.name, run.elapsed)

    def _pool(self, table: Table, bound: int, run: Run) -> list[tuple[Result, DispatchSettings]]:
        """The best of the rules, to start from."""
        tried: list[tuple[Result, DispatchSettings]] = []
        for rule in rules(table.problem):
            settings = rule.settings(table.problem, bound)
            if not table.problem.failed:
                settings = replace(settings, order="index")  # the only one that is alike on all pipelines
            tried.append((table.run(settings), settings))
            tried.sort(key=lambda pair: pair[0].rank)
            del tried[POOL:]
            if run.over or tried[0][0].period <= bound:
                break
        return tried


def searched(problem: Problem) -> Problem:
    """What to search on: one pipeline where all are alike, else the problem itself."""
    job = problem.job
    if problem.failed or job.pipelines == 1 or job.speeds:
        return problem
    return replace(problem, job=replace(job, pipelines=1))


def _table(problem: Problem, time_limit: float) -> Table:
    job = problem.job
    many = job.ops >= COMPILED_OPS and time_limit >= COMPILED_SECONDS
    return Table(problem, compiled=True if many and find_spec("numba") is not None else None)


def _change(settings: DispatchSettings, bound: int, noise: random.Random, *, reorder: bool) -> DispatchSettings:
    """One to three small random changes, each to a run of neighbouring stages.

    reorder: of the order of micro-batches too.
    """
    stages = len(settings.depth)
    kinds = ("depth", "final", "open_limit", "max_wait", "max_wait_w", "target", *(("order",) if reorder else ()))
    for _ in range(noise.choice((1, 1, 2, 3))):
        what = noise.choice(kinds)
        if what == "order":
            settings = replace(settings, order=noise.choice((*ORDERS, noise.randrange(1 << 20))))
            continue
        if what == "target":
            settings = replace(settings, target=int(bound * noise.choice(TARGETS)))
            continue
        begin = noise.randrange(stages)
        end = min(stages, begin + noise.choice((1, 1, 2, 4, stages)))
        values: list[int] = list(getattr(settings, what))
        if what in ("max_wait", "max_wait_w"):
            values[begin:end] = [noise.choice(MAX_WAITS)] * (end - begin)
        else:
            step = noise.choice((-2, -1, 1, 2))
            values[begin:end] = _stepped(values[begin:end], step, lowest=int(what == "open_limit"), top=2 * stages)
        change: dict[str, Any] = {what: tuple(values)}
        settings = replace(settings, **change)
    return settings


def _stepped(values: Sequence[int], step: int, *, lowest: int, top: int) -> list[int]:
    """Each value and `step`, not below `lowest`; from no limit one comes down to about `top`."""
    return [max(lowest, min(v, top if v >= UNLIMITED else v) + step) for v in values]
