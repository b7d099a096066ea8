"""A problem as the flat arrays that `dispatch` takes, and its results as schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.plans.routing import assign
from openrecycle.planner.plans.schedule import OpArrays, OpsByWorker, Schedule, op_times, whole
from openrecycle.planner.solvers.loops import INT64, STATE, compiled_functions, dispatch, retime, worth_compiling

UNLIMITED = 1 << 40
ALWAYS = 1_000_000  # a wait that goes on however little it spares


@dataclass(frozen=True)
class DispatchSettings:
    """How the event loop chooses; see `dispatch`. One number per stage, but for:

    target: ticks within which a stage should be done, counted from when its first F can start.
    order: which micro-batch first: `index`; `guests`, re-routed ones first; `own`, last; a number
    seeds a shuffle of near neighbours. split: which workers split B: `all`, `peers` of failed
    ones, `none`. alike: find the order as if F, I and W of a stage lasted equally long, so that
    all workers keep step, and then give each op its true time in that order.
    """

    depth: tuple[int, ...]
    final: tuple[int, ...]
    open_limit: tuple[int, ...]
    max_wait: tuple[int, ...]
    max_wait_w: tuple[int, ...]
    target: int
    order: str | int = "index"
    split: str = "all"
    alike: bool = False


@dataclass(frozen=True)
class Result:
    """Starts in ticks per item (stage * n + micro-batch). first, last: by stage, its first start
    and its last end. spans: the sum of last - first, by which results of equal period compare."""

    period: int
    spans: int
    first: list[int]
    last: list[int]
    starts: tuple[Sequence[int], Sequence[int], Sequence[int]] = field(repr=False)
    split: str = "all"

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better."""
        return (self.period, self.spans)


def fits_machine_code(problem: Problem) -> bool:
    """Do all numbers of the loops fit 64 bits? Else they are left to Python's own integers."""
    job = problem.job
    workers, items = job.pipelines * job.stages, job.pipelines * job.stages * job.micro_batches
    slowest = [max(problem.worker_ticks(Worker(p, s)).work for p in range(job.pipelines)) for s in range(job.stages)]
    # A time is at most all work and transfers one after the other; an event code packs it with an index.
    transfers = sum(job.transfer_ticks) + sum(job.backward_transfer_ticks)
    longest = job.pipelines * job.micro_batches * (sum(slowest) + transfers)
    # What a wait spares is weighed in percent of ALWAYS.
    return 3 * longest * (workers + 2 * items) < INT64 and ALWAYS * max(slowest) < INT64


