"""What the policies that plan with a job's profile share: who is in the job, who stands by."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque

from openrecycle.planner.simulation.costs import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policy_base import (
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Reaction,
    Stop,
)


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
