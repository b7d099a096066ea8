"""Runs the console's blocking calls in threads of the API's own, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from openrecycle.app.runtime.errors import ConsoleError

P = ParamSpec("P")
T = TypeVar("T")

# Seconds after which a call counts as stuck: the database gives up long before.
STUCK_SECONDS = 120.0


class Threads:
    """A pool that knows since when each of its threads is at work."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self.name = most, name
        self._pool = ThreadPoolExecutor(most, name)
        self._began: dict[object, float] = {}
        self._taken = 0

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._timed, function)

    async def run_now(self, function: Callable[[], T]) -> T:
        """Raises ConsoleError (429) where every thread is at work. For one event loop."""
        if self._taken >= self._most:
            raise ConsoleError(429, "too_many", f"{self._most} {self.name} are being made already; try again later")
        self._taken += 1
        try:
            return await self.run(function)
        finally:
            self._taken -= 1

    def _timed(self, function: Callable[[], T]) -> T:
        key = object()
        self._began[key] = time.monotonic()
        try:
            return function()
        finally:
            del self._began[key]

    @property
    def stuck(self) -> bool:
        """Has every thread been at one call for longer than any takes?"""
        began = list(self._began.values())
        return len(began) >= self._most and max(began) < time.monotonic() - STUCK_SECONDS


# The database has one writer at a time: more threads would only queue in another place.
_pool = Threads(8, "api")
# Jobs are made one after the other: one of 16,384 workers takes half a second, and all threads would be taken by eight.
_maker = Threads(1, "new jobs")
# They wait for children, of which there are a few: agents have the other threads.
_exporter = Threads(4, "exports")


def stuck() -> str:
    """Which threads stand still; empty: none."""
    return ", ".join(threads.name for threads in (_pool, _maker) if threads.stuck)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await _pool.run(partial(function, *args, **kwargs))


async def in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For making what may have thousands of workers: whoever asks for something else meanwhile waits for none of it."""
    return await _maker.run(partial(function, *args, **kwargs))


async def exporting(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For a file that may take minutes. Raises ConsoleError (429) where enough of them are being made."""
    return await _exporter.run_now(partial(function, *args, **kwargs))


async def answer_in_thread(function: Callable[P, BaseModel], *args: P.args, **kwargs: P.kwargs) -> Response:
    """What the function returns, as JSON, for what may speak of thousands: FastAPI would write it in the event loop."""

    def text() -> str:
        return function(*args, **kwargs).model_dump_json()

    return Response(await in_thread(text), media_type="application/json")
