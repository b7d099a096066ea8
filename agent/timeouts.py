"""All limits of the agents, with their defaults and reasons: how long a worker waits for a peer, how long it may be
silent, how long it may be at one op.

heartbeat < suspect < dead < transfer < group: the lower rungs are the console's (app.coordination.ladder). Whoever
waits for a dead peer is freed by the generation that the console opens, long before its own time-outs. A shorter one
would break a transfer whose peer is only slow to be declared dead, and take the blame for it.

None of them counts time in which the one who judges, or the one who is judged, did not get to run: see agent.liveness.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrecycle.planner.errors import InputError

LONGEST_SECONDS = 86400.0
ALIVE_SECONDS = 1.0
"""A worker process says so often that it lives."""
TIMES_LONGEST = 20.0
"""An op may take so many times as long as the longest of its kind has taken on this worker."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Raises InputError.

    form: to connect the groups of a generation.
    transfer: to wait for a peer's data. Above any silence that is borne.
    group: for a sum over a stage's workers, in which others may still wait for transfers.
    silence: without a word from a worker process, after which its launcher ends it, unless it computes. A worker
    says something every ALIVE_SECONDS; longer where its console waits longer.
    start: without a first word from a process that has just been started.
    op: the least that an op or the loading of a micro-batch may take, however quick they have been: TIMES_LONGEST
    times 40 ms would be less than a busy machine may cost.
    first_op: what an op may take that has not been measured yet, as it may be compiled first; also, what the last
    worker of a stage may take.
    """

    form: float = 15.0
    transfer: float = 120.0
    group: float = 150.0
    silence: float = 20.0
    start: float = 120.0
    op: float = 10.0
    first_op: float = 600.0

    def __post_init__(self) -> None:
        for name in ("form", "transfer", "group", "silence", "start", "op", "first_op"):
            if not 0 < getattr(self, name) <= LONGEST_SECONDS:
                raise InputError(option(name), getattr(self, name), "more than 0 seconds, at most a day")
        if self.group <= self.transfer:
            raise InputError(option("group"), self.group, f"more than --transfer-timeout ({self.transfer:g} s)")
        if self.silence < 4 * ALIVE_SECONDS:
            raise InputError(
                option("silence"), self.silence, f"at least {4 * ALIVE_SECONDS:g} s, four words of a worker"
            )
        if self.first_op < self.op:
            raise InputError(option("first_op"), self.first_op, f"at least --op-timeout ({self.op:g} s)")

    @property
    def pause(self) -> float:
        """Seconds after which a silence may be that of the listener, or of all: well below one that is a death."""
        return max(2.5 * ALIVE_SECONDS, self.silence / 4)

    def check_above(self, dead: float) -> None:
        """dead: seconds of silence after which a worker is out. Raises InputError."""
        if self.transfer <= dead:
            raise InputError(
                option("transfer"),
                self.transfer,
                f"more than the {dead:g} s after which a silent worker is out of the job",
            )


def option(name: str) -> str:
    """Of the field `name` of Timeouts: `--first-op-timeout`."""
    return f"--{name.replace('_', '-')}-timeout"
