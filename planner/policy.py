"""What to do at a failure: predicts each way on, picks the one that trains most, and says why.

Pure functions of the job's state, its planned throughput and what recovery costs. All ways are
compared by the samples that are trained from now to the expected repair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.catalog import Catalog
from planner.catalog_store import Found, StoredCatalog
from planner.errors import InfeasibleError, InputError
from planner.failures import failures_per_stage
from planner.job import Problem, Worker
from planner.simulation.costs import RecoveryCosts
from planner.simulation.planned import PlannedJob, Rate
from planner.solvers.list_scheduler import ListScheduler

# Ops above which nothing is planned while a failure waits: the count's own period stands for it.
PLANNED_OPS = 200_000


@dataclass(frozen=True)
class Option:
    """One way on. pause: seconds until training goes on. redo: seconds of earlier work that is lost.

    rate: samples per second from then on.
    """

    name: str
    pause: float
    rate: float
    redo: float = 0.0

    def samples(self, horizon: float, before: float) -> float:
        """Trained within `horizon` seconds, less what is lost of the work done at rate `before`."""
        return max(0.0, horizon - self.pause) * self.rate - self.redo * before


@dataclass(frozen=True)
class Advice:
    """options: best first. sentence: why, with the numbers. absorbed: do the bubbles hold the extra load?"""

    choice: Option
    options: tuple[Option, ...]
    horizon: float
    absorbed: bool
    sentence: str


@dataclass(frozen=True)
class JobState:
    """failed: dead places of the grid. since_checkpoint: seconds of work since the last one; None: there
    is none. spares: workers that stand by.
    """

    failed: frozenset[Worker]
    since_checkpoint: float | None = None
    spares: int = 0


def best_option(options: Sequence[Option], horizon: float, before: float) -> list[Option]:
    """The options, those with most samples first; of equals the one with the shorter pause."""
    return sorted(options, key=lambda o: (-o.samples(horizon, before), o.pause, o.name))


def advise(
    state: JobState,
    planned: PlannedJob,
    costs: RecoveryCosts,
    *,
    heals_in: float,
    catalog: Catalog | StoredCatalog | None = None,
) -> Advice:
    """The best of re-routing, re-routing after migrations, re-partitioning, dropping replicas, a spare,
    and restarting from the checkpoint.

    heals_in: seconds until the failed workers are expected back. catalog: plans made ahead.
    Raises InputError for a worker outside the grid, InfeasibleError when no way leads on.
    """
    if not 0 < heals_in < math.inf:
        raise InputError("heals_in", heals_in, "seconds until the expected repair, above 0")
    if state.since_checkpoint is not None and not 0 <= state.since_checkpoint < math.inf:
        raise InputError("since_checkpoint", state.since_checkpoint, "seconds, at least 0")
    if isinstance(state.spares, bool) or state.spares < 0:
        raise InputError("spares", state.spares, "a number of workers of at least 0")
    for worker in state.failed:
        planned.job.check_worker(worker, field="failed")
    options = _options(state, planned, costs, catalog)
    if not options:
        raise InfeasibleError(
            f"{planned.workers - len(state.failed)} living workers can't go on", "bring back a failed worker"
        )
    full = planned.full.per_second
    ranked = best_option(options, heals_in, full)
    absorbed, load = _load(state, planned)
    return Advice(ranked[0], tuple(ranked), heals_in, absorbed, _sentence(ranked, heals_in, full, load))


def _options(
    state: JobState, planned: PlannedJob, costs: RecoveryCosts, catalog: Catalog | StoredCatalog | None
) -> list[Option]:
    failures = len(state.failed)
    living = planned.workers - failures
    seen = costs.detect + costs.recover
    stages = planned.job.stages
    out: list[Option] = []

    def offer(name: str, pause: float, rate: Rate | None, redo: float = 0.0) -> None:
        if rate is not None:
            out.append(Option(name, pause, rate.per_second, redo))

    here = _rerouted_here(state.failed, planned, catalog)
    offer("re-route", seen, here)
    best = planned.rerouted(failures)
    if best is not None and failures and (here is None or best.seconds < here.seconds):
        offer("migrate and re-route", seen + costs.migrate, best)
    offer("re-partition", seen + costs.repartition, planned.repartitioned(living))
    broken = len({worker.pipeline for worker in state.failed})
    if failures:
        offer("drop the replica", seen, planned.replicas(planned.job.pipelines - broken))
        if state.spares >= failures:
            offer("take spares", seen + costs.rejoin, planned.full)
    if state.since_checkpoint is not None:
        restarted = planned.fewer_pipelines(living // stages)
        offer("restart from the checkpoint", costs.detect + costs.restart, restarted, state.since_checkpoint)
    return out


def _rerouted_here(
    failed: frozenset[Worker], planned: PlannedJob, catalog: Catalog | StoredCatalog | None
) -> Rate | None:
    """With the failures where they are: as planned ahead, else by the list scheduler now."""
    found = catalog.find(failed) if catalog is not None else None
    plan = found.plan if isinstance(found, Found) else found
    if plan is not None:
        return Rate(plan.metrics.period * planned.unit, planned.samples)
    job = planned.job
    if 3 * planned.workers * job.micro_batches > PLANNED_OPS:
        return planned.rerouted(len(failed))
    try:
        schedule = ListScheduler().solve(Problem(job, failed, planned.technique, planned.memory)).schedule
    except (InfeasibleError, InputError):
        return None
    return Rate(schedule.period * planned.tick, planned.samples)


def _load(state: JobState, planned: PlannedJob) -> tuple[bool, str]:
    """Do the bubbles hold what each peer has to take beside its own? And in words.

    1F1B leaves stages - 1 slots idle on every worker of an iteration, so staggered iterations take
    up to so many further micro-batches for nothing.
    """
    job = planned.job
    worst, extra = 0, 0
    for stage, dead in enumerate(failures_per_stage(state.failed, job)):
        if dead == job.pipelines:
            return False, f"no worker of stage {stage} lives"
        more = -(-job.pipelines * job.micro_batches // (job.pipelines - dead)) - job.micro_batches
        if more > extra:
            worst, extra = stage, more
    bubbles = job.stages - 1
    if extra <= bubbles:
        return True, f"the bubbles hold the {extra} further micro-batches per peer" if extra else ""
    return False, (
        f"the bubbles can't absorb the load: stage {worst}'s peers have {extra} further micro-batches each, "
        f"and 1F1B leaves room for {bubbles}"
    )


def _sentence(ranked: Sequence[Option], horizon: float, full: float, load: str) -> str:
    best = ranked[0]
    text = (
        f"{best.name}: {best.rate:.4g} samples/s ({best.rate / full:.0%} of fault-free) after a pause of "
        f"{best.pause:.3g} s, {max(0.0, best.samples(horizon, full)):,.0f} samples in the {_span(horizon)} to the "
        "expected repair"
    )
    if len(ranked) > 1:
        next_best = ranked[1]
        text += (
            f"; next is {next_best.name} with {max(0.0, next_best.samples(horizon, full)):,.0f} "
            f"({next_best.rate:.4g} samples/s after {next_best.pause:.3g} s)"
        )
    return f"{text}; {load}" if load else text


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
