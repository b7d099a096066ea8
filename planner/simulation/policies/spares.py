"""Spares: workers that are paid for and stand by, each to take a dead one's place."""

from __future__ import annotations

from openrecycle.planner.errors import InputError
from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy
from openrecycle.planner.simulation.policy_base import Stop


class Spares(GridPolicy):
    """`spares` workers beside those of the trace. They don't fail, so the policy comes off a little
    better than it would. Once more are dead than there are spares, the job has only as many whole
    pipelines as the rest makes, each with its own micro-batches.
    """

    name = "spares"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts, spares: int) -> None:
        super().__init__(planned, costs)
        if isinstance(spares, bool) or not 0 <= spares <= 100_000:
            raise InputError("--spares", spares, "a whole number from 0 to 100000")
        self.extra_workers = spares
        self.name = f"spares-{spares}"

    def rate(self, workers: int) -> Rate | None:
        staffed = min(self.workers, workers + self.extra_workers) if workers else 0
        return self.planned.replicas(staffed // self.planned.job.stages)

    def loss(self, left: int, replaced: int) -> Stop:
        """A spare takes its peers' state; without one the pipeline is dropped."""
        taken = left + self.extra_workers >= self.workers
        return Stop(self.recovery(replaced + taken))
