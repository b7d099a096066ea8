"""Reference schedules of a job without failures: GPipe, 1F1B, and zero-bubble ZB-H1 and ZB-H2.

Each is a fixed order of ops per worker, the same in all pipelines; the times follow from the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageTicks, Technique, Worker
from openrecycle.planner.plans.schedule import Op, Schedule, inputs

Order = list[tuple[str, int]]  # (kind, micro-batch)


class Reference(NamedTuple):
    """A published schedule: on each stage `depth` forwards, then a backward and a forward in turn.

    depth: by job and stage. lag: by stage, how many micro-batches the W's are behind the I's; None: B is not split.
    technique: the least technique under which it runs as published (the zero-bubble ones step without a barrier).
    memory: the limit that it keeps to, by job.
    """

    depth: Callable[[Job, int], int]
    lag: Callable[[int], int] | None
    technique: Technique
    memory: Callable[[Job], str]

    def orders(self, job: Job) -> list[Order]:
        """Returns the order of ops of each stage."""
        m, stages = job.micro_batches, range(job.stages)
        if self.lag is None:
            return [_one_f_one_b(m, self.depth(job, s)) for s in stages]
        return [_zero_bubble(m, self.depth(job, s), self.lag(s)) for s in stages]

    def held(self, job: Job, stage: int) -> int:
        """Returns the most activations on a stage: F's that may start before the first W or B has ended."""
        return min(job.micro_batches, self.depth(job, stage) + (self.lag(stage) if self.lag else 0))


REFERENCES = {
    # PipeDream-Flush.
    "1f1b": Reference(lambda job, s: job.stages - s, None, Technique.FAULT_FREE, lambda _: "1f1b"),
    # All forwards, then all backwards.
    "gpipe": Reference(lambda job, _: job.micro_batches, None, Technique.FAULT_FREE, lambda _: "none"),
    # Qi et al., Zero Bubble Pipeline Parallelism: no stage holds more than 1F1B does on its first stage.
    "zb-h1": Reference(lambda job, s: job.stages - s, lambda s: s, Technique.STAGGERED, lambda _: "uniform"),
    # As ZB-H1 with 2 stages - 1 activations, which fills the warm-up with forwards.
    "zb-h2": Reference(
        lambda job, s: 2 * (job.stages - s) - 1,
        lambda s: 2 * s,
        Technique.STAGGERED,
        lambda job: str(2 * job.stages - 1),
    ),
}


def reference_schedule(problem: Problem, name: str) -> Schedule:
    """Make the schedule of one of REFERENCES. Memory limits are ignored."""
    return in_order(problem, REFERENCES[name].orders(problem.job))


def one_forward_one_backward(problem: Problem) -> Schedule:
    """Make 1F1B. Raises InfeasibleError when it holds more activations than the memory limit allows."""
    job = problem.job
    for s, limit in enumerate(problem.limits):
        held = REFERENCES["1f1b"].held(job, s)
        if limit is not None and limit < held:
            raise InfeasibleError(
                f"1F1B holds {held} activations on stage {s} and the memory limit is {limit}",
                f"allow at least {min(job.micro_batches, job.stages)} (--memory 1f1b), or use the adaptive technique",
            )
    return reference_schedule(problem, "1f1b")


@lru_cache(maxsize=256)
def reference_period(job: Job) -> int:
    """Return the ticks of fault-free 1F1B, O included, which `slowdown_vs_1f1b` is measured against.

    It runs at the workers' own speeds, so the slowest pipeline counts.
    """
    problem = Problem(job, technique=Technique.FAULT_FREE, memory=MemoryLimit("none"))
    orders = REFERENCES["1f1b"].orders(job)
    rows = {_lengths(problem, pipeline) for pipeline in _unlike(job)}
    ends = [start + length for row in rows for ops in _starts(problem, orders, row) for _, _, start, length in ops]
    return max(ends) + problem.longest_optimizer


class Timed(NamedTuple):
    """A reference with times, for a problem without failures. period: ticks. starts: by stage, (kind, micro-batch,
    start, duration) of the ops of one pipeline, which stands for all where no worker has a speed of its own."""

    name: str
    period: int
    orders: list[Order]
    starts: list[list[tuple[str, int, int, int]]]


