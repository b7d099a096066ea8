"""What a policy is: how a job trains with the workers it has, and what it does when they change.

Times here and in the engine are whole microseconds, so that results do not depend on rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SECOND = 1_000_000
MILLISECOND = 1_000


@dataclass(frozen=True)
class Pace:
    """How training goes on until something changes.

    iteration: microseconds of one. samples: that it trains on. checkpoint_every: iterations between
    checkpoints, 0 for none; checkpoint: microseconds that one takes, during which nothing trains.
    """

    iteration: int
    samples: float
    checkpoint_every: int = 0
    checkpoint: int = 0

    def __post_init__(self) -> None:
        if self.iteration < 1 or self.samples < 0 or self.checkpoint_every < 0 or self.checkpoint < 0:
            raise ValueError(f"not a pace: {self}")

    @property
    def rate(self) -> float:
        """Samples per second between checkpoints."""
        return self.samples * SECOND / self.iteration


@dataclass(frozen=True)
class MembershipChange:
    """Who came, who went and who became ready at one instant. lost: in the order in which they went."""

    lost: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()


class Cluster:
    """The workers as a policy sees them, in the order in which they came. now: microseconds.

    ready: those that can train.
    """

    def __init__(self) -> None:
        self.now = 0
        self._living: dict[str, bool] = {}
        self._usable = 0

    @property
    def ready(self) -> list[str]:
        return [name for name, usable in self._living.items() if usable]

    @property
    def living(self) -> int:
        """Workers that are there and paid for, ready or not yet."""
        return len(self._living)

    @property
    def usable(self) -> int:
        """How many are ready."""
        return self._usable

    def add(self, name: str) -> None:
        self._living[name] = False

    def remove(self, name: str) -> bool:
        """Was it ready?"""
        was_ready = self._living.pop(name)
        self._usable -= was_ready
        return was_ready

    def set_ready(self, name: str) -> bool:
        """Is it still there?"""
        if name not in self._living:
            return False
        self._usable += not self._living[name]
        self._living[name] = True
        return True


@dataclass(frozen=True)
class Stop:
    """Training stops now and goes on after `pause` microseconds, at the pace that the policy then gives.

    The iteration in flight is lost, unless `grace` and it would have ended within the pause.
    rollback: what was done since the last checkpoint is lost too. save: the pause begins with a
    checkpoint, so that nothing of what was done before can be lost later.
    """

    pause: int
    grace: bool = False
    rollback: bool = False
    save: bool = False


@dataclass(frozen=True)
class KeepTraining:
    """Training goes on.

    stretch: so much longer does what is left of the iteration in flight take, cut to milliseconds.
    pace: of the iterations after it; None: as before. ask: call `boundary` when it ends.
    """

    stretch: float = 1.0
    pace: Pace | None = None
    ask: bool = False


Reaction = Stop | KeepTraining


class Policy(Protocol):
    """One object per run: it may keep state. `pace` is asked whenever training (re)starts.

    fault_free: samples per second with nothing failed, which goodput is measured against.
    workers: that the job is made for; more than so many stand by. extra_workers: that are paid for
    beside those of the trace.
    """

    name: str
    fault_free: float
    workers: int
    extra_workers: int

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        """Workers came or went. training: an iteration is in flight; paused: between two paces; neither: halted."""
        ...

    def boundary(self, cluster: Cluster) -> Reaction:
        """An iteration has ended after which the policy had asked to be called."""
        ...

    def pace(self, cluster: Cluster) -> Pace | None:
        """With these workers, from now. None: training can't go on; the job waits for workers."""
        ...
