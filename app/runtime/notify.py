"""Wakes coroutines that wait for something new, from any thread."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How many waiters are woken per round of the event loop.
AT_ONCE = 8
# Waiters that come while this many wait get random time-outs, at least half of what they asked for. Else all launchers
# that were woken by the same generation would ask again at the same time, and again each time. Of 2,048 workers they
# are 256, and the answers take the loop a sixth of a second, in which no heartbeat is heard.
MANY_WAITERS = 64


class Topic:
    """Something that coroutines wait for. `publish` tells every coroutine in `wait_for` to look again. Nothing is lost
    in between, since a waiter looks once more after it has registered."""

    def __init__(self, many: int = MANY_WAITERS, shares: tuple[float, float] = (0.5, 1.0)) -> None:
        """many: from this many waiters on, each waits for a random share of the time that it asks for. shares: the
        smallest and the largest such share."""
        self._many, self._shares = many, shares
        self._lock = threading.Lock()
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._closed = False
        self._dismissed = 0

    def publish(self) -> None:
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with self._lock:
            for future, loop in self._waiters.items():
                waiting.setdefault(loop, []).append(future)
        for loop, futures in waiting.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake_some, loop, futures)  # one call for all: to interrupt a loop is slow

    def dismiss(self) -> None:
        """Ends the waiting of all who wait now: `wait_for` returns None if there is no news."""
        with self._lock:
            self._dismissed += 1
        self.publish()

    def close(self) -> None:
        """Ends all waiting, now and later; `wait_for` returns None if there is no news."""
        self._closed = True
        self.publish()

    @property
    def followed(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    async def wait_for(self, look: Callable[[], T | None], timeout: float) -> T | None:
        """Returns the first `look()` that is not None, or None after `timeout` seconds (sooner if many wait, or
        after `dismiss`). `look` must not block."""
        loop = asyncio.get_running_loop()
        if len(self._waiters) >= self._many:
            timeout *= random.SystemRandom().uniform(*self._shares)
        until, dismissed = loop.time() + timeout, self._dismissed
        while True:
            news: asyncio.Future[None] = loop.create_future()
            with self._lock:
                self._waiters[news] = loop
            try:
                found = look()
                left = until - loop.time()
                if found is not None or self._closed or self._dismissed != dismissed or left <= 0:
                    return found
                timer = loop.call_later(left, _wake, news)
                try:
                    await news
                finally:
                    timer.cancel()
            finally:
                with self._lock:
                    self._waiters.pop(news, None)


def _wake_some(loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], first: int = 0) -> None:
    """Wakes a few waiters per round of the loop: thousands that answer at once would delay heartbeats for as long."""
    for future in futures[first : first + AT_ONCE]:
        _wake(future)
    if first + AT_ONCE < len(futures):
        loop.call_soon(_wake_some, loop, futures, first + AT_ONCE)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
