"""The list scheduler makes a valid schedule of any size without a time limit.

It runs the event loop of `loops` under a number of rules and keeps the best result. Which rules, and how many, depends
on the problem alone, never on the clock or on chance, so every agent that plans for the same failures gets the same
plan. `Table` turns a problem into the flat arrays that the loop takes, and the loop's results into schedules.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, count, islice
from typing import Any

import numpy as np

from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.failures import levelled
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.jobs.words import plural
from openrecycle.planner.plans.baseline import (
    Timed,
    in_order,
    least_reference,
    one_forward_one_backward,
    references,
)
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import OpArrays, OpsByWorker, Schedule, op_times, whole
from openrecycle.planner.solvers.base import Run, Solution
from openrecycle.planner.solvers.loops import INT64, STATE, compiled_functions, dispatch, retime, worth_compiling
from openrecycle.planner.solvers.routing import assign

# -- a problem as the flat arrays that `dispatch` takes, and its results as schedules -----------

UNLIMITED = 1 << 40
MOST = 64
"""The most rules that are tried on one problem."""
ALWAYS = 1_000_000  # max_wait of a worker that waits however little delay it spares


@dataclass(frozen=True)
class DispatchSettings:
    """How the event loop chooses; see `dispatch`. One number per stage, except for:

    target: ticks within which a stage should be done, counted from when its first F can start.
    order: which micro-batch goes first: `index` by number; `guests` re-routed ones first; `own` re-routed ones last; a
    number is the seed of a shuffle among near neighbours. split: which workers split B: `all`, `peers` of failed
    workers, `none`. alike: find the order as if F, I and W of a stage lasted equally long, so that all workers keep in
    step, and then give each op its true time in that order.
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
    """The outcome of one run of the loop. starts: of F, I and W in ticks, by item (stage * n + micro-batch). first,
    last: by stage, its first start and last end. spans: the sum of last - first; it ranks results of equal period."""

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
    """Do all numbers of the loops fit in 64 bits? If not, the loops run in Python, on its own integers."""
    job = problem.job
    workers, items = job.pipelines * job.stages, job.pipelines * job.stages * job.micro_batches
    slowest = [max(problem.worker_ticks(Worker(p, s)).work for p in range(job.pipelines)) for s in range(job.stages)]
    # No time exceeds all work and transfers one after the other; an event code packs a time with an index.
    transfers = sum(job.transfer_ticks) + sum(job.backward_transfer_ticks)
    longest = job.pipelines * job.micro_batches * (sum(slowest) + transfers)
    # worth_a_wait multiplies ticks by a percentage of up to ALWAYS.
    return 3 * longest * (workers + 2 * items) < INT64 and ALWAYS * max(slowest) < INT64


