"""How many connections the console takes at a time: fewer than it may have files open.

Each connection is a file. Without any left, the console could not read its database, begin a process or accept who
comes next, not even to say so. So some are kept for itself, and who comes beyond is told to come back.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import structlog

from agent.protocol import Problem
from app.api.problems import MEDIA_TYPE

log = structlog.get_logger()

# For databases, processes, modules that are read in, and whoever is being refused.
KEPT_FILES = 128
# Between two lines in the log.
QUIET_SECONDS = 60.0
# Seconds for a refused connection to ask, so that the answer reaches it.
PATIENCE = 1.0


class Crowd:
    """most: connections at a time."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._said = -QUIET_SECONDS
        self._refused = 0

    @classmethod
    def of_process(cls) -> Crowd:
        """By the files that this process may have open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(1 << 31 if files == resource.RLIM_INFINITY else max(1, files - min(KEPT_FILES, files // 2)))

    def admits(self, connections: int) -> bool:
        """Is there room for the last one of so many? One that is refused is said in the log, once a minute."""
        if connections <= self.most:
            return True
        self._refused += 1
        now = self._clock()
        if now - self._said >= QUIET_SECONDS:
            log.warning(
                "connections are refused: as many are open as the limit on open files (ulimit -n) allows",
                open=self.most,
                refused=self._refused,
            )
            self._said, self._refused = now, 0
        return False

    def hopeless(self, connections: int) -> bool:
        """Are there so many that are being refused that even those take the files that are kept?"""
        return connections > self.most + KEPT_FILES // 4

    @property
    def answer(self) -> bytes:
        """To whatever is asked over a connection that is refused."""
        detail = f"{self.most} connections are open, as many as the console takes; try again in a second"
        body = (
            Problem(title="Service Unavailable", status=503, code="crowded", detail=detail).model_dump_json().encode()
        )
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
        return b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n\r\n%b" % (head.encode(), body)
