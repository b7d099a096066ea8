"""The throughput of a job in each state that a policy may bring it to, from plans of this planner."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import (
    MAX_DECIMALS,
    MAX_LAYERS,
    MAX_TICKS,
    SECONDS,
    SIZES,
    TIMES,
    Job,
    LayerProfile,
    MemoryLimit,
    Problem,
    StageProfile,
    Technique,
    Worker,
)
from openrecycle.planner.layers.migration import Counts, best_distributions, check_unit, models
from openrecycle.planner.layers.partition import Layout, best_at_home, lay_out, layer_bounds, staffed, with_stages
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.solvers.list_scheduler import ListScheduler

if TYPE_CHECKING:
    from openrecycle.planner.catalogs.catalog import StoredCatalog

# No job has more samples, and sums of larger numbers would overflow.
MOST_SAMPLES = 1e12
# Layers per stage for a job whose layers are not known, so that re-partition has something to move.
LAYERS_PER_STAGE = 8
# About how many ops are scheduled to compare partitions. It is low, since many states are planned and none is run.
EFFORT = 60_000
# From so many ops on, one plan or layout serves for several counts of failures, as in a catalog.
LARGE = 50_000


@dataclass(frozen=True)
class Rate:
    """seconds: time of one iteration. samples: how many it trains on."""

    seconds: float
    samples: float

    @property
    def per_second(self) -> float:
        return self.samples / self.seconds


A = TypeVarTuple("A")
S = TypeVar("S")
T = TypeVar("T")


def kept(method: Callable[[S, *A], T]) -> Callable[[S, *A], T]:
    """Cache a method's results in the object, for as long as that lives."""

    @wraps(method)
    def look_up(self: S, *args: *A) -> T:
        answers = vars(self).setdefault(f"answers of {method.__name__}", {})
        if args not in answers:
            answers[args] = method(self, *args)
        found: T = answers[args]
        return found

    return look_up


def check_sizes(
    samples: float | None, layers: int, least_stages: int | None, unit_seconds: float | None, stages: int | None = None
) -> None:
    """Check the arguments of a PlannedJob; None stands for the value that follows from the job. stages: of the job, if
    it is known. Raises InputError."""
    if samples is not None and not 0 < samples <= MOST_SAMPLES:
        raise InputError("--samples", samples, f"samples of one iteration, above 0 and at most {MOST_SAMPLES:g}")
    if isinstance(layers, bool) or not 1 <= layers <= 512:
        raise InputError("--layers-per-stage", layers, "a whole number from 1 to 512")
    if least_stages is not None and (least_stages < 1 or (stages is not None and least_stages > stages)):
        most = "the job's stages" if stages is None else stages
        raise InputError("--least-stages", least_stages, f"a whole number from 1 to {most}")
    if unit_seconds is not None:
        check_unit(unit_seconds)


