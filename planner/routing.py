"""Which living peer runs which micro-batch at each stage.

A micro-batch stays in its own pipeline wherever that worker lives. The others go round-robin to
the living peers of the stage, micro-batch by micro-batch, so that each peer's guests are spread
over the iteration and peers' loads differ by at most one. Where peers are of unequal speed each
guest goes where the load in time stays least, so a slow worker takes fewer, and these are spread
over the iteration as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import cycle

from planner.job import Problem, Worker

Routes = tuple[tuple[int, ...], ...]


def assign(problem: Problem) -> Routes:
    """assign(problem)[stage][pipeline * micro_batches + micro_batch]: pipeline of the worker."""
    job = problem.job
    routes = []
    for stage in range(job.stages):
        peers = problem.living_peers(stage)
        living = set(peers)
        orphaned = [p for p in range(job.pipelines) if p not in living]
        row = [p for p in range(job.pipelines) for _ in range(job.micro_batches)]
        hosts = _hosts(problem, stage, len(orphaned) * job.micro_batches)
        for micro_batch in range(job.micro_batches):
            for pipeline in orphaned:
                row[pipeline * job.micro_batches + micro_batch] = next(hosts)
        routes.append(tuple(row))
    return tuple(routes)


def _hosts(problem: Problem, stage: int, guests: int) -> Iterator[int]:
    """The pipelines of the peers that take the stage's guests, in the guests' order."""
    peers = problem.living_peers(stage)
    work = {p: problem.worker_ticks(Worker(p, stage)).work for p in peers}
    if len(set(work.values())) == 1:
        return cycle(peers)
    loads = [((problem.job.micro_batches + 1) * work[p], place, p) for place, p in enumerate(peers)]
    heapq.heapify(loads)
    share = dict.fromkeys(peers, 0)
    for _ in range(guests):
        load, place, p = loads[0]
        share[p] += 1
        heapq.heapreplace(loads, (load + work[p], place, p))
    # Peer p's k-th guest of n is due at (2 k + 1) / 2 n of the iteration.
    due = [((2 * k + 1) / (2 * n), place, p) for place, (p, n) in enumerate(share.items()) for k in range(n)]
    return (p for _, _, p in sorted(due))


def route(problem: Problem) -> dict[tuple[int, int, int], int]:
    """(stage, pipeline, micro_batch) -> pipeline of the worker that runs it."""
    count = problem.job.micro_batches
    return {
        (stage, *divmod(index, count)): worker
        for stage, row in enumerate(assign(problem))
        for index, worker in enumerate(row)
    }
