"""Which node runs which cell of the grid, so that a lost node takes no stage with it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker


def place(job: Job, nodes: int) -> dict[Worker, int]:
    """The node of every cell.

    Up to as many nodes as pipelines: whole pipelines, in turn, so that neighbouring stages share a
    node. Beyond that a pipeline is cut over several nodes, which no other pipeline uses. Either way
    the replicas of a stage are on min(nodes, pipelines) different nodes. Raises InputError for more
    nodes than workers.
    """
    if not 1 <= nodes <= job.pipelines * job.stages:
        raise InputError("--nodes", nodes, f"from 1 to {job.pipelines * job.stages}, a worker for each")
    out = {}
    for cell in job.workers():
        first = cell.pipeline % nodes
        own = range(first, nodes, job.pipelines) if nodes > job.pipelines else (first,)
        out[cell] = own[cell.stage * len(own) // job.stages]
    return out


def stand_in(cell: Worker, home: int, living: Collection[int], where: Mapping[Worker, int]) -> int:
    """The node to start `cell` on: its own, or, where that is lost, the living one with the fewest
    replicas of its stage, then the fewest workers. where: node of every worker that runs."""
    if home in living:
        return home

    def burden(node: int) -> tuple[int, int, int]:
        here = [w for w, n in where.items() if n == node]
        return sum(w.stage == cell.stage for w in here), len(here), node

    return min(living, key=burden)
