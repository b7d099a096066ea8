"""The options that a job can take by itself while workers are out, and who picks one: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PATIENCE = 60.0
LEAST_PATIENCE, MOST_PATIENCE = 1.0, 86_400.0


class Mode(StrEnum):
    """AUTOMATIC: the coordinator decides at once. MANUAL: when workers are lost, the job waits for an
    operator to choose how it goes on, and the best way is taken when nobody does."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True)
class Candidate:
    """One option, called as in planner.policy. failed: the places that are empty under it; moves: (from,
    to) of workers that change their stage.

    rate: samples per second by its plan; share: of the fault-free plan's, slowdown_vs_1f1b: against
    fault-free 1F1B. pause: seconds until it trains. samples: until the expected repair. plan: its
    fingerprint. text: what it does and brings, in a sentence without its full stop.
    """

    name: str
    failed: tuple[str, ...]
    moves: tuple[tuple[str, str], ...] = ()
    rate: float = 0.0
    share: float = 0.0
    slowdown_vs_1f1b: float = 0.0
    pause: float = 0.0
    samples: float = 0.0
    plan: str = ""
    text: str = ""


@dataclass(frozen=True)
class Offer:
    """failed: the workers that were out when it was made. candidates: best first. better: the name of
    one that is clearly better than re-routing, which is what the job does anyway; "": none is."""

    failed: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    better: str = ""

    def find(self, name: str) -> Candidate | None:
        return next((c for c in self.candidates if c.name == name), None)


# -- what can happen ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Offered:
    """The options have been worked out. None: they could not be, for the reason given."""

    failed: tuple[str, ...]
    offer: Offer | None
    reason: str = ""


@dataclass(frozen=True)
class Chosen:
    """An operator picked a candidate. failed: the workers that were out in what they saw; None: not said."""

    name: str
    actor: str
    failed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModeSet:
    """patience: seconds that the job waits for an operator in manual mode."""

    mode: Mode
    patience: float
    actor: str


@dataclass(frozen=True)
class PlanFrozen:
    """An operator wants the plan in force to stay (app.coordination.freezing), or, not frozen, no longer."""

    frozen: bool
    actor: str


@dataclass(frozen=True)
class DrainAsked:
    """An operator wants `worker` to leave at the next boundary."""

    worker: str
    actor: str


@dataclass(frozen=True)
class UsePlan:
    """The plan of this fingerprint is to be in force, with the same workers. failed: those that it does
    without. actor: the operator who wants it; "": the console does, for the reason given."""

    fingerprint: str
    failed: tuple[str, ...]
    actor: str
    reason: str = ""
