"""What a console does about the lead, from what it sees: a function without a clock or a database."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from openrecycle.db.leadership import Lease


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds. renew: between two renewals of the lease. lease: without renewal, after which it has run out.
    poll: between two looks of a console that does not lead. A takeover takes at most about lease + 2 poll,
    and the reading of the jobs."""

    renew: float = 1.0
    lease: float = 4.0
    poll: float = 0.5


class Action(Enum):
    STAY = "stay"  # and renew the lease again
    STEP_DOWN = "step down"
    LEAD = "lead"  # claim a new term
    EVICT = "evict"  # end the sessions of a leader that does not run, or those that this console had before
    WAIT = "wait"


@dataclass(frozen=True)
class Seen:
    """reached: the database answered. locked: this console's session holds the lock. lease: None where there
    is none yet."""

    reached: bool
    locked: bool = False
    lease: Lease | None = None


@dataclass(frozen=True)
class Decision:
    """reason: a sentence for people, without a full stop."""

    action: Action
    reason: str


def decide(me: str, term: int | None, seen: Seen, times: LeaseTimes) -> Decision:
    """me: this console. term: the one in which it leads, or None."""
    return _waiting(me, seen, times) if term is None else _leading(me, term, seen)


def _leading(me: str, term: int, seen: Seen) -> Decision:
    if not seen.reached:
        return Decision(Action.STEP_DOWN, "the connection to the database is lost, and the lead with it")
    lease = seen.lease
    if lease is None or lease.term != term:
        return Decision(Action.STEP_DOWN, f"{leader(lease)} leads since")
    if lease.holder != me or not seen.locked:
        return Decision(Action.STEP_DOWN, f"the lead of term {term} was taken from this console")
    return Decision(Action.STAY, f"this console leads (term {term})")


def _waiting(me: str, seen: Seen, times: LeaseTimes) -> Decision:
    if not seen.reached:
        return Decision(Action.WAIT, "the database does not answer; nobody is known to lead")
    lease = seen.lease
    if seen.locked:
        return Decision(Action.LEAD, f"nobody leads{_after(lease)}")
    if lease is None or not lease.holder:
        # Between a lock and a lease; or a version of this program that knew the lock alone.
        return Decision(Action.WAIT, "another console is about to lead")
    if lease.holder == me:
        # Its connection broke, and the database has not noticed: nobody but this console knows that.
        reason = f"the database still holds the lead of term {lease.term} for an earlier connection of this console"
        return Decision(Action.EVICT, reason)
    if lease.age >= times.lease:
        return Decision(Action.EVICT, f"{leader(lease)} leads, but was not heard for {lease.age:.1f} s")
    return Decision(Action.WAIT, f"{leader(lease)} leads (term {lease.term}); it was heard {lease.age:.1f} s ago")


def leader(lease: Lease | None) -> str:
    return lease.address if lease is not None and lease.address else "another console"


def _after(lease: Lease | None) -> str:
    return f" after term {lease.term}" if lease is not None and lease.term else ""
