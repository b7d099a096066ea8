"""Wakes coroutines that wait for something new, from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Topic:
    """`publish` says "look again" to everyone in `wait_for`. Nothing is lost in between: a waiter
    looks once more after it has registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closed = False

    def publish(self) -> None:
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        with self._lock:
            for event, loop in self._waiters.items():
                waiting.setdefault(loop, []).append(event)
        for loop, events in waiting.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, events)  # once: a loop is slow to interrupt

    def close(self) -> None:
        """Sends every waiter home with None, now and later."""
        self._closed = True
        self.publish()

    @property
    def closed(self) -> bool:
        return self._closed

    async def wait_for(self, look: Callable[[], T | None], timeout: float) -> T | None:
        """The first `look()` that is not None; None after `timeout` seconds. `look` must not block."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        until = loop.time() + timeout
        with self._lock:
            self._waiters[event] = loop
        try:
            while True:
                event.clear()
                found = look()
                left = until - loop.time()
                if found is not None or self._closed or left <= 0:
                    return found
                try:
                    await asyncio.wait_for(event.wait(), left)
                except TimeoutError:
                    return look()
        finally:
            with self._lock:
                self._waiters.pop(event, None)


def _wake(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
