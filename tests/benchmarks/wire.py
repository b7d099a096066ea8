"""A keep-alive connection of a simulated agent: cheap, so that the generator leaves the processor to the console."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import Callable

TIMEOUT_SECONDS = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

Answered = Callable[[int, bytes], None]
"""Takes status and body; status 0: there was no answer, and the body says why."""


class Wire(asyncio.Protocol):
    """One request at a time; what is asked meanwhile waits for its turn."""

    def __init__(self, port: int, source: str) -> None:
        self._port, self._source = port, source
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[bytes, Answered]] = deque()
        self._current: Answered | None = None
        self._since = 0.0
        self._buffer = b""
        self._connecting: asyncio.Task[None] | None = None
        self.closed = False

    def waits_since(self) -> float:
        """Loop time at which what it waits for was sent; infinity where it waits for nothing."""
        return self._since if self._current is not None else math.inf

    def send(self, request: bytes, answered: Answered) -> None:
        """No task, no future, no timer: thousands of these are sent every second."""
        if self.closed:
            return
        if self._current is not None:
            self._waiting.append((request, answered))
            return
        self._current, self._since = answered, asyncio.get_running_loop().time()
        transport = self._transport
        if transport is None or transport.is_closing():
            self._connecting = asyncio.create_task(self._connect(request))
        else:
            transport.write(request)

    async def ask(self, request: bytes, timeout: float = TIMEOUT_SECONDS) -> tuple[int, bytes]:
        """Status and body. Raises OSError, also where no answer comes."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()

        def answered(status: int, body: bytes) -> None:
            if answer.done():
                return
            if status:
                answer.set_result((status, body))
            else:
                answer.set_exception(ConnectionError(body.decode()))

        self.send(request, answered)
        timer = loop.call_later(timeout, self.give_up, "no answer")
        try:
            return await answer
        finally:
            timer.cancel()

    def give_up(self, why: str) -> None:
        """Whoever waits for an answer gets none, and the connection is made anew for the next one."""
        current, self._current = self._current, None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if current is not None:
            current(0, why.encode())
        self._next()

    def close(self) -> None:
        """For good; nobody who waits hears of it."""
        self.closed = True
        self._waiting.clear()
        self._current = None
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, "127.0.0.1", self._port, local_addr=(self._source, 0))
        except OSError as error:
            self.give_up(str(error))
            return
        if self.closed or self._transport is None:
            self.close()
        else:
            self._transport.write(request)

    def _next(self) -> None:
        if self._waiting and self._current is None:
            self.send(*self._waiting.popleft())

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._buffer = b""

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._current is not None:
            self.give_up("connection lost")

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        length = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
        if end < 0 or len(data) < end + 4 + (int(length[1]) if length else 0):
            self._buffer = data
            return
        self._buffer = b""
        current, self._current = self._current, None
        if current is not None:
            current(int(data[9:12]), data[end + 4 :])
        if self._waiting:
            self._next()
