"""Which living peer runs which micro-batch at each stage.

A micro-batch stays in its own pipeline wherever that worker lives (and is not much slower than its
peers). The others go round-robin to the living peers of the stage, micro-batch by micro-batch, so that
each peer's guests are spread over the iteration and peers' loads differ by at most one. Where peers are
of unequal speed each guest goes where the load in time stays least, so a slow worker takes fewer, and
these are spread over the iteration as well. A worker so slow that its own micro-batches alone would
make the period longer than its peers need give it (see `least_load`) sends the rest of them to its peers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from itertools import cycle

from openrecycle.planner.jobs.job import Problem, Worker

Routes = tuple[tuple[int, ...], ...]


def assign(problem: Problem) -> Routes:
    """assign(problem)[stage][pipeline * micro_batches + micro_batch]: pipeline of the worker."""
    job = problem.job
    longest = least_load(problem) if job.speeds else 0
    routes = []
    for stage in range(job.stages):
        keeps = dict.fromkeys(problem.living_peers(stage), job.micro_batches)
        if job.speeds:
            work = _work(problem, stage)
            keeps = {p: min(n, longest // work[p]) for p, n in keeps.items()}
        row = [p for p in range(job.pipelines) for _ in range(job.micro_batches)]
        away = {p: n for p in range(job.pipelines) if (n := job.micro_batches - keeps.get(p, 0))}
        hosts = _hosts(problem, stage, sum(away.values()), keeps)
        for micro_batch in range(job.micro_batches):
            for pipeline, n in away.items():
                # Spread over the iteration: all of a dead worker's, some of a slow one's.
                if (micro_batch + 1) * n // job.micro_batches > micro_batch * n // job.micro_batches:
                    row[pipeline * job.micro_batches + micro_batch] = next(hosts)
        routes.append(tuple(row))
    return tuple(routes)


def least_load(problem: Problem) -> int:
    """Least ticks in which every stage can do its F's, I's and W's, however its peers share them."""
    total = problem.job.pipelines * problem.job.micro_batches
    return max(_shared(list(_work(problem, s).values()), total) for s in range(problem.job.stages))


def _work(problem: Problem, stage: int) -> dict[int, int]:
    """Ticks of a micro-batch by living peer."""
    return {p: problem.worker_ticks(Worker(p, stage)).work for p in problem.living_peers(stage)}


def _shared(work: list[int], total: int) -> int:
    return bisect_left(range(total * min(work)), True, key=lambda time: sum(time // ticks for ticks in work) >= total)


def _hosts(problem: Problem, stage: int, guests: int, keeps: dict[int, int]) -> Iterator[int]:
    """The pipelines of the peers that take the stage's guests, in the guests' order.

    keeps: how many of its own each peer runs.
    """
    work = _work(problem, stage)
    if len(set(work.values())) == 1:
        return cycle(work)
    loads = [((keeps[p] + 1) * work[p], place, p) for place, p in enumerate(work)]
    heapq.heapify(loads)
    share = dict.fromkeys(work, 0)
    for _ in range(guests):
        load, place, p = loads[0]
        share[p] += 1
        heapq.heapreplace(loads, (load + work[p], place, p))
    # Peer p's k-th guest of n is due at (2 k + 1) / 2 n of the iteration.
    due = [((2 * k + 1) / (2 * n), place, p) for place, (p, n) in enumerate(share.items()) for k in range(n)]
    return (p for _, _, p in sorted(due))
