"""Checkpoint and restart: everyone begins anew from the last checkpoint.

On as many whole pipelines as there are (`CheckpointRestart`), or as Varuna (EuroSys'22) does it, on
pipelines of the depth that is best for the workers there are (`Varuna`).
"""

from __future__ import annotations

from dataclasses import replace

from openrecycle.planner.simulation.planned import Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy, seconds
from openrecycle.planner.simulation.policy_base import SECOND, Cluster, Pace, Stop


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


class Varuna(CheckpointRestart):
    """The grid morphs: depth and number of pipelines follow the workers, with 1F1B throughout."""

    name = "varuna"

    def used(self, workers: int) -> int:
        morphed = self.planned.morphed(min(workers, self.workers))
        return 0 if morphed is None else morphed[0]

    def rate(self, workers: int) -> Rate | None:
        morphed = self.planned.morphed(workers)
        return None if morphed is None else morphed[1]
