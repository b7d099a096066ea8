"""Runs the console's blocking calls in threads of the API's own, off the event loop, and watches that loop."""

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

# Seconds after which a call, or a job's turn, counts as stuck: a database that does not answer takes a tenth of it.
STUCK_SECONDS = 120.0


class Threads:
    """A pool that knows since when each of its threads is at work. stuck_seconds: after so many a call counts as
    stuck."""

    def __init__(self, most: int, name: str, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._most, self.name, self.stuck_seconds = most, name, stuck_seconds
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
        return len(began) >= self._most and max(began) < time.monotonic() - self.stuck_seconds


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


# -- when the event loop ran last --------------------------------------------------------------------


class EventLoopWatch:
    """When the event loop ran last on which the console hears its workers: while it stands still, in a handler that
    takes long, nobody can be heard, and nobody's silence means anything.

    One per process. `start` is called in the loop, the rest by any thread.

    every: seconds between two beats of the loop. clock: that of the console. Where no loop is expected, nothing is
    ever overdue.
    """

    def __init__(self, every: float = 0.25, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expected, self._ran = False, 0.0

    def expect(self) -> None:
        """There will be a loop; until it runs, it is overdue from now on."""
        self._expected, self._ran = True, self._clock()

    def start(self) -> None:
        """Until the loop ends."""
        self._loop = asyncio.get_running_loop()
        self._beat()

    @property
    def overdue(self) -> float:
        """Seconds for which the loop has not run though it should have; 0 where none is expected, or not any more."""
        loop = self._loop
        if not self._expected if loop is None else loop.is_closed():
            return 0.0
        return max(0.0, self._clock() - self._ran - self._every)

    def _beat(self) -> None:
        assert self._loop is not None
        self._ran = self._clock()
        self._loop.call_later(self._every, self._beat)
