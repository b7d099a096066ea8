"""Migration of workers: moving failures to the stages where they cost least.

Only the number of failures per stage matters for the period. A living worker that takes the
weights of another stage moves a failure from that stage to its own; that costs the copy of weights
and optimizer state, during which nobody trains, and pays off over the time until the job heals.
The distributions that are compared are planned with speeds and reductions. A job's speeds belong to
places of its grid, so a worker that migrates is counted at the speed of the place that it takes.
Pure functions: nothing here moves anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.jobs.words import planned
from openrecycle.planner.layers.distribution import CopyCost, Counts, FailureDistribution, candidates, models
from openrecycle.planner.solvers.list_scheduler import ListScheduler

# Distributions that are planned with the list scheduler, after each period model has ranked its own.
PLANNED = 3

# Of the units of time that a profile may be in. Any other, such as a slot, is none.
SECONDS = {"min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Migration:
    """Living `worker` leaves its stage and becomes `takes`, with the weights and optimizer state of
    `source`, a living peer there; None: no peer lives, and they come from the last checkpoint."""

    worker: Worker
    takes: Worker
    source: Worker | None

    def __str__(self) -> str:
        origin = f"from {self.source}" if self.source else "from the last checkpoint"
        return f"{self.worker} takes the place of {self.takes}, with its weights {origin}"


@dataclass(frozen=True)
class MigrationPlan:
    """What to do about the failures, and why.

    present, counts: failures per stage now and afterwards. failed: the dead or vacated places
    afterwards. period_now (None: no schedule exists), period: ticks, of the list scheduler's plans.
    pause: seconds of training lost to the copies. iterations_gained: over the horizon, against
    leaving the failures where they are; None without a horizon or without a present period.
    """

    present: Counts
    counts: Counts
    migrations: tuple[Migration, ...]
    failed: frozenset[Worker]
    period_now: int | None
    period: int
    pause: float
    iterations_gained: float | None
    reason: str


@dataclass(frozen=True)
class _Option:
    migrations: tuple[Migration, ...]
    counts: Counts
    failed: frozenset[Worker]
    period: int
    pause: float
    moved: int


def best_migrations(
    job: Job,
    failed: Iterable[Worker],
    *,
    technique: Technique = Technique.STAGGERED,
    memory: MemoryLimit = MemoryLimit("uniform"),  # noqa: B008 (frozen)
    cost: CopyCost | None = None,
    heals_in: float | None = None,
    unit_seconds: float | None = None,
) -> MigrationPlan:
    """The distribution under which most iterations are done until the job heals.

    cost: of the copies; None: they are free. heals_in: seconds until the failed workers are
    expected back; None: they are not. unit_seconds: how long the job's time unit is; by default
    what its name says, and 1 second for a unit that is no unit of time. Staying wins ties.
    Raises InputError, and InfeasibleError when fewer workers live than there are stages.
    """
    if heals_in is not None and not 0 <= heals_in < float("inf"):
        raise InputError("--heals-in", heals_in, "a number of seconds of at least 0")
    seconds = SECONDS.get(job.time_unit, 1.0) if unit_seconds is None else unit_seconds
    if not 0 < seconds < float("inf"):
        raise InputError("--unit-seconds", seconds, "a number of seconds above 0")
    tick = seconds / job.ticks_per_unit
    cost = cost or CopyCost((0,) * job.stages, 1.0)
    dead = frozenset(job.check_worker(w, field="--fail") for w in failed)
    if dead and not technique.reroutes:
        raise InputError("--technique", technique.value, "adaptive, decoupled or staggered when a worker has failed")
    present = failures_per_stage(dead, job)
    stay = _planned(job, dead, technique, memory, present)
    options = [stay] if stay else []
    worth: dict[Counts, FailureDistribution] = {}
    for model in reversed(models(job, technique, memory)):
        ranked = sorted(
            (c for c in candidates(model, present, cost) if c.counts != present),
            key=lambda c: (-_iterations(c.period * tick, c.pause, heals_in), c.pause, c.moved),
        )
        worth.update((c.counts, c) for c in ranked[:PLANNED])
    for candidate in worth.values():
        migrations, after = migrations_to(job, dead, candidate.counts)
        made = _planned(job, after, technique, memory, candidate.counts)
        if made is not None:
            options.append(_Option(migrations, made.counts, after, made.period, candidate.pause, candidate.moved))
    if not options:
        # The model found a distribution, so the limit on memory or the like stands in the way of all.
        Problem(job, dead, technique, memory)
        raise InfeasibleError("no distribution of the failures has a schedule", "raise the memory limit")
    best = max(options, key=lambda o: (_iterations(o.period * tick, o.pause, heals_in), -o.pause, -o.moved, o is stay))
    gained = None
    if stay is not None and heals_in is not None:
        gained = _iterations(best.period * tick, best.pause, heals_in) - _iterations(stay.period * tick, 0, heals_in)
    return MigrationPlan(
        present,
        best.counts,
        best.migrations,
        best.failed,
        stay.period if stay else None,
        best.period,
        best.pause,
        gained,
        _reason(job, present, stay, best, options, heals_in, tick, gained),
    )


def _iterations(period: float, pause: float, heals_in: float | None) -> float:
    """Done within the horizon; without one the rate, for then no pause weighs anything."""
    return 1 / period if heals_in is None else max(0.0, heals_in - pause) / period


def _planned(
    job: Job, failed: frozenset[Worker], technique: Technique, memory: MemoryLimit, counts: Counts
) -> _Option | None:
    try:
        solution = ListScheduler().solve(Problem(job, failed, technique, memory))
    except InfeasibleError:
        return None
    return _Option((), counts, failed, solution.schedule.period, 0.0, 0)


def migrations_to(job: Job, dead: frozenset[Worker], counts: Counts) -> tuple[tuple[Migration, ...], frozenset[Worker]]:
    """The migrations that lead to `counts` failures per stage, and the places that are empty afterwards.

    Failures that share pipelines make shorter plans (measured), so a place is filled where its
    pipeline has fewest failures, and left where it has most.
    """
    empty = set(dead)
    per_pipeline = [0] * job.pipelines
    for worker in dead:
        per_pipeline[worker.pipeline] += 1
    change = [new - old for new, old in zip(counts, failures_per_stage(dead, job), strict=True)]
    takes = [s for s, n in enumerate(change) for _ in range(-n)]
    gives = [s for s, n in enumerate(change) for _ in range(n)]
    migrations: list[Migration] = []
    copies = [0] * job.stages
    for to, origin in zip(takes, gives, strict=True):
        place = min((w for w in empty if w.stage == to), key=lambda w: (per_pipeline[w.pipeline], w))
        empty.discard(place)
        per_pipeline[place.pipeline] -= 1
        leaving = min(
            (Worker(p, origin) for p in range(job.pipelines) if Worker(p, origin) not in empty),
            key=lambda w: (-per_pipeline[w.pipeline], w),
        )
        empty.add(leaving)
        per_pipeline[leaving.pipeline] += 1
        peers = [Worker(p, to) for p in range(job.pipelines) if Worker(p, to) not in dead]
        source = peers[copies[to] % len(peers)] if peers else None
        copies[to] += 1
        migrations.append(Migration(leaving, place, source))
    return tuple(migrations), frozenset(empty)


def _reason(
    job: Job,
    present: Sequence[int],
    stay: _Option | None,
    best: _Option,
    options: Sequence[_Option],
    heals_in: float | None,
    tick: float,
    gained: float | None,
) -> str:
    """One sentence."""
    failures = "failure where it is" if sum(present) == 1 else f"{sum(present)} failures where they are"
    if not sum(present):
        return "nothing has failed"
    if best is not stay:
        one = len(best.migrations) == 1
        moves = "1 migration" if one else f"{len(best.migrations)} migrations"
        after = _span(job, best.period)
        if stay is None:
            empty = [f"stage {s}" for s, n in enumerate(present) if n == job.pipelines]
            what = f"no peer lives on {' and '.join(empty)}" if empty else "the present failures have no schedule"
            return f"{what}; {moves} {'restores' if one else 'restore'} the job, with a period of {after}"
        text = f"{moves} {'shortens' if one else 'shorten'} the period from {_span(job, stay.period)} to {after}"
        if any(m.takes == w for m in best.migrations for w, _ in job.speeds):
            text += ", if the workers that migrate are as fast as those whose places they take"
        if best.pause:
            text += f" at the price of a pause of {best.pause:.3g} s"
        if heals_in is not None and gained is not None:
            text += f", which gains {gained:.3g} iterations in the {heals_in:g} s until the job heals"
        return text
    shorter = min((o for o in options if o.period < best.period), key=lambda o: o.period, default=None)
    if shorter is None:
        return f"leave the {failures}: no other distribution over the stages has a shorter period"
    saved = (best.period - shorter.period) * tick
    text = (
        f"leave the {failures}: copies would pause training for {shorter.pause:.3g} s to save "
        f"{saved:.3g} s per iteration"
    )
    assert heals_in is not None  # without a horizon the shorter period would have been chosen
    done = _iterations(best.period * tick, 0, heals_in)
    return text + f", and the job heals in {heals_in:g} s, after {done:.3g} iterations"


def _span(job: Job, ticks: int) -> str:
    return planned(job.units(ticks), job.time_unit, 6)
