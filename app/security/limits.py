"""How often somebody may ask: token buckets, and a count of wrong tokens.

The numbers: agents 20,000 requests a second and 100,000 at once per token, which 8,192 workers at one
heartbeat a second and all that they say when a generation opens stay below; people and programs 100 a second
and 1,000 at once per token or account (a page is some 100 files); addresses without a right token 10 a
second and 200 at once. Wrong tokens: 20 a minute per address, 200 a minute in all; an address from which a right one
came before has 200 a minute of its own.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimit:
    """per_second: in the long run. burst: at once."""

    per_second: float
    burst: float


AGENTS = RateLimit(20_000, 100_000)
PEOPLE = RateLimit(100, 1_000)
UNKNOWN = RateLimit(10, 200)

WRONG_SECONDS = 60.0
WRONG_PER_ADDRESS = 20
# Of an address from which a right token came before: others behind it must not lock its owner out.
WRONG_PER_GOOD_ADDRESS = 200
WRONG_IN_ALL = 200

# Buckets that are kept; the one that was idle for longest is forgotten first, and is full again by then.
MAX_KEPT = 20_000

Clock = Callable[[], float]


class RateLimits:
    """One bucket for each (kind, key). For the event loop alone: no lock."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[tuple[RateLimit, str], tuple[float, float]] = OrderedDict()

    def take(self, rate: RateLimit, key: str) -> int:
        """0 when the request may pass, else seconds until it may."""
        now = self._clock()
        name = (rate, key)
        left, at = self._buckets.pop(name, (rate.burst, now))
        left = min(rate.burst, left + (now - at) * rate.per_second)
        wait = 0 if left >= 1 else max(1, math.ceil((1 - left) / rate.per_second))
        self._buckets[name] = (left if wait else left - 1, now)
        if len(self._buckets) > MAX_KEPT:
            self._buckets.popitem(last=False)
        return wait


class WrongTokens:
    """How many wrong tokens came in the last minute, from an address and from everybody."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._all: deque[float] = deque(maxlen=WRONG_IN_ALL)
        self._by_address: OrderedDict[str, deque[float]] = OrderedDict()
        self._good: OrderedDict[str, None] = OrderedDict()

    def note(self, address: str) -> None:
        now = self._clock()
        self._all.append(now)
        of_address = self._by_address.pop(address, None) or deque(maxlen=WRONG_PER_GOOD_ADDRESS)
        of_address.append(now)
        self._by_address[address] = of_address
        if len(self._by_address) > MAX_KEPT:
            self._by_address.popitem(last=False)

    def right(self, address: str) -> None:
        """A right token came from there: strangers who guess can't lock it out."""
        self._good.pop(address, None)
        self._good[address] = None
        if len(self._good) > MAX_KEPT:
            self._good.popitem(last=False)

    def wait(self, address: str) -> int:
        """Seconds until another token may be tried from there; 0: now."""
        if address in self._good:
            counts = [(self._by_address.get(address), WRONG_PER_GOOD_ADDRESS)]
        else:
            counts = [(self._by_address.get(address), WRONG_PER_ADDRESS), (self._all, WRONG_IN_ALL)]
        now = self._clock()
        waits = [WRONG_SECONDS - (now - times[-most]) for times, most in counts if times and len(times) >= most]
        return max([0, *(math.ceil(wait) for wait in waits)])
