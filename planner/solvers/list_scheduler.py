"""The list scheduler: any size, no time limit needed, always a valid schedule.

It runs the event loop of `dispatch` under a handful of rules and keeps the best result. Which
rules, and how many, depends on the problem alone, never on the clock or on chance: every agent
that plans for the same failures gets the same plan.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from planner.baseline import one_forward_one_backward, reference_period
from planner.bounds import period_bound
from planner.job import MemoryLimit, Problem, Worker
from planner.routing import assign
from planner.schedule import Op, Schedule
from planner.solvers.base import Cancelled, Progress, ProgressCallback, Solution
from planner.solvers.dispatch import dispatch

UNLIMITED = 1 << 60
# Rules tried so long as the ops of all tries together stay below this.
EFFORT = 400_000


@dataclass(frozen=True)
class Rule:
    """How the event loop chooses. See `dispatch` for what each number does.

    depth: forwards that a stage runs ahead before it prefers backwards (`eager`: none; `1f1b`:
    stages - s; `zb`: 2 (stages - s) - 1; `all`). open_limit: pending W's that force a W (`one`,
    `half` of the memory limit, `full`: one less than the limit, `never`). order: which
    micro-batch first (`index`; `guests`: re-routed ones first; `own`; a number seeds a shuffle of
    near neighbours). split: which workers split B (`none`, `peers` of failed workers, `all`).
    """

    depth: str
    open_limit: str
    order: str | int = "index"
    split: str = "all"


class ListScheduler:
    """The Solver of this module. `time_limit` only cuts the number of rules short."""

    name = "list"

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
            schedule = one_forward_one_backward(problem)
            return Solution(schedule, schedule.period, self.name, time.perf_counter() - begin)
        table = _Table(problem)
        best: _Result | None = None
        target = min(bound, warm_start.period) if warm_start else bound
        for rule in _rules(problem):
            result = table.run(rule)
            if best is None or result.period < best.period:
                best = result
                if on_progress:
                    on_progress(Progress(self.name, time.perf_counter() - begin, best.period, bound))
            if best.period <= target or time.perf_counter() - begin > time_limit or (cancelled and cancelled()):
                break
        assert best is not None
        if not problem.failed and best.period > reference_period(problem.job) and _admits_1f1b(problem):
            schedule = one_forward_one_backward(problem)
        else:
            schedule = table.schedule(best)
        if warm_start is not None and warm_start.period <= schedule.period:
            schedule = warm_start
        return Solution(schedule, bound, self.name, time.perf_counter() - begin)


def _admits_1f1b(problem: Problem) -> bool:
    needed = MemoryLimit("1f1b").limits(problem.job)
    pairs = zip(problem.limits, needed, strict=True)
    return all(limit is None or held is None or limit >= held for limit, held in pairs)


def _rules(problem: Problem) -> Iterator[Rule]:
    """Best first; their number falls with the size of the problem."""
    job = problem.job
    ops = 3 * job.pipelines * job.stages * job.micro_batches
    tries = max(3, min(200, EFFORT // ops))
    splits = ["none"]
    if problem.technique.splits:
        splits = ["all", "peers"] if problem.failed else ["all"]
    fixed = [
        Rule(depth, open_limit, order, split)
        for order in ("index", "guests", "own")
        for split in splits
        for depth, open_limit in (
            ("1f1b", "full"),
            ("1f1b", "never"),
            ("eager", "full"),
            ("1f1b", "half"),
            ("zb", "never"),
            ("eager", "never"),
            ("zb", "full"),
            ("1f1b", "one"),
            ("all", "never"),
        )
    ]
    yield from fixed[:tries]
    for seed in range(max(0, tries - len(fixed))):
        like = fixed[seed % len(fixed)]
        yield Rule(like.depth, like.open_limit, seed, like.split)


@dataclass(frozen=True)
class _Result:
    """Starts per item (stage * n + micro-batch), in ticks. split: per worker."""

    period: int
    forward: list[int]
    backward: list[int]
    weight: list[int]
    split: list[int]


class _Table:
    """A problem as the flat arrays that `dispatch` takes."""

    def __init__(self, problem: Problem) -> None:
        job = problem.job
        self.problem = problem
        self.n = job.pipelines * job.micro_batches
        self.workers = job.stages * job.pipelines
        self.route = [s * job.pipelines + p for s, row in enumerate(assign(problem)) for p in row]
        self.load = [0] * self.workers
        for w in self.route:
            self.load[w] += 1
        self.base = [0] * self.workers
        for w in range(1, self.workers):
            self.base[w] = self.base[w - 1] + self.load[w - 1]
        self.capacity = [UNLIMITED if limit is None else limit for limit in problem.limits]
        self.forward = [t.forward for t in job.ticks]
        self.input_backward = [t.input_backward for t in job.ticks]
        self.weight_backward = [t.weight_backward for t in job.ticks]

    def run(self, rule: Rule) -> _Result:
        job, n, workers = self.problem.job, self.n, self.workers
        split = self._split(rule.split)
        keys = self._keys(rule.order)
        buffers = [[0] * (job.stages * n) for _ in range(6)]
        ready_forward, ready_backward, pending, forward, backward, weight = buffers
        dispatch(
            job.pipelines,
            n,
            self.route,
            self.forward,
            self.input_backward,
            self.weight_backward,
            job.transfer_ticks,
            self.capacity,
            split,
            keys,
            keys,
            [self._depth(rule.depth, w // job.pipelines) for w in range(workers)],
            [self._open_limit(rule.open_limit, w) for w in range(workers)],
            self.base,
            ready_forward,
            ready_backward,
            pending,
            forward,
            backward,
            weight,
            [0] * (9 * workers),
            [0] * workers,
        )
        period = self._period(forward, backward, weight, split)
        return _Result(period, forward, backward, weight, split)

    def schedule(self, result: _Result) -> Schedule:
        return Schedule.build(self.problem, self._ops(result))

    def _ops(self, result: _Result) -> Iterator[Op]:
        job, n = self.problem.job, self.n
        for s, ticks in enumerate(job.ticks):
            workers = [Worker(p, s) for p in range(job.pipelines)]
            for m in range(n):
                item = s * n + m
                pipeline, micro_batch = divmod(m, job.micro_batches)
                w = self.route[item]
                worker = workers[w % job.pipelines]
                yield Op("F", pipeline, micro_batch, s, worker, result.forward[item], ticks.forward)
                start = result.backward[item]
                if result.split[w]:
                    yield Op("I", pipeline, micro_batch, s, worker, start, ticks.input_backward)
                    yield Op("W", pipeline, micro_batch, s, worker, result.weight[item], ticks.weight_backward)
                else:
                    yield Op("B", pipeline, micro_batch, s, worker, start, ticks.backward)

    def _period(self, forward: list[int], backward: list[int], weight: list[int], split: list[int]) -> int:
        """The definition of planner.schedule, on the arrays."""
        problem, n = self.problem, self.n
        first, last = [], []
        for s, ticks in enumerate(problem.job.ticks):
            row = range(s * n, (s + 1) * n)
            ends = (
                weight[k] + ticks.weight_backward if split[self.route[k]] else backward[k] + ticks.backward for k in row
            )
            first.append(min(forward[k] for k in row))
            last.append(max(ends))
        optimizers = [t.optimizer for t in problem.job.ticks]
        if problem.technique.staggers:
            return max(end + o - start for start, end, o in zip(first, last, optimizers, strict=True))
        return max(last) - min(first) + max(optimizers)

    def _split(self, which: str) -> list[int]:
        problem = self.problem
        if which == "none":
            return [0] * self.workers
        if which == "all":
            return [1] * self.workers
        return [
            int(len(problem.living_peers(s)) < problem.job.pipelines)
            for s in range(problem.job.stages)
            for _ in range(problem.job.pipelines)
        ]

    def _keys(self, order: str | int) -> list[int]:
        """Rank of each item on its worker; equal ranks fall back on the micro-batch."""
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

    def _depth(self, name: str, stage: int) -> int:
        below = self.problem.job.stages - stage
        return {"eager": 0, "1f1b": below, "zb": 2 * below - 1, "all": UNLIMITED}[name]

    def _open_limit(self, name: str, worker: int) -> int:
        limit = min(self.capacity[worker // self.problem.job.pipelines], max(1, self.load[worker]))
        return {"one": 1, "half": max(1, limit // 2), "full": max(1, limit - 1), "never": UNLIMITED}[name]
