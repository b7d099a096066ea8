"""How long workers wait for each other. The upper rungs of the ladder whose lower ones are the console's.

heartbeat < suspect < dead < transfer < group: whoever waits for a dead peer is freed by the epoch that the
console opens, long before its own time-outs. A shorter one would break a transfer whose peer is only slow
to be declared dead, and take the blame for it. Whoever is heard, and does not take up an epoch for as long as one
waits for a transfer, hangs: its launcher ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError

HANG_SECONDS = 20.0
"""Silence after which a launcher ends a worker process of its own; longer where its console waits longer."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. form: to connect the groups of an epoch. transfer: to wait for a peer's data. group: for a
    sum over a stage's workers, in which others may still wait for transfers. Raises InputError."""

    form: float = 15.0
    transfer: float = 120.0
    group: float = 150.0

    def __post_init__(self) -> None:
        for name in ("form", "transfer", "group"):
            if not 0 < getattr(self, name) <= 86400:
                raise InputError(f"--{name}-timeout", getattr(self, name), "more than 0 seconds, at most a day")
        if self.group <= self.transfer:
            raise InputError("--group-timeout", self.group, f"more than --transfer-timeout ({self.transfer:g} s)")

    def check_above(self, dead: float) -> None:
        """dead: seconds of silence after which a worker is out. Raises InputError."""
        if self.transfer <= dead:
            raise InputError(
                "--transfer-timeout",
                self.transfer,
                f"more than the {dead:g} s after which a silent worker is out of the job",
            )
