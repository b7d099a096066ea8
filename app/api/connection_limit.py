"""How many connections the console takes at a time: fewer than it may have files open.

Each connection is a file. Without any left, the console could not read its database, begin a process or accept who
comes next, not even to say so. So some are kept for itself, and who comes beyond is told to come back.

A connection over which nothing is asked shuts nobody out: where there is no room, or where an address has its share,
the one that has waited longest for a request makes way, of the address that has most of them. What has been asked is
always answered.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import structlog

from openrecycle.agent.messages.protocol import ProblemDetails
from openrecycle.app.runtime.problems import MEDIA_TYPE

log = structlog.get_logger()

# For databases, processes, modules that are read in, and whoever is being refused.
KEPT_FILES = 128
# Between two lines in the log.
QUIET_SECONDS = 60.0
# Seconds for a refused connection to ask, so that the answer reaches it.
TIMEOUT = 1.0


class LimitedConnection(Protocol):
    """A connection. address: of its other end; ours, behind a proxy."""

    address: str

    def make_way(self) -> None:
        """Ends it, soon: nothing has been asked over it."""


class ConnectionLimit:
    """most: connections at a time. share: of one address, at most; None: half of them. exempt: is an address a
    proxy's, which has everybody's connections? For the event loop alone: no lock."""

    def __init__(
        self,
        most: int,
        *,
        share: int | None = None,
        exempt: Callable[[str], bool] = lambda address: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self.share = max(1, most // 2) if share is None else share
        self._exempt = exempt
        self._clock = clock
        self._open: Counter[str] = Counter()
        # By address: those over which nothing is asked now, the one that waits for longest first.
        self._waiting: dict[str, dict[LimitedConnection, None]] = {}
        self._leaving: set[LimitedConnection] = set()
        self._said = -QUIET_SECONDS
        self._refused = 0

    @classmethod
    def of_process(
        cls, share: int | None = None, exempt: Callable[[str], bool] = lambda address: False
    ) -> ConnectionLimit:
        """By the files that this process may have open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = 1 << 31 if files == resource.RLIM_INFINITY else max(1, files - min(KEPT_FILES, files // 2))
        return cls(most, share=share, exempt=exempt)

    # -- who is there ---------------------------------------------------------------------------

    def enter(self, guest: LimitedConnection, connections: int) -> bool:
        """May it stay? connections: that are open, with this one."""
        address = guest.address
        self._open[address] += 1
        self.waits(guest)
        over_share = self._open[address] > self.share and not self._exempt(address)
        if over_share and not self._evict(address, guest):
            return self.admits(self.most + 1)  # said as any other refusal is
        if connections - len(self._leaving) > self.most:
            busiest = max(self._open, key=self._open.__getitem__)
            if not self._evict(busiest, guest) and not self._evict(address, guest):
                return self.admits(connections - len(self._leaving))
        return True

    def leave(self, guest: LimitedConnection) -> None:
        """It is closed, or is no HTTP connection any more."""
        self.asks(guest)
        if guest in self._leaving:
            self._leaving.discard(guest)
            return
        self._open[guest.address] -= 1
        if self._open[guest.address] <= 0:
            del self._open[guest.address]

    def waits(self, guest: LimitedConnection) -> None:
        """Nothing is asked over it from now on."""
        waiting = self._waiting.get(guest.address)
        if waiting is None:
            waiting = self._waiting[guest.address] = {}
        waiting.pop(guest, None)
        waiting[guest] = None

    def asks(self, guest: LimitedConnection) -> None:
        """The whole head of a request has come."""
        waiting = self._waiting.get(guest.address)
        if waiting is not None:
            waiting.pop(guest, None)
            if not waiting:
                del self._waiting[guest.address]

    def _evict(self, address: str, newcomer: LimitedConnection) -> bool:
        victim = next((guest for guest in self._waiting.get(address, ()) if guest is not newcomer), None)
        if victim is None:
            return False
        self.leave(victim)
        self._leaving.add(victim)
        victim.make_way()
        return True

    # -- refusing -------------------------------------------------------------------------------

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
            ProblemDetails(title="Service Unavailable", status=503, code="crowded", detail=detail)
            .model_dump_json()
            .encode()
        )
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
        return b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n\r\n%b" % (head.encode(), body)
