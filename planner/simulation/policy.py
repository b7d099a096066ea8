"""What to do at a failure: predicts each option, and ranks first the one that trains most.

Pure functions of the job's state, its planned throughput and the costs of recovery. All options are compared by the
samples that are trained from now to the expected repair, the end of the job, or the next change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.jobs.words import DROP, MIGRATE, REROUTE, STAND_BY, milliseconds, percent
from openrecycle.planner.layers.migration import CopyCost, best_migrations
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.simulation.engine import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.solvers.list_scheduler import ListScheduler

if TYPE_CHECKING:
    from openrecycle.planner.layers.migration import Migration

REPARTITION, SHALLOWER = "re-partition", "one stage less"


# -- the options when workers are lost or come back, and which is better ------------------------


@dataclass(frozen=True)
class Option:
    """One option. pause: seconds until training goes on. redo: seconds of earlier work that is lost.

    rate: samples per second after the pause. migrations: workers that change their stage for it, where that is known.
    partition: layers per stage, where they change and that is known.
    """

    name: str
    pause: float
    rate: float
    redo: float = 0.0
    migrations: tuple[Migration, ...] = ()
    partition: tuple[int, ...] = ()

    def samples(self, horizon: float, before: float) -> float:
        """Samples trained within `horizon` seconds, minus the earlier work that is lost, which was done at rate
        `before`."""
        return max(0.0, horizon - self.pause) * self.rate - self.redo * before


def best_option(options: Sequence[Option], horizon: float, before: float) -> list[Option]:
    """Sort the options, the best first."""
    return sorted(options, key=lambda o: merit(o.name, o.samples(horizon, before), o.pause))


def merit(name: str, samples: float, pause: float) -> tuple[float, float, bool, str]:
    """Sort key for options, the best first: by samples trained; if these differ in the last bits only, by the shorter
    pause, and then options that take no healthy worker out come first."""
    return -float(f"{samples:.9g}"), pause, name in (DROP, STAND_BY), name


# -- what to do at a failure --------------------------------------------------------------------

# With more ops nothing is planned while a failure waits: a period for the number of failures is used instead.
PLANNED_OPS = 200_000

# A fraction from here on is called the whole, since plans are counted in ticks.
WHOLE = 0.995


@dataclass(frozen=True)
class Advice:
    """options: best first. horizon: seconds that it looks ahead. load: do the bubbles hold the extra load? In words; ""
    where there is none."""

    options: tuple[Option, ...]
    horizon: float
    load: str


@dataclass(frozen=True)
class PolicyState:
    """failed: dead places of the grid. since_checkpoint: seconds of work since the last checkpoint; None: there is
    none."""

    failed: frozenset[Worker]
    since_checkpoint: float | None = None


def advise(
    state: PolicyState,
    planned: PlannedJob,
    costs: RecoveryCosts,
    *,
    heals_in: float,
    left: float = math.inf,
) -> Advice:
    """Rank re-routing, re-routing after migrations, re-partitioning, also with one stage less, dropping replicas, and
    restarting from the checkpoint.

    heals_in: seconds until the failed workers are expected back. left: iterations left of the job, which may end before
    then; they are counted at the rate of re-routing.
    Raises InputError for a worker outside the grid, InfeasibleError when no option lets the job go on.
    """
    if not 0 < heals_in < math.inf:
        raise InputError("heals_in", heals_in, "seconds until the expected repair, above 0")
    if state.since_checkpoint is not None and not 0 <= state.since_checkpoint < math.inf:
        raise InputError("since_checkpoint", state.since_checkpoint, "seconds, at least 0")
    for worker in state.failed:
        planned.job.check_worker(worker, field="failed")
    here = _rerouted_here(state.failed, planned)
    seconds = (here or planned.full).seconds
    horizon = min(heals_in, costs.detect + costs.recover + max(1.0, left) * seconds)
    options = _options(state, planned, costs, horizon, here)
    if not options:
        raise InfeasibleError(
            f"{planned.workers - len(state.failed)} living workers can't go on", "bring back a failed worker"
        )
    ranked = best_option(options, horizon, planned.full.per_second)
    load = _load(state, planned, next((o.rate for o in options if o.name == REROUTE), None))
    return Advice(tuple(ranked), horizon, load)


def _options(
    state: PolicyState,
    planned: PlannedJob,
    costs: RecoveryCosts,
    horizon: float,
    here: Rate | None,
) -> list[Option]:
    """List the options that are possible. here: the rate of re-routing with the failures where they are."""
    failures = len(state.failed)
    living = planned.workers - failures
    seen = costs.detect + costs.recover
    stages = planned.job.stages
    out: list[Option] = []

    def offer(name: str, pause: float, rate: Rate | None, redo: float = 0.0) -> None:
        if rate is not None:
            out.append(Option(name, pause, rate.per_second, redo))

    offer(REROUTE, seen, here)
    if failures and (moved := _migrated(state.failed, planned, costs, horizon, here)):
        out.append(moved)
    if laid := _repartitioned(state.failed, planned, seen + costs.repartition):
        out.append(laid)
    if failures:
        offer(SHALLOWER, seen + costs.repartition, planned.with_depth(stages - 1, living))
    broken = len({worker.pipeline for worker in state.failed})
    if failures:
        offer(DROP, seen, planned.replicas(planned.job.pipelines - broken))
    if state.since_checkpoint is not None:
        restarted = planned.fewer_pipelines(living // stages)
        offer("restart from the checkpoint", costs.detect + costs.restart, restarted, state.since_checkpoint)
    return out


def _migrated(
    failed: frozenset[Worker], planned: PlannedJob, costs: RecoveryCosts, heals_in: float, here: Rate | None
) -> Option | None:
    """Re-routing with the failures moved to where they cost least; None when they are there already.

    On a large grid no plan is made: the period is that for the number of failures, and who moves is left open.
    """
    seen = costs.detect + costs.recover
    if _large(planned) or not planned.technique.reroutes:
        best = planned.rerouted(len(failed))
        if best is None or (here is not None and best.seconds >= here.seconds):
            return None
        return Option(MIGRATE, seen + costs.migrate, best.per_second)
    # One copy takes `migrate` seconds; each peer of a stage sends one copy at a time.
    cost = CopyCost((1,) * planned.job.stages, 1 / costs.migrate) if costs.migrate else None
    try:
        moved = best_migrations(
            planned.job,
            failed,
            technique=planned.technique,
            memory=planned.memory,
            cost=cost,
            heals_in=heals_in,
            unit_seconds=planned.unit,
        )
    except InfeasibleError:
        return None
    if not moved.migrations:
        return None
    rate = Rate(moved.period * planned.tick, planned.samples)
    return Option(MIGRATE, seen + moved.pause, rate.per_second, migrations=moved.migrations)


def _repartitioned(failed: frozenset[Worker], planned: PlannedJob, pause: float) -> Option | None:
    """The layers and, where that helps, workers on other stages. On a large grid no layout is made: the rate is that
    for the number of workers, and the partition is left open."""
    if _large(planned):
        rate = planned.with_depth(planned.job.stages, planned.workers - len(failed))
        return None if rate is None else Option(REPARTITION, pause, rate.per_second)
    layout = planned.laid_out(failed)
    if layout is None:
        return None
    known = layout.partition if planned.job.layers else ()
    return Option(REPARTITION, pause, planned.rate_of(layout).per_second, migrations=layout.migrations, partition=known)


def _large(planned: PlannedJob) -> bool:
    return planned.job.ops > PLANNED_OPS


def _rerouted_here(failed: frozenset[Worker], planned: PlannedJob) -> Rate | None:
    """The rate of re-routing with the failures where they are; None where there is no plan."""
    if _large(planned):
        return planned.rerouted(len(failed))
    try:
        schedule = ListScheduler().solve(Problem(planned.job, failed, planned.technique, planned.memory)).schedule
    except (InfeasibleError, InputError):
        return None
    return Rate(schedule.period * planned.tick, planned.samples)


def _load(state: PolicyState, planned: PlannedJob, rate: float | None) -> str:
    """Say whether 1F1B's bubbles hold the micro-batches that each peer has to take in addition; "": there are none.

    1F1B leaves stages - 1 slots idle on every worker of an iteration, so staggered iterations take up to so many
    further micro-batches without becoming longer than 1F1B's. rate: that of re-routing as planned, which memory limits
    and the optimizer's step may keep below that.
    """
    job = planned.job
    worst, extra = 0, 0
    for stage, dead in enumerate(failures_per_stage(state.failed, job)):
        if dead == job.pipelines:
            return f"no worker of stage {stage} lives"
        more = -(-job.pipelines * job.micro_batches // (job.pipelines - dead)) - job.micro_batches
        if more > extra:
            worst, extra = stage, more
    bubbles = job.stages - 1
    if not extra:
        return ""
    if extra > bubbles:
        return (
            f"the bubbles can't absorb the load: stage {worst}'s peers have {extra} further micro-batches each, "
            f"and 1F1B leaves room for {bubbles}"
        )
    share = rate / one_f_one_b(planned).per_second if rate is not None else 0.0
    held = f"1F1B's bubbles have room for the {extra} further micro-batches per peer"
    if share >= WHOLE:
        return f"{held}, so re-routing is as fast as fault-free 1F1B"
    reached = f"re-routing reaches {percent(share, 0)} of its speed within the memory limit and the steps"
    return f"{held}, though {reached}"


def one_f_one_b(planned: PlannedJob) -> Rate:
    """The rate of fault-free 1F1B, which the paper measures slowdowns against."""
    return Rate(reference_period(planned.job.at_home) * planned.tick, planned.samples)


def shares(rate: float, planned: PlannedJob) -> str:
    """Compare a rate with the fault-free plan and with fault-free 1F1B, in words."""
    return (
        f"{percent(rate / planned.full.per_second, 0)} of the fault-free plan, "
        f"{percent(rate / one_f_one_b(planned).per_second, 0)} of fault-free 1F1B"
    )


def span(seconds: float) -> str:
    """A time in words, in a suitable unit."""
    return milliseconds(1000 * seconds)
