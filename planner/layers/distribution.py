"""How many failures each stage should bear: dynamic programming over counts per stage.

A period model gives one number per stage and count, g(s, c), that never falls as c grows; a
distribution (c_0, c_1, ...) is taken to have the period max over s of g(s, c_s). There are two:
the proven bound (`PeriodModel`) and the load alone (`LoadModel`). Neither is right everywhere: the
bound is what a plan may reach, and the list scheduler comes closer to it where stages are alike.
So callers take the best distributions of both and plan them. Times here are in ticks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.bounds import CountBounds

Counts = tuple[int, ...]

# Beyond so many stages distributions are ranked by load alone: the bound of one takes a pass over all stages,
# and there are at least as many to rank as there are stages.
MOST_BOUNDED_STAGES = 512

# Of a copy, in bytes per second: a 100 Gb/s link.
COPY_BANDWIDTH = 12.5e9


class PeriodModel:
    """g(s, c) = proven bound of the job with c failed workers, all on stage s; computed on demand.

    At nominal speed and without reductions: fewer peers may reduce sooner and slow ones may be among
    the dead, but g must not fall. Callers plan what a model proposes, with both.
    """

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit) -> None:
        self.job = job
        self.technique = technique
        self.memory = memory
        self._known: dict[tuple[int, int], int | None] = {}

    @cached_property
    def _bounds(self) -> CountBounds | None:
        """None: the job has no schedule even without failures."""
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
        """Most failures that `stage` bears within `limit` ticks; -1 when even none is too long."""
        low, high = -1, self.job.pipelines - 1
        while low < high:
            middle = (low + high + 1) // 2
            period = self.period(stage, middle)
            if period is not None and period <= limit:
                low = middle
            else:
                high = middle - 1
        return low


class LoadModel(PeriodModel):
    """g(s, c) = compute of the stage's busiest worker with c peers dead: failures go where peers have time."""

    def _period(self, stage: int, count: int) -> int | None:
        job, ticks = self.job, self.job.ticks[stage]
        per_worker = -(-job.pipelines * job.micro_batches // (job.pipelines - count))
        return per_worker * ticks.work + ticks.optimizer


def models(job: Job, technique: Technique, memory: MemoryLimit) -> list[PeriodModel]:
    """Those by which a job's distributions are ranked, the load first."""
    load = LoadModel(job, technique, memory)
    return [load, PeriodModel(job, technique, memory)] if job.stages <= MOST_BOUNDED_STAGES else [load]


def best_distributions(model: PeriodModel, most: int) -> Iterator[Counts]:
    """For 0, 1, ..., `most` failures the distribution of the shortest period, each one more than the last.

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
    """One way to distribute the failures, from where they are now.

    period: ticks by the model. pause: seconds until the last copy has arrived. moved: bytes copied.
    """

    counts: Counts
    period: int
    pause: float
    moved: int


@dataclass(frozen=True)
class CopyCost:
    """What a migration costs: state_bytes of each stage (weights and optimizer), bytes per second."""

    state_bytes: tuple[int, ...]
    bandwidth: float

    def pause(self, stage: int, copies: int, peers: int) -> float:
        """Seconds until `copies` workers have the state of `stage` from its living peers.

        Peers send side by side, each one copy after the other. With no peer they all load from
        the one checkpoint.
        """
        rounds = -(-copies // max(1, peers))
        return rounds * self.state_bytes[stage] / self.bandwidth


def candidates(model: PeriodModel, present: Counts, cost: CopyCost) -> list[FailureDistribution]:
    """Every distribution worth a thought: no other has a period, a pause and bytes moved that are all as good.

    For each period that a stage can have, from the shortest possible to the present one: a stage
    must give away what it can't bear within that period and no more, which makes pause and bytes
    the least possible; where those failures go is found by dynamic programming (`_place`).
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


def _periods(model: PeriodModel, present: Counts, shortest: int, longest: int | None) -> list[int]:
    """The periods that lie between the two and that some stage has for some count, ascending."""
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


def _within(model: PeriodModel, present: Counts, cost: CopyCost, limit: int) -> FailureDistribution | None:
    """The cheapest way to a period of at most `limit`; None when there is none."""
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


def _place(model: PeriodModel, kept: Sequence[int], room: Sequence[int], extra: int) -> Counts | None:
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


def check_copy_cost(job: Job, state_bytes: Sequence[int], bandwidth: float) -> CopyCost:
    """state_bytes: one number for all stages, or one per stage. Raises InputError."""
    per_stage = tuple(state_bytes) * job.stages if len(state_bytes) == 1 else tuple(state_bytes)
    if len(per_stage) != job.stages:
        raise InputError("--state-bytes", len(per_stage), f"one number, or one per stage ({job.stages})")
    for value in per_stage:
        if value < 0:
            raise InputError("--state-bytes", value, "a number of bytes of at least 0")
    if not 0 < bandwidth < float("inf"):
        raise InputError("--bandwidth", bandwidth, "bytes per second above 0")
    return CopyCost(per_stage, bandwidth)
