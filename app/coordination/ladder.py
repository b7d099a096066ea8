"""When silence means what: the rungs of the time-out ladder."""

from __future__ import annotations

from dataclasses import dataclass

from openrecycle.planner.errors import InputError

LOST_SECONDS = 3600.0


@dataclass(frozen=True)
class Ladder:
    """When silence means what, in seconds. Each rung must lie above the one before.

    heartbeat: how often a worker reports. suspect: silence after which it is marked. dead: silence
    after which the job goes on without it. transfer_grace: how long a broken transfer may wait for
    the exit or the time-out that explains it. Raises InputError.
    """

    heartbeat: float = 1.0
    suspect: float = 5.0
    dead: float = 20.0
    transfer_grace: float = 2.0

    def __post_init__(self) -> None:
        if not 0.05 <= self.heartbeat <= 3600:
            raise InputError("heartbeat", self.heartbeat, "0.05 to 3600 seconds")
        if not self.suspect >= 2 * self.heartbeat:
            raise InputError("suspect", self.suspect, f"at least two heartbeats ({2 * self.heartbeat:g} s)")
        if not self.suspect < self.dead <= 86400:
            raise InputError("dead", self.dead, f"more than suspect ({self.suspect:g} s), at most a day")
        if not 0 < self.transfer_grace < self.dead:
            raise InputError("transfer_grace", self.transfer_grace, f"above 0, below dead ({self.dead:g} s)")

    @property
    def lost(self) -> float:
        """Silence of all workers, after which the job is given up; until then they may have been suspended together."""
        return max(self.dead, LOST_SECONDS)

    def check_above(self, transfer: float | None, group: float | None) -> None:
        """The rungs that a job's agents have said they wait on. Raises InputError."""
        if transfer is not None and transfer <= self.dead:
            expected = f"more than dead ({self.dead:g} s), the silence after which this console takes a worker out"
            raise InputError("transfer_timeout", transfer, expected)
        if group is not None and transfer is not None and group <= transfer:
            raise InputError("group_timeout", group, f"more than transfer_timeout ({transfer:g} s)")
