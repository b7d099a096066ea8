"""Oobleck (SOSP'23) from its measured throughput: pipelines are re-instantiated after each loss."""

from __future__ import annotations

from openrecycle.planner.simulation.policies.measured import Measured
from openrecycle.planner.simulation.policy_base import Reaction, Stop


class OobleckTable(Measured):
    """A loss stops training for the model's constant time; an iteration that ends within it still counts."""

    name = "oobleck"

    def loss(self, left: int) -> Reaction:
        return Stop(self.pause(left), grace=True)
