"""All limits of the agents, with their defaults and reasons: how long a worker waits for a peer, how long it may be
silent, how long it may be at one op.

heartbeat < suspect < dead < transfer < group: the lower time-outs are the console's (FailureTimeouts in
agent.coordination.membership). Whoever waits for a dead peer is freed by the generation that the console opens, long
before its own time-outs. A shorter one would break a transfer whose peer is only slow to be declared dead, and take
the blame for it.

None of them counts time in which the one who judges, or the one who is judged, did not get to run: see
agent.monitoring.liveness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from openrecycle.agent.config.settings import OptionGroup, documented, option

LONGEST_SECONDS = 86400.0
ALIVE_SECONDS = 1.0
"""A worker process says so often that it lives."""
TIMES_LONGEST = 20.0
"""An op may take so many times as long as the longest of its kind has taken on this worker."""


def _seconds(default: float, flag: str, help: str, **more: Any) -> Any:
    limits: dict[str, Any] = {"above": 0, "most": LONGEST_SECONDS, "expected": "more than 0 seconds, at most a day"}
    return option(default, f"Seconds {help}", flag=flag, **limits, **more)


@documented
@dataclass(frozen=True, kw_only=True)
class Timeouts(OptionGroup):
    """How long workers, and what watches them, wait."""

    PATH: ClassVar[str] = "faults.timeouts"

    form: float = _seconds(15.0, "--form-timeout", "in which the workers of a generation must have connected.")
    transfer: float = _seconds(
        120.0,
        "--transfer-timeout",
        "to wait for another worker's data; longer than the silence after which a worker is out.",
        told="transfer_timeout",
    )
    group: float = _seconds(
        150.0,
        "--group-timeout",
        "to wait for a sum over a stage's workers; longer than for a transfer.",
        told="group_timeout",
    )
    # A worker says something every ALIVE_SECONDS; its launcher waits longer where its console does.
    silence: float = _seconds(
        20.0, "--silence-timeout", "of silence after which a worker process that does not compute is ended."
    )
    start: float = _seconds(120.0, "--start-timeout", "in which a new worker process must have said something.")
    # However quick ops have been: TIMES_LONGEST times 40 ms would be less than a busy machine may cost.
    op: float = _seconds(
        10.0,
        "--op-timeout",
        "that an op may take, or 20 times its longest so far, whichever is more; then it hangs.",
    )
    # Also, what the last worker of a stage may take.
    first_op: float = _seconds(
        600.0, "--first-op-timeout", "for an op that was not measured yet: it may be compiled first."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group <= self.transfer:
            raise self.refuse("group", f"more than `{self.path('transfer')}` ({self.transfer:g} s)")
        if self.silence < 4 * ALIVE_SECONDS:
            raise self.refuse("silence", f"at least {4 * ALIVE_SECONDS:g} s, four words of a worker")
        if self.first_op < self.op:
            raise self.refuse("first_op", f"at least `{self.path('op')}` ({self.op:g} s)")

    @property
    def pause(self) -> float:
        """Seconds after which a silence may be that of the listener, or of all: well below one that is a death."""
        return max(2.5 * ALIVE_SECONDS, self.silence / 4)

    def check_above(self, dead: float) -> None:
        """dead: seconds of silence after which a worker is out. Raises InputError."""
        if self.transfer <= dead:
            raise self.refuse("transfer", f"more than the {dead:g} s after which a silent worker is out of the job")
