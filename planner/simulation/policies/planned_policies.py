"""The policies that plan with a job's profile, by the name that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policies.bamboo_table import BambooTable
from openrecycle.planner.simulation.policies.best import Best
from openrecycle.planner.simulation.policies.checkpoint_restart import CheckpointRestart, Varuna
from openrecycle.planner.simulation.policies.drop_replica import DropReplica
from openrecycle.planner.simulation.policies.grid import GridPolicy, seconds
from openrecycle.planner.simulation.policy_base import Cluster, KeepTraining, MembershipChange, Policy, Reaction, Stop
from openrecycle.planner.simulation.tables import Costs, NodeTable


class Bamboo(BambooTable):
    """Every worker also runs its successor's forwards. A re-balance costs what a re-partition does."""

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        self.planned = planned
        full = NodeTable({planned.workers: planned.redundant(planned.job.pipelines).per_second})
        pause = NodeTable({1: costs.detect + costs.recover + costs.repartition})
        constants = Costs(planned.samples, pause, None, None)
        super().__init__(full, constants, corrected=True, stages=planned.job.stages)
        self.name = "bamboo"
        self.fault_free = planned.full.per_second

    def rate(self, nodes: int) -> float:
        pipelines = min(nodes // self.stages, self.planned.job.pipelines)
        return self.planned.redundant(pipelines).per_second if pipelines else 0.0


class FaultFree(GridPolicy):
    name = "fault-free"

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        return KeepTraining() if training or paused else Stop(0)

    def rate(self, workers: int) -> Rate | None:
        return self.planned.full

    def _staff(self) -> None:
        """Nobody is looked at."""


class ReCycle(GridPolicy):
    """Beyond one failure each is taken to fall where it has to be moved from, at the price of one copy."""

    name = "recycle"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.rerouted(self.workers - workers)

    def loss(self, left: int, replaced: int) -> Stop:
        moved = self.costs.migrate if self.workers - left > 1 else 0.0
        return Stop(self.recovery(replaced, moved))


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


PLANNED: dict[str, Callable[[PlannedJob, RecoveryCosts], Policy]] = {
    "fault-free": FaultFree,
    "recycle": ReCycle,
    "oobleck": Oobleck,
    "repartition": Repartition,
    "drop-replica": DropReplica,
    "checkpoint-restart": CheckpointRestart,
    "varuna": Varuna,
    "bamboo": Bamboo,
    "ours": Best,
}


def planned_policy(name: str, planned: PlannedJob, costs: RecoveryCosts, *, spares: int = 1) -> Policy:
    """A fresh policy for one run. Raises InputError."""
    if name == "spares":
        return Spares(planned, costs, spares)
    if name not in PLANNED:
        raise InputError("--policy", name, "with a profile one of " + ", ".join((*PLANNED, "spares")))
    return PLANNED[name](planned, costs)
