"""The policies that plan with a job's profile."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.words import DROP, REROUTE
from openrecycle.planner.simulation.options import REPARTITION, Option, best_option
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policies.published import BambooTable, Costs, NodeTable
from openrecycle.planner.simulation.policy_base import (
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Policy,
    Reaction,
    RecoveryCosts,
    Stop,
)

# -- what they share: who is in the job, who stands by -----------------------------------------------


class GridPolicy(ABC):
    """A worker that is lost stops the job; one that comes back joins at an iteration's end.

    Subclasses say how many workers take part (`used`), how fast the job then is (`rate`), and what
    losses and returns cost (`loss`, `growth`). One that stands by is lost without a sound. A job that
    stood still pays a restart and loses no work: its last checkpoint is taken to be of when it stopped.
    """

    name = ""

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        self.planned = planned
        self.costs = costs
        self.workers = planned.workers
        self.fault_free = planned.full.per_second
        self.extra_workers = 0
        self.started = False
        self.active: set[str] = set()
        self.standby: deque[str] = deque()

    # -- for subclasses --------------------------------------------------------------------------

    def used(self, workers: int) -> int:
        """How many of so many take part."""
        return min(workers, self.workers)

    @abstractmethod
    def rate(self, workers: int) -> Rate | None:
        """With so many in the job; None: it can't train."""

    def loss(self, left: int, replaced: int) -> Stop:
        """Workers of the job were lost; so many will take part, `replaced` of them new in their place."""
        return Stop(self.recovery(replaced))

    def growth(self, workers: int) -> Stop:
        """So many can now take part, which is more than before."""
        return Stop(seconds(self.costs.rejoin))

    def recovery(self, replaced: int, further: float = 0.0) -> int:
        """Microseconds until all know and have new groups, and whoever is new or moves has its state."""
        copies = max(further, self.costs.rejoin if replaced else 0.0)
        return seconds(self.costs.detect + self.costs.recover + copies)

    # -- Policy ------------------------------------------------------------------------------------

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        self.standby.extend(change.ready)
        hit = 0
        for name in change.lost:
            if name in self.active:
                self.active.remove(name)
                hit += 1
            else:
                self.standby.remove(name)
        left = self.used(len(self.active) + len(self.standby))
        if not training and not paused:
            if self.rate(left) is None:
                return KeepTraining()
            return Stop(seconds(self.costs.restart) if self.started else 0)
        if hit:
            return self.loss(left, max(0, min(hit, left - len(self.active))))
        return KeepTraining(ask=training and left > len(self.active))

    def boundary(self, cluster: Cluster) -> Reaction:
        grown = self.used(len(self.active) + len(self.standby))
        return self.growth(grown) if grown > len(self.active) else KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        self._staff()
        made = self.rate(len(self.active))
        if made is None:
            return None
        self.started = True
        return Pace(max(1, round(made.seconds * SECOND)), made.samples)

    def _staff(self) -> None:
        """Fills the job from those who stand by, or lets go of those it has no use for."""
        wanted = self.used(len(self.active) + len(self.standby))
        while len(self.active) < wanted:
            self.active.add(self.standby.popleft())
        for name in heapq.nlargest(len(self.active) - wanted, self.active):
            self.active.remove(name)
            self.standby.append(name)


def seconds(value: float) -> int:
    """In microseconds."""
    return round(value * SECOND)


# -- checkpoint and restart --------------------------------------------------------------------------

# Checkpoint and restart: everyone begins anew from the last checkpoint.
#
# On as many whole pipelines as there are (`CheckpointRestart`), or as Varuna (EuroSys'22) does it, on
# pipelines of the depth that is best for the workers there are (`Varuna`).


