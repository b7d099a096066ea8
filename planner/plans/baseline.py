"""Reference schedules of a job without failures: GPipe, 1F1B, and zero-bubble ZB-H1 and ZB-H2.

Each is a fixed order of ops per worker, the same in all pipelines; times follow from the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageTicks, Technique, Worker
from openrecycle.planner.plans.schedule import Op, Schedule

Order = list[tuple[str, int]]  # (kind, micro-batch)


def one_forward_one_backward(problem: Problem) -> Schedule:
    """1F1B (PipeDream-Flush): stage s runs stages - s forwards, then alternates B and F.

    Raises InfeasibleError when that holds more activations than the memory limit allows.
    """
    job = problem.job
    for s, limit in enumerate(problem.limits):
        held = min(job.micro_batches, job.stages - s)
        if limit is not None and limit < held:
            raise InfeasibleError(
                f"1F1B holds {held} activations on stage {s} and the memory limit is {limit}",
                f"allow at least {min(job.micro_batches, job.stages)} (--memory 1f1b), or use the adaptive technique",
            )
    return _timed(problem, [_one_f_one_b(job.micro_batches, job.stages - s) for s in range(job.stages)])


def gpipe(problem: Problem) -> Schedule:
    """GPipe: every stage runs all forwards, then all backwards. Memory limits are not looked at."""
    m = problem.job.micro_batches
    order = [("F", j) for j in range(m)] + [("B", j) for j in range(m)]
    return _timed(problem, [order] * problem.job.stages)


def zb_h1(problem: Problem) -> Schedule:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism): split backward, no stage holds more
    than 1F1B's first (`stages`). W's fall behind by s on stage s.
    """
    stages = problem.job.stages
    return _timed(problem, [_zero_bubble(problem.job.micro_batches, stages - s, s) for s in range(stages)])


def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2: as ZB-H1 with 2 stages - 1 activations, which fills the warm-up with forwards."""
    m, stages = problem.job.micro_batches, problem.job.stages
    return _timed(problem, [_zero_bubble(m, 2 * (stages - s) - 1, 2 * s) for s in range(stages)])


@lru_cache(maxsize=256)
def reference_period(job: Job) -> int:
    """Ticks of fault-free 1F1B, O included: what `slowdown_vs_1f1b` is measured against.

    At the workers' own speeds: the slowest pipeline counts.
    """
    problem = Problem(job, technique=Technique.FAULT_FREE, memory=MemoryLimit("none"))
    orders = [_one_f_one_b(job.micro_batches, job.stages - s) for s in range(job.stages)]
    rows = {_lengths(problem, pipeline) for pipeline in _unlike(job)}
    ends = [start + length for row in rows for ops in _starts(problem, orders, row) for _, _, start, length in ops]
    return max(ends) + problem.longest_optimizer


class Timed(NamedTuple):
    """A reference of a problem without failures, timed. period: ticks. starts: of each of `pipelines`, by stage
    (kind, micro-batch, start, duration); one pipeline stands for all where none has speeds of its own."""

    name: str
    period: int
    orders: list[Order]
    starts: list[list[tuple[str, int, int, int]]]


def references(problem: Problem) -> Iterator[Timed]:
    """Those that `problem`, without failures, allows: its technique has their ops, its memory what they hold.

    starts: of the first of the pipelines that are unlike each other.
    """
    job = problem.job
    stages, m = range(job.stages), job.micro_batches
    known: dict[str, Callable[[int], Order]] = {
        "1f1b": lambda s: _one_f_one_b(m, job.stages - s),
        "gpipe": lambda s: [("F", j) for j in range(m)] + [("B", j) for j in range(m)],
    }
    if problem.technique.splits:
        known["zb-h1"] = lambda s: _zero_bubble(m, job.stages - s, s)
        known["zb-h2"] = lambda s: _zero_bubble(m, 2 * (job.stages - s) - 1, 2 * s)
    rows = {_lengths(problem, pipeline): pipeline for pipeline in reversed(_unlike(job))}
    for name, order in known.items():
        if not all(limit is None or _held(name, job, s) <= limit for s, limit in enumerate(problem.limits)):
            continue
        orders = [order(s) for s in stages]
        made = [_starts(problem, orders, row) for row in rows]
        first = [min(starts[s][0][2] for starts in made) for s in stages]
        last = [max(starts[s][-1][2] + starts[s][-1][3] for starts in made) for s in stages]
        if problem.technique.staggers:
            period = max(last[s] + problem.fastest[s].optimizer - first[s] for s in stages)
        else:
            period = max(last) - min(first) + problem.longest_optimizer
        yield Timed(name, period, orders, made[0])


def _held(name: str, job: Job, stage: int) -> int:
    """Most activations that a reference holds on a stage: F's that may start before the first W or B has ended."""
    below = job.stages - stage
    depth, lag = {"1f1b": (below, 0), "zb-h1": (below, stage), "zb-h2": (2 * below - 1, 2 * stage)}.get(
        name, (job.micro_batches, 0)
    )
    return min(job.micro_batches, depth + lag)


