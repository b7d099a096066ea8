"""The job as it would be if nothing failed: what the others are measured against."""

from __future__ import annotations

from openrecycle.planner.simulation.planned import Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy
from openrecycle.planner.simulation.policy_base import Change, Cluster, Keep, Reaction, Stop


class FaultFree(GridPolicy):
    name = "fault-free"

    def changed(self, cluster: Cluster, change: Change, *, training: bool, paused: bool) -> Reaction:
        return Keep() if training or paused else Stop(0)

    def rate(self, workers: int) -> Rate | None:
        return self.planned.full

    def _staff(self) -> None:
        """Nobody is looked at."""
