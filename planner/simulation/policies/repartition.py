"""Re-partition: the model's layers are spread anew over the living workers.

ElasWave and Chameleon do so with zero-bubble schedules (`Repartition`, here with the layouts and plans of our
planner), Oobleck with templates that run 1F1B (`Oobleck`).
"""

from __future__ import annotations

from openrecycle.planner.simulation.planned import Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy, seconds
from openrecycle.planner.simulation.policy_base import Stop


class Repartition(GridPolicy):
    """Every loss and every return moves layers, and training waits for them."""

    name = "repartition"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.repartitioned(workers)

    def loss(self, left: int, replaced: int) -> Stop:
        return Stop(self.recovery(replaced, self.costs.repartition))

    def growth(self, workers: int) -> Stop:
        return Stop(seconds(self.costs.repartition))


class Oobleck(Repartition):
    """With Oobleck's templates; what is lost with a node is measured against our fault-free job."""

    name = "oobleck"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.templates(workers)
