"""Finds which layers each stage should hold and, where workers may change their stage, how many each should have.

A stage s of the layers from a up to b takes at least c(s, a, b): the largest of the bounds of planner.plans.bounds that
concern one stage alone. They depend on how long a micro-batch turns round below the stage. That is F and I of all
layers from b on, however these are cut, and of the transfers there the shortest, as many as there are cuts. So dynamic
programming over stages and layers finds exactly the least, over all partitions, of the largest c; no plan of any
partition is shorter. Of the bounds for two stages, the one with the first stage is known once the first cut is, and is
used too.

Where counts are free, c gives the fewest workers with which a stage keeps within a time T. The same dynamic programming
gives the fewest for all stages, and bisection the least T for which the living workers suffice.

The partition that is best by these bounds need not have the shortest plan: the list scheduler plans it and its
neighbours.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.jobs.words import layers_moved
from openrecycle.planner.layers.migration import (
    CopyCost,
    Migration,
    MigrationOption,
    MigrationPlan,
    check_times,
    chosen,
    iterations,
    migrations_to,
)
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.bounds import Bound, period_bound
from openrecycle.planner.solvers.list_scheduler import ListScheduler, Table, rules

Ints = NDArray[Any]  # int64, or Python's own integers where int64 is too short
Partition = tuple[int, ...]
Counts = tuple[int, ...]
Furthest = tuple[tuple[int, ...], ...]
"""By stage, for each layer at which it may begin, the last index (exclusive) at which it may end; (): anywhere."""

# How many partitions are tried, and how many rules of the list scheduler for each: about EFFORT ops in all.
EFFORT, TRIED, FEWEST, MOST_RULES = 500_000, 24, 3, 64
# The FINAL shortest are planned in full; for jobs of LARGE or more ops only the shortest, by the caller, who needs a
# plan anyway.
FINAL, LARGE = 4, 2_000
# The neighbours of a partition are not tried if its period is so many times that of the shortest.
WORSE = 1.05
# How many neighbours of a partition, or of a distribution of failures, are compared by their proven bounds.
NEIGHBOURS = 64
# How many distributions of the failures are planned to find the best migrations.
DISTRIBUTIONS = 8
# From so many stages, the slowest ones, a layer is moved to any other stage; from the rest only to the next ones.
SOURCES = 8
# The most cells of the arrays (see LayerBounds) that a job may have: a cell takes 100 bytes and 2 microseconds, and
# where times are too long for 64 bits 700 bytes and 100 times as long.
CELLS, EXACT_CELLS = 3_000_000, 40_000
# How many cells of costs are cached, for some numbers of workers.
KEPT = 10_000_000
_NONE = 1 << 61
_BEYOND = 1 << 200


@dataclass(frozen=True)
class Layout:
    """A partition with the workers of each stage, and its period.

    problem: the job with this partition and these workers. bound: no plan is shorter, of all that `over` names. period:
    ticks, of the list scheduler's plan. moved: layers that change their stage from the partition before. migrations:
    workers that change their stage. reason: a sentence. refused: why there is no memory for a better partition; "":
    none was refused.
    """

    problem: Problem
    bound: Bound
    over: Over
    period: int
    moved: int
    migrations: tuple[Migration, ...]
    reason: str
    refused: str = ""

    @property
    def partition(self) -> Partition:
        return self.problem.job.partition

    @property
    def counts(self) -> Counts:
        """Living workers per stage."""
        return tuple(len(self.problem.living_peers(s)) for s in range(self.problem.job.stages))


def lay_out(
    job: Job,
    failed: Iterable[Worker] = (),
    *,
    technique: Technique = Technique.STAGGERED,
    memory: MemoryLimit = MemoryLimit("uniform"),  # noqa: B008 (frozen)
    over: Over = "partitions",
    present: Partition | None = None,
    room: LayerRoom | None = None,
) -> Layout:
    """Return the layout with the shortest plan.

    over: what may be chosen; with `layouts` workers may change their stage. present: the partition in force, by default
    that of `job`; of equally good partitions the one to which fewer layers move is chosen. room: the memory of workers
    for layers that move from `present`, if the workers stay on their stage; None: there is enough. The result depends
    on the arguments alone, so all callers get the same. Raises InputError, and InfeasibleError when no layout has a
    plan.
    """
    if not job.layers:
        raise InputError("layers", 0, "a job with layers, of which a partition can be chosen")
    dead = frozenset(job.check_worker(w, field="--fail") for w in failed)
    now = job.partition if present is None else job.check_partition(present, field="present")
    counts = tuple(job.pipelines - n for n in failures_per_stage(dead, job))
    free = _laid_out(job, dead, counts, technique, memory, over, now)
    if room is None or over != "partitions" or not (refused := room.refusal(free.partition, now, counts)):
        return free
    for growing in dict.fromkeys((1, 2, job.stages // 2, job.stages)):
        furthest = room.furthest(now, counts, growing)
        best = _laid_out(job, dead, counts, technique, memory, over, now, furthest)
        if not room.refusal(best.partition, now, counts):
            break
    # (The bound of a plan is over all partitions, also those without room.)
    return replace(best, bound=free.bound, refused=refused)


def _laid_out(
    job: Job,
    dead: frozenset[Worker],
    counts: Counts,
    technique: Technique,
    memory: MemoryLimit,
    over: Over,
    now: Partition,
    furthest: Furthest = (),
) -> Layout:
    if over == "schedules" or (over == "partitions" and min(counts) < 1):
        problem = Problem(job.with_partition(now), dead, technique, memory)  # raises where a stage is dead
        bound = Bound(period_bound(problem), "the partition is given")
        return _PartitionSearch(problem, now, EFFORT).given(bound)
    bounds = layer_bounds(job, technique, memory, furthest)
    options: list[Layout] = []
    if min(counts) > 0 and bounds.least(counts) is not None:
        options.append(_made(bounds, dead, counts, job, now, EFFORT))
    found = bounds.fewest(sum(counts)) if over == "layouts" else None
    if found is not None:
        bound, wanted = found
        options = [replace(layout, bound=bound, over=over) for layout in options]
        if wanted != counts:
            migrations, after = migrations_to(job, dead, tuple(job.pipelines - n for n in wanted))
            made = _made(bounds, after, wanted, job, now, EFFORT)
            options.append(replace(made, bound=bound, over=over, migrations=migrations))
    if not options:
        bounds.refuse(counts)
    return min(options, key=lambda o: (o.period, len(o.migrations), o.moved))


def best_relayout(
    job: Job,
    failed: Iterable[Worker],
    *,
    technique: Technique,
    memory: MemoryLimit,
    cost: Callable[[Job], CopyCost],
    heals_in: float | None = None,
    unit_seconds: float | None = None,
) -> MigrationPlan:
    """As planner.layers.migration.best_migrations, with the best partition of the layers for each distribution of the
    failures. cost: that of copies, for a job with its partition. Raises InputError and InfeasibleError.

    It plans the distribution that is best by the bounds, then others as long as their bounds, with their pauses,
    promise more iterations.
    """
    tick = check_times(job, heals_in, unit_seconds)
    dead = frozenset(failed)
    best = lay_out(job, dead, technique=technique, memory=memory, over="layouts")
    present = failures_per_stage(dead, job)
    stay = None
    with suppress(InfeasibleError):  # a stage may have no living worker, or not enough memory
        stay = _option(lay_out(job, dead, technique=technique, memory=memory), present, cost)
    options = {o.counts: o for o in (stay, _option(best, present, cost) if best.migrations else None) if o}
    bounds, price = layer_bounds(job, technique, memory), cost(job)

    def worth(option: MigrationOption) -> tuple[float, float]:
        return iterations(option.period * tick, option.pause, heals_in), -option.pause

    while len(options) < DISTRIBUTIONS:
        # The shortest plan may come with a long pause, or only with failures elsewhere than the bounds say.
        leader = max(options.values(), key=worth)
        promising = []
        for counts in {*_one_failure_moved(job, present), *_one_failure_moved(job, leader.counts)} - options.keys():
            bound = bounds.least(tuple(job.pipelines - n for n in counts))
            pause = max(price.pause(s, n, job.pipelines - present[s]) for s, n in _copies(present, counts))
            if bound is not None:
                promising.append((iterations(bound.ticks * tick, pause, heals_in), -pause, counts))
        if not promising or (first := max(promising))[:2] <= worth(leader):
            break
        migrations, after = migrations_to(job, dead, first[2])
        alive = tuple(job.pipelines - n for n in first[2])
        layout = replace(_made(bounds, after, alive, job, job.partition, EFFORT // 4), migrations=migrations)
        options[first[2]] = _option(layout, present, cost)
    return chosen(job, present, stay, list(options.values()), heals_in, tick)


def _one_failure_moved(job: Job, counts: Counts) -> Iterator[Counts]:
    """Yield distributions in which one failure has another stage, some NEIGHBOURS at most."""
    fullest = heapq.nlargest(max(1, NEIGHBOURS // job.stages), range(job.stages), key=counts.__getitem__)
    for origin in fullest:
        for to in range(job.stages):
            if counts[origin] and to != origin and counts[to] < job.pipelines - 1:
                yield tuple(n - (s == origin) + (s == to) for s, n in enumerate(counts))


def _copies(present: Counts, counts: Counts) -> list[tuple[int, int]]:
    """Return (stage, number of workers that come to it)."""
    return [(s, max(0, before - after)) for s, (before, after) in enumerate(zip(present, counts, strict=True))]


def _option(layout: Layout, present: Counts, cost: Callable[[Job], CopyCost]) -> MigrationOption:
    job, after = layout.problem.job, failures_per_stage(layout.problem.failed, layout.problem.job)
    price, copies = cost(job), _copies(present, after)
    return MigrationOption(
        layout.migrations,
        after,
        layout.problem.failed,
        layout.period,
        max(price.pause(s, n, job.pipelines - present[s]) for s, n in copies),
        sum(n * price.state_bytes[s] for s, n in copies),
        layout.partition,
    )


def best_at_home(job: Job, technique: Technique, memory: MemoryLimit) -> Job:
    """Return the job with the partition that is best without failures as its home, which later partitions move layers
    from and are compared with. Returns the job itself where its own is as good. Raises as `lay_out` does."""
    best = lay_out(job, technique=technique, memory=memory)
    if job.partition != job.home:
        return job.begun_with(best.partition)
    stays = best.partition == job.partition or best.period >= _as_given(job, technique, memory)
    return job if stays else job.begun_with(best.partition)


def _as_given(job: Job, technique: Technique, memory: MemoryLimit) -> float:
    """Return the period of the job's own partition, planned in full for small jobs; inf if it has no plan."""
    try:
        return lay_out(job, technique=technique, memory=memory, over="schedules").period
    except InfeasibleError:
        return math.inf


