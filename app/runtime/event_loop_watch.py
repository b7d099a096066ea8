"""When the event loop ran last on which the console hears its workers.

While it stands still, in a handler that takes long, nobody can be heard, and nobody's silence means anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class EventLoopWatch:
    """One per process. `start` is called in the loop, the rest by any thread.

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
