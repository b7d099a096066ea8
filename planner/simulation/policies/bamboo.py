"""Bamboo (NSDI'23) on a planned job: the rules of `BambooTable` with throughput from the job's profile."""

from __future__ import annotations

from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policies.bamboo_table import BambooTable
from openrecycle.planner.simulation.tables import Costs, NodeTable


class Bamboo(BambooTable):
    """Every worker also runs its successor's forwards. A re-balance costs what a re-partition does."""

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        self.planned = planned
        full = NodeTable({planned.workers: planned.redundant(planned.job.pipelines).per_second})
        pause = NodeTable({1: costs.detect + costs.recover + costs.repartition})
        constants = Costs(planned.samples, pause, None, None)
        super().__init__(full, constants, corrected=True, stages=planned.job.stages)
        self.name = "bamboo"
        self.fault_free = planned.full.per_second

    def rate(self, nodes: int) -> float:
        pipelines = min(nodes // self.stages, self.planned.job.pipelines)
        return self.planned.redundant(pipelines).per_second if pipelines else 0.0