class Table:
    """One problem as flat arrays, for any number of runs.

    compiled: use machine code; by default where it pays and numba is installed.
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
        self.room = [self._vector(column) for column in zip(*problem.room, strict=True)]
        self._keys: dict[str | int, Any] = {}
        self._splits: dict[str, Any] = {}

    def run(self, settings: DispatchSettings) -> Result:
        job = self.problem.job
        functions: tuple[Callable[..., int], Callable[..., None]] = (dispatch, retime)
        loop, again = compiled_functions() if self.compiled else functions
        if settings.split not in self._splits:
            self._splits[settings.split] = self._vector(self.split(settings.split))
        split = self._splits[settings.split]
        sequence = self._zeros(3 * self.items)
        queues = [self._zeros(self.items) for _ in range(3)]
        starts = (self._zeros(self.items), self._zeros(self.items), self._zeros(self.items))
        # Times are in thirds of a tick, so that a third of a stage's work is a whole number.
        scale = 3 if settings.alike else 1
        times = [self._vector([t.work for t in self.ticks])] * 3 if settings.alike else self.times
        started = loop(
            job.pipelines,
            self.n,
            self.route,
            *times,
            *(ticks * scale if self.compiled else [scale * t for t in ticks] for ticks in self.transfers),
            *self.room,
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
        """Makes a result out of starts in ticks by item. split: as in DispatchSettings."""
        return self.result((self._vector(forward), self._vector(backward), self._vector(weight)), split)

    def schedule(self, result: Result) -> Schedule:
        return ArraySchedule(self, result)

    def split(self, which: str) -> list[int]:
        """Returns by worker 1 where it splits B, else 0."""
        problem, pipelines = self.problem, self.problem.job.pipelines
        if which == "peers":
            stages = [int(len(problem.living_peers(s)) < pipelines) for s in range(problem.job.stages)]
        else:
            stages = [int(which == "all")] * problem.job.stages
        return [flag for flag in stages for _ in range(pipelines)]

    def result(self, starts: tuple[Any, Any, Any], split: str = "all") -> Result:
        """Computes first, last and period for these starts, as planner.plans.schedule defines them."""
        job = self.problem.job
        forward, backward, weight = starts
        flags = self.split(split)[:: job.pipelines]
        ends = {
            flag: self._last_ends(*((weight, "weight_backward") if flag else (backward, "backward")))
            for flag in set(flags)
        }
        first, last = self._by_stage(forward, min), [ends[flag][s] for s, flag in enumerate(flags)]
        optimizers = [t.optimizer for t in self.problem.fastest]
        spans = [end - start for start, end in zip(first, last, strict=True)]
        if self.problem.technique.staggers:
            period = max(span + o for span, o in zip(spans, optimizers, strict=True))
        else:
            period = max(last) - min(first) + max(optimizers)
        return Result(period, sum(spans), first, last, starts, split)

    def _last_ends(self, starts: Any, name: str) -> list[int]:
        """By stage, the end of the last of its W's or B's."""
        job = self.problem.job
        if not job.speeds:
            latest = self._by_stage(starts, max)
            return [start + int(getattr(self.ticks[s * job.pipelines], name)) for s, start in enumerate(latest)]
        ends = [int(a) + int(getattr(self.ticks[w], name)) for a, w in zip(starts, self.route, strict=True)]
        return [max(ends[at : at + self.n]) for at in range(0, self.items, self.n)]

    def _by_stage(self, starts: Any, which: Callable[..., int]) -> list[int]:
        """Applies `min` or `max` to the starts of each stage."""
        if self.compiled:
            found: list[int] = getattr(starts.reshape(-1, self.n), which.__name__)(axis=1).tolist()
            return found
        return [which(starts[at : at + self.n]) for at in range(0, self.items, self.n)]

    def _slack(self, target: int, scale: int, *, alike: bool) -> list[int]:
        """By worker, the latest start of its work with which it ends in time if it never idles; in 1/scale ticks."""
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
            return [r + noise for r, noise in zip(rank, _noise(order, job.pipelines, self.items), strict=True)]
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


@lru_cache(maxsize=MOST)
def _noise(seed: int, pipelines: int, items: int) -> Sequence[int]:
    """How far a shuffle moves each item. It is the same for all problems of a size, and a search sees hundreds."""
    draw = random.Random(seed).randrange
    spread = pipelines * (1 + seed % 4)
    return array("i", (draw(spread + 1) for _ in range(items)))


class ArraySchedule(Schedule):
    """A Schedule whose period is known before its ops are made.

    table, result: what the ops are made from.
    """

    table: Table
    result: Result

    def __init__(self, table: Table, result: Result) -> None:
        super().__init__(table.problem, OpsByWorker(table.problem.living_workers(), self._ops))
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "result", result)
        # These equal the values that the base class would compute from all ops; a test compares them.
        self.__dict__["period"] = result.period
        self.__dict__["makespan"] = max(result.last) - min(result.first)

    def _ops(self) -> OpArrays:
        table, result, job = self.table, self.result, self.problem.job
        route = whole(table.route).reshape(job.stages, table.n) % job.pipelines
        starts = np.stack([whole(times).reshape(job.stages, table.n) for times in result.starts])
        split = whole(table.split(result.split)).reshape(job.stages, job.pipelines)
        step = whole(result.last if self.problem.technique.staggers else [max(result.last)] * job.stages)
        return OpArrays.of_items(self.problem, route, starts, split, op_times(self.problem), step)


# -- the rules that it tries, best first -------------------------------------------------------------

# A rule gives settings for any problem. The list was chosen by measurement, greedily: each time the rule that lowers
# the mean gap most, over the grids of tests/benchmarks/bench_planner.py.

# -- the list scheduler -------------------------------------------------------------------------

# Rules are tried as long as the ops of all tries together stay below this number.
EFFORT = 800_000
FEWEST = 4
HUGE = 1_000_000  # problems with more ops get two rules only


@dataclass(frozen=True)
class Rule:
    """A recipe for DispatchSettings. depth: how many forwards a stage runs ahead before it prefers backwards: `eager`
    0, `1f1b` stages - s, `zb` 2 (stages - s) - 1.

    open_limit: the number of pending W's that forces one. `never`; `one`; `half` of the memory limit; `full-k`: k + 1
    less than the limit; `turn-k`: so that as many activations stay free for forwards as micro-batches turn round below
    at full speed, and k more.
    max_wait, max_wait_w: percent, the same on all stages. target: a multiple of the lower bound.
    final: how many of the last forwards go first, as a multiple of the micro-batches that turn round below.
    alike: see DispatchSettings; it changes nothing where F, I and W last equally long anyway.
    """

    depth: str
    open_limit: str
    max_wait: int = 0
    max_wait_w: int = 0
    target: float = 1.0
    final: float = 0.0
    alike: bool = False
    order: str | int = "index"
    split: str = "all"

    def settings(self, problem: Problem, bound: int) -> DispatchSettings:
        job = problem.job
        stages = range(job.stages)
        depths = {"eager": 0, "1f1b": 1, "zb": 2}[self.depth]
        turns = job.turn_ticks
        slowest = max(t.work for t in job.ticks)
        return DispatchSettings(
            depth=tuple(depths * (job.stages - s) - (depths > 1) for s in stages),
            final=tuple(int(self.final * turns[s] / job.ticks[s].work) for s in stages),
            open_limit=tuple(self._open_limit(problem, s, turns[s], slowest) for s in stages),
            max_wait=(self.max_wait,) * job.stages,
            max_wait_w=(self.max_wait_w,) * job.stages,
            target=int(bound * self.target),
            order=self.order,
            split=self.split,
            alike=self.alike,
        )

    def _open_limit(self, problem: Problem, stage: int, turn: int, slowest: int) -> int:
        if self.open_limit == "never":
            return UNLIMITED
        if self.open_limit == "one":
            return 1
        job = problem.job
        most = -(-job.pipelines * job.micro_batches // len(problem.living_peers(stage)))
        limit = problem.limits[stage]
        limit = most if limit is None else min(limit, most)
        if self.open_limit == "half":
            return max(1, limit // 2)
        name, _, less = self.open_limit.partition("-")
        if name == "full":
            return max(1, limit - 1 - int(less))
        return max(1, limit - int(less) - -(-turn // slowest))


# depth, open_limit, max_wait, max_wait_w, target, final
EVERY = [
    Rule("1f1b", "never", 100, 100),
    Rule("1f1b", "turn-0", 100, 100, alike=True),
    Rule("1f1b", "never", alike=True),
    Rule("zb", "turn-1"),
    Rule("1f1b", "never", 100, 0, 1.03),
    Rule("1f1b", "turn-0", 100, 100),
    Rule("1f1b", "never"),
    Rule("1f1b", "turn-2", 100, 100),
    Rule("zb", "turn-0", 100),
    Rule("zb", "turn-2"),
    Rule("1f1b", "turn-1", 100, 100),
    Rule("1f1b", "turn-1", 100, 100, 1.0, 1.5),
    Rule("1f1b", "turn-2", 100, 100, 1.0, 2.0),
    Rule("zb", "turn-2", 100, 100),
    Rule("zb", "turn-0"),
    Rule("1f1b", "full-0", ALWAYS, ALWAYS),
    Rule("1f1b", "never", ALWAYS, ALWAYS, 1.03),
    Rule("1f1b", "full-1", 100, 100, alike=True),
    Rule("zb", "never", alike=True),
    Rule("1f1b", "half", 100),
    Rule("zb", "half", 100, 100),
    Rule("zb", "full-0", 100),
    Rule("1f1b", "turn-1", 100),
    Rule("1f1b", "turn-0", 100),
    Rule("1f1b", "full-1", 100, 100),
    Rule("zb", "full-2", 100),
    Rule("eager", "never"),
    Rule("zb", "never"),
    Rule("1f1b", "full-0"),
    Rule("eager", "one"),
]


ORDERS = ("index", "guests", "own")


def rules(problem: Problem) -> tuple[Rule, ...]:
    """Return the rules to try on a problem. Their number depends on its size alone.

    Large problems get the first few of EVERY; small ones get all of them, in every order of micro-batches, and then
    with shuffled orders.
    """
    in_step = all(t.forward == t.input_backward == t.weight_backward for t in problem.job.ticks)
    return _rules(problem.technique.splits, bool(problem.failed), in_step, tries(problem.job.ops))


@lru_cache(maxsize=MOST)
def _rules(splits: bool, failed: bool, in_step: bool, most: int) -> tuple[Rule, ...]:
    return tuple(islice((rule for rule in _endless(splits, failed) if not (rule.alike and in_step)), most))


def tries(ops: int) -> int:
    """Return how many rules are tried on a problem of so many ops."""
    return 2 if ops > HUGE else max(FEWEST, min(MOST, EFFORT // ops))


def _endless(splits: bool, failed: bool) -> Iterator[Rule]:
    if not splits:
        yield from _coupled()
    some = EVERY[:8]
    for order in ORDERS if failed else ORDERS[:1]:
        yield from (replace(rule, order=order) for rule in (EVERY if order == "index" else some))
    if failed:
        yield from (replace(rule, split="peers") for rule in some)
    for seed in count():
        yield replace(EVERY[seed % len(EVERY)], order=seed)


def _coupled() -> Iterator[Rule]:
    """Yield the rules for a whole B: without separate W's only depth, max_wait and order matter."""
    plain = [Rule(depth, "never", max_wait, split="none") for max_wait in (0, 100) for depth in ("1f1b", "eager", "zb")]
    orders: Iterator[str | int] = chain(ORDERS, count())
    for order in orders:
        yield from (replace(rule, order=order) for rule in plain)


