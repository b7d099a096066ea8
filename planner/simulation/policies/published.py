"""The policies that play measured tables, by the name that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.policies.bamboo_table import BambooTable
from openrecycle.planner.simulation.policies.measured import MeasuredPolicy
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
from openrecycle.planner.simulation.tables import Costs, NodeTable, read_costs, read_throughput


class OobleckTable(MeasuredPolicy):
    """A loss stops training for the model's constant time; an iteration that ends within it still counts."""

    name = "oobleck"

    def loss(self, left: int) -> Reaction:
        return Stop(self.pause(left), grace=True)


class ReCycleTable(MeasuredPolicy):
    """Workers that return take part from the next iteration on. It needs one living worker per stage,
    which the table does not say: it goes on as long as anyone lives.
    """

    name = "recycle"

    def start(self, nodes: int) -> Reaction:
        return Stop(0)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if training and not change.lost:
            return KeepTraining(ask=True)
        return super().changed(cluster, change, training=training, paused=paused)

    def boundary(self, cluster: Cluster) -> Reaction:
        return KeepTraining(pace=self.pace(cluster))

    def pace(self, cluster: Cluster) -> Pace | None:
        rate = self.rate(cluster.usable)
        if not cluster.usable or not rate:
            return None
        return Pace(cut_to_milliseconds(self.costs.samples / rate), self.costs.samples)


class VarunaTable(MeasuredPolicy):
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


# name: (the system whose rows it reads, how it is made)
PUBLISHED: dict[str, tuple[str, Callable[[NodeTable, Costs], MeasuredPolicy]]] = {
    "oobleck": ("oobleck", OobleckTable),
    "varuna": ("varuna", VarunaTable),
    "bamboo": ("bamboo", BambooTable),
    "bamboo-corrected": ("bamboo", partial(BambooTable, corrected=True)),
    "recycle": ("recycle", ReCycleTable),
}


def published(name: str, throughput: Path, costs: Path, model: str) -> MeasuredPolicy:
    """A fresh policy for one run. Raises InputError."""
    if name not in PUBLISHED:
        raise InputError("--policy", name, "with --throughput one of " + ", ".join(PUBLISHED))
    system, make = PUBLISHED[name]
    return make(read_throughput(throughput, system, model), read_costs(costs, system, model))
