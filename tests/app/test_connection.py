"""Connections to the console: how many there may be, and requests that come in pieces."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from guarded_console import Served, heartbeat
from starlette.responses import PlainTextResponse
from ui_console import ConsoleHere, JobHere
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from openrecycle.agent.messages.protocol import API
from openrecycle.app.api.connection import ConnectionLimit, connections
from openrecycle.app.security.access import Access
from tests.golden import golden

pytestmark = pytest.mark.processes


class Connection(asyncio.Transport):
    """The console's end of a connection from 127.0.0.1, without a network: what comes in when is the test's.

    beside: another one to the same server.
    """

    def __init__(self, served: Served, beside: Connection | None = None) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8501)})
        self.out, self.closing = b"", False
        config = uvicorn.Config(served.app, log_config=None, lifespan="off", proxy_headers=False)
        config.load()
        self.state = beside.state if beside else ServerState()
        self.kind = beside.kind if beside else connections()
        self.protocol = self.kind(config, self.state, {})
        self.protocol.connection_made(self)

    def get_write_buffer_size(self) -> int:
        return 0  # all that is written has been read

    def write(self, data: Any) -> None:
        self.out += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    async def ask(self, *pieces: bytes, answers: int = 1) -> list[tuple[int, dict[str, str], Any]]:
        """Status, headers and body of each answer to the pieces, each of which comes in by itself."""
        self.out = b""
        for piece in pieces:
            self.protocol.data_received(piece)
        async with asyncio.timeout(60):
            while len(found := parsed(self.out)) < answers:
                await asyncio.sleep(0.001)
        return found


def parsed(data: bytes) -> list[tuple[int, dict[str, str], Any]]:
    out = []
    while b"\r\n\r\n" in data:
        head, _, data = data.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers["content-length"])
        text = data[:size]
        out.append((int(status.split()[1]), headers, json.loads(text) if text[:1] == b"{" else text))
        data = data[size:]
    return out


def request(served: Served, seq: int) -> bytes:
    body = json.dumps(heartbeat("W0_1", seq)).encode()
    lines = [
        f"POST {API}/jobs/{served.job.job_id}/heartbeats HTTP/1.1",
        "Host: localhost:8501",
        *(f"{name}: {value}" for name, value in served.headers.items()),
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def served(here: ConsoleHere) -> Iterator[Served]:
    yield Served(here.console, JobHere(here.console, "connections").register())
    here.console.security.access = Access()


Case = Callable[[Connection], Any]


def run(served: Served, case: Case) -> None:
    """Each case begins with one heartbeat that went the whole way."""

    async def whole() -> None:
        connection = Connection(served)
        ((status, _, body),) = await connection.ask(request(served, 1))
        assert (status, body["generation"], body["taken"]) == (200, 1, 1)
        await case(connection)

    asyncio.run(whole())


def test_beyond_the_open_files_it_is_said_and_those_before_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrecycle.app.api.connection.TIMEOUT", 0)

    async def case(first: Connection) -> None:
        first.kind.limit = ConnectionLimit(1)
        second = Connection(served, first)
        ((status, headers, body),) = await second.ask(request(served, 2))
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert (body["status"], body["code"]) == (503, "crowded")
        assert second.closing
        second.protocol.data_received(request(served, 2))
        assert len(parsed(second.out)) == 1
        idle = Connection(served, first)
        async with asyncio.timeout(60):
            while not idle.closing:
                await asyncio.sleep(0.001)
        assert idle.out == b""
        ((status, _, _),) = await first.ask(request(served, 3))
        assert (status, first.closing) == (200, False)
        for gone in (second, idle, first):
            gone.protocol.connection_lost(None)
        ((status, _, _),) = await Connection(served, first).ask(request(served, 4))
        assert status == 200

    run(served, case)


def test_websockets_are_of_their_address_as_long_as_they_are_open() -> None:
    """They shut out nobody else: what they take is no more than one address may have."""
    kind = connections()
    kind.limit = ConnectionLimit(5, share=3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
        else:
            await PlainTextResponse("an answer")(scope, receive, send)

    async def whole() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=kind, ws="websockets-sansio", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        port = listener.getsockname()[1]
        address = f"ws://127.0.0.1:{port}/"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            asked = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            writer.write(asked)
            assert b"200" in await reader.readline()
            opened = [await connect(address) for _ in range(3)]
            for _ in range(3):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(address)
                assert refused.value.response.status_code == 503
            writer.write(asked)
            await reader.readuntil(b"answer")
            writer.write(asked)
            assert b"200" in await reader.readuntil(b"answer"), "it is still connected"
            await opened.pop().close()
            opened.append(await connect(address))
            for each in opened:
                await each.close()
            writer.close()
            async with asyncio.timeout(60):
                while kind.limit.addresses:
                    await asyncio.sleep(0.001)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(whole())


def test_connections_that_are_refused_are_said_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    limit = ConnectionLimit(10, clock=lambda: now)
    assert limit.admits(10)
    assert not any(limit.admits(11) for _ in range(5))
    assert capsys.readouterr().out.count(golden("connections-are-refused")) == 1
    now = 60.0
    assert not limit.admits(11)
    assert "refused=5" in capsys.readouterr().out
    assert limit.hopeless(10 + 33) and not limit.hopeless(10 + 32)


def test_some_files_are_kept_for_the_console_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1_024, 896), (100, 50), (1, 1), (resource.RLIM_INFINITY, 1 << 31)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert ConnectionLimit.of_process().most == most


def test_pieces_and_several_at_once_are_answered(served: Served) -> None:
    async def case(connection: Connection) -> None:
        data = request(served, 2)
        for cut in (1, 20, data.index(b"Host"), data.index(b"\r\n\r\n") + 2, len(data) - 1):
            assert [a[0] for a in await connection.ask(data[:cut], data[cut:])] == [200]
        assert [a[0] for a in await connection.ask(data + request(served, 3), answers=2)] == [200, 200]
        assert [a[0] for a in await connection.ask(request(served, 4))] == [200], "and then it goes on as before"

    run(served, case)


def test_what_looks_like_a_request_inside_of_one_is_none(served: Served) -> None:
    start = f"POST {API}/jobs/{served.job.job_id}/heartbeats HTTP/1.1\r\n".encode()
    host = b"Host: localhost:8501\r\n"

    async def case(connection: Connection) -> None:
        # The parser waits for the rest of a header: together they are one request.
        assert [a[0] for a in await connection.ask(start + b"X-Note: ", request(served, 50))] == [200]
        # The body of one that has no token.
        inner = request(served, 60)
        fresh = Connection(served)
        head = start + host + f"Content-Length: {len(inner)}\r\n\r\n".encode()
        assert [a[0] for a in await fresh.ask(head, inner)] == [401]

    run(served, case)
    job = served.console.jobs.find(served.job.job_id)
    job.take_heartbeats()
    assert job.measurements.contacts["W0_1"].beat.seq == 50