# Above so many items it takes longer than it is worth to find out which workers need not split B, or to plan for more
# failures than there are.
SELECTIVE_ITEMS = 30_000


class ListScheduler:
    """Makes the schedule that other solvers start from. The time limit of a run only cuts the number of rules short.

    compiled: use machine code or not; by default where it pays and numba is installed.
    """

    name = "list"

    def __init__(self, *, compiled: bool | None = None) -> None:
        self._compiled = compiled

    def solve(self, problem: Problem, run: Run | None = None) -> Solution:
        """Raises InfeasibleError when no schedule exists."""
        run = run or Run()
        bound = period_bound(problem)
        if not problem.technique.reroutes:
            return _fault_free(problem, bound, run)
        table = Table(problem, compiled=self._compiled)
        best: Result | None = None
        settings: DispatchSettings | None = None
        for rule in rules(problem):
            tried = rule.settings(problem, bound)
            result = table.run(tried)
            if best is None or result.rank < best.rank:
                best, settings = result, tried
                run.tell(self.name, best.period, bound)
            if best.period <= bound or run.over:
                break
        assert best is not None and settings is not None
        best = _less_split(table, best, settings)
        schedule = table.schedule(best)
        if not problem.failed:
            reference = None if best.period <= bound else least_reference(problem)
            if reference is not None and reference.period < best.period:
                schedule = _as_schedule(table, reference)
        elif best.period > bound and not run.over:
            if table.items <= SELECTIVE_ITEMS:
                schedule = _of_levelled(schedule, compiled=self._compiled)
            for other in rerouted_references(problem, below=schedule.period, compiled=self._compiled):
                schedule = min(schedule, other.for_fewer(problem), key=lambda s: s.period)
        return Solution(schedule, bound, self.name, run.elapsed)


