"""Ours: at every failure and every return the option that trains most until the next change."""

from __future__ import annotations

from dataclasses import replace

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.words import DROP, REROUTE
from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policies.grid import GridPolicy, seconds
from openrecycle.planner.simulation.policy import REPARTITION, Option, best_option
from openrecycle.planner.simulation.policy_base import (
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Reaction,
    Stop,
)

WAIT = "wait"


class Best(GridPolicy):
    """Chooses between re-routing, re-partitioning and dropping replicas, or lets a worker that returned wait.

    It knows the past only: the next change is expected after the mean time between those so far,
    `prior` seconds counting as the first.
    """

    name = "ours"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts, *, prior: float = 600.0) -> None:
        super().__init__(planned, costs)
        if not 0 < prior < float("inf"):
            raise InputError("prior", prior, "seconds above 0")
        self.mode = self.ran = REROUTE  # for what is under way, and what trained last
        self.fresh = True
        self.prior = prior
        self.changes = 0
        self._now = 0

    def rate(self, workers: int) -> Rate | None:
        return self._rate(self._quickest(workers) if self.fresh else self.mode, workers)

    def _rate(self, mode: str, workers: int) -> Rate | None:
        if mode == REPARTITION:
            return self.planned.repartitioned(workers)
        if mode == DROP:
            return self.planned.replicas(min(self.planned.job.pipelines, workers // self.planned.job.stages))
        return self.planned.rerouted(self.workers - workers)

    def _quickest(self, workers: int) -> str:
        rates = {mode: rate.per_second for mode in (REROUTE, REPARTITION, DROP) if (rate := self._rate(mode, workers))}
        return max(rates, key=lambda mode: rates[mode], default=REROUTE)

    def horizon(self, now: int) -> float:
        """Seconds until the next change, as the past suggests."""
        return (self.prior + now / SECOND) / (1 + self.changes)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if self.started:
            self.changes += 1
        if not training and not paused:
            self.fresh = True
        self._now = cluster.now
        reaction = super().changed(cluster, change, training=training, paused=paused)
        if paused and change.ready and not self.fresh and isinstance(reaction, KeepTraining):
            # The pause may have been for a way that is no longer the best.
            chosen = self.mode
            again = self.loss(self.used(len(self.active) + len(self.standby)), len(change.ready))
            if self.mode != chosen:
                return again
        return reaction

    def loss(self, left: int, replaced: int) -> Stop:
        seen = self.costs.detect + self.costs.recover
        copied = self.costs.rejoin if replaced else 0.0
        moved = self.costs.migrate if self.workers - left > 1 else 0.0
        back = self.costs.repartition if self.ran == REPARTITION else 0.0
        again = max(copied, self.costs.repartition)
        pauses = dict.fromkeys((REROUTE, DROP), seen + max(copied, moved, back))
        return self._go(self._options(left, {**pauses, REPARTITION: seen + again}))

    def boundary(self, cluster: Cluster) -> Reaction:
        grown = self.used(len(self.active) + len(self.standby))
        if grown <= len(self.active):
            return KeepTraining()
        moved = self.costs.repartition if self.mode == REPARTITION else 0.0
        pauses = dict.fromkeys((REROUTE, DROP), max(self.costs.rejoin, moved))
        options = self._options(grown, {**pauses, REPARTITION: self.costs.repartition})
        now = self.rate(len(self.active))
        if now is not None:
            options.append(Option(WAIT, 0.0, now.per_second))
        self._now = cluster.now
        if not options or self._best(options).name == WAIT:
            return KeepTraining()
        return self._go(options)

    def pace(self, cluster: Cluster) -> Pace | None:
        if self.fresh:
            # Nothing ran, so there is nothing to move from.
            self.mode = self._quickest(self.used(len(self.active) + len(self.standby)))
            self.fresh = False
        self.ran = self.mode
        return super().pace(cluster)

    def _options(self, workers: int, pauses: dict[str, float]) -> list[Option]:
        found = [(mode, pause, self._rate(mode, workers)) for mode, pause in pauses.items()]
        return [Option(mode, pause, rate.per_second) for mode, pause, rate in found if rate is not None]

    def _go(self, options: list[Option]) -> Stop:
        if not options:
            return Stop(seconds(self.costs.detect))
        chosen = self._best(options)
        self.mode = chosen.name
        return Stop(seconds(chosen.pause))

    def _best(self, options: list[Option]) -> Option:
        """Until the next change, and what that will cost: it finds the job as this choice leaves it."""
        again = dict.fromkeys((REROUTE, DROP), max(self.costs.rejoin, self.costs.migrate))
        again[REPARTITION] = self.costs.repartition
        again[WAIT] = again[self.mode]
        charged = {replace(option, pause=option.pause + again[option.name]): option for option in options}
        return charged[best_option(list(charged), self.horizon(self._now), 0.0)[0]]
