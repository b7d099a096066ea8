"""What the policies that play measured tables share: the pace by node count, and when they start."""

from __future__ import annotations

from openrecycle.planner.simulation.policy_base import (
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Reaction,
    Stop,
    cut_to_milliseconds,
)
from openrecycle.planner.simulation.tables import Costs, NodeTable

# Nodes that make no pipeline any more, in the seeds' simulations: they take 12 stages throughout.
STAGES = 12
# From a node's arrival until it can train.
READY_AFTER = 45 * SECOND


class MeasuredPolicy:
    """A policy over samples per second by node count. stages: the fewest nodes that make a pipeline.

    A node that comes while the job trains takes part from the next reconfiguration on.
    """

    name = ""
    extra_workers = 0

    def __init__(self, throughput: NodeTable, costs: Costs, *, stages: int = STAGES) -> None:
        self.stages = stages
        self.throughput = throughput
        self.costs = costs
        self.fault_free = throughput.best
        self.workers = max(throughput.by_nodes)

    def pause(self, nodes: int) -> int:
        """Microseconds from a loss that leaves so many nodes until training goes on."""
        return 0 if self.costs.pause is None else round(self.costs.pause.at(nodes) * SECOND)

    def rate(self, nodes: int) -> float:
        """Samples per second among so many nodes."""
        return self.throughput.at(nodes)

    def start(self, nodes: int) -> Reaction:
        """The first start, and every one after a standstill."""
        return Stop(self.pause(nodes))

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if not training and not paused:
            return self.start(cluster.usable) if change.ready else KeepTraining()
        if not change.lost:
            return KeepTraining()
        return self.loss(cluster.usable)

    def loss(self, left: int) -> Reaction:
        """Nodes were lost; so many are left."""
        return Stop(self.pause(left))

    def boundary(self, cluster: Cluster) -> Reaction:
        return KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        rate = self.rate(cluster.usable)
        if cluster.usable < self.stages or not rate:
            return None
        return Pace(cut_to_milliseconds(self.costs.samples / rate), self.costs.samples)