def _fault_free(problem: Problem, bound: int, run: Run) -> Solution:
    """Return 1F1B. A fault-free plan is one in the order of a published schedule with whole B's, so the bound is the
    shortest such schedule that the memory limit allows. Where that is GPipe, the plan has a gap."""
    schedule = one_forward_one_backward(problem)
    least = least_reference(problem)
    assert least is not None  # 1F1B at least
    message = ""
    if least.period < schedule.period:
        units = problem.job.units
        message = (
            f"fault-free is 1F1B's order; GPipe's has a period of {units(least.period)} {plural(problem.job.time_unit)}"
        )
    return Solution(schedule, max(bound, least.period), ListScheduler.name, run.elapsed, message)


def _of_levelled(schedule: Schedule, *, compiled: bool | None) -> Schedule:
    """Plan for as many failures on every stage as the worst stage has; keep that plan if it is shorter, since it serves
    for these failures too."""
    problem = schedule.problem
    more = replace(problem, failed=levelled(problem.failed, problem.job))
    if more.failed == problem.failed or period_bound(more) >= schedule.period:
        return schedule
    other = ListScheduler(compiled=compiled).solve(more).schedule.for_fewer(problem)
    return other if other.period < schedule.period else schedule


def rerouted_references(problem: Problem, *, below: int, compiled: bool | None = None) -> Iterator[Schedule]:
    """Yield published schedules on the pipelines without failures, which share all micro-batches, if they may take less
    than `below` ticks. Their problem counts the living workers of the other pipelines as failed."""
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
    """Return the same result with fewer workers that split B, where that costs nothing.

    On a real device I and W apart take a little longer than B, and more memory.
    """
    if table.items > SELECTIVE_ITEMS or settings.split != "all":
        return best
    for split in ("none", "peers") if table.problem.failed else ("none",):
        result = table.run(replace(settings, split=split))
        if result.period <= best.period:
            return result
    return best


