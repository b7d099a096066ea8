"""How fast a job is in each state that a policy may bring it to, from our own planner's plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from openrecycle.planner.baseline import reference_period
from openrecycle.planner.catalog_store import StoredCatalog
from openrecycle.planner.catalog_task import LARGE
from openrecycle.planner.distribution import Counts, best_distributions, models
from openrecycle.planner.errors import InfeasibleError, InputError
from openrecycle.planner.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.migration import SECONDS
from openrecycle.planner.simulation.templates import distribute, instantiations, partition, template_depths
from openrecycle.planner.solvers.list_scheduler import ListScheduler

# Layers of a stage where nobody says how many there are: what re-partition can move.
LAYERS_PER_STAGE = 8


@dataclass(frozen=True)
class Rate:
    """seconds: of one iteration. samples: that it trains on."""

    seconds: float
    samples: float

    @property
    def per_second(self) -> float:
        return self.samples / self.seconds


class PlannedJob:
    """One job's throughput by state. Periods are planned when asked for and kept.

    samples: of one iteration of the whole job. layers: per stage. least_stages: of the shallowest
    pipeline whose workers hold the model. catalog: whose periods are taken where it has them.
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
        if not 0 < samples < math.inf:
            raise InputError("--samples", samples, "samples of one iteration, above 0")
        if isinstance(layers, bool) or not 1 <= layers <= 512:
            raise InputError("--layers-per-stage", layers, "a whole number from 1 to 512")
        least = max(1, job.stages - job.stages // 4) if least_stages is None else least_stages
        if not 1 <= least <= job.stages:
            raise InputError("--least-stages", least, f"a whole number from 1 to {job.stages}")
        seconds = SECONDS.get(job.time_unit, 1.0) if unit_seconds is None else unit_seconds
        if not 0 < seconds < math.inf:
            raise InputError("--unit-seconds", seconds, "a number of seconds above 0")
        self.job = job
        self.samples = samples
        self.technique = technique
        self.memory = memory
        self.tick = seconds / job.ticks_per_unit
        self.unit = seconds
        self.layers = layers
        self.least_stages = least
        self.workers = job.pipelines * job.stages
        self._periods: dict[int, float | None] = {}
        self._templates: dict[tuple[int, int, bool], float] = {}
        self._redundant: dict[int, Rate] = {}
        self._morphed: dict[int, tuple[int, Rate] | None] = {}
        self._repartitioned: dict[tuple[int, bool], Rate | None] = {}
        if catalog is not None:
            self._take(catalog)

    # -- re-routing ------------------------------------------------------------------------------

    @cached_property
    def _distributions(self) -> tuple[list[Counts], ...]:
        """By period model: the best distribution of 0, 1, 2, ... failures over the stages."""
        if not self.technique.reroutes:
            return ([(0,) * self.job.stages],)
        most = self.workers - self.job.stages
        ranked = models(self.job, self.technique, self.memory)[: 1 if self._large else None]
        return tuple(list(best_distributions(model, most)) for model in ranked)

    @property
    def _large(self) -> bool:
        return 3 * self.workers * self.job.micro_batches >= LARGE

    def rerouted(self, failures: int) -> Rate | None:
        """With so many workers dead, wherever they cost least; None where no plan exists."""
        if failures and not self.technique.reroutes:
            return None
        if failures not in self._periods:
            # On a large grid one plan serves for all counts up to the next that has as many
            # failures on each stage: a plan for more failures serves for fewer.
            step = self.job.stages if self._large else 1
            planned = min(-(-failures // step) * step, self.workers - self.job.stages)
            if failures > planned:
                self._periods[failures] = None
            elif failures == planned:
                self._periods[failures] = self._plan(failures)
            else:
                made = self.rerouted(planned)
                self._periods[failures] = None if made is None else made.seconds
        seconds = self._periods[failures]
        return None if seconds is None else Rate(seconds, self.samples)

    def _plan(self, failures: int) -> float | None:
        """Seconds of the shortest of the plans for the distributions that the period models find best."""
        options = dict.fromkeys(found[failures] for found in self._distributions if failures < len(found))
        periods = []
        for counts in options:
            dead = frozenset(Worker(p, s) for s, n in enumerate(counts) for p in range(n))
            try:
                solution = ListScheduler().solve(Problem(self.job, dead, self.technique, self.memory))
            except InfeasibleError:
                continue
            periods.append(solution.schedule.period * self.tick)
        return min(periods, default=None)

    def _take(self, catalog: StoredCatalog) -> None:
        question = catalog.question
        asked = (self.job, self.technique, self.memory)
        if (question.job, question.technique, question.memory) != asked:
            raise InputError("--catalog", catalog.info.fingerprint, "a catalog of this job, technique and memory limit")
        for name in catalog.blobs.names():
            header = catalog.header(name)
            seconds = header.metrics.period * self.unit
            known = self._periods.get(len(header.workers))
            self._periods[len(header.workers)] = seconds if known is None else min(known, seconds)

    # -- other states ------------------------------------------------------------------------------

    @property
    def full(self) -> Rate:
        """Nothing has failed. Raises InfeasibleError when there is no plan."""
        made = self.rerouted(0)
        if made is None:
            Problem(self.job, frozenset(), self.technique, self.memory)
            raise InfeasibleError("the full grid has no plan", "raise the memory limit")
        return made

    def replicas(self, pipelines: int) -> Rate | None:
        """Only so many whole pipelines, each with its own micro-batches: fewer samples per iteration."""
        if pipelines < 1:
            return None
        return Rate(self.full.seconds, self.samples * pipelines / self.job.pipelines)

    def fewer_pipelines(self, pipelines: int) -> Rate | None:
        """Only so many whole pipelines, which run all micro-batches."""
        if pipelines < 1:
            return None
        return self.rerouted((self.job.pipelines - pipelines) * self.job.stages)

    def repartitioned(self, workers: int, *, ours: bool = True) -> Rate | None:
        """The layers over all living workers, in pipelines of unlike depth; None when none fits.

        ours: no pipeline is deeper than the grid's, and each runs our planner's schedule; otherwise
        Oobleck's templates, which run 1F1B.
        """
        key = (workers, ours)
        if key not in self._repartitioned:
            self._repartitioned[key] = self._repartition(workers, ours)
        return self._repartitioned[key]

    def morphed(self, workers: int) -> tuple[int, Rate] | None:
        """The best grid of pipelines of one depth, with 1F1B: (workers that it uses, its rate)."""
        if workers not in self._morphed:
            total = self.job.pipelines * self.job.micro_batches
            best: tuple[float, int] | None = None
            for depth in range(self.least_stages, min(2 * self.job.stages, workers) + 1):
                pipelines = min(workers // depth, total)
                seconds = self._template(depth, -(-total // pipelines), False)
                if seconds < math.inf and (best is None or (seconds, pipelines * depth) < best):
                    best = seconds, pipelines * depth
            self._morphed[workers] = None if best is None else (best[1], Rate(best[0], self.samples))
        return self._morphed[workers]

    def redundant(self, pipelines: int) -> Rate:
        """Whole pipelines whose workers also run their successor's forwards, with 1F1B: Bamboo."""
        own = self.job.profiles
        doubled = tuple(
            replace(_joined([_share_of(p, 1.0)]), forward=round(p.forward + own[(s + 1) % len(own)].forward, 6))
            for s, p in enumerate(own)
        )
        if pipelines in self._redundant:
            return self._redundant[pipelines]
        total = self.job.pipelines * self.job.micro_batches
        job = replace(self.job, pipelines=pipelines, micro_batches=-(-total // pipelines), profiles=doubled)
        self._redundant[pipelines] = Rate(reference_period(job) * self.unit / job.ticks_per_unit, self.samples)
        return self._redundant[pipelines]

    def _repartition(self, workers: int, ours: bool) -> Rate | None:
        if workers < self.least_stages:
            return None
        total = self.job.pipelines * self.job.micro_batches
        if ours:
            depths = range(self.least_stages, self.job.stages + 1)
        else:
            tolerated = self.job.pipelines - 1
            deepest = min(2 * self.job.stages, self.layers * self.job.stages)
            depths = template_depths(self.workers, self.least_stages, tolerated, deepest)
        best = math.inf
        for chosen in instantiations(workers, depths, self.job.pipelines):
            seconds, _ = distribute(total, chosen, lambda depth, n: self._template(depth, n, ours))
            best = min(best, seconds)
        return None if math.isinf(best) else Rate(best, self.samples)

    def _template(self, stages: int, micro_batches: int, ours: bool) -> float:
        """Seconds that one pipeline of so many stages takes; inf where it doesn't fit.

        Beyond 4 micro-batches per stage each further one takes as long as the last did on average:
        the pipeline is in its steady state.
        """
        if not micro_batches:
            return 0.0
        key = (stages, micro_batches, ours)
        if key not in self._templates:
            steady = 4 * stages
            if micro_batches > steady:
                at = self._template(stages, steady, ours)
                each = (at - self._template(stages, steady - stages, ours)) / stages
                self._templates[key] = at + each * (micro_batches - steady)
            else:
                self._templates[key] = self._pipeline(stages, micro_batches, ours)
        return self._templates[key]

    def _pipeline(self, stages: int, micro_batches: int, ours: bool) -> float:
        try:
            job = self._template_job(stages, micro_batches)
            if not ours:
                return reference_period(job) * self.unit / job.ticks_per_unit
            technique = self.technique if self.technique.reroutes else Technique.STAGGERED
            solution = ListScheduler().solve(Problem(job, frozenset(), technique, self.memory))
            return solution.schedule.period * self.unit / job.ticks_per_unit
        except InfeasibleError:
            return math.inf

    def _template_job(self, stages: int, micro_batches: int) -> Job:
        """One pipeline of this depth, its layers partitioned so that the slowest stage is quickest."""
        layers = [_share_of(p, 1 / self.layers) for p in self.job.profiles for _ in range(self.layers)]
        counts = partition(tuple(p.forward + p.input_backward + p.weight_backward for p in layers), stages)
        if counts is None:
            raise InfeasibleError(f"{len(layers)} layers make no {stages} stages", "use fewer stages")
        profiles, at = [], 0
        for count in counts:
            profiles.append(_joined(layers[at : at + count]))
            at += count
        transfers = (max(self.job.transfers, default=0.0),) * (stages - 1)
        back = (max(self.job.backward_transfers, default=0.0),) * (stages - 1)
        capacity = (min(self.job.capacity_bytes),) * stages if self.job.capacity_bytes else ()
        return Job(
            1,
            stages,
            micro_batches,
            profiles=tuple(profiles),
            transfers=transfers,
            backward_transfers=back,
            time_unit=self.job.time_unit,
            capacity_bytes=capacity,
        )


def _share_of(profile: StageProfile, share: float) -> StageProfile:
    """That share of a stage's layers. The reduction is that of the whole stage's peers."""
    step = profile.optimizer + (profile.reductions[-1] if profile.reductions else 0.0)
    return replace(
        profile,
        forward=profile.forward * share,
        input_backward=profile.input_backward * share,
        weight_backward=profile.weight_backward * share,
        optimizer=step * share,
        reductions=(),
        activation_bytes=round(profile.activation_bytes * share),
        weight_backward_bytes=round(profile.weight_backward_bytes * share),
        weight_bytes=round(profile.weight_bytes * share),
        optimizer_bytes=round(profile.optimizer_bytes * share),
    )


def _joined(layers: list[StageProfile]) -> StageProfile:
    """The stage that these layers make; times to the planner's 6 decimals."""

    def times(name: str) -> float:
        return round(math.fsum(getattr(layer, name) for layer in layers), 6)

    def sizes(name: str) -> int:
        return int(sum(getattr(layer, name) for layer in layers))

    return StageProfile(
        forward=times("forward"),
        input_backward=times("input_backward"),
        weight_backward=times("weight_backward"),
        optimizer=times("optimizer"),
        activation_bytes=sizes("activation_bytes"),
        weight_backward_bytes=sizes("weight_backward_bytes"),
        weight_bytes=sizes("weight_bytes"),
        optimizer_bytes=sizes("optimizer_bytes"),
    )
