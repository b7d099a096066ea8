"""ReCycle (SOSP'24) from measured throughput by GPU count: micro-batches go to living peers."""

from __future__ import annotations

from openrecycle.planner.simulation.policies.measured import Measured
from openrecycle.planner.simulation.policy_base import Change, Cluster, Keep, Pace, Reaction, Stop, cut_to_milliseconds


class ReCycleTable(Measured):
    """Workers that return take part from the next iteration on. It needs one living worker per stage,
    which the table does not say: it goes on as long as anyone lives.
    """

    name = "recycle"

    def start(self, nodes: int) -> Reaction:
        return Stop(0)

    def changed(self, cluster: Cluster, change: Change, *, training: bool, paused: bool) -> Reaction:
        if training and not change.lost:
            return Keep(ask=True)
        return super().changed(cluster, change, training=training, paused=paused)

    def boundary(self, cluster: Cluster) -> Reaction:
        return Keep(pace=self.pace(cluster))

    def pace(self, cluster: Cluster) -> Pace | None:
        rate = self.rate(cluster.usable)
        if not cluster.usable or not rate:
            return None
        return Pace(cut_to_milliseconds(self.costs.samples / rate), self.costs.samples)
