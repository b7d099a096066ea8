"""HTTP connections: how many the console takes at a time, and what one may take of it. uvicorn has no limits of its own
on heads, on time, or on answers that nobody reads.

Each connection is a file. Without any left, the console could not read its database, begin a process or accept who
comes next, not even to say so. So some are kept for itself, and who comes beyond is told to come back.

A connection over which nothing is asked shuts nobody out: where there is no room, or where an address has its share,
the one that has waited longest for a request makes way, of the address that has most of them. What has been asked is
always answered.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from openrecycle.app.runtime.problems import AGAIN, problem

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
            busiest = max(self._waiting, key=self._open.__getitem__)
            if not self._evict(busiest, guest) and not self._evict(address, guest):
                return self.admits(connections - len(self._leaving))
        return True

    def leave(self, guest: LimitedConnection) -> None:
        """It is closed."""
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
                "connections are refused: the limit on open files (ulimit -n) or the share of one address "
                "(--connections-per-address) is reached",
                open=self.most,
                refused=self._refused,
            )
            self._said, self._refused = now, 0
        return False

    def hopeless(self, connections: int) -> bool:
        """Are there so many that are being refused that even those take the files that are kept?"""
        return connections > self.most + KEPT_FILES // 4


# Of a request's head: bytes, and seconds from its first one, or from the beginning of the connection.
HEAD_BYTES, HEAD_SECONDS = 64 * 1024, 30.0
# Of an answer so much must be taken by its reader in that time, or the connection ends: what is not read takes memory.
SEND_BYTES, SEND_SECONDS = 64 * 1024, 30.0
# Of what comes after a refusal and is not looked at.
MOST_THROWN_AWAY = 1024 * 1024

_AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER: on, for no time


class LimitedProtocol(HttpToolsProtocol):
    """One connection. limit: set by `connections`.

    A request's head has HEAD_BYTES and HEAD_SECONDS at most, from its first byte, or from the connection's beginning;
    so has what is neither head nor body (trailers, sizes of chunks). A request that has been accepted takes its time;
    its answer is read, or given up (SEND_BYTES, SEND_SECONDS).
    """

    limit: ConnectionLimit
    address = ""
    _refused = False
    _in_message = False  # has the parser had a part of a request?
    _no_head_in_time: asyncio.TimerHandle | None = None
    _idle_bytes = 0  # that were neither the end of a head nor a part of a body
    _too_large = False
    _left = False
    _upgraded = False
    _head_open = False
    _head_bytes = 0
    _thrown_away = 0
    _unread: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._await_head()
        if self.limit.enter(self, len(self.connections)):
            return
        self._refused = True
        if self.limit.hopeless(len(self.connections)):
            transport.close()
        else:
            self.loop.call_later(TIMEOUT, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._is_read()
        super().connection_lost(exc)

    def make_way(self) -> None:
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def _await_reader(self) -> None:
        if self._unread is None and self.transport.get_write_buffer_size():
            self._unread_bytes = self._unread_now()
            self._unread = self.loop.call_later(SEND_SECONDS, self._look_for_reader)

    def _look_for_reader(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() and self._unread_now() > self._unread_bytes - SEND_BYTES:
            # Closing it would wait for the reader, and the system would keep what is not read.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()
        else:
            self._await_reader()

    def _unread_now(self) -> int:
        """Bytes, with those that the system has and the other side has not: megabytes, of which it is slow to ask for
        more."""
        held = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", held)[0])

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def handle_websocket_upgrade(self) -> None:
        """It stays one of its address's, and waits for nothing any more."""
        self._upgraded = True
        self._head_came()
        self._is_read()
        self.limit.asks(self)
        self.ws_protocol_class = partial(LimitedWebSocket, self._leave)  # type: ignore[assignment]
        super().handle_websocket_upgrade()

    def _leave(self) -> None:
        self._head_came()
        if not self._left:
            self._left = True
            self.limit.leave(self)

    def _await_head(self) -> None:
        if self._no_head_in_time is None:
            self._no_head_in_time = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_came(self) -> None:
        if self._no_head_in_time is not None:
            self._no_head_in_time.cancel()
            self._no_head_in_time = None

    def _head_is_late(self) -> None:
        self._no_head_in_time = None
        if not self._idle_bytes:
            self.transport.close()
            return
        self._turn_away(408, "too_slow", f"the head of the request: not all of it came within {HEAD_SECONDS:g} s")

    def _turn_away(self, status: int, code: str, detail: str) -> None:
        """Says so and ends the connection, once the other side has had the time to read it: what is still on its way
        when a connection is closed resets it, and the answer is lost."""
        if self._thrown_away or self.transport.is_closing():
            return
        self._thrown_away = 1
        self._head_came()
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:  # else there is an answer on its way
            self.transport.write(_answer(status, code, detail))
        self.loop.call_later(TIMEOUT, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._turn_away(431, "too_large", f"the head of the request: more than {HEAD_BYTES:,} bytes")
        else:
            self._turn_away(400, "invalid", "the request: it is no HTTP/1.1")

    def data_received(self, data: bytes) -> None:
        if self._thrown_away:
            self._thrown_away += len(data)
            if self._thrown_away > MOST_THROWN_AWAY:
                self.transport.close()
            return
        if self._refused:
            if not self.transport.is_closing():
                detail = "there is no room for this connection; try again in a second"
                self.transport.write(_answer(503, "crowded", detail, AGAIN))
                self.transport.close()
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._thrown_away or self._left or self._upgraded:
            return
        if self._idle_bytes > HEAD_BYTES:
            self._too_large = True
            self.send_400_response("")
        elif self._head_open or (self._idle_bytes and not self._in_message):
            self._await_head()

    def on_response_complete(self) -> None:
        if not self._left and not self._upgraded:
            self.limit.waits(self)
        super().on_response_complete()
        self._await_reader()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES:  # in one piece with all that follows; or as trailers of a body
            self._too_large = True
            raise ValueError("too large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) > HEAD_BYTES:
            self._too_large = True
            raise ValueError("too large")
        self._head_open, self._idle_bytes = False, 0
        self._head_came()
        self.limit.asks(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._in_message = self._head_open = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._in_message, self._idle_bytes = False, 0
        super().on_message_complete()


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """What a LimitedProtocol becomes. left: called when it is closed."""

    def __init__(self, left: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._left = left

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        super().connection_lost(exc)


def connections(
    share: int | None = None, exempt: Callable[[str], bool] = lambda address: False
) -> type[LimitedProtocol]:
    """The protocol for uvicorn's `http`; after app.runtime.patches.tune_process.

    share, exempt: see ConnectionLimit."""
    return type("Connection", (LimitedProtocol,), {"limit": ConnectionLimit.of_process(share, exempt)})


def _answer(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> bytes:
    refused = problem(status, code, detail, headers)
    head = b"".join(b"%b: %b\r\n" % header for header in refused.raw_headers)
    return b"HTTP/1.1 %d %b\r\n%bconnection: close\r\n\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        head,
        bytes(refused.body),
    )
