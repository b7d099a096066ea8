"""ReCycle (SOSP'24) with our planner's plans: the micro-batches of dead workers go to living peers.

Which of its techniques are used is the planned job's `technique`.
"""

from __future__ import annotations

from openrecycle.planner.simulation.planned import Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy
from openrecycle.planner.simulation.policy_base import Stop


class ReCycle(GridPolicy):
    """Beyond one failure each is taken to fall where it has to be moved from, at the price of one copy."""

    name = "recycle"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.rerouted(self.workers - workers)

    def loss(self, left: int, replaced: int) -> Stop:
        moved = self.costs.migrate if self.workers - left > 1 else 0.0
        return Stop(self.recovery(replaced, moved))
