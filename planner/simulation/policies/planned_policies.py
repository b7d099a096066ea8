"""The policies that plan with a job's profile, by the name that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable

from openrecycle.planner.errors import InputError
from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policies.bamboo import Bamboo
from openrecycle.planner.simulation.policies.best import Best
from openrecycle.planner.simulation.policies.checkpoint_restart import CheckpointRestart, Varuna
from openrecycle.planner.simulation.policies.drop_replica import DropReplica
from openrecycle.planner.simulation.policies.fault_free import FaultFree
from openrecycle.planner.simulation.policies.recycle import ReCycle
from openrecycle.planner.simulation.policies.repartition import Oobleck, Repartition
from openrecycle.planner.simulation.policies.spares import Spares
from openrecycle.planner.simulation.policy_base import Policy

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
