"""One time axis for processes of several hosts.

Processes of a host share its monotonic clock, so their times compare as they are. Clocks of
different hosts are compared with the console's: half of the shortest of a few round trips bounds the
error, whatever the network did in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from openrecycle.agent.messages.client import ConsoleClient
from openrecycle.agent.messages.protocol import ClockReading, clock_name

ROUND_TRIPS = 8


@dataclass(frozen=True)
class Offset:
    """microseconds: to be added to this clock's times to get the console's; within ± uncertainty."""

    microseconds: int
    uncertainty: int


def offset_to_console(client: ConsoleClient) -> Offset:
    """Raises ConsoleUnavailable or ConsoleRefused."""

    def ask() -> ClockReading:
        reading = client.get("/clock", ClockReading)
        assert reading is not None
        return reading

    return measure_offset(ask)


def measure_offset(ask: Callable[[], ClockReading], now: Callable[[], int] = time.monotonic_ns) -> Offset:
    """ask: reads the console's clock; now: this one, in nanoseconds."""
    best: Offset | None = None
    for _ in range(ROUND_TRIPS):
        sent = now()
        reading = ask()
        received = now()
        if reading.name == clock_name():
            return Offset(0, 0)
        # Rounded up: the reading itself is cut to whole microseconds.
        uncertainty = (received - sent) // 2000 + 2
        if best is None or uncertainty < best.uncertainty:
            best = Offset(reading.microseconds - (sent + received) // 2000, uncertainty)
    assert best is not None
    return best
