"""Drop the replica (torchft, elastic data parallel): a pipeline with a dead worker stands still.

The others go on with their own micro-batches, so an iteration trains on fewer samples: the only
policy here that changes what an update sees.
"""

from __future__ import annotations

import heapq

from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy, seconds
from openrecycle.planner.simulation.policy_base import Cluster, KeepTraining, MembershipChange, Pace, Reaction, Stop


class DropReplica(GridPolicy):
    """Workers have places of their own here: which pipelines are whole depends on who was lost."""

    name = "drop-replica"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        super().__init__(planned, costs)
        self.place: dict[str, int] = {}
        self.free = list(range(self.workers))  # a heap of places, pipeline by pipeline
        self.dead = [planned.job.stages] * planned.job.pipelines  # empty places of each pipeline
        self.running = 0

    @property
    def whole(self) -> int:
        """Pipelines without an empty place."""
        return self.dead.count(0)

    def rate(self, workers: int) -> Rate | None:
        return self.planned.replicas(self.whole)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        before = self.whole
        self.standby.extend(change.ready)
        for name in change.lost:
            if name in self.place:
                self._leave(name)
            else:
                self.standby.remove(name)
        whole = self.whole
        while self.standby and self.free:
            self._take(self.standby.popleft())
        if not training and not paused:
            if not self.whole:
                return KeepTraining()
            return Stop(seconds(self.costs.restart) if self.started else 0)
        if whole < before:
            return self.loss(0, self.whole - whole)
        return KeepTraining(ask=self.whole > self.running)

    def boundary(self, cluster: Cluster) -> Reaction:
        return self.growth(0) if self.whole > self.running else KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        self.running = self.whole
        return super().pace(cluster)

    def _staff(self) -> None:
        """Places are taken as workers come."""

    def _take(self, name: str) -> None:
        place = heapq.heappop(self.free)
        self.place[name] = place
        self.dead[place // self.planned.job.stages] -= 1

    def _leave(self, name: str) -> None:
        place = self.place.pop(name)
        heapq.heappush(self.free, place)
        self.dead[place // self.planned.job.stages] += 1
