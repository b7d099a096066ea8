"""Varuna (EuroSys'22) from its measured throughput: checkpoint, and morph to what is left."""

from __future__ import annotations

from dataclasses import replace

from openrecycle.planner.errors import InputError
from openrecycle.planner.simulation.policies.measured import Measured
from openrecycle.planner.simulation.policy_base import SECOND, Cluster, Pace, Reaction, Stop
from openrecycle.planner.simulation.tables import Costs, NodeTable


class VarunaTable(Measured):
    """A loss drops the work since the last checkpoint. The measured restart time includes saving one,
    which does not happen at a loss, so that much is taken off.
    """

    name = "varuna"

    def __init__(self, throughput: NodeTable, costs: Costs) -> None:
        if costs.checkpoint is None or costs.every is None:
            raise InputError("checkpoint_save_s", costs.checkpoint, "checkpoint_save_s and checkpoint_every_iterations")
        super().__init__(throughput, costs)
        self.checkpoint = round(costs.checkpoint * SECOND)
        self.every = costs.every

    def pause(self, nodes: int) -> int:
        return max(0, super().pause(nodes) - self.checkpoint)

    def loss(self, left: int) -> Reaction:
        return Stop(self.pause(left), rollback=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        made = super().pace(cluster)
        return made and replace(made, checkpoint_every=self.every, checkpoint=self.checkpoint)