def staffed(
    job: Job,
    workers: int,
    *,
    technique: Technique,
    memory: MemoryLimit,
    effort: int = EFFORT,
    final: int = FINAL,
) -> Layout | None:
    """Return the best layout of so many living workers on any stages; None where they can't run the job.

    effort: about how many ops are scheduled to compare partitions. final: how many of the shortest are planned in full.
    """
    bounds = layer_bounds(job, technique, memory)
    found = bounds.fewest(workers)
    if found is None:
        return None
    bound, counts = found
    # Failures that share pipelines make shorter plans (measured).
    dead = frozenset(Worker(p, s) for s, n in enumerate(counts) for p in range(job.pipelines - n))
    return replace(_made(bounds, dead, counts, job, job.partition, effort, final), bound=bound, over="layouts")


def bound_over(problem: Problem, over: Over) -> int:
    """Return ticks that no plan can beat, for these failures or, over `layouts`, for as many workers."""
    if over == "schedules":
        return period_bound(problem)
    bounds = layer_bounds(problem.job, problem.technique, problem.memory)
    counts = tuple(len(problem.living_peers(s)) for s in range(problem.job.stages))
    if over == "layouts":
        found = bounds.fewest(sum(counts))
        bound = found and found[0]
    else:
        bound = bounds.least(counts)
    return bound.ticks if bound else period_bound(problem)


