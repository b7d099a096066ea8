"""Which living peer runs which micro-batch at each stage.

A micro-batch stays in its own pipeline wherever that worker lives. The others go round-robin to
the living peers of the stage, micro-batch by micro-batch, so that each peer's guests are spread
over the iteration and peers' loads differ by at most one.
"""

from __future__ import annotations

from planner.job import Problem

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
        turn = 0
        for micro_batch in range(job.micro_batches):
            for pipeline in orphaned:
                row[pipeline * job.micro_batches + micro_batch] = peers[turn]
                turn = (turn + 1) % len(peers)
        routes.append(tuple(row))
    return tuple(routes)


def route(problem: Problem) -> dict[tuple[int, int, int], int]:
    """(stage, pipeline, micro_batch) -> pipeline of the worker that runs it."""
    count = problem.job.micro_batches
    return {
        (stage, *divmod(index, count)): worker
        for stage, row in enumerate(assign(problem))
        for index, worker in enumerate(row)
    }
