"""A network between agents and console that does what networks do: it cuts, delays, repeats and re-orders requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Faults:
    """What becomes of a request, each with a chance of its own.

    cut: the connection breaks before the console has it. unanswered: the console has it, and its answer is lost.
    late: it comes up to `seconds` late, after requests that were sent after it. again: what says something (a POST)
    comes a second time, up to `seconds` later.
    """

    cut: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    again: float = 0.0
    seconds: float = 0.5


class FaultyNetwork:
    """Passes requests on to a console on this machine, from a port of its own, in a thread of its own.

    counts: what was done, by the names in Faults.
    """

    def __init__(self, console_port: int, seed: int, faults: Faults | None = None) -> None:
        self._console_port, self._random = console_port, random.Random(seed)
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="network", daemon=True)
        self._thread.start()
        assert self._listens.wait(30), "the network did not come up"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        await self._end.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request; then the connection ends, which agents must bear anyway."""
        # Cancelled at the network's end, which asyncio's streams would log.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            request = await _read_request(reader)
            if not self._happens(self.faults.cut, "cut"):
                await self._pause_if(self.faults.late, "late")
                answer = await self._ask(request)
                if request.startswith(b"POST") and self._happens(self.faults.again, "again"):
                    self._later(request)
                if not self._happens(self.faults.unanswered, "unanswered"):
                    writer.write(answer)
                    await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    def _later(self, request: bytes) -> None:
        async def repeat() -> None:
            await asyncio.sleep(self._random.uniform(0, self.faults.seconds))
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._ask(request)

        task = asyncio.create_task(repeat())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pause_if(self, chance: float, name: str) -> None:
        if self._happens(chance, name):
            await asyncio.sleep(self._random.uniform(0, self.faults.seconds))

    def _happens(self, chance: float, name: str) -> bool:
        if self._random.random() >= chance:
            return False
        self.counts[name] += 1
        return True

    async def _ask(self, request: bytes) -> bytes:
        """The console's whole answer. Raises OSError while it is down."""
        reader, writer = await asyncio.open_connection(HOST, self._console_port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body, asking for a connection that ends with the answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
    return head[:-4] + b"\r\nConnection: close\r\n\r\n" + body