class PlannedJob:
    """One job's throughput by state. Periods are planned when they are asked for, and cached.

    samples: of one iteration of the whole job. layers: per stage, where the job has none. least_stages: stages of the
    shortest pipeline whose workers can hold the model. catalog: its periods are used where it has them.
    Raises InputError.
    """

    def __init__(
        self,
        job: Job,
        *,
        samples: float,
        technique: Technique = Technique.STAGGERED,
        memory: MemoryLimit = MemoryLimit("uniform"),  # noqa: B008 (frozen)
        unit_seconds: float | None = None,
        layers: int = LAYERS_PER_STAGE,
        least_stages: int | None = None,
        catalog: StoredCatalog | None = None,
    ) -> None:
        if job.speeds:
            raise InputError("profile.speeds", len(job.speeds), "none: the simulator's workers are equally fast")
        check_sizes(samples, layers, least_stages, unit_seconds, job.stages)
        least = max(1, job.stages - job.stages // 4) if least_stages is None else least_stages
        seconds = SECONDS.get(job.time_unit, 1.0) if unit_seconds is None else unit_seconds
        self.job = job
        self.samples = samples
        self.technique = technique
        self.memory = memory
        self.tick = seconds / job.ticks_per_unit
        self.unit = seconds
        self.layers = layers
        self.least_stages = least
        self.workers = job.pipelines * job.stages
        self._known = {} if catalog is None else self._periods_of(catalog)

    # -- re-routing ------------------------------------------------------------------------------

    @cached_property
    def _distributions(self) -> tuple[list[Counts], ...]:
        """By period model: the best distributions of 0, 1, 2, ... failures over the stages."""
        if not self.technique.reroutes:
            return ([(0,) * self.job.stages],)
        most = self.workers - self.job.stages
        ranked = models(self.job, self.technique, self.memory)[: 1 if self._large else None]
        return tuple(list(best_distributions(model, most)) for model in ranked)

    @property
    def _large(self) -> bool:
        return self.job.ops >= LARGE

    def rerouted(self, failures: int) -> Rate | None:
        """The rate with so many workers dead, on the stages where they cost least; None where no plan exists."""
        if failures and not self.technique.reroutes:
            return None
        seconds = self._rerouted(failures)
        return None if seconds is None else Rate(seconds, self.samples)

    @kept
    def _rerouted(self, failures: int) -> float | None:
        if failures in self._known:
            return self._known[failures]
        # On a large grid one plan serves for all counts up to the next that has as many failures on each stage, since a
        # plan for more failures also serves for fewer.
        step = self.job.stages if self._large else 1
        planned = min(-(-failures // step) * step, self.workers - self.job.stages)
        if failures > planned:
            return None
        if failures < planned:
            return self._rerouted(planned)
        if failures == 1:
            return min(filter(None, self._first), default=None)
        return self._plan(self._best(failures))

    @cached_property
    def _first(self) -> list[float | None]:
        """Seconds of an iteration with one worker dead, by its stage."""
        stages = range(self.job.stages)
        return [self._plan([tuple(int(s == dead) for s in stages)]) for dead in stages]

    def moves(self, failures: int) -> bool:
        """May the plan of `rerouted` have failures on other stages than those where they happened? A single failure is
        not moved if it costs the same on every stage."""
        if failures < 1 or self.job.stages == 1 or not self.technique.reroutes:
            return False
        return failures > 1 or self._large or len(set(self._first)) > 1

    def _best(self, failures: int) -> list[Counts]:
        """The distributions that the period models find best."""
        return list(dict.fromkeys(found[failures] for found in self._distributions if failures < len(found)))

    def _plan(self, options: list[Counts]) -> float | None:
        """Seconds of an iteration by the shortest of the plans for these distributions."""
        return min(filter(None, map(self._planned, options)), default=None)

    @kept
    def _planned(self, counts: Counts) -> float | None:
        dead = frozenset(Worker(p, s) for s, n in enumerate(counts) for p in range(n))
        try:
            solution = ListScheduler().solve(Problem(self.job, dead, self.technique, self.memory))
        except InfeasibleError:
            return None
        return solution.schedule.period * self.tick

    def _periods_of(self, catalog: StoredCatalog) -> dict[int, float]:
        """The catalog's shortest period in seconds, by number of failures."""
        question = catalog.question
        if question != CatalogQuestion(self.job, self.technique, self.memory):
            what = "a catalog of this job, technique and memory limit, with the layers where they are"
            raise InputError("--catalog", catalog.info.fingerprint, what)
        found: dict[int, float] = {}
        for header in catalog.headers().values():
            if question.fits(header.partition):
                seconds = header.metrics.period * self.unit
                found[header.failures] = min(found.get(header.failures, math.inf), seconds)
        return found

    # -- other states ------------------------------------------------------------------------------

    @property
    def full(self) -> Rate:
        """The rate with nothing failed and the layers in their home partition. Raises InfeasibleError when there is no
        plan."""
        if self.job.at_home is not self.job:
            return self._at_home
        made = self.rerouted(0)
        if made is None:
            Problem(self.job, frozenset(), self.technique, self.memory)
            raise InfeasibleError("the full grid has no plan", "raise the memory limit")
        return made

    @cached_property
    def _at_home(self) -> Rate:
        problem = Problem(self.job.at_home, frozenset(), self.technique, self.memory)
        return Rate(ListScheduler().solve(problem).schedule.period * self.tick, self.samples)

    def replicas(self, pipelines: int) -> Rate | None:
        """The rate of so many whole pipelines, each with its own micro-batches: fewer samples per iteration."""
        if pipelines < 1:
            return None
        return Rate(self.full.seconds, self.samples * pipelines / self.job.pipelines)

    def fewer_pipelines(self, pipelines: int) -> Rate | None:
        """The rate of so many whole pipelines that run all micro-batches."""
        if pipelines < 1:
            return None
        gone = self.job.pipelines - pipelines
        if gone and not self.technique.reroutes:
            return None
        whole = (gone,) * self.job.stages
        if self._best(sum(whole)) == [whole]:  # a catalog may have this period
            return self.rerouted(sum(whole))
        seconds = self._planned(whole)
        return None if seconds is None else Rate(seconds, self.samples)

    @cached_property
    def layered(self) -> Job | None:
        """The job with layers: its own or, where it has none, `self.layers` equal ones per stage.

        None where those would be too many, or their op times would have too many decimals for so long a job.
        """
        return self.job if self.job.layers else _by_layers(self.job, self.layers)

    def check_layers(self, policy: str) -> None:
        """Raises InputError for a policy that changes the partition of a job whose layers can't be cut anew: it would
        have no rate, or that of another policy."""
        if self.layered is None:
            why = f"the {self.job.stages} stages of this one, with their times, can't be cut into so few"
            raise InputError("--policy", policy, f"one that moves no layers: a job has {MAX_LAYERS} at most, and {why}")
        if policy == "repartition":
            try:
                layer_bounds(self.layered, self._layout_technique, self.memory)
            except InputError:  # about layers that were made up here, so it needs other words
                layers, stages = len(self.layered.layers), self.layered.stages
                expected = f"another one: {layers:,} layers in {stages:,} stages are too many to choose a partition of"
                raise InputError("--policy", policy, expected) from None

    @property
    def _layout_technique(self) -> Technique:
        return self.technique if self.technique.reroutes else Technique.STAGGERED

    @kept
    def laid_out(self, failed: frozenset[Worker]) -> Layout | None:
        """The best partition of the layers, with workers where they are of most use; None if there is none."""
        if self.layered is None:
            return None
        try:
            return lay_out(self.layered, failed, technique=self._layout_technique, memory=self.memory, over="layouts")
        except (InfeasibleError, InputError):  # there is none, or there are too many to choose from
            return None

    def rate_of(self, layout: Layout) -> Rate:
        return Rate(layout.period * self.unit / layout.problem.job.ticks_per_unit, self.samples)

    def repartitioned(self, workers: int) -> Rate | None:
        """The best rate of all living workers with the layers cut anew: on any stages, in pipelines as deep as the
        grid's or one stage shorter. Layers stay where they are if that is best. None where nothing fits."""
        # (Layouts are found by heuristics: now and then one that leaves a worker idle is shorter.)
        if workers >= self.workers:  # nothing has failed
            return self.rerouted(0)
        options = [self.with_depth(self.job.stages - less, workers - idle) for less in (0, 1) for idle in (0, 1)]
        options.append(self.rerouted(self.workers - workers))
        return min(filter(None, options), key=lambda rate: rate.seconds, default=None)

    def with_depth(self, stages: int, workers: int) -> Rate | None:
        """The rate in pipelines of so many stages; None where the model or the workers don't fit."""
        if stages < self.least_stages or self.layered is None:
            return None
        # On a large grid one layout serves for all counts down to the next that has one worker less on each stage.
        step = self.job.stages if self._large and workers > 2 * self.job.stages else 1
        return self._staffed(stages, workers - workers % step)

    @kept
    def _staffed(self, stages: int, workers: int) -> Rate | None:
        assert self.layered is not None
        try:
            job = self.layered if stages == self.job.stages else with_stages(self.layered, stages, workers)
            if job is None:
                return None
            made = staffed(job, workers, technique=self._layout_technique, memory=self.memory, effort=EFFORT, final=1)
        except InputError:  # too many layers and stages to choose from, or too many ops
            return None
        return None if made is None else self.rate_of(made)

    @kept
    def templates(self, workers: int) -> Rate | None:
        """The rate with the layers over all living workers, in pipelines of different depth that run 1F1B: Oobleck's
        templates."""
        if workers < self.least_stages:
            return None
        total = self.job.pipelines * self.job.micro_batches
        tolerated = self.job.pipelines - 1
        most = min(2 * self.job.stages, len(self._stepping))
        depths = template_depths(self.workers, self.least_stages, tolerated, most)
        best = math.inf
        for chosen in instantiations(workers, depths, self.job.pipelines):
            if sum(shares(total, chosen, self._template, math.nextafter(best, 0))) >= total:
                best, _ = distribute(total, chosen, self._template)
        return None if math.isinf(best) else Rate(best, self.samples)

    @kept
    def morphed(self, workers: int) -> tuple[int, Rate] | None:
        """The best grid of pipelines of equal depth with 1F1B: (workers that it uses, its rate)."""
        total = self.job.pipelines * self.job.micro_batches
        best: tuple[float, int] | None = None
        for depth in range(self.least_stages, min(2 * self.job.stages, workers) + 1):
            pipelines = min(workers // depth, total)
            seconds = self._template(depth, -(-total // pipelines))
            if seconds < math.inf and (best is None or (seconds, pipelines * depth) < best):
                best = seconds, pipelines * depth
        return None if best is None else (best[1], Rate(best[0], self.samples))

    @kept
    def redundant(self, pipelines: int) -> Rate:
        """The rate of whole pipelines whose workers also run the forwards of the next stage, with 1F1B: Bamboo."""
        own = self.job.profiles
        ahead = [round(p.forward + own[(s + 1) % len(own)].forward, MAX_DECIMALS) for s, p in enumerate(own)]
        doubled = tuple(
            replace(p, reductions=(), optimizer=_step_of(p), forward=forward)
            for p, forward in zip(own, ahead, strict=True)
        )
        total = self.job.pipelines * self.job.micro_batches
        job = replace(self.job.as_stages(), pipelines=pipelines, micro_batches=-(-total // pipelines), profiles=doubled)
        return Rate(reference_period(job) * self.unit / job.ticks_per_unit, self.samples)

    @kept
    def _template(self, stages: int, micro_batches: int) -> float:
        """Seconds that one pipeline of so many stages takes with 1F1B; inf where it doesn't fit.

        From 4 micro-batches per stage on the pipeline is in its steady state: each further micro-batch takes as long as
        the last ones did on average.
        """
        steady = 4 * stages
        if not micro_batches:
            return 0.0
        if micro_batches <= steady:
            return self._pipeline(stages, micro_batches)
        at = self._template(stages, steady)
        each = (at - self._template(stages, steady - stages)) / stages
        return at + each * (micro_batches - steady)

    def _pipeline(self, stages: int, micro_batches: int) -> float:
        """Seconds of one pipeline, with its layers cut so that the slowest stage is as fast as possible."""
        if stages > len(self._stepping):
            return math.inf
        job = Job(1, stages, micro_batches, time_unit=self.job.time_unit, layers=self._stepping)
        return reference_period(job) * self.unit / job.ticks_per_unit

    @cached_property
    def _stepping(self) -> tuple[LayerProfile, ...]:
        """The layers, each with its all-reduce as a part of its step; empty where they would be too many."""
        layers = self.layered.layers if self.layered else ()
        made = {id(layer): replace(layer, reductions=(), optimizer=_step_of(layer)) for layer in layers}
        return tuple(made[id(layer)] for layer in layers)


def evened(job: Job, *, technique: Technique, memory: MemoryLimit, layers: int = LAYERS_PER_STAGE) -> Job:
    """Return the job as every policy begins it: with the partition that is best without failures, so that no policy is
    credited with a better balance.

    A job of stages or of layers that is balanced already is returned as it is.
    """
    by_layers = job if job.layers else _by_layers(job, layers) if layers > 0 else None
    if by_layers is None:
        return job
    try:
        even = best_at_home(by_layers, technique, memory)
    except (InfeasibleError, InputError):  # there is none, or there are too many to choose from
        return job
    return job if even is by_layers else even


def _by_layers(job: Job, most: int) -> Job | None:
    """Cut each stage into so many equal layers, or as many as are allowed; see `PlannedJob.layered`."""
    each = min(most, MAX_LAYERS // job.stages)
    if not each:
        return None
    decimals = _decimals(job)
    layers: list[LayerProfile] = []
    for s, profile in enumerate(job.profiles):
        cut = min(s, job.stages - 2)
        sent, back = (job.transfers[cut], job.backward_transfers[cut]) if cut >= 0 else (0.0, 0.0)
        share = vars(_share_of(profile, each, decimals))
        layers += [LayerProfile(**share, transfer=sent, backward_transfer=back)] * each
    parts: dict[str, Any] = {"layers": tuple(layers), "partition": (each,) * job.stages}
    try:
        return replace(job, **parts, profiles=(), transfers=(), backward_transfers=())
    except InputError:
        return None


def _decimals(job: Job) -> int:
    """Decimals of the op time of a layer: as many as a job twice as long may have, and no fewer than the job's own."""
    own = round(math.log10(job.ticks_per_unit))
    return max(own, min(MAX_DECIMALS, math.floor(math.log10(MAX_TICKS / (2 * job.longest)))))


def _share_of(profile: StageProfile, layers: int, decimals: int) -> StageProfile:
    """The profile of one of so many equal layers of a stage."""

    def share(time: float) -> float:
        return max(round(time / layers, decimals), 10.0**-decimals) if time else 0.0

    times: dict[str, Any] = {name: share(getattr(profile, name)) for name in TIMES}
    sizes: dict[str, Any] = {name: getattr(profile, name) // layers for name in SIZES}
    return StageProfile(**times, reductions=tuple(map(share, profile.reductions)), **sizes)


def _step_of(profile: StageProfile) -> float:
    """The optimizer step together with the all-reduce among all peers of the stage."""
    return round(profile.optimizer + (profile.reductions[-1] if profile.reductions else 0.0), MAX_DECIMALS)


# -- pipeline templates ------------------------------------------------------------------------------

# Oobleck (SOSP'23) plans pipelines of different depth that use every worker. Layers are partitioned over the stages of
# each template; templates are instantiated so that their depths add up to the number of living workers; micro-batches
# are distributed so that the slowest pipeline is as fast as possible.

# Up to so many workers every multiset of depths is tried; beyond, only the most even one of each size.
ENUMERATED = 40


def template_depths(workers: int, least: int, tolerated: int, most: int) -> range:
    """Return consecutive depths, from the fewest workers that hold the model on.

    With depths n0 to N - f n0 any number of workers of at least (f + 1) n0 is a sum of depths (no
    gap between consecutive numbers: the Frobenius argument). `most`: no more stages than layers.
    """
    return range(least, max(least, min(most, workers - tolerated * least)) + 1)


def instantiations(workers: int, depths: range, pipelines: int) -> Iterator[tuple[int, ...]]:
    """Yield multisets of at most `pipelines` depths that add up to `workers`, each in falling order."""
    if workers <= ENUMERATED:
        yield from _sums(workers, depths, pipelines, depths.stop - 1)
        return
    for count in range(1, pipelines + 1):
        depth, longer = divmod(workers, count)
        if depth >= depths.start and depth + (longer > 0) < depths.stop:
            yield (depth + 1,) * longer + (depth,) * (count - longer)


def _sums(total: int, depths: range, parts: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    if parts == 0 or total < depths.start:
        return
    for first in range(min(total, largest), depths.start - 1, -1):
        if first * parts < total:
            return
        for rest in _sums(total - first, depths, parts - 1, first):
            yield (first, *rest)


def distribute(total: int, depths: tuple[int, ...], time: Callable[[int, int], float]) -> tuple[float, tuple[int, ...]]:
    """Return the least time within which pipelines of these depths run `total` micro-batches, and how many each gets.

    time(depth, micro_batches): of one pipeline; it does not fall as micro-batches grow. The least time is that of some
    pipeline with some number of them; it is found by bisection over that number, depth by depth.
    """
    best = math.inf
    for kind in set(depths):

        def suffices(n: int, depth: int = kind) -> bool:
            return sum(shares(total, depths, time, time(depth, n))) >= total

        best = min(best, time(kind, bisect_left(range(total), True, key=suffices)))
    left = total
    out = []
    for most in shares(total, depths, time, best):
        out.append(min(most, left))
        left -= out[-1]
    return best, tuple(out)


def shares(total: int, depths: tuple[int, ...], time: Callable[[int, int], float], limit: float) -> list[int]:
    """Return by pipeline the most micro-batches that it runs within `limit`, up to `total`."""
    most = {kind: bisect_right(range(1, total + 1), limit, key=partial(time, kind)) for kind in set(depths)}
    return [most[depth] for depth in depths]
