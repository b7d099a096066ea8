"""Local search for grids too large to be solved exactly: over settings, and over parts of an order.

`Tuner`: the event loop plans a whole iteration in milliseconds, so thousands of its settings can be tried: how far each
stage runs ahead, how many W's it may leave open, how long it waits. A change is kept when the result is no worse: by
its period or, where that is equal, by the sum of the stages' spans. Where nothing failed the search is on one pipeline,
since pipelines then don't meet: what is best for one is best for all, and is found in a fraction of the time.

`Rearranger`: parts of a schedule's order are dispatched anew, forwards or backwards, and kept if no worse. A dispatcher
packs the ops that it still has ahead of it well. So going forwards it leaves the end of the iteration loose, and going
backwards its beginning. Here one pass is followed by others over parts of its result, in either direction: a schedule
whose first half was made forwards and whose second half backwards is 2 to 3 % shorter than either on large grids with
failures. After such large windows come small ones, each with rules and priorities of its own, for as long as there is
time. The search takes op times of any kind: a worker's speed and the all-reduce are part of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

from openrecycle.planner.jobs.job import Problem
from openrecycle.planner.plans.baseline import references
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers import loops
from openrecycle.planner.solvers.base import Run, Solution
from openrecycle.planner.solvers.list_scheduler import (
    ALWAYS,
    ORDERS,
    UNLIMITED,
    ArraySchedule,
    DispatchSettings,
    Result,
    Table,
    fits_machine_code,
    reference_result,
    rules,
)
from openrecycle.planner.solvers.loops import compiled_windows

SETTINGS = 4  # how many settings are improved side by side

# -- local search over the list scheduler's settings --------------------------------------------

MAX_WAITS = (0, 30, 100, 300, ALWAYS)
TARGETS = (0.98, 1.0, 1.01, 1.02, 1.05, 1.1)
# From so many ops and seconds on, the search repays the time that loading compiled loops takes.
COMPILED_OPS, COMPILED_SECONDS = 1_500, 3.0


class Tuner:
    """The solver that searches over settings. It uses all of its time unless the gap closes."""

    name = "list+tuning"

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution:
        bound = period_bound(problem)
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
        return Solution(min(warm_start, schedule, key=lambda s: s.period), bound, self.name, run.elapsed)

    def _pool(self, table: Table, bound: int, run: Run) -> list[tuple[Result, DispatchSettings]]:
        """Runs the rules and returns the best results, to start from."""
        tried: list[tuple[Result, DispatchSettings]] = []
        for rule in rules(table.problem):
            settings = rule.settings(table.problem, bound)
            if not table.problem.failed:
                settings = replace(settings, order="index")  # the only order that is alike on all pipelines
            tried.append((table.run(settings), settings))
            tried.sort(key=lambda pair: pair[0].rank)
            del tried[SETTINGS:]
            if run.over or tried[0][0].period <= bound:
                break
        return tried


def searched(problem: Problem) -> Problem:
    """Return the problem to search on: one pipeline where all are alike, else the problem itself."""
    job = problem.job
    if problem.failed or job.pipelines == 1 or job.speeds:
        return problem
    return replace(problem, job=replace(job, pipelines=1))


def _table(problem: Problem, time_limit: float) -> Table:
    job = problem.job
    many = job.ops >= COMPILED_OPS and time_limit >= COMPILED_SECONDS
    return Table(problem, compiled=True if many and find_spec("numba") is not None else None)


def _change(settings: DispatchSettings, bound: int, noise: random.Random, *, reorder: bool) -> DispatchSettings:
    """Make one to three small random changes, each to a run of neighbouring stages.

    reorder: may the order of micro-batches change too?
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
    """Add `step` to each value, but go no lower than `lowest`; "no limit" counts as `top`."""
    return [max(lowest, min(v, top if v >= UNLIMITED else v) + step) for v in values]


# -- orders of a problem's ops (see `loops`): their ranks, and a part of one dispatched anew ----------

Array = np.ndarray[Any, np.dtype[np.int64]]


