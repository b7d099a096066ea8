"""Thread pools for the API's blocking calls, which must not run in the event loop, and a watch on that loop."""

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

# Seconds after which a call, or a job's tick, counts as stuck. A database that does not answer takes a tenth of it.
STUCK_SECONDS = 120.0


class Threads:
    """A thread pool that knows since when each of its threads has been at work. stuck_seconds: a call counts as stuck
    after this time."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self.name, self.stuck_seconds = most, name, STUCK_SECONDS
        self._pool = ThreadPoolExecutor(most, name)
        self._began: dict[object, float] = {}
        self._taken = 0

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._timed, function)

    async def run_now(self, function: Callable[[], T]) -> T:
        """Runs a function if a thread is free, else raises ConsoleError (429). For one event loop."""
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
        """Whether every thread has been at one call for longer than any should take."""
        began = list(self._began.values())
        return len(began) >= self._most and max(began) < time.monotonic() - self.stuck_seconds


# The database has one writer at a time: more threads would only queue in another place.
_pool = Threads(8, "api")
# Jobs are created one after the other: one of 16,384 workers takes half a second, and eight would take all threads.
new_job_threads = Threads(1, "new jobs")
# Exports wait for child processes, so they have threads of their own and leave the others to agents.
export_threads = Threads(4, "exports")


def stuck() -> str:
    """Returns the names of the pools whose threads are all stuck; empty: none."""
    return ", ".join(threads.name for threads in (_pool, new_job_threads) if threads.stuck)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await _pool.run(partial(function, *args, **kwargs))


async def in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function that may make thousands of workers, in a thread of its own, so that other requests don't wait."""
    return await new_job_threads.run(partial(function, *args, **kwargs))


async def exporting(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function that makes a file, which may take minutes. Raises ConsoleError (429) when all such threads are at
    work."""
    return await export_threads.run_now(partial(function, *args, **kwargs))


async def answer_in_thread(function: Callable[P, BaseModel], *args: P.args, **kwargs: P.kwargs) -> Response:
    """Returns the function's result as JSON, written in the thread. For results with thousands of entries, which
    FastAPI would write in the event loop."""

    def text() -> str:
        return function(*args, **kwargs).model_dump_json()

    return Response(await in_thread(text), media_type="application/json")


# -- when the event loop ran last --------------------------------------------------------------------


class EventLoopWatch:
    """Knows when the event loop that receives heartbeats last ran. While the loop stands still, in a handler that takes
    long, no worker can be heard, so no silence counts.

    One per process. `start` is called in the loop, the rest by any thread.

    every: seconds between two beats of the loop. clock: the console's. Without `expect` or `start`, nothing is ever
    overdue.
    """

    def __init__(self, every: float = 0.25, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expected, self._ran = False, 0.0

    def expect(self) -> None:
        """Notes that a loop will start; until it runs, it counts as overdue from now on."""
        self._expected, self._ran = True, self._clock()

    def start(self) -> None:
        """Begins to watch the running loop, until it ends."""
        self._loop = asyncio.get_running_loop()
        self._beat()

    @property
    def overdue(self) -> float:
        """Seconds for which the loop has not run though it should have; 0 if none is expected, or it has ended."""
        loop = self._loop
        if not self._expected if loop is None else loop.is_closed():
            return 0.0
        return max(0.0, self._clock() - self._ran - self._every)

    def _beat(self) -> None:
        assert self._loop is not None
        self._ran = self._clock()
        self._loop.call_later(self._every, self._beat)