def with_stages(job: Job, stages: int, workers: int) -> Job | None:
    """Return a job with the same layers and micro-batches but another number of stages, and room for so many workers.

    Its pipelines need not be those of `job`: the micro-batches are divided evenly among as few pipelines as possible.
    Returns None where that can't be done: there are fewer layers or workers than stages, or workers have speeds of
    their own, whose places no longer exist.
    """
    total = job.pipelines * job.micro_batches
    if not job.layers or job.speeds or not 1 <= stages <= min(len(job.layers), workers):
        return None
    rows = next((n for n in range(-(-workers // stages), total + 1) if total % n == 0), None)
    if rows is None:
        return None

    def reductions(layer: LayerProfile) -> tuple[float, ...]:
        """Makes the list by living peers, from 1 to all rows; beyond those measured, the last value is repeated."""
        known = layer.reductions[-job.pipelines :]
        return known and tuple(known[min(n, len(known)) - 1] for n in range(1, rows + 1))

    capacity = job.capacity_bytes and (min(job.capacity_bytes),) * stages
    return Job(
        rows,
        stages,
        total // rows,
        time_unit=job.time_unit,
        capacity_bytes=capacity,
        layers=tuple(replace(layer, reductions=reductions(layer)) for layer in job.layers),
    )


# -- bounds --------------------------------------------------------------------------------------------


def layer_bounds(job: Job, technique: Technique, memory: MemoryLimit, furthest: Furthest = ()) -> LayerBounds:
    """Return the bounds of any partition of the job's layers; its own does not matter."""
    return _layer_bounds(job.at_home, technique, memory, furthest)


@lru_cache(maxsize=16)
def _layer_bounds(job: Job, technique: Technique, memory: MemoryLimit, furthest: Furthest) -> LayerBounds:
    return LayerBounds(job, technique, memory, furthest)


class LayerBounds:
    """c(s, a, b) of the module for all stages and layers, in ticks.

    Arrays are [D, D]: stage s may begin at layers s to s + D - 1, and end behind these layers. D = layers - stages + 1,
    since each other stage has at least one layer. Impossible cells have `none`, a number above all times. Raises
    InputError where there are too many cells.
    """

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit, furthest: Furthest = ()) -> None:
        self.job, self.technique, self.memory, self.furthest = job, technique, memory, furthest
        self.total = job.pipelines * job.micro_batches
        scale = job.ticks_per_unit
        splits = technique.splits

        def ticks(name: str) -> list[int]:
            return [round(getattr(layer, name) * scale) for layer in job.layers]

        forward, back, weight, step = map(ticks, ("forward", "input_backward", "weight_backward", "optimizer"))
        if not splits:
            back, weight = [i + w for i, w in zip(back, weight, strict=True)], [0] * len(weight)
        wires = [round((layer.transfer + layer.back) * scale) for layer in job.layers]
        most = (sum(forward) + sum(back) + sum(weight) + sum(step) + sum(wires)) * 4 * (self.total + 1)
        self.exact: Any = np.int64 if most * 100 < _NONE else object
        self.none = _NONE if self.exact is np.int64 else _BEYOND
        cells, few = job.stages * self.width**2, EXACT_CELLS if self.exact is object else CELLS
        if cells > few:
            why = " with op times of so many digits" if cells <= CELLS else ""
            expected = (
                f"fewer to choose a partition for {job.stages} stages{why}: there are {cells:,} places for a stage, "
                f"at most {few:,}; or a partition that is given"
            )
            raise InputError("layers", len(job.layers), expected)
        self._keep = max(job.stages, KEPT // self.width**2)
        self.forward, self.back, self.weight, self.step = (self._sums(v) for v in (forward, back, weight, step))
        self.wires = wires
        self.down = [round(layer.transfer * scale) for layer in job.layers]
        self.up = [round(layer.back * scale) for layer in job.layers]
        speeds = [Fraction(Decimal(repr(speed))) for _, speed in job.speeds]
        self.fastest = max([Fraction(1), *speeds])
        self._known: dict[tuple[int, int], tuple[Ints, Ints]] = {}

    def _sums(self, values: Sequence[int]) -> Ints:
        return np.array([0, *accumulate(values)], self.exact)

    @property
    def width(self) -> int:
        """D: at how many layers a stage may begin."""
        return len(self.job.layers) - self.job.stages + 1

    def _begins(self, s: int) -> Ints:
        return np.arange(s, s + self.width)

    def _span(self, sums: Ints, s: int) -> Ints:
        a = self._begins(s)
        out: Ints = sums[a + 1][None, :] - sums[a][:, None]
        return out

    def _shortest(self, s: int, times: Sequence[int], *, below: bool) -> Ints:
        """[D]: the least sum of the transfers below a stage, by where it ends (below=True), or of those above it, by
        where it begins. Its own cut has a known transfer; for the others the shortest are taken."""
        job, layers = self.job, len(self.job.layers)
        out = []
        for a in range(s, s + self.width):
            own, others = (a, job.stages - 2 - s) if below else (a - 1, s - 1)
            if others < 0:
                out.append(0)
                continue
            rest = times[a + 1 : layers - 1] if below else times[: a - 1]
            # Below, the stage ends with layer a; above, the one before it ends with layer a - 1.
            out.append(times[own] + sum(heapq.nsmallest(others, rest)) if len(rest) >= others else 0)
        return np.array(out, self.exact)

    @cached_property
    def stages(self) -> list[_Terms]:
        return [self._terms(s) for s in range(self.job.stages)]

    def _terms(self, s: int) -> _Terms:
        job = self.job
        begins = self._begins(s)
        F, I, W, O = (self._span(v, s) for v in (self.forward, self.back, self.weight, self.step))  # noqa: E741
        both = self.forward + self.back
        below = np.broadcast_to(both[-1] - both[begins + 1] + self._shortest(s, self.wires, below=True), F.shape)
        above = both[begins] + self._shortest(s, self.wires, below=False)
        limit = self._limits(s)
        possible = np.triu(np.ones(F.shape, bool)) & (limit != 0)
        if self.furthest:
            possible &= begins[None, :] < np.array(self.furthest[s])[begins][:, None]
        if s == 0:
            possible[1:] = False
        if s == job.stages - 1:
            possible[:, :-1] = False
        if self.fastest != 1:
            F, I, W, O, below, above = map(self._scaled, (F, I, W, O, below, above))  # noqa: E741
        # (Impossible cells are divided by as well, so they must not be 0.)
        F, I, W = np.where(possible, F, 1), np.where(possible, I, 0), np.where(possible, W, 0)  # noqa: E741
        if self.technique.staggers:
            span_on = residence_on = O
            # The way down to the stage and back up, then W and O of the first stage.
            inner_on = np.broadcast_to(above[:, None], F.shape) if s else O
        else:
            head = self._way(begins, self.forward, s, self.down)
            tail = self._way(begins, self.back, s, self.up) + self._scaled(self.weight[1])
            rest = np.maximum(W, tail[:, None]) if s else W
            span_on, inner_on = head[:, None] + O, head[:, None] + rest + O
            residence_on = inner_on - W
        return _Terms(F, I, W, F + below, limit, span_on, inner_on, residence_on, possible, O)

    def _scaled(self, ticks: Any) -> Any:
        """Divides by the highest speed of any worker, rounding up as StageTicks.at_speed does."""
        return -(-ticks * self.fastest.denominator // self.fastest.numerator)

    def _way(self, begins: Ints, sums: Ints, s: int, wires: Sequence[int]) -> Ints:
        out: Ints = self._scaled(sums[begins] + self._shortest(s, wires, below=False))
        return out

    def _limits(self, s: int) -> Ints:
        """[D, D]: most activations that a worker of the stage can hold; 0 where not even one fits; all micro-batches
        where there is no limit."""
        job, shape = self.job, (self.width, self.width)
        if self.memory.text != "bytes":
            count = self.memory.limits(job, self.technique)[s]
            return np.full(shape, self.total if count is None else min(count, self.total), self.exact)
        if not job.capacity_bytes:
            self.memory.limits(job, self.technique)  # raises
        need, keep, weights, state = (
            self._span(np.array([0, *accumulate(getattr(p, name) for p in job.layers)], object), s)
            for name in ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes")
        )
        # (As StageProfile.micro_batch_bytes and least_bytes.)
        each, least = (np.maximum(need, keep), np.minimum(need, keep)) if self.technique.splits else (need, need)
        free = job.capacity_bytes[s] - weights - state
        fitting = np.where(least > 0, free // np.where(least > 0, least, 1), self.total)
        held = np.where(free < each, 0, fitting)
        return np.minimum(held, self.total).astype(self.exact)

    def _reduced(self, s: int, living: int | None) -> Ints | int:
        """[D, D]: ticks that the all-reduce adds to the step with `living` peers; None: with the number of peers for
        which it is least."""
        job = self.job
        if not any(layer.reductions for layer in job.layers):
            return 0
        return self._span(self._reductions(living), s)

    def _reductions(self, living: int | None) -> Ints:
        scale, known = self.job.ticks_per_unit, []
        for layer in self.job.layers:
            if not layer.reductions:
                known.append(0)
            elif living is None:
                known.append(round(min(layer.reductions[-self.job.pipelines :]) * scale))
            else:
                known.append(round(layer.reductions[living - 1 - self.job.pipelines] * scale))
        return self._sums(known)

    # -- with counts ---------------------------------------------------------------------------

    def costs(self, s: int, living: int) -> tuple[Ints, Ints]:
        """Returns, [D, D] each, c, and the bound with the first stage without that stage's W and O."""
        if (s, living) not in self._known:
            if len(self._known) >= self._keep:
                self._known.clear()
            self._known[s, living] = self._costs(s, living)
        return self._known[s, living]

    def _costs(self, s: int, living: int) -> tuple[Ints, Ints]:
        t = self.stages[s]
        n = -(-self.total // living)
        held = np.minimum(n, t.limit)
        held = np.where(t.possible, held, 1)
        first = np.maximum(t.turn, held * t.F) + (n - held) * t.F + n * t.I
        inner = first + (n - held) * t.W
        cool = np.where(n > held, np.maximum(0, t.turn + t.I + t.W - t.F - held * (t.I + t.W)), 0)
        reduced = self._reduced(s, living)
        own = first + n * t.W + cool + t.span_on
        own = np.maximum(own, -(-n // held) * (t.turn + t.I + t.W) + t.residence_on)
        if not self.technique.staggers:
            own = np.maximum(own, inner + t.inner_on)
        own = own + reduced
        if self.job.speeds:
            own = np.maximum(own, self._loaded(s, t, living) + t.O + reduced)
        pair = inner + t.inner_on if self.technique.staggers and s else np.zeros_like(own)
        return np.where(t.possible, own, self.none), np.where(t.possible, pair, self.none)

    def _loaded(self, s: int, t: _Terms, living: int) -> Ints:
        """Divides the stage's work by the speeds of its fastest workers; those that live are not faster."""
        own = [Fraction(Decimal(repr(speed))) for worker, speed in self.job.speeds if worker.stage == s]
        speeds = sorted([*own, *[Fraction(1)] * (self.job.pipelines - len(own))], reverse=True)[:living]
        rate = sum(speeds, Fraction(0))
        work = self._span(self.forward + self.back + self.weight, s)
        out: Ints = -(-work * self.total * rate.denominator // rate.numerator)
        return out

    def firsts(self, living: int) -> Ints:
        """[D]: W and O of the first stage, by where it ends."""
        reduced = self._reduced(0, living)
        t = self.stages[0]
        row: Ints = (t.W + t.O + reduced)[0]
        return row

    def least(self, counts: Counts) -> Bound | None:
        """Returns the bound over all partitions; None if no partition fits in memory."""
        rows = [self.costs(s, n) for s, n in enumerate(counts)]
        last = len(rows) - 1
        after = np.full(self.width, self.none, self.exact)
        after[-1] = 0
        relaxed = [after]  # from the last stage on: the least bound of the stages from this one on, by where it begins
        first = int(self.firsts(counts[0]).min())
        for s in range(last, 0, -1):
            own, pair = rows[s]
            relaxed.append(np.maximum(np.maximum(own, pair + first), relaxed[-1][None, :]).min(1))
        whole = np.maximum(rows[0][0][0], relaxed[-1])
        if int(whole.min()) >= self.none:
            return None
        best = self.none
        tail = self.firsts(counts[0])
        # For each end of the first stage, with its W and O for that end; the most promising ends come first.
        for j in np.argsort(whole, kind="stable").tolist():
            if whole[j] >= best:
                break
            value = after
            for s in range(last, 0, -1):
                own, pair = rows[s]
                value = np.maximum(np.maximum(own, pair + tail[j]), value[None, :]).min(1)
            best = min(best, max(int(rows[0][0][0, j]), int(value[j])))
        what = f"no partition of {len(self.job.layers)} layers over {len(counts)} stages lets each end sooner"
        return Bound(best, what)

    def partition(self, counts: Counts, limit: int, present: Partition) -> Partition | None:
        """Returns the partition within `limit` by the bounds to which fewest layers move, and of several the one whose
        stages' times add up to least. None: there is none."""
        rows = [self.costs(s, n) for s, n in enumerate(counts)]
        tail, last, out_of = self.firsts(counts[0]), len(counts) - 1, _NONE >> 1
        starts = [0, *accumulate(present)]
        grain, weight = max(1, limit >> 20), (1 << 21) * len(counts)
        price: list[NDArray[np.int64]] = []
        for s, (own, _) in enumerate(rows):
            a, b = self._begins(s)[:, None], self._begins(s)[None, :] + 1
            kept = np.maximum(0, np.minimum(b, starts[s + 1]) - np.maximum(a, starts[s]))
            cost = np.where(own <= limit, own // grain, 0).astype(np.int64)
            price.append(np.where(own <= limit, (b - a - kept) * weight + cost, out_of))
        highest = max((int(pair.max(initial=0, where=pair < self.none)) for _, pair in rows[1:]), default=0)
        best: tuple[int, int, list[NDArray[np.int64]]] | None = None
        free: tuple[NDArray[np.int64], list[NDArray[np.int64]]] | None = None  # if the first stage limits no other
        for j in np.flatnonzero(price[0][0] < out_of).tolist():
            room = limit - int(tail[j])
            if highest <= room:
                free = free or self._cheapest(price[1:])
                value, picks = free
            else:
                within = [np.where(pair <= room, p, out_of) for (_, pair), p in zip(rows[1:], price[1:], strict=True)]
                value, picks = self._cheapest(within)
            whole = int(price[0][0, j]) + int(value[j])
            if whole < out_of and (best is None or whole < best[0]):
                best = whole, j, picks
        if best is None:
            return None
        ends = [best[1]]
        for pick in best[2]:
            ends.append(int(pick[ends[-1]]))
        cuts = [0, *(s + 1 + end for s, end in enumerate(ends))]
        assert len(cuts) == last + 2
        return tuple(b - a for a, b in pairwise(cuts))

    def _cheapest(self, price: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """For the last stages, with these prices: returns [D] the least sum, by where the first of them begins; and by
        stage [D] where it then ends, by where it begins."""
        value = np.full(self.width, _NONE, np.int64)
        value[-1] = 0
        picks = []
        for own in reversed(price):
            sums = np.minimum(own + value[None, :], _NONE)
            picks.append(sums.argmin(1))
            value = sums.min(1)
        return value, picks[::-1]

    def refuse(self, counts: Counts) -> None:
        """Raises the error that says why no partition is possible."""
        if min(counts) < 1:
            raise InfeasibleError("too few workers live for all stages", "bring back a failed worker")
        raise InfeasibleError(
            "no partition of the layers fits in the workers' memory", "give workers more memory, or use more stages"
        )

    # -- with counts free ----------------------------------------------------------------------

    def fewest(self, workers: int) -> tuple[Bound, Counts] | None:
        """Returns the bound for so many workers, and how many of them each stage gets; None: they are too few or too
        many."""
        pipelines = self.job.pipelines
        if not self.job.stages <= workers <= pipelines * self.job.stages:
            return None
        work = self.total * int(self.forward[-1] + self.back[-1] + self.weight[-1])
        low = high = max(1, -(-self._scaled(work) // workers))
        most, step = self._longest(), max(1, low // 64)
        while self._needed(high, workers) is None:
            if high >= most:
                return None
            low, high, step = high + 1, min(most, high + step), 2 * step
        while low < high:
            middle = (low + high) // 2
            if self._needed(middle, workers) is None:
                low = middle + 1
            else:
                high = middle
        needed = self._needed(low, workers)
        assert needed is not None
        counts = list(needed)
        # The workers that are left go to the stages that take longest.
        partition = self.partition(tuple(counts), self._with(counts, low), self.job.partition)
        for _ in range(workers - sum(counts)):
            open_to = [s for s, n in enumerate(counts) if n < pipelines]
            if not open_to:
                break
            at = self.times(partition, counts) if partition else [0] * len(counts)
            counts[max(open_to, key=lambda s: (at[s], s))] += 1
        return Bound(low, f"no layout of {workers} workers over {len(counts)} stages lets each end sooner"), tuple(
            counts
        )

    def _with(self, counts: Sequence[int], ticks: int) -> int:
        own = self.least(tuple(counts))
        return max(ticks, own.ticks) if own else ticks

    def times(self, partition: Partition, counts: Sequence[int]) -> list[int]:
        """Returns c of each stage."""
        out, a = [], 0
        for s, n in enumerate(partition):
            out.append(int(self.costs(s, counts[s])[0][a - s, a + n - 1 - s]))
            a += n
        return out

    def _longest(self) -> int:
        """Returns ticks within which one worker per stage runs all micro-batches, whatever the partition."""
        out = 1
        for s in range(self.job.stages):
            ends = [int(v.max(initial=0, where=v < self.none)) for v in self._costs(s, 1)]
            out = max(out, ends[0], ends[1] + int(self.firsts(1).max()))
        return out + max(int(self._reductions(n)[-1]) for n in range(1, self.job.pipelines + 1))

    def _needed(self, ticks: int, workers: int) -> Counts | None:
        """Returns the workers per stage, as few in all as may keep within `ticks`; None if they are more than
        `workers`."""
        pipelines, last = self.job.pipelines, self.job.stages - 1
        value = np.full(self.width, 1 << 40, np.int64)
        value[-1] = 0
        rows: list[NDArray[np.int64]] = []
        picks: list[NDArray[np.int64]] = []
        for s in range(last, -1, -1):
            most = np.maximum(self._most(s, ticks), 0)
            need = np.where(most > 0, -(-self.total // np.maximum(most, 1)), 1 << 40).astype(np.int64)
            need = np.where(need > pipelines, 1 << 40, need)
            sums = need + value[None, :]
            rows.append(need)
            picks.append(sums.argmin(1))
            value = sums.min(1)
        if value[0] > workers:
            return None
        rows, picks = rows[::-1], picks[::-1]
        counts, at = [], 0
        for row, pick in zip(rows, picks, strict=True):
            counts.append(int(row[at, pick[at]]))
            at = int(pick[at])
        return tuple(counts)

    def _most(self, s: int, ticks: int) -> Ints:
        """[D, D]: most micro-batches that a worker of the stage can run within `ticks`; 0 in impossible cells."""
        t = self.stages[s]
        reduced = self._reduced(s, None)
        C = np.where(t.possible, t.limit, 1)
        work, back = t.F + t.I + t.W, t.I + t.W
        filled = np.maximum(t.turn, C * t.F)
        cool = np.maximum(0, t.turn + back - t.F - C * back)
        room = ticks - t.span_on - reduced
        inside = np.minimum(np.minimum(room // work, _over(room - t.turn, back, self.total)), C)
        beyond = (room - filled + C * t.F - cool) // work
        most = np.where(beyond > C, beyond, inside)
        rounds = (ticks - t.residence_on - reduced) // (t.turn + back)
        most = np.minimum(most, np.maximum(rounds, 0) * C)
        if s or not self.technique.staggers:
            first = self.least_first_free if self.technique.staggers else reduced
            room = ticks - t.inner_on - first
            inside = np.minimum(np.minimum(room // (t.F + t.I), _over(room - t.turn, t.I, self.total)), C)
            beyond = (room - filled + C * (t.F + t.W)) // work
            most = np.minimum(most, np.where(beyond > C, beyond, inside))
        out: Ints = np.where(t.possible, np.minimum(most, self.total), 0)
        return out

    @cached_property
    def least_first_free(self) -> int:
        t = self.stages[0]
        return int((t.W + t.O + self._reduced(0, None))[0].min())


@dataclass(frozen=True)
class _Terms:
    """What the bounds need of one stage, [D, D] each; see planner.plans.bounds for the letters. limit: C, 0 where not
    even one fits. span_on, inner_on, residence_on: what a period has in addition to the span, to the time until the
    last I, and to the residence."""

    F: Ints
    I: Ints  # noqa: E741
    W: Ints
    turn: Ints
    limit: Ints
    span_on: Ints
    inner_on: Ints
    residence_on: Ints
    possible: NDArray[np.bool_]
    O: Ints  # noqa: E741


def _over(room: Ints, each: Ints, most: int) -> Ints:
    """How many of `each` fit in `room`. If they take no time: `most`, or -1 where room is negative."""
    out: Ints = np.where(each > 0, room // np.where(each > 0, each, 1), np.where(room >= 0, most, -1))
    return out


# -- from bounds to plans ------------------------------------------------------------------------------


def _made(
    bounds: LayerBounds,
    dead: frozenset[Worker],
    counts: Counts,
    job: Job,
    present: Partition,
    effort: int,
    final: int = FINAL,
) -> Layout:
    """Return the best partition for these counts; there must be one."""
    bound = bounds.least(counts)
    assert bound is not None
    partition = bounds.partition(counts, bound.ticks, present)
    assert partition is not None
    problem = Problem(job.with_partition(partition), dead, bounds.technique, bounds.memory)
    return _PartitionSearch(problem, present, effort, final).best(bounds, counts, bound)


class _PartitionSearch:
    """Finds the partition with the shortest plan, starting from the one that is best by the bounds."""

    def __init__(self, problem: Problem, present: Partition, effort: int, final: int = FINAL) -> None:
        self.problem, self.present, self.effort, self.final = problem, present, effort, final
        self.ops = problem.job.ops

    def given(self, bound: Bound) -> Layout:
        return Layout(self.problem, bound, "schedules", self._period(self.problem), 0, (), bound.reason)

    def best(self, bounds: LayerBounds, counts: Counts, bound: Bound) -> Layout:
        """Starts from the partition of `problem`. Tries the neighbours of partitions that are short under some rules of
        the list scheduler, as far as the effort goes, and plans the shortest few under all rules."""
        job = self.problem.job
        few = max(1, min(MOST_RULES, self.effort // (self.ops * TRIED)))
        looks = max(FEWEST, min(TRIED, self.effort // (self.ops * few)))
        known: dict[Partition, tuple[int, int]] = {}
        waiting: list[tuple[tuple[int, int], Partition]] = []

        def look(partition: Partition) -> None:
            if partition not in known:
                known[partition] = self._quick(partition, few), layers_moved(self.present, partition)
                heapq.heappush(waiting, (known[partition], partition))

        look(job.partition)
        if max(bounds.times(self.present, counts)) < bounds.none:
            look(self.present)
        while waiting and len(known) < looks:
            (period, _), start = heapq.heappop(waiting)
            shortest = min(known.values())[0]
            if shortest <= bound.ticks or period > shortest * WORSE:
                break
            for partition in islice(self._neighbours(start, bounds, counts, shortest), looks - len(known)):
                look(partition)
        ranked = sorted(known, key=lambda p: (known[p], p))
        best: tuple[int, int, Partition] | None = None
        for partition in ranked[: self.final] if self.ops < LARGE else ranked[:1]:
            if best is None or best[0] > bound.ticks:
                period = self._period(self._at(partition)) if self.ops < LARGE else known[partition][0]
                found = period, known[partition][1], partition
                best = found if best is None else min(best, found)
        assert best is not None
        period, moved, partition = best
        reason = f"the best of {len(known)} partitions tried; {bound.reason}"
        return Layout(self._at(partition), bound, "partitions", period, moved, (), reason)

    def _at(self, partition: Partition) -> Problem:
        return replace(self.problem, job=self.problem.job.with_partition(partition))

    def _quick(self, partition: Partition, few: int) -> int:
        """Returns the period under the first few rules."""
        problem = self._at(partition)
        if not problem.technique.reroutes:
            return self._period(problem)
        bound, table = period_bound(problem), Table(problem)
        shortest = _BEYOND
        for rule in islice(rules(problem), few):
            shortest = min(shortest, table.run(rule.settings(problem, bound)).period)
            if shortest <= bound:
                break
        return shortest

    def _neighbours(
        self, partition: Partition, bounds: LayerBounds, counts: Counts, period: int
    ) -> Iterator[Partition]:
        """Yields partitions in which one layer has moved and that may be shorter than `period`, the least bound
        first."""
        ranked = []
        stages = range(len(partition))
        own = bounds.times(partition, counts)
        slowest = heapq.nlargest(SOURCES, stages, key=lambda s: (own[s], -s))
        for s in stages:
            for t in stages if s in slowest else (s - 1, s + 1):
                if partition[s] < 2 or t == s or t not in stages:
                    continue
                moved = list(partition)
                moved[s] -= 1
                moved[t] += 1
                made = tuple(moved)
                times = bounds.times(made, counts)
                if max(times) < period:
                    ranked.append((max(times), layers_moved(self.present, made), sum(times), made))
        ranked.sort()
        close = []
        for _, moved_layers, _, made in ranked[:NEIGHBOURS]:
            ticks = period_bound(self._at(made))
            if ticks < period:
                close.append((ticks, moved_layers, made))
        close.sort()
        return (made for _, _, made in close)

    def _period(self, problem: Problem) -> int:
        return ListScheduler().solve(problem).schedule.period
