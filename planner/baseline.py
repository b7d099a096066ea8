"""Reference schedules of a job without failures: GPipe and 1F1B.

Each is a fixed order of ops per worker, the same in all pipelines; times follow from the order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from planner.errors import InfeasibleError
from planner.job import Job, MemoryLimit, Problem, Technique, Worker
from planner.schedule import Op, Schedule

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


@lru_cache(maxsize=256)
def reference_period(job: Job) -> int:
    """Ticks of fault-free 1F1B, O included: what `slowdown_vs_1f1b` is measured against."""
    one = replace(job, pipelines=1)
    return one_forward_one_backward(Problem(one, technique=Technique.FAULT_FREE, memory=MemoryLimit("none"))).period


def _one_f_one_b(micro_batches: int, depth: int) -> Order:
    warm = min(depth, micro_batches)
    order: Order = [("F", j) for j in range(warm)]
    for j in range(micro_batches):
        order.append(("B", j))
        if warm + j < micro_batches:
            order.append(("F", warm + j))
    return order


def _timed(problem: Problem, orders: list[Order]) -> Schedule:
    """Every pipeline runs `orders` (one per stage), each op as early as the order allows."""
    job = problem.job
    ticks, wire, last = job.ticks, job.transfer_ticks, job.stages - 1
    end: dict[tuple[str, int, int], int] = {}
    starts: list[list[tuple[str, int, int, int]]] = [[] for _ in orders]
    at, free = [0] * job.stages, [0] * job.stages
    waiting = list(range(job.stages))
    while waiting:
        s = waiting.pop()
        while at[s] < len(orders[s]):
            kind, j = orders[s][at[s]]
            if kind == "F":
                arrival = 0 if s == 0 else end.get(("F", s - 1, j), -1)
                arrival += wire[s - 1] if s and arrival >= 0 else 0
                length = ticks[s].forward
            else:
                arrival = end.get(("F", s, j), -1) if s == last else end.get(("B", s + 1, j), -1)
                arrival += wire[s] if s < last and arrival >= 0 else 0
                length = ticks[s].backward
            if arrival < 0:
                break
            start = max(arrival, free[s])
            free[s] = end[kind, s, j] = start + length
            starts[s].append((kind, j, start, length))
            at[s] += 1
            neighbour = s + 1 if kind == "F" else s - 1
            if 0 <= neighbour <= last and neighbour not in waiting:
                waiting.append(neighbour)
    return Schedule.build(
        problem,
        (
            Op(kind, p, j, s, Worker(p, s), start, length)
            for s, row in enumerate(starts)
            for p in range(job.pipelines)
            for kind, j, start, length in row
        ),
    )
