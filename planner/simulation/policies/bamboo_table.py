"""Bamboo (NSDI'23) from throughput by node count: every node also computes what its successor would.

A stage's predecessor takes over when its node is lost (its shadow). The throughput has the
redundant computation in it.
"""

from __future__ import annotations

from dataclasses import replace

from openrecycle.planner.simulation.policies.measured import STAGES, MeasuredPolicy
from openrecycle.planner.simulation.policy_base import (
    MILLISECOND,
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Reaction,
    Stop,
)
from openrecycle.planner.simulation.tables import Costs, NodeTable

# What is left of an iteration, and all after it until the next re-balance, take so much longer.
FAIL_OVER = 1.5
# Two neighbouring stages lost: everyone restarts.
GLOBAL_RESTART = 30 * SECOND
# A re-balance is due above this share of nodes whose loss would be fatal.
EXPOSED = 0.05

Place = tuple[int, int]  # (pipeline, stage)


class BambooTable(MeasuredPolicy):
    """`corrected`: without an artefact of the published simulation, in which the loss of a node that
    only stands by slows training down as well.
    """

    def __init__(self, throughput: NodeTable, costs: Costs, *, corrected: bool = False, stages: int = STAGES) -> None:
        super().__init__(throughput, costs, stages=stages)
        self.corrected = corrected
        self.name = "bamboo-corrected" if corrected else "bamboo"
        self.places: dict[str, list[Place]] = {}
        self.order: list[str] = []  # in which the next layout takes the nodes
        self.pipelines = 0
        self.waiting = 0
        self.slowed = False
        self.current: Pace | None = None

    def start(self, nodes: int) -> Reaction:
        return Stop(GLOBAL_RESTART)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if not training:
            earlier = self.order if paused else [n for n in cluster.ready if n not in change.ready]
            self.order = [*earlier, *change.ready]
        if not training and not paused:
            return super().changed(cluster, change, training=training, paused=paused)
        if paused:
            # Whoever was to take part is missing when the pause ends, and it begins anew.
            return Stop(self.pause(cluster.usable)) if change.lost else KeepTraining()
        self.waiting += len(change.ready)
        slower = False
        for name in change.lost:
            places = self.places.pop(name, [])
            if places and not self._taken_over(places):
                self.order = cluster.ready
                return Stop(GLOBAL_RESTART)
            slower = slower or bool(places) or not self.corrected
        if self.corrected and change.lost and not slower:
            self.current = super().pace(cluster)
            return KeepTraining(pace=self.current, ask=self._due())
        if not slower or self.slowed:
            return KeepTraining(ask=self._due())
        self.slowed = True
        assert self.current is not None
        iteration = int(self.current.iteration * FAIL_OVER) // MILLISECOND * MILLISECOND
        self.current = replace(self.current, iteration=iteration)
        return KeepTraining(stretch=FAIL_OVER, pace=self.current, ask=self._due())

    def _taken_over(self, places: list[Place]) -> bool:
        """Does the predecessor take the place? Not when the lost node held two, or the predecessor does."""
        if len(places) > 1:
            return False
        pipeline, stage = places[0]
        shadow = (pipeline, (stage - 1) % self.stages)
        for held in self.places.values():
            if shadow in held:
                if len(held) > 1:
                    return False
                held.append(places[0])
                return True
        return True

    def _due(self) -> bool:
        """Is a re-balance due at the end of the iteration?"""
        overloaded = sum(len(held) > 1 for held in self.places.values())
        active = self.pipelines * self.stages - overloaded
        if overloaded and (self.waiting >= overloaded or 2 * overloaded / active > EXPOSED):
            return True
        return (active + self.waiting) // self.stages > self.pipelines

    def boundary(self, cluster: Cluster) -> Reaction:
        if not self._due():
            return KeepTraining()
        self.order = cluster.ready
        return Stop(self.pause(cluster.usable))

    def pace(self, cluster: Cluster) -> Pace | None:
        """A new layout: whole pipelines, first of the nodes that were there in the order in which they
        came, then of those that got ready during the pause; the rest stand by.
        """
        there = set(cluster.ready)
        ready = [name for name in self.order if name in there]
        self.pipelines = len(ready) // self.stages
        used = ready[: self.pipelines * self.stages]
        self.places = {name: [divmod(i, self.stages)] for i, name in enumerate(used)}
        self.waiting = len(ready) - len(used)
        self.slowed = False
        self.current = super().pace(cluster)
        return self.current
