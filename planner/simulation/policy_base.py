"""What a policy is: how a job trains with the workers it has, what it does when they change, and what that costs.

But for the costs, times here and in the engine are whole microseconds, so that results do not depend on rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol

from openrecycle.planner.jobs.errors import InputError

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


@dataclass(frozen=True)
class RecoveryCosts:
    """What it costs to get from one state of a job to the next, and what a worker costs.

    Seconds, unless said otherwise. The defaults are for a job of some hundred accelerators.

    detect: from a death until all know. recover: agreement and new groups, with a plan made ahead.
    rejoin: until a worker that returns has its peers' state. migrate: until a worker that changes its
    stage has. repartition: until every worker has the layers of a new partition. restart: from the
    last checkpoint, everyone anew. checkpoint: to save one; checkpoint_interval: between two.
    dollars: per worker and hour.
    """

    detect: float = 1.0
    recover: float = 1.0
    rejoin: float = 5.0
    migrate: float = 5.0
    repartition: float = 20.0
    restart: float = 300.0
    checkpoint: float = 30.0
    checkpoint_interval: float = 1800.0
    dollars: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e7:
                raise InputError(f"--cost {field.name}", value, "a number from 0 to 1e7")
            if field.name == "checkpoint_interval" and not value:
                raise InputError("--cost checkpoint_interval", value, "a number of seconds above 0")

    @classmethod
    def parse(cls, text: str, *, field: str = "--cost") -> RecoveryCosts:
        """`detect=1,recover=0.5,...`, any subset. Raises InputError."""
        known = [f.name for f in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, raw = part.partition("=")
            if name not in known:
                raise InputError(field, part, "NAME=NUMBER with NAME one of " + ", ".join(known))
            try:
                values[name] = float(raw)
            except ValueError:
                values[name] = math.nan
            if not math.isfinite(values[name]):
                raise InputError(field, part, f"{name}=NUMBER")
        return cls(**values)
