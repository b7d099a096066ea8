"""Stretches ops to given times, as an accelerator of that speed would take; the computation is inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Problem, Worker
from openrecycle.planner.layers.migration import SECONDS

# Seconds. An op that starts so soon after this process woke up from the one before had its inputs by then.
PROMPT = 0.00025
# By how much a late wake-up may be made up for where an op received something; see PacedDevice.
GRACE = 0.001


class PacedDevice:
    """The clock of a device that runs what is queued back to back.

    An op whose inputs are there starts when the op before it ends, not when this process is next
    given a processor: what a busy machine adds to a wake-up is not added to every op. An op that had
    to wait starts when it has what it waited for. No op ends before its own computation.

    When a received input came in is not known exactly: it may have come while this process was late
    to wake up. So there a wake-up is made up for by GRACE at most; no op is too short by more.

    pace: seconds by op kind; a kind that is missing takes as long as it takes. ended: when the last
    op did, on the device.
    """

    def __init__(
        self,
        pace: Mapping[str, float],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.set_pace(pace)
        self._now, self._sleep = now, sleep
        self.ended = 0.0
        self._free: float | None = None
        self._woke = 0.0
        self._received = False

    def set_pace(self, pace: Mapping[str, float]) -> None:
        """From the next op on."""
        self._pace = dict(pace)
        if "I" in pace and "W" in pace:
            self._pace["B"] = pace["I"] + pace["W"]

    def paces(self, kind: str) -> bool:
        """Is an op of this kind stretched?"""
        return kind in self._pace

    def waited(self) -> None:
        """The next op had to wait for peers and starts when its computation does."""
        self._free = None

    def received(self) -> None:
        """The next op has just been given something by another worker, for which it may have waited."""
        self._received = True

    def finish(self, kind: str, started: float) -> float:
        """Returns when the op has ended, with the seconds that it took on the device.

        started: when its computation began, on the clock `now`.
        """
        pace = self._pace.get(kind)
        if pace is None:
            self._free, self._received = None, False
            self.ended = self._now()
            return self.ended - started
        begun = self._begun(started)
        self._free = max(begun + pace, self._now())
        if (left := self._free - self._now()) > 0:
            self._sleep(left)
        self._woke, self._received = self._now(), False
        self.ended = self._free
        return self._free - begun

    def _begun(self, started: float) -> float:
        if self._free is None:
            return started
        if not self._received:
            return self._free
        return max(self._free, started - GRACE) if started - self._woke < PROMPT else started


def profile_pace(job: Job, me: Worker, living: Iterable[Worker]) -> dict[str, float]:
    """Seconds by op kind that the job's profile says `me` takes, at its own speed, with these workers.

    O has the reduction in it, and is left out where the profile says nothing of either.
    Raises InputError for a time unit that is no time.
    """
    second = SECONDS.get(job.time_unit)
    if second is None:
        raise InputError(
            "planning.pace", "profile", f"a profile in {', '.join(SECONDS)}; its time unit is {job.time_unit}"
        )
    unit = second / job.ticks_per_unit
    ticks = Problem(job, frozenset(job.workers()) - frozenset(living)).worker_ticks(me)
    times = {"F": ticks.forward, "I": ticks.input_backward, "W": ticks.weight_backward, "O": ticks.optimizer}
    return {kind: n * unit for kind, n in times.items() if kind != "O" or n}