class Table:
    """One problem, made ready for any number of runs.

    compiled: use machine code; by default where it pays and can be had.
    """

    def __init__(self, problem: Problem, *, compiled: bool | None = None) -> None:
        job = problem.job
        self.problem = problem
        self.n = job.pipelines * job.micro_batches
        self.items = job.stages * self.n
        self.workers = job.stages * job.pipelines
        route = [s * job.pipelines + p for s, row in enumerate(assign(problem)) for p in row]
        self.load = [0] * self.workers
        for w in route:
            self.load[w] += 1
        base = [0] * self.workers
        for w in range(1, self.workers):
            base[w] = base[w - 1] + self.load[w - 1]
        self.ticks = [problem.worker_ticks(Worker(p, s)) for s in range(job.stages) for p in range(job.pipelines)]
        if compiled is None:
            compiled = worth_compiling(3 * self.items)
        self.compiled = compiled and fits_machine_code(problem)
        self.route = self._vector(route)
        self.base = self._vector(base)
        self.times = [
            self._vector([getattr(t, name) for t in self.ticks])
            for name in ("forward", "input_backward", "weight_backward")
        ]
        self.transfers = [self._vector(ticks) for ticks in (job.transfer_ticks, job.backward_transfer_ticks)]
        self.capacity = self._vector([UNLIMITED if limit is None else limit for limit in problem.limits])
        self._keys: dict[str | int, Any] = {}

    def run(self, settings: DispatchSettings) -> Result:
        job = self.problem.job
        functions: tuple[Callable[..., int], Callable[..., None]] = (dispatch, retime)
        loop, again = compiled_functions() if self.compiled else functions
        split = self._vector(self.split(settings.split))
        sequence = self._zeros(3 * self.items)
        queues = [self._zeros(self.items) for _ in range(3)]
        starts = (self._zeros(self.items), self._zeros(self.items), self._zeros(self.items))
        # In thirds of a tick, so that a third of a stage's work is a whole number.
        scale = 3 if settings.alike else 1
        times = [self._vector([t.work for t in self.ticks])] * 3 if settings.alike else self.times
        started = loop(
            job.pipelines,
            self.n,
            self.route,
            *times,
            *(ticks * scale if self.compiled else [scale * t for t in ticks] for ticks in self.transfers),
            self.capacity,
            split,
            self._key(settings.order),
            *map(
                self._vector,
                (
                    settings.depth,
                    settings.final,
                    settings.open_limit,
                    settings.max_wait,
                    settings.max_wait_w,
                ),
            ),
            self._vector(self._slack(settings.target, scale, alike=settings.alike)),
            self.base,
            *queues,
            *starts,
            sequence,
            self._zeros(STATE * self.workers),
            self._zeros(self.workers),
        )
        if settings.alike:
            free = self._zeros(self.workers)
            again(self.n, self.route, *self.times, *self.transfers, split, sequence, started, *starts, free)
        return self.result(starts, settings.split)

    def timed(self, forward: Sequence[int], backward: Sequence[int], weight: Sequence[int], split: str) -> Result:
        """Starts in ticks by item, as a result of this table. split: as in Settings."""
        return self.result((self._vector(forward), self._vector(backward), self._vector(weight)), split)

    def schedule(self, result: Result) -> Schedule:
        return ArraySchedule(self, result)

    def split(self, which: str) -> list[int]:
        """By worker: 1 where it splits B."""
        problem, pipelines = self.problem, self.problem.job.pipelines
        if which == "peers":
            stages = [int(len(problem.living_peers(s)) < pipelines) for s in range(problem.job.stages)]
        else:
            stages = [int(which == "all")] * problem.job.stages
        return [flag for flag in stages for _ in range(pipelines)]

    def result(self, starts: tuple[Any, Any, Any], split: str = "all") -> Result:
        """first, last and period of such starts, by the definitions of planner.plans.schedule."""
        job, n = self.problem.job, self.n
        forward, backward, weight = starts
        flags = self.split(split)
        first, last = [], []
        for s in range(job.stages):
            row = slice(s * n, (s + 1) * n)
            first.append(int(min(forward[row]) if not self.compiled else forward[row].min()))
            if flags[s * job.pipelines]:
                last.append(self._last_end(weight[row], row, "weight_backward"))
            else:
                last.append(self._last_end(backward[row], row, "backward"))
        optimizers = [t.optimizer for t in self.problem.fastest]
        spans = [end - start for start, end in zip(first, last, strict=True)]
        if self.problem.technique.staggers:
            period = max(span + o for span, o in zip(spans, optimizers, strict=True))
        else:
            period = max(last) - min(first) + max(optimizers)
        return Result(period, sum(spans), first, last, starts, split)

    def _last_end(self, starts: Any, row: slice, name: str) -> int:
        """When the last of the stage's W's or B's has ended."""
        if not self.problem.job.speeds:
            return self._largest(starts) + int(getattr(self.ticks[self.route[row.start]], name))
        return max(int(a) + int(getattr(self.ticks[w], name)) for a, w in zip(starts, self.route[row], strict=True))

    def _slack(self, target: int, scale: int, *, alike: bool) -> list[int]:
        """By worker: when it must begin to end in time if it never idles; in 1/scale ticks."""
        job = self.problem.job
        longest = self.problem.longest_optimizer
        out, head = [], 0
        for s, t in enumerate(self.problem.fastest):
            end = head + scale * (target - t.optimizer)
            if not self.problem.technique.staggers:
                end = scale * (target - longest)
            peers = range(s * job.pipelines, (s + 1) * job.pipelines)
            out += [end - scale * self.load[w] * self.ticks[w].work for w in peers]
            head += (t.work if alike else t.forward) + (scale * job.transfer_ticks[s] if s + 1 < job.stages else 0)
        return out

    def _key(self, order: str | int) -> Any:
        if order not in self._keys:
            if len(self._keys) > 8:
                self._keys.clear()
            self._keys[order] = self._vector(self._ranks(order))
        return self._keys[order]

    def _ranks(self, order: str | int) -> list[int]:
        job, n = self.problem.job, self.n
        rank = [m % job.micro_batches * job.pipelines + m // job.micro_batches for m in range(n)] * job.stages
        if order == "index":
            return rank
        if isinstance(order, int):
            noise = random.Random(order)
            spread = job.pipelines * (1 + order % 4)
            return [r + noise.randrange(spread + 1) for r in rank]
        sign = -1 if order == "guests" else 1
        return [
            (1 + sign * int(self.route[item] % job.pipelines != item % n // job.micro_batches)) * n + r
            for item, r in enumerate(rank)
        ]

    def _vector(self, values: Sequence[int]) -> Any:
        if self.compiled:
            return np.array(values, dtype=np.int64)
        return list(values)

    def _zeros(self, count: int) -> Any:
        if self.compiled:
            return np.zeros(count, dtype=np.int64)
        return [0] * count

    def _largest(self, values: Any) -> int:
        return int(values.max() if self.compiled else max(values))


class ArraySchedule(Schedule):
    """A Schedule whose period is known without making its ops.

    table, result: what they are made from.
    """

    table: Table
    result: Result

    def __init__(self, table: Table, result: Result) -> None:
        super().__init__(table.problem, OpsByWorker(table.problem.living_workers(), self._ops))
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "result", result)
        # The values that the base class would compute from all ops; tested equal.
        self.__dict__["period"] = result.period
        self.__dict__["makespan"] = max(result.last) - min(result.first)

    def _ops(self) -> OpArrays:
        table, result, job = self.table, self.result, self.problem.job
        route = whole(table.route).reshape(job.stages, table.n) % job.pipelines
        starts = np.stack([whole(times).reshape(job.stages, table.n) for times in result.starts])
        split = whole(table.split(result.split)).reshape(job.stages, job.pipelines)
        step = whole(result.last if self.problem.technique.staggers else [max(result.last)] * job.stages)
        return OpArrays.of_items(self.problem, route, starts, split, op_times(self.problem), step)