def _as_schedule(table: Table, reference: Timed) -> Schedule:
    """Put a published schedule on the whole grid, in the form of the table where all workers are alike."""
    if table.problem.job.speeds:
        return in_order(table.problem, reference.orders)
    return table.schedule(reference_result(table, reference))


def reference_result(table: Table, reference: Timed) -> Result:
    """Apply a published schedule of one pipeline to each pipeline of the table that lives as a whole: it runs what is
    routed to it, micro-batch by micro-batch, in that schedule's order. The job has no speeds, and the other pipelines
    have failed as a whole."""
    job, n = table.problem.job, table.n
    own: dict[str, list[list[int]]] = {kind: [] for kind in "FIW"}
    for row in reference.starts:
        for kind in own:
            own[kind].append([0] * job.micro_batches * job.pipelines)
        for kind, j, start, _ in row:
            own["I" if kind == "B" else kind][-1][j] = start
    taken = [0] * job.pipelines
    place = [0] * n  # the index of each micro-batch among those that its worker runs, the same on all stages
    for m in sorted(range(n), key=lambda m: (m % job.micro_batches, m)):
        host = int(table.route[m])
        place[m] = taken[host]
        taken[host] += 1
    starts = [[own[kind][s][k] for s in range(job.stages) for k in place] for kind in "FIW"]
    splits = any(kind == "W" for kind, _ in reference.orders[0])
    return table.timed(starts[0], starts[1], starts[2], "all" if splits else "none")


# -- what is best without failures -------------------------------------------------------------------

# In this order, since of two plans with equal period the first is kept: the technique that asks least of the job.
_TECHNIQUES = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)


def best_fault_free(job: Job, memory: MemoryLimit) -> Schedule:
    """Return the shortest fault-free plan of `job` at a memory limit: the best of all techniques, each with the list
    scheduler's rules and the published schedules (1F1B, GPipe, ZB-H1, ZB-H2) that it and the limit allow. Where all
    pipelines are alike, the plan is for one pipeline.

    It does not depend on the technique of the plan that is compared with it: what a job loses by its failures, or by
    doing without a technique, is measured from one mark, which is the same for all callers.
    A job that has layers is cut by its home partition or, where that does not fit in memory, as it is cut now.
    Raises InputError, and InfeasibleError where no technique has a plan.
    """
    try:
        return _best(job.at_home, memory)
    except InfeasibleError:
        if job.at_home is job:
            raise
        return _best(job, memory)


@lru_cache(maxsize=64)
def _best(job: Job, memory: MemoryLimit) -> Schedule:
    # Pipelines without failures are independent of each other, so where their workers are equally fast, one pipeline is
    # planned for all.
    alone = job if job.speeds else replace(job, pipelines=1)
    best: Schedule | None = None
    refused: InfeasibleError | None = None
    for technique in _TECHNIQUES:
        try:
            problem = Problem(alone, technique=technique, memory=memory)
            schedule = ListScheduler().solve(problem).schedule
        except InfeasibleError as error:
            refused = error
            continue
        if best is None or schedule.period < best.period:
            best = schedule
    if best is None:
        assert refused is not None
        raise refused
    return best
