"""Limits on HTTP connections: how many the console takes at a time (`ConnectionLimit`), and how much time and memory
one may take (`LimitedProtocol`). uvicorn has no limits of its own on heads, on time, or on answers that nobody reads.

Each connection is an open file. Without any left, the console could not read its database, start a process, or accept
and refuse the next connection. So it keeps some files for itself, and refuses connections beyond that with 503.

A connection without a request shuts nobody out. If there is no room, or an address has its share, the connection is
closed that has waited longest for a request, of the address that has most connections. A request that was received is
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

# Files that are kept for databases, processes, imports, and connections that are being refused.
KEPT_FILES = 128
# Seconds between two lines in the log.
QUIET_SECONDS = 60.0
# Seconds for which a refused connection may send its request, so that it gets the answer.
TIMEOUT = 1.0


class LimitedConnection(Protocol):
    """A connection. address: of its other end, which is the proxy if there is one."""

    address: str

    def make_way(self) -> None:
        """Closes the connection, over which no request has come."""


class ConnectionLimit:
    """Counts connections, and decides which are refused or closed. Has no lock: only the event loop may use it.

    most: connections at a time. share: the most of one address; None: half of them. exempt: says whether an address is
    a proxy's, which has everybody's connections."""

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
        # By address: the connections without a request, the one that has waited longest first.
        self._waiting: dict[str, dict[LimitedConnection, None]] = {}
        self._leaving: set[LimitedConnection] = set()
        self._said = -QUIET_SECONDS
        self._refused = 0

    @classmethod
    def of_process(
        cls, share: int | None = None, exempt: Callable[[str], bool] = lambda address: False
    ) -> ConnectionLimit:
        """Makes the limit by the number of files that this process may have open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = 1 << 31 if files == resource.RLIM_INFINITY else max(1, files - min(KEPT_FILES, files // 2))
        return cls(most, share=share, exempt=exempt)

    # -- who is there ---------------------------------------------------------------------------

    @property
    def addresses(self) -> set[str]:
        """Returns the addresses of all connections that are open or being closed: nothing of others is kept."""
        return {*self._open, *self._waiting, *(guest.address for guest in self._leaving)}

    def enter(self, guest: LimitedConnection, connections: int) -> bool:
        """Takes a new connection; returns whether it may stay. connections: how many are open, with this one."""
        address = guest.address
        self._open[address] += 1
        self.waits(guest)
        over_share = self._open[address] > self.share and not self._exempt(address)
        if over_share and not self._evict(address, guest):
            return self.admits(self.most + 1)  # refused, and logged like any other refusal
        if connections - len(self._leaving) > self.most:
            busiest = max(self._waiting, key=self._open.__getitem__)
            if not self._evict(busiest, guest) and not self._evict(address, guest):
                return self.admits(connections - len(self._leaving))
        return True

    def leave(self, guest: LimitedConnection) -> None:
        """Notes that a connection is closed."""
        self.asks(guest)
        if guest in self._leaving:
            self._leaving.discard(guest)
            return
        self._open[guest.address] -= 1
        if self._open[guest.address] <= 0:
            del self._open[guest.address]

    def waits(self, guest: LimitedConnection) -> None:
        """Notes that a connection has no request from now on."""
        waiting = self._waiting.get(guest.address)
        if waiting is None:
            waiting = self._waiting[guest.address] = {}
        waiting.pop(guest, None)
        waiting[guest] = None

    def asks(self, guest: LimitedConnection) -> None:
        """Notes that the whole head of a request has come."""
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
        """Says whether there is room for the last of so many connections. Refusals are logged once a minute."""
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
        """Says whether so many connections are being refused that they use up the kept files."""
        return connections > self.most + KEPT_FILES // 4


# Limits for a request's head: bytes, and seconds from its first byte, or from the beginning of the connection.
HEAD_BYTES, HEAD_SECONDS = 64 * 1024, 30.0
# A client must read this much of an answer in this time, or the connection is closed, since unread bytes take memory.
SEND_BYTES, SEND_SECONDS = 64 * 1024, 30.0
# The most bytes that are received and dropped after a refusal.
MOST_THROWN_AWAY = 1024 * 1024

_AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER: on, for no time


class LimitedProtocol(HttpToolsProtocol):
    """One connection. limit: set by `connections`.

    A request's head may take at most HEAD_BYTES and HEAD_SECONDS, from its first byte or from the connection's
    beginning. The same holds for bytes that are neither head nor body (trailers, sizes of chunks). A request that has
    been accepted may take any time. Its answer must be read, or it is given up (SEND_BYTES, SEND_SECONDS).
    """

    limit: ConnectionLimit
    address = ""
    _refused = False
    _in_message = False  # whether the parser has had a part of a request
    _no_head_in_time: asyncio.TimerHandle | None = None
    _idle_bytes = 0  # bytes since the last end of a head or part of a body
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
            # A plain close would wait for the client, and the system would keep the unread bytes.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()
        else:
            self._await_reader()

    def _unread_now(self) -> int:
        """Returns the unread bytes: those that wait here, and those in the system that the client has not received. The
        latter may be megabytes, of which the client asks for more only slowly."""
        held = bytearray(4)
        with suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", held)[0])

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def handle_websocket_upgrade(self) -> None:
        """Hands over to a WebSocket, which still counts for its address, but has no time limits."""
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
        """Answers with an error, and closes the connection after the client has had time to read that. Data that is on
        its way when a connection is closed resets the connection, and the answer is lost."""
        if self._thrown_away or self.transport.is_closing():
            return
        self._thrown_away = 1
        self._head_came()
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:  # else another answer is on its way
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
        if self._head_bytes > HEAD_BYTES:  # it came in one piece with other data, or as trailers of a body
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
    """The WebSocket that a LimitedProtocol becomes. left: called when it is closed."""

    def __init__(self, left: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._left = left

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        super().connection_lost(exc)


def connections(
    share: int | None = None, exempt: Callable[[str], bool] = lambda address: False
) -> type[LimitedProtocol]:
    """Makes the protocol class for uvicorn's option `http`. Call it after app.runtime.patches.tune_process, which
    raises the limit on open files. share, exempt: see ConnectionLimit."""
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