def references(problem: Problem) -> Iterator[Timed]:
    """Yield the references that `problem`, without failures, allows: its technique has their ops, and its memory limit
    what they hold.

    starts: of one pipeline; where workers have speeds of their own, the period is over all of them.
    """
    job = problem.job
    stages = range(job.stages)
    rows = {_lengths(problem, pipeline): pipeline for pipeline in reversed(_unlike(job))}
    for name, reference in REFERENCES.items():
        if reference.lag is not None and not problem.technique.splits:
            continue
        if not all(limit is None or reference.held(job, s) <= limit for s, limit in enumerate(problem.limits)):
            continue
        orders = reference.orders(job)
        made = [_starts(problem, orders, row) for row in rows]
        first = [min(starts[s][0][2] for starts in made) for s in stages]
        last = [max(starts[s][-1][2] + starts[s][-1][3] for starts in made) for s in stages]
        if problem.technique.staggers:
            period = max(last[s] + problem.fastest[s].optimizer - first[s] for s in stages)
        else:
            period = max(last) - min(first) + problem.longest_optimizer
        yield Timed(name, period, orders, made[0])


@lru_cache(maxsize=256)
def least_reference(problem: Problem) -> Timed | None:
    """Return the shortest reference that `problem`, without failures, allows; None if its memory limit allows none."""
    return min(references(problem), key=lambda reference: reference.period, default=None)


def _one_f_one_b(micro_batches: int, depth: int) -> Order:
    warm = min(depth, micro_batches)
    order: Order = [("F", j) for j in range(warm)]
    for j in range(micro_batches):
        order.append(("B", j))
        if warm + j < micro_batches:
            order.append(("F", warm + j))
    return order


def _zero_bubble(micro_batches: int, depth: int, lag: int) -> Order:
    """`depth` forwards, then I, W, F in turn, with the W's `lag` micro-batches behind the I's."""
    warm = min(depth, micro_batches)
    order: Order = [("F", j) for j in range(warm)]
    for j in range(micro_batches):
        order.append(("I", j))
        if j >= lag:
            order.append(("W", j - lag))
        if warm + j < micro_batches:
            order.append(("F", warm + j))
    return order + [("W", j) for j in range(max(0, micro_batches - lag), micro_batches)]


def in_order(problem: Problem, orders: list[Order]) -> Schedule:
    """Make the schedule in which every pipeline runs `orders` (one per stage), each op as early as possible."""
    job = problem.job
    lengths = [_lengths(problem, p) for p in range(job.pipelines)] if job.speeds else [_lengths(problem, 0)]
    made = {row: _starts(problem, orders, row) for row in set(lengths)}
    return Schedule.build(
        problem,
        (
            Op(kind, p, j, s, Worker(p, s), start, length)
            for p in range(job.pipelines)
            for s, row in enumerate(made[lengths[p if job.speeds else 0]])
            for kind, j, start, length in row
        ),
    )


def _unlike(job: Job) -> list[int]:
    """Return pipelines that stand for all: each one that has a worker of its own speed, and one of the others."""
    own = {worker.pipeline for worker, _ in job.speeds}
    return [*sorted(own), *[p for p in range(job.pipelines) if p not in own][:1]]


def _lengths(problem: Problem, pipeline: int) -> tuple[StageTicks, ...]:
    return tuple(problem.worker_ticks(Worker(pipeline, s)) for s in range(problem.job.stages))


def _starts(
    problem: Problem, orders: list[Order], ticks: tuple[StageTicks, ...]
) -> list[list[tuple[str, int, int, int]]]:
    """Return by stage (kind, micro-batch, start, duration) of one pipeline's ops."""
    job = problem.job
    last = job.stages - 1
    lengths = [own.by_kind for own in ticks]
    end: dict[tuple[str, int, int], int] = {}
    starts: list[list[tuple[str, int, int, int]]] = [[] for _ in orders]
    at, free = [0] * job.stages, [0] * job.stages
    waiting = list(range(job.stages))
    while waiting:
        s = waiting.pop()
        while at[s] < len(orders[s]):
            kind, j = orders[s][at[s]]
            arrival = _arrival(end, kind, s, j, problem)
            length = lengths[s][kind]
            if arrival < 0:
                break
            start = max(arrival, free[s])
            free[s] = end["I" if kind == "B" else kind, s, j] = start + length
            starts[s].append((kind, j, start, length))
            at[s] += 1
            neighbour = {"F": s + 1, "W": -1}.get(kind, s - 1)
            if 0 <= neighbour <= last and neighbour not in waiting:
                waiting.append(neighbour)
    return starts


def _arrival(end: dict[tuple[str, int, int], int], kind: str, s: int, j: int, problem: Problem) -> int:
    """Return when the inputs of the op have arrived; -1 if that is not known yet. In `end`, B counts as I."""
    found = 0
    for source, stage, lag in inputs(kind, s, problem.job):
        done = end.get((source, stage, j), -1)
        if done < 0:
            return -1
        found = max(found, done + lag)
    return found