def timed_schedule(problem: Problem, reference: Timed) -> Schedule:
    """The whole grid's schedule, op by op."""
    return _timed(problem, reference.orders)


def _one_f_one_b(micro_batches: int, depth: int) -> Order:
    warm = min(depth, micro_batches)
    order: Order = [("F", j) for j in range(warm)]
    for j in range(micro_batches):
        order.append(("B", j))
        if warm + j < micro_batches:
            order.append(("F", warm + j))
    return order


def _zero_bubble(micro_batches: int, depth: int, lag: int) -> Order:
    """`depth` forwards, then I, W, F in turn, the W's `lag` micro-batches behind the I's."""
    warm = min(depth, micro_batches)
    order: Order = [("F", j) for j in range(warm)]
    for j in range(micro_batches):
        order.append(("I", j))
        if j >= lag:
            order.append(("W", j - lag))
        if warm + j < micro_batches:
            order.append(("F", warm + j))
    return order + [("W", j) for j in range(max(0, micro_batches - lag), micro_batches)]


def _timed(problem: Problem, orders: list[Order]) -> Schedule:
    """Every pipeline runs `orders` (one per stage), each op as early as the order allows."""
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
    """Pipelines that stand for all: those with a worker of its own speed, and one without."""
    own = {worker.pipeline for worker, _ in job.speeds}
    return [*sorted(own), *[p for p in range(job.pipelines) if p not in own][:1]]


def _lengths(problem: Problem, pipeline: int) -> tuple[StageTicks, ...]:
    return tuple(problem.worker_ticks(Worker(pipeline, s)) for s in range(problem.job.stages))


def _starts(
    problem: Problem, orders: list[Order], ticks: tuple[StageTicks, ...]
) -> list[list[tuple[str, int, int, int]]]:
    """By stage (kind, micro-batch, start, duration) of one pipeline's ops."""
    job = problem.job
    last = job.stages - 1
    lengths = [{"F": t.forward, "B": t.backward, "I": t.input_backward, "W": t.weight_backward} for t in ticks]
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
            free[s] = end["B" if kind == "I" else kind, s, j] = start + length
            starts[s].append((kind, j, start, length))
            at[s] += 1
            neighbour = {"F": s + 1, "W": -1}.get(kind, s - 1)
            if 0 <= neighbour <= last and neighbour not in waiting:
                waiting.append(neighbour)
    return starts


def _arrival(end: dict[tuple[str, int, int], int], kind: str, s: int, j: int, problem: Problem) -> int:
    """When what the op needs is there; -1: not yet known. I and B are one in `end`'s keys."""
    job = problem.job
    last = job.stages - 1
    if kind == "W":
        return end.get(("B", s, j), -1)
    if kind == "F":
        source, lag = ("F", s - 1, j), job.transfer_ticks[s - 1] if s else 0
        if s == 0:
            return 0
    elif s == last:
        source, lag = ("F", s, j), 0
    else:
        source, lag = ("B", s + 1, j), job.backward_transfer_ticks[s]
    done = end.get(source, -1)
    return done + lag if done >= 0 else -1
