"""Migration of workers: how many failures each stage should bear, and which workers move for that.

Only the number of failures per stage matters for the period. A living worker that takes the weights of another stage
moves a failure from that stage to its own. That costs the copy of weights and optimizer state, during which nobody
trains, and pays off over the time until the job heals.

Dynamic programming over counts per stage finds where failures cost least. A period model gives one number per stage
and count, g(s, c), that never falls as c grows; the period of a distribution (c_0, c_1, ...) is taken to be the largest
g(s, c_s). There are two models: the proven bound (`BoundModel`) and the load alone (`LoadModel`). Neither is right
everywhere: the bound is what a plan may reach, and the list scheduler comes closer to it where stages are alike. So the
best distributions of both are planned, with speeds and all-reduces. A job's speeds belong to places of its grid, so a
worker that migrates is counted at the speed of the place that it takes. Times of models are in ticks.
All functions are pure: nothing here moves anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import SECONDS, Job, MemoryLimit, Problem, Technique, Worker, check_bytes
from openrecycle.planner.jobs.words import planned
from openrecycle.planner.plans.bounds import CountBounds
from openrecycle.planner.plans.plan import WorkerName
from openrecycle.planner.solvers.list_scheduler import ListScheduler

# -- how many failures each stage should bear ---------------------------------------------------

Counts = tuple[int, ...]

# With more stages, distributions are ranked by load alone: the bound of one takes a pass over all stages, and there
# are at least as many distributions to rank as stages.
MOST_BOUNDED_STAGES = 512

# Default bandwidth of a copy, in bytes per second: a 100 Gb/s link.
COPY_BANDWIDTH = 12.5e9
# With less, a pause might be infinite, which JSON has no number for.
LEAST_BANDWIDTH = 1.0


class BoundModel:
    """g(s, c) = proven bound of the job with c failed workers, all on stage s; computed on demand.

    It is for nominal speed and without all-reduces, since g must not fall, though fewer peers may reduce sooner, and
    the dead may be slow ones. Callers plan what a model proposes, with both.
    """

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit) -> None:
        self.job = job
        self.technique = technique
        self.memory = memory
        self._known: dict[tuple[int, int], int | None] = {}

    @cached_property
    def _bounds(self) -> CountBounds | None:
        """The bounds; None if the job has no schedule even without failures."""
        try:
            return CountBounds(self.job, self.technique, self.memory)
        except InfeasibleError:
            return None

    def period(self, stage: int, count: int) -> int | None:
        """g(stage, count) in ticks; None when no schedule exists, as with no living peer."""
        key = (stage, count)
        if key not in self._known:
            self._known[key] = self._period(stage, count) if count < self.job.pipelines else None
        return self._known[key]

    def _period(self, stage: int, count: int) -> int | None:
        return self._none_failed if not count else self._bounds.ticks(stage, count) if self._bounds else None

    @cached_property
    def _none_failed(self) -> int | None:
        return self._bounds.ticks(0, 0) if self._bounds else None

    def of(self, counts: Sequence[int]) -> int | None:
        """The period of a distribution; None when no schedule exists."""
        longest = 0
        for stage, count in enumerate(counts):
            period = self.period(stage, count)
            if period is None:
                return None
            longest = max(longest, period)
        return longest

    def most(self, stage: int, limit: int) -> int:
        """Most failures that `stage` bears within `limit` ticks; -1 when it takes longer without any."""
        low, high = -1, self.job.pipelines - 1
        while low < high:
            middle = (low + high + 1) // 2
            period = self.period(stage, middle)
            if period is not None and period <= limit:
                low = middle
            else:
                high = middle - 1
        return low


class LoadModel(BoundModel):
    """g(s, c) = compute of the stage's busiest worker with c peers dead: failures go to stages that have time left."""

    def _period(self, stage: int, count: int) -> int | None:
        job, ticks = self.job, self.job.ticks[stage]
        per_worker = -(-job.pipelines * job.micro_batches // (job.pipelines - count))
        return per_worker * ticks.work + ticks.optimizer


def models(job: Job, technique: Technique, memory: MemoryLimit) -> list[BoundModel]:
    """Return the models that rank a job's distributions, the load first."""
    load = LoadModel(job, technique, memory)
    return [load, BoundModel(job, technique, memory)] if job.stages <= MOST_BOUNDED_STAGES else [load]


def best_distributions(model: BoundModel, most: int) -> Iterator[Counts]:
    """Yield for 0, 1, ..., `most` failures the distribution of the shortest period; each adds one failure to the last.

    One recurrence serves all counts: the best of f + 1 is the best of f with one more failure on
    the stage s that has the least g(s, c_s + 1). Proof: the stages chosen so far are those of the f
    smallest of all numbers g(s, c), c >= 1, since g(s, .) does not fall; any distribution of f
    failures uses f of these numbers, so the largest of its own is no smaller than the f-th
    smallest of all. Among equals the later stage is chosen: it has more idle time to give, and the
    list scheduler's plans come out shorter (measured on 16 x 16 and 64 x 32 grids).

    Ends early when no further worker can be spared.
    """
    stages = model.job.stages
    counts = [0] * stages
    heap: list[tuple[int, int]] = []

    def offer(stage: int) -> None:
        period = model.period(stage, counts[stage] + 1)
        if period is not None:
            heapq.heappush(heap, (period, -stage))

    for stage in range(stages):
        offer(stage)
    yield tuple(counts)
    for _ in range(most):
        if not heap:
            return
        stage = -heapq.heappop(heap)[1]
        counts[stage] += 1
        yield tuple(counts)
        offer(stage)


@dataclass(frozen=True)
class FailureDistribution:
    """One way to distribute the failures over the stages.

    period: ticks by the model. pause: seconds until the last copy has arrived. moved: bytes copied.
    """

    counts: Counts
    period: int
    pause: float
    moved: int


@dataclass(frozen=True)
class CopyCost:
    """The cost of a migration. state_bytes: weights and optimizer state, by stage. bandwidth: bytes per second."""

    state_bytes: tuple[int, ...]
    bandwidth: float

    def pause(self, stage: int, copies: int, peers: int) -> float:
        """Seconds until `copies` workers have the state of `stage` from its living peers.

        Peers send side by side, each one copy after the other. With no living peer, all load from
        the one checkpoint.
        """
        rounds = -(-copies // max(1, peers))
        return rounds * self.state_bytes[stage] / self.bandwidth


def candidates(model: BoundModel, present: Counts, cost: CopyCost) -> list[FailureDistribution]:
    """Return every distribution that no other beats or equals in period, pause and bytes moved alike.

    It looks at each period that a stage can have, from the shortest possible to the present one. Each stage gives away
    just the failures that it can't bear within that period, which makes pause and bytes the least possible; dynamic
    programming finds where those failures go (`_place`).
    Sorted by period. Raises InfeasibleError when fewer workers live than there are stages.
    """
    total = sum(present)
    *_, best = best_distributions(model, total)
    shortest = model.of(best)
    if shortest is None:
        Problem(model.job, frozenset(), model.technique, model.memory)  # raises, and says why
    if shortest is None or sum(best) < total:
        living = model.job.pipelines * model.job.stages - total
        raise InfeasibleError(
            f"{living} living workers can't staff {model.job.stages} stages", "bring back a failed worker"
        )
    longest = model.of(present)
    out: list[FailureDistribution] = []
    for limit in _periods(model, present, shortest, longest):
        made = _within(model, present, cost, limit)
        if made is not None and (not out or made.pause < out[-1].pause or made.moved < out[-1].moved):
            out.append(made)
    return out


def _periods(model: BoundModel, present: Counts, shortest: int, longest: int | None) -> list[int]:
    """Return the periods from `shortest` to `longest` that some stage has for some count, ascending."""
    found = {shortest}
    for stage in range(model.job.stages):
        most = min(model.job.pipelines - 1, sum(present))
        for count in range(max(0, model.most(stage, shortest)), most + 1):
            period = model.period(stage, count)
            if period is None or (longest is not None and period > longest):
                break
            if period >= shortest:
                found.add(period)
    return sorted(found)


def _within(model: BoundModel, present: Counts, cost: CopyCost, limit: int) -> FailureDistribution | None:
    """Return the cheapest way to a period of at most `limit`; None when there is none."""
    pipelines = model.job.pipelines
    room = [model.most(s, limit) for s in range(model.job.stages)]
    if min(room) < 0:
        return None
    given = [max(0, c - r) for c, r in zip(present, room, strict=True)]
    kept = [c - g for c, g in zip(present, given, strict=True)]
    counts = _place(model, kept, room, sum(given))
    if counts is None:
        return None
    pause = max(cost.pause(s, g, pipelines - present[s]) if g else 0.0 for s, g in enumerate(given))
    moved = sum(g * cost.state_bytes[s] for s, g in enumerate(given))
    period = model.of(counts)
    assert period is not None
    return FailureDistribution(counts, period, pause, moved)


def _place(model: BoundModel, kept: Sequence[int], room: Sequence[int], extra: int) -> Counts | None:
    """Distributes `extra` failures over stages that have room beyond what they have `kept`.

    Dynamic programming over stages: best[k] is the least (sum of the stages' periods, sum of the
    distances of the new failures from the last stage) with k of them on the stages so far. Stages
    that give failures away are full and get none.
    """
    stages = model.job.stages
    best: list[tuple[int, int] | None] = [(0, 0)] + [None] * extra
    choices: list[list[int]] = []
    for s in range(stages):
        following: list[tuple[int, int] | None] = [None] * (extra + 1)
        choice = [0] * (extra + 1)
        for here in range(min(extra, room[s] - kept[s]) + 1):
            period = model.period(s, kept[s] + here)
            assert period is not None  # within room
            late = here * (stages - 1 - s)
            for before in range(extra + 1 - here):
                known = best[before]
                if known is None:
                    continue
                value = (known[0] + period, known[1] + late)
                current = following[before + here]
                if current is None or value < current:
                    following[before + here] = value
                    choice[before + here] = here
        best = following
        choices.append(choice)
    if best[extra] is None:
        return None
    counts = list(kept)
    left = extra
    for s in reversed(range(stages)):
        counts[s] += choices[s][left]
        left -= choices[s][left]
    return tuple(counts)


def check_copy_cost(job: Job, state_bytes: Sequence[int] | None, bandwidth: float) -> CopyCost:
    """Make a CopyCost. state_bytes: one number for all stages, or one per stage; None: what the job's profile says.
    Raises InputError."""
    if state_bytes is None:
        state_bytes = [profile.fixed_bytes for profile in job.profiles]
    per_stage = tuple(state_bytes) * job.stages if len(state_bytes) == 1 else tuple(state_bytes)
    if len(per_stage) != job.stages:
        raise InputError("--state-bytes", len(per_stage), f"one number, or one per stage ({job.stages})")
    for value in per_stage:
        check_bytes("--state-bytes", value)
    if not LEAST_BANDWIDTH <= bandwidth < float("inf"):
        raise InputError("--bandwidth", bandwidth, f"at least {LEAST_BANDWIDTH:g} byte per second")
    return CopyCost(per_stage, bandwidth)


# -- migration of workers -----------------------------------------------------------------------

# How many distributions of each period model are planned with the list scheduler.
PLANNED = 3

# Far beyond these, times in seconds become 0 or infinite.
LEAST_UNIT, MOST_UNIT = 1e-30, 1e9
# Thirty years: far beyond, differences of iterations are no numbers.
MOST_HEALS_IN = 1e9


def check_unit(seconds: float) -> None:
    """Raises InputError for what is no length of a unit of time."""
    if not LEAST_UNIT <= seconds <= MOST_UNIT:
        raise InputError("--unit-seconds", seconds, f"a number of seconds from {LEAST_UNIT:g} to {MOST_UNIT:g}")


def check_times(job: Job, heals_in: float | None, unit_seconds: float | None) -> float:
    """Return the seconds of the job's tick. heals_in, unit_seconds: as for `best_migrations`. Raises InputError."""
    if heals_in is not None and not 0 <= heals_in <= MOST_HEALS_IN:
        raise InputError("--heals-in", heals_in, f"a number of seconds from 0 to {MOST_HEALS_IN:g}")
    seconds = SECONDS.get(job.time_unit, 1.0) if unit_seconds is None else unit_seconds
    check_unit(seconds)
    return seconds / job.ticks_per_unit


@dataclass(frozen=True)
class Migration:
    """`worker`, which lives, leaves its stage and becomes `takes`, with the weights and optimizer state of `source`, a
    living peer there; None: no peer lives, and they come from the last checkpoint."""

    worker: Worker
    takes: Worker
    source: Worker | None

    def __str__(self) -> str:
        origin = f"from {self.source}" if self.source else "from the last checkpoint"
        return f"{self.worker} takes the place of {self.takes}, with its weights {origin}"


class MigrationAnswer(BaseModel):
    """`worker` leaves its stage for the place of `takes`; `source` gives it the weights (None: a checkpoint)."""

    worker: WorkerName
    takes: WorkerName
    source: WorkerName | None


class Migrations(BaseModel):
    """A MigrationPlan as a document: periods in the job's time unit; gained: iterations."""

    migrations: list[MigrationAnswer]
    failed: list[WorkerName]
    present: list[int]
    counts: list[int]
    period_now: float | None
    period: float
    pause: float
    gained: float | None
    partition: list[int]
    reason: str


@dataclass(frozen=True)
class MigrationPlan:
    """The migrations to make for some failures, and the reason.

    present, counts: failures per stage now and afterwards. failed: the places that are dead or vacated afterwards.
    period_now (None: no schedule exists), period: ticks, of the list scheduler's plans. pause: seconds of training lost
    to the copies. iterations_gained: until the job heals, compared with leaving the failures where they are; None
    without that time or without a present period. partition: layers per stage afterwards, where these are chosen too.
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
    partition: tuple[int, ...] = ()

    def document(self, job: Job) -> Migrations:
        return Migrations(
            migrations=[
                MigrationAnswer(worker=str(m.worker), takes=str(m.takes), source=str(m.source) if m.source else None)
                for m in self.migrations
            ],
            failed=[str(worker) for worker in sorted(self.failed)],
            present=list(self.present),
            counts=list(self.counts),
            period_now=None if self.period_now is None else job.units(self.period_now),
            period=job.units(self.period),
            pause=self.pause,
            gained=self.iterations_gained,
            partition=list(self.partition),
            reason=self.reason,
        )


@dataclass(frozen=True)
class MigrationOption:
    """One way to go on: the fields are those of MigrationPlan. moved: bytes copied."""

    migrations: tuple[Migration, ...]
    counts: Counts
    failed: frozenset[Worker]
    period: int
    pause: float
    moved: int
    partition: tuple[int, ...] = ()


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
    """Return the distribution with which most iterations are done until the job heals.

    cost: of the copies; None: they are free. heals_in: seconds until the failed workers are expected back; None: they
    are not. unit_seconds: how long the job's time unit is; by default what its name says, and 1 second for a unit that
    is no unit of time. Of equals, staying is chosen.
    Raises InputError, and InfeasibleError when fewer workers live than there are stages.
    """
    tick = check_times(job, heals_in, unit_seconds)
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
            key=lambda c: (-iterations(c.period * tick, c.pause, heals_in), c.pause, c.moved),
        )
        worth.update((c.counts, c) for c in ranked[:PLANNED])
    for candidate in worth.values():
        migrations, after = migrations_to(job, dead, candidate.counts)
        made = _planned(job, after, technique, memory, candidate.counts)
        if made is not None:
            options.append(
                MigrationOption(migrations, made.counts, after, made.period, candidate.pause, candidate.moved)
            )
    return chosen(job, present, stay, options, heals_in, tick)


def chosen(
    job: Job,
    present: Counts,
    stay: MigrationOption | None,
    options: Sequence[MigrationOption],
    heals_in: float | None,
    tick: float,
) -> MigrationPlan:
    """Return the option with which most iterations are done until the job heals. stay: the one without migrations, if
    it is possible. tick: seconds of one."""
    best = max(options, key=lambda o: (iterations(o.period * tick, o.pause, heals_in), -o.pause, -o.moved, o is stay))
    gained = None
    if stay is not None and heals_in is not None:
        gained = iterations(best.period * tick, best.pause, heals_in) - iterations(stay.period * tick, 0, heals_in)
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
        best.partition,
    )


def iterations(period: float, pause: float, heals_in: float | None) -> float:
    """Iterations done until the job heals; without that time the rate, since then no pause counts."""
    return 1 / period if heals_in is None else max(0.0, heals_in - pause) / period


def _planned(
    job: Job, failed: frozenset[Worker], technique: Technique, memory: MemoryLimit, counts: Counts
) -> MigrationOption | None:
    try:
        solution = ListScheduler().solve(Problem(job, failed, technique, memory))
    except InfeasibleError:
        return None
    return MigrationOption((), counts, failed, solution.schedule.period, 0.0, 0)


def migrations_to(job: Job, dead: frozenset[Worker], counts: Counts) -> tuple[tuple[Migration, ...], frozenset[Worker]]:
    """Return the migrations that lead to `counts` failures per stage, and the places that are empty afterwards.

    Failures that share pipelines make shorter plans (measured). So the place that is filled is in the pipeline with
    fewest failures, and the place that is left in the one with most.
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
    stay: MigrationOption | None,
    best: MigrationOption,
    options: Sequence[MigrationOption],
    heals_in: float | None,
    tick: float,
    gained: float | None,
) -> str:
    """Explain the choice in one sentence."""
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
    done = iterations(best.period * tick, 0, heals_in)
    return text + f", and the job heals in {heals_in:g} s, after {done:.3g} iterations"


def _span(job: Job, ticks: int) -> str:
    return planned(job.units(ticks), job.time_unit, 6)
