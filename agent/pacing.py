"""Stretches ops to given times, as an accelerator of that speed would take; the computation is inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class PacedDevice:
    """The clock of a device that runs what is queued back to back.

    An op that needs nothing from another worker starts when the op before it ends, not when this
    process is next given a processor: what a busy machine adds to a wake-up is not added to every
    op. An op that received something starts when it has it. No op ends before its own computation.

    pace: seconds by op kind; a kind that is missing takes as long as it takes.
    """

    def __init__(
        self,
        pace: Mapping[str, float],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace = dict(pace)
        if "I" in pace and "W" in pace:
            self._pace["B"] = pace["I"] + pace["W"]
        self._now, self._sleep = now, sleep
        self._free: float | None = None

    def waited(self) -> None:
        """The next op needed something from another worker and starts when its computation does."""
        self._free = None

    def finish(self, kind: str, started: float) -> float:
        """Returns when the op has ended, with the seconds that it took on the device.

        started: when its computation began, on the clock `now`.
        """
        pace = self._pace.get(kind)
        if pace is None:
            self._free = None
            return self._now() - started
        begun = started if self._free is None else self._free
        end = begun + pace
        now = self._now()
        if end > now:
            self._sleep(end - now)
        else:
            end = now
        self._free = end
        return end - begun