class CheckpointRestart(GridPolicy):
    """All micro-batches are kept: fewer pipelines take longer. Workers that make no whole pipeline stand by."""

    name = "checkpoint-restart"

    def used(self, workers: int) -> int:
        stages = self.planned.job.stages
        return min(workers, self.workers) // stages * stages

    def rate(self, workers: int) -> Rate | None:
        return self.planned.fewer_pipelines(workers // self.planned.job.stages)

    def loss(self, left: int, replaced: int) -> Stop:
        return Stop(seconds(self.costs.detect + self.costs.restart), rollback=True)

    def growth(self, workers: int) -> Stop:
        return Stop(seconds(self.costs.checkpoint + self.costs.restart), save=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        made = super().pace(cluster)
        if made is None:
            return None
        every = max(1, round(self.costs.checkpoint_interval * SECOND / made.iteration))
        return replace(made, checkpoint_every=every, checkpoint=seconds(self.costs.checkpoint))


class Varuna(CheckpointRestart):
    """The grid morphs: depth and number of pipelines follow the workers, with 1F1B throughout."""

    name = "varuna"

    def used(self, workers: int) -> int:
        morphed = self.planned.morphed(min(workers, self.workers))
        return 0 if morphed is None else morphed[0]

    def rate(self, workers: int) -> Rate | None:
        morphed = self.planned.morphed(workers)
        return None if morphed is None else morphed[1]


# -- drop the replica --------------------------------------------------------------------------------


class DropReplica(GridPolicy):
    """As torchft and elastic data parallel: a pipeline with a dead worker stands still. The others go on with their
    own micro-batches, so an iteration trains on fewer samples: the only policy here that changes what an update sees.

    Workers have places of their own here: which pipelines are whole depends on who was lost.
    """

    name = "drop-replica"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        super().__init__(planned, costs)
        self.place: dict[str, int] = {}
        self.free = list(range(self.workers))  # a heap of places, pipeline by pipeline
        self.dead = [planned.job.stages] * planned.job.pipelines  # empty places of each pipeline
        self.running = 0

    @property
    def whole(self) -> int:
        """Pipelines without an empty place."""
        return self.dead.count(0)

    def rate(self, workers: int) -> Rate | None:
        return self.planned.replicas(self.whole)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        before = self.whole
        self.standby.extend(change.ready)
        for name in change.lost:
            if name in self.place:
                self._leave(name)
            else:
                self.standby.remove(name)
        whole = self.whole
        while self.standby and self.free:
            self._take(self.standby.popleft())
        if not training and not paused:
            if not self.whole:
                return KeepTraining()
            return Stop(seconds(self.costs.restart) if self.started else 0)
        if whole < before:
            return self.loss(0, self.whole - whole)
        return KeepTraining(ask=self.whole > self.running)

    def boundary(self, cluster: Cluster) -> Reaction:
        return self.growth(0) if self.whole > self.running else KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        self.running = self.whole
        return super().pace(cluster)

    def _staff(self) -> None:
        """Places are taken as workers come."""

    def _take(self, name: str) -> None:
        place = heapq.heappop(self.free)
        self.place[name] = place
        self.dead[place // self.planned.job.stages] -= 1

    def _leave(self, name: str) -> None:
        place = self.place.pop(name)
        heapq.heappush(self.free, place)
        self.dead[place // self.planned.job.stages] += 1


# -- others ------------------------------------------------------------------------------------------


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

    def cut(self, iteration: float) -> int:
        return max(1, round(iteration))

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
    """A failure that may have to be moved to where it costs least has the price of one copy."""

    name = "recycle"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.rerouted(self.workers - workers)

    def loss(self, left: int, replaced: int) -> Stop:
        moved = self.costs.migrate if self.planned.moves(self.workers - left) else 0.0
        return Stop(self.recovery(replaced, moved))


class SpareWorkers(GridPolicy):
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


# -- ours: at every failure and every return the option that trains most until the next change -------

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
        moved = self.costs.migrate if self.planned.moves(self.workers - left) else 0.0
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


# -- by the name that `--policy` takes ---------------------------------------------------------------

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
        return SpareWorkers(planned, costs, spares)
    if name not in PLANNED:
        raise InputError("--policy", name, "with a profile one of " + ", ".join((*PLANNED, "spares")))
    return PLANNED[name](planned, costs)
