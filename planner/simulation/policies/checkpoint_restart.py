"""Checkpoint and restart: everyone begins anew from the last checkpoint, on as many whole pipelines as there are."""

from __future__ import annotations

from dataclasses import replace

from planner.simulation.planned import Rate
from planner.simulation.policies.grid import GridPolicy, seconds
from planner.simulation.policy_base import SECOND, Cluster, Pace, Stop


class CheckpointRestart(GridPolicy):
    """All micro-batches are kept: fewer pipelines take longer. Workers that make no whole pipeline stand by."""

    name = "checkpoint-restart"

    def used(self, workers: int) -> int:
        stages = self.planned.job.stages
        return min(workers, self.workers) // stages * stages

    def rate(self, workers: int) -> Rate | None:
        return self.planned.fewer_pipelines(workers // self.planned.job.stages)

    def loss(self, left: int, replaced: int) -> Stop:
        return Stop(seconds(self.costs.detect + self.costs.restart), rollback=True)

    def growth(self, workers: int) -> Stop:
        return Stop(seconds(self.costs.checkpoint + self.costs.restart), save=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        made = super().pace(cluster)
        if made is None:
            return None
        every = max(1, round(self.costs.checkpoint_interval * SECOND / made.iteration))
        return replace(made, checkpoint_every=every, checkpoint=seconds(self.costs.checkpoint))