class OpOrders:
    """Ranks and changes orders of one problem in which every B is split. Not for two threads at once.

    compiled: use machine code.
    """

    def __init__(self, table: Table, *, compiled: bool = True) -> None:
        self.table = table
        job = table.problem.job
        self.n, self.items, self.stages = table.n, table.items, job.stages
        run = compiled_windows() if compiled else vars(loops)
        self._mirror, self._earliest = run["mirror"], run["earliest"]
        self._weight_starts, self._redispatch = run["weight_starts"], run["redispatch"]
        self.route = np.asarray(table.route, dtype=np.int64)
        forward, backward, weight = (np.asarray(ticks, dtype=np.int64) for ticks in table.times)
        sent, returned = (np.asarray(ticks, dtype=np.int64) for ticks in table.transfers)
        # Ticks of down, up, W and both transfers: first for going forwards, then for going backwards.
        self._lengths = ((forward, backward, weight, sent, returned), (backward, forward, weight, returned, sent))
        limits = table.problem.limits
        self._capacity = np.array([UNLIMITED if limit is None else limit for limit in limits], dtype=np.int64)
        self._base = np.asarray(table.base, dtype=np.int64)
        self._load = np.asarray(table.load, dtype=np.int64)
        fastest = table.problem.fastest
        self._optimizer = np.array([t.optimizer for t in fastest], dtype=np.int64)
        self._heads = np.array(table.problem.heads, dtype=np.int64)
        self._stage = np.arange(table.workers) // job.pipelines
        self._down, self._up = self._zeros(self.items), self._zeros(self.items)
        self._free = self._zeros(table.workers)
        self._first, self._last = self._zeros(self.stages), self._zeros(self.stages)
        self._mirrored = self._zeros(3 * self.items)
        self._queues = self._zeros(self.items), self._zeros(self.items)

    def of(self, result: Result) -> Array:
        """Returns the order of a schedule; of ops that start together, those without duration come first."""
        forward, backward, weight = (np.asarray(starts, dtype=np.int64) for starts in result.starts)
        lengths = [ticks[self.route] for ticks in self._lengths[0][:3]]
        whole = np.array(self.table.split(result.split))[self.route] == 0
        weight = np.where(whole, backward + lengths[1], weight)
        items = np.arange(self.items)
        starts = np.concatenate((forward, backward, weight))
        ends = starts + np.concatenate(lengths)
        codes = np.concatenate((items, self.items + items, 2 * self.items + self.route))
        stage = np.tile(items // self.n, 3)
        order: Array = codes[np.lexsort((codes, -stage, ends, starts))]
        return order

    def rank(self, order: Array) -> tuple[int, int]:
        """Returns (period, sum of the stages' spans) in ticks, with each stage started as late as possible."""
        last, first = self._ends(order)
        spans = last - first
        if self.table.problem.technique.staggers:
            return int((spans + self._optimizer).max()), int(spans.sum())
        return int(last.max() - first.min() + self._optimizer.max()), int(spans.sum())

    def _ends(self, order: Array) -> tuple[Array, Array]:
        """Returns by stage the end of its last op if all start early, and the latest start of its first op."""
        self._run(False, order, self._zeros(self.stages), len(order))
        last = self._last.copy()
        latest = int(last.max())
        if not self.table.problem.technique.staggers:
            last[:] = latest
        self._mirror(order, self.items, self._mirrored)
        self._run(True, self._mirrored, latest - last, len(order))
        return last, latest - self._last

    def _run(self, backwards: bool, order: Array, release: Array, count: int) -> None:
        self._earliest(
            self.n,
            self.route,
            *self._lengths[backwards],
            release,
            order,
            count,
            self._down,
            self._up,
            self._free,
            self._first,
            self._last,
        )

    def again(
        self,
        order: Array,
        begin: int,
        end: int,
        manner: DispatchSettings,
        keys: tuple[Array, Array],
        *,
        backwards: bool,
    ) -> Array | None:
        """Returns `order` with order[begin:end] dispatched anew (`loops.redispatch`), or None where the memory limit
        stops that.

        manner: the settings; its order and split are not used. keys: priorities of downs and of ups, smaller first.
        """
        job = self.table.problem.job
        made: Array
        due = self._heads + manner.target - self._optimizer
        if backwards:
            latest = int(due.max())
            begin, end = len(order) - end, len(order) - begin
            made = self._zeros(len(order))
            self._mirror(order, self.items, made)
            release, due = latest - due, latest - self._heads
        else:
            made, release = order.copy(), self._zeros(self.stages)
        lengths = self._lengths[backwards]
        self._run(backwards, made, release, begin)
        work = self._load * (lengths[0] + lengths[1] + lengths[2])
        slack = due[self._stage] - work
        started = self._redispatch(
            job.pipelines,
            self.n,
            self.route,
            *lengths,
            int(backwards),
            self._capacity,
            *keys,
            *(
                np.array(row, dtype=np.int64)
                for row in (manner.depth, manner.final, manner.open_limit, manner.max_wait, manner.max_wait_w)
            ),
            slack,
            self._base,
            begin,
            end,
            self._down,
            self._up,
            self._free,
            *self._queues,
            self._zeros(5 * self.items),
            self._zeros(loops.STATE * self.table.workers),
            self._zeros(self.table.workers),
            made,
        )
        if started < end - begin:
            return None
        if not backwards:
            return made
        back = self._zeros(len(made))
        self._mirror(made, self.items, back)
        return back

    def result(self, order: Array) -> Result:
        """Makes the schedule of an order: stages start as late, and then ops as early, as they can."""
        _, first = self._ends(order)
        self._run(False, order, first, len(order))
        weights, zeros = self._zeros(self.items), self._zeros(self.table.workers)
        self._weight_starts(
            self.route,
            *self._lengths[0][:3],
            order,
            self._down,
            self._up,
            self._base,
            zeros.copy(),
            zeros,
            weights,
        )
        weight = self._zeros(self.items)
        weight[np.lexsort((self._up, self.route))] = weights
        return self.table.result((self._down.copy(), self._up.copy(), weight))

    def _zeros(self, count: int) -> Array:
        zeros: Array = np.zeros(count, dtype=np.int64)
        return zeros


# -- the search --------------------------------------------------------------------------------------

KEPT_ORDERS = 4  # how many orders are improved side by side
# How many of the list scheduler's rules the search starts from; fewer where each takes long.
STARTS, STARTS_LARGE, LARGE_ITEMS = 12, 4, 50_000
# The first windows. Each reaches to the end of the order and is dispatched backwards. The numbers: where it begins, as
# a fraction of the order; depth and final as multiples of 1F1B's; max_wait; max_wait_w. Chosen by measurement, like
# the rules of the list scheduler, on 64 x 32 x 64 and 32 x 64 x 128.
OPENING = (
    (0.3, 1.25, 0.25, 300, ALWAYS),
    (0.7, 1.0, 0.0, 300, ALWAYS),
    (0.3, 0.75, 0.0, 0, ALWAYS),
    (0.2, 1.0, 0.0, 30, ALWAYS),
    (0.2, 1.0, 0.5, 100, ALWAYS),
    (0.0, 1.0, 0.5, 100, ALWAYS),
)
# After so many windows the worst order of the pool is replaced by the best.
RENEWAL = 200
# Where a large window begins, and how large small ones are, as fractions of the whole order.
CUTS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SIZES = (0.02, 0.05, 0.1, 0.2, 0.4)
# How often micro-batches keep their own order, and how often a window is dispatched backwards.
BY_INDEX, BACKWARDS = 0.8, 0.65
# Priorities are multiples of FINE, so that noise can be finer than one place in the order.
FINE = 8


def rearrangeable(problem: Problem) -> bool:
    """Does the technique leave a choice, is numba installed, and do the numbers fit the compiled loops? These count
    memory in micro-batches, so the limits must be exact."""
    possible = problem.technique.splits and problem.limits_are_exact
    return possible and find_spec("numba") is not None and fits_machine_code(problem)


class Rearranger:
    """The solver that searches over windows, for problems that are `rearrangeable`. It uses all of its time unless the
    gap closes.

    compiled: False for the same loops in plain Python, which is slow.
    """

    name = "list+windows"

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution:
        bound = period_bound(problem)
        best = warm_start.period
        # Loading the compiled loops takes seconds; with less time than that, nothing can be gained.
        if best <= bound or run.over or (self._compiled and run.time_limit < COMPILED_SECONDS):
            return Solution(warm_start, bound, self.name, run.elapsed)
        # A schedule for more failures has other routes, so it is searched on its own, by turns with the given problem.
        starts = [warm_start, *([warm_start.made_for] if warm_start.made_for else [])]
        searches = [
            _OrderSearch(
                problem if start is warm_start else start.problem,
                start,
                bound,
                random.Random(0),
                compiled=self._compiled,
            )
            for start in starts
        ]
        for search in searches:
            search.start(run)
        for search in cycle(searches):
            if min(s.best for s in searches) <= bound or run.over:
                break
            search.step(run.elapsed / run.time_limit)
            if search.best < best:
                best = search.best
                run.tell(self.name, best, bound)
        schedule = warm_start
        for start, search in zip(starts, searches, strict=True):
            if search.best < start.period:
                made = search.schedule()
                made = made if start is warm_start else made.for_fewer(problem)
                schedule = min(schedule, made, key=lambda s: s.period)
        return Solution(schedule, bound, self.name, run.elapsed)


class _OrderSearch:
    """A search over the orders of one problem. `pool` has the best orders so far, the best of them first."""

    def __init__(
        self, problem: Problem, warm_start: Schedule, bound: int, noise: random.Random, *, compiled: bool
    ) -> None:
        self.problem, self.bound, self.noise = searched(problem), bound, noise
        self.table = Table(self.problem, compiled=compiled)
        self._whole = problem
        self.orders = OpOrders(self.table, compiled=compiled)
        self.random = np.random.default_rng(noise.randrange(1 << 30))
        self.pool: list[tuple[tuple[int, int], Array]] = []
        if isinstance(warm_start, ArraySchedule) and warm_start.problem == self.problem:
            self._keep(self.orders.of(warm_start.result))
        if not self.problem.failed and not self.problem.job.speeds:
            for reference in references(self.problem):
                self._keep(self.orders.of(reference_result(self.table, reference)))
        job = self.problem.job
        n = job.pipelines * job.micro_batches
        place = [m % job.micro_batches * job.pipelines + m // job.micro_batches for m in range(n)]
        self._index = np.array(place * job.stages, dtype=np.int64) * FINE
        self._turns = 0

    @property
    def best(self) -> int:
        """Period of the best order, in ticks."""
        return self.pool[0][0][0]

    def schedule(self) -> Schedule:
        result = self.orders.result(self.pool[0][1])
        if self._whole is self.problem:
            return self.table.schedule(result)
        # All pipelines get the times of the one that was searched on.
        table = Table(self._whole, compiled=self.table.compiled)
        copies = self._whole.job.pipelines
        rows = [np.asarray(starts).reshape(self.problem.job.stages, -1) for starts in result.starts]
        forward, backward, weight = (np.tile(row, (1, copies)).ravel() for row in rows)
        return table.schedule(table.result((forward, backward, weight)))

    def start(self, run: Run) -> None:
        """Fills the pool: with the results of the first rules (at least one), then with OPENING applied to the best
        two."""
        count = STARTS if self.table.items < LARGE_ITEMS else STARTS_LARGE
        for _, rule in zip(range(count), rules(self.problem), strict=False):
            self._keep(self.orders.of(self.table.run(rule.settings(self.problem, self.bound))))
            if run.over or self.best <= self.bound:
                return
        last = self._index.max() - self._index
        heads = [order for _, order in self.pool[:2]]
        for cut, depth, final, max_wait, max_wait_w in OPENING:
            manner = self._manner(depth, 0, final, None, max_wait, max_wait_w, self.bound)
            for order in heads:
                if run.over or self.best <= self.bound:
                    return
                begin = int(cut * len(order))
                made = self.orders.again(order, begin, len(order), manner, (last, last), backwards=True)
                if made is not None:
                    self._keep(made)

    def _keep(self, order: Array) -> None:
        self.pool.append((self.orders.rank(order), order))
        self.pool.sort(key=lambda pair: pair[0])
        del self.pool[KEPT_ORDERS:]

    def step(self, progress: float) -> None:
        """Tries one window of one order. progress: the fraction of the time that is over; windows get smaller with
        it."""
        self._turns += 1
        if self._turns % RENEWAL == 0:
            self.pool[-1] = self.pool[0]
        place = self.noise.randrange(len(self.pool))
        rank, order = self.pool[place]
        backwards = self.noise.random() < BACKWARDS
        large = self.noise.random() < max(0.1, 1 - 3 * progress)
        begin, end = self._window(len(order), large=large, backwards=backwards)
        keys = self._keys(order, backwards=backwards)
        made = self.orders.again(order, begin, end, self._any_manner(), keys, backwards=backwards)
        if made is None:
            return
        after = self.orders.rank(made)
        if after <= rank:
            self.pool[place] = after, made
        elif large and after < self.pool[-1][0]:
            self.pool[-1] = after, made
        self.pool.sort(key=lambda pair: pair[0])

    def _window(self, count: int, *, large: bool, backwards: bool) -> tuple[int, int]:
        """Chooses begin and end. A large window reaches to the end from which it is dispatched."""
        if large:
            cut = int(self.noise.choice(CUTS) * count)
            return (cut, count) if backwards else (0, count - cut)
        size = int(count * self.noise.choice(SIZES))
        begin = self.noise.randrange(-size // 2, count - size // 2)
        return max(0, begin), min(count, begin + size)

    def _keys(self, order: Array, *, backwards: bool) -> tuple[Array, Array]:
        """Chooses priorities of downs and ups: by micro-batch or by their present places, often with noise."""
        items = self.table.items
        if self.noise.random() < BY_INDEX:
            down = up = self._index.max() - self._index if backwards else self._index
        else:
            places = np.zeros(2 * items, dtype=np.int64)
            named = order < 2 * items
            places[order[named]] = np.nonzero(named)[0] * FINE // 3
            if backwards:
                places = places.max() - places
            down, up = (places[items:], places[:items]) if backwards else (places[:items], places[items:])
        spread = self.noise.choice((0, 0, 0, 0.5, 1, 2, 4)) * FINE * self.problem.job.pipelines
        if spread:
            down, up = (
                np.maximum(0, keys + (self.random.standard_normal(items) * spread).astype(np.int64))
                for keys in (down, up)
            )
        return down, up

    def _any_manner(self) -> DispatchSettings:
        """Chooses rules at random, the same on all stages."""
        choice = self.noise.choice
        return self._manner(
            choice((0.75, 1, 1, 1, 1.25, 2)),
            choice((-1, 0, 0, 1)),
            choice((0, 0.25, 0.5, 0.5, 1)),
            choice((None, None, 0, 1, 2)),
            choice((0, 30, 100, 300)),
            choice((100, 300, ALWAYS)),
            choice((self.best, self.bound)),
        )

    def _manner(
        self, depth: float, more: int, final: float, spare: int | None, max_wait: int, max_wait_w: int, target: int
    ) -> DispatchSettings:
        """Makes settings. depth: a multiple of 1F1B's, plus `more`; final: a multiple of twice 1F1B's depth. spare: how
        many activations pending W's leave free, beyond those of the micro-batches that turn round; None: pending W's
        are not limited."""
        problem = self.problem
        stages = problem.job.stages
        below = [stages - s for s in range(stages)]
        most = [self.table.n if limit is None else limit for limit in problem.limits]
        return DispatchSettings(
            depth=tuple(max(0, int(depth * b) + more) for b in below),
            final=tuple(int(final * 2 * b) for b in below),
            open_limit=tuple(
                UNLIMITED if spare is None else max(1, limit - spare - 2 * b // 3)
                for limit, b in zip(most, below, strict=True)
            ),
            max_wait=(max_wait,) * stages,
            max_wait_w=(max_wait_w,) * stages,
            target=target,
        )
