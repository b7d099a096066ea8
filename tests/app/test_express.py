"""Heartbeats that are answered where they come in: only those that are exactly like one that was let through."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from lane_served import HARDENED, Served, heartbeat
from ui_console import ConsoleHere, JobHere
from uvicorn.server import ServerState

from openrecycle.agent.protocol import API
from openrecycle.app.api.crowd import Crowd
from openrecycle.app.api.express import express
from openrecycle.app.security.access import Access

pytestmark = pytest.mark.processes


class Connection(asyncio.Transport):
    """The console's end of a connection from 127.0.0.1, without a network: what comes in when is the test's.

    beside: another one to the same server.
    """

    def __init__(self, served: Served, beside: Connection | None = None) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8501)})
        self.out, self.closing = b"", False
        config = uvicorn.Config(served.lane, log_config=None, lifespan="off", proxy_headers=False)
        config.load()
        self.state = beside.state if beside else ServerState()
        self.kind = beside.kind if beside else express(served.lane)
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


def request(served: Served, seq: int, *more: str, worker: str = "W0_1", **fields: Any) -> bytes:
    body = json.dumps(heartbeat(worker, seq) | fields).encode()
    lines = [
        f"POST {API}/jobs/{served.job.job_id}/heartbeats HTTP/1.1",
        "Host: localhost:8501",
        *(f"{name}: {value}" for name, value in served.headers.items()),
        *more,
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def served(here: ConsoleHere) -> Iterator[Served]:
    yield Served(here.console, JobHere(here.console, "express").register())
    here.console.access = Access()


Case = Callable[[Connection], Any]


def run(served: Served, case: Case) -> None:
    """Each case begins with one heartbeat that went the whole way."""

    async def whole() -> None:
        connection = Connection(served)
        ((status, _, body),) = await connection.ask(request(served, 1))
        assert (status, body) == (200, {"generation": 1})
        await case(connection)

    asyncio.run(whole())


async def straight(connection: Connection, data: bytes) -> tuple[int, dict[str, str], Any] | None:
    """The answer, if it was there before anything else could run."""
    connection.out = b""
    connection.protocol.data_received(data)
    return parsed(connection.out)[0] if connection.out else None


def test_beyond_the_open_files_it_is_said_and_those_before_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrecycle.app.api.express.PATIENCE", 0)

    async def case(first: Connection) -> None:
        first.kind.crowd = Crowd(1)
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


def test_connections_that_are_refused_are_said_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    crowd = Crowd(10, clock=lambda: now)
    assert crowd.admits(10)
    assert not any(crowd.admits(11) for _ in range(5))
    assert capsys.readouterr().out.count("connections are refused") == 1
    now = 60.0
    assert not crowd.admits(11)
    assert "refused=5" in capsys.readouterr().out
    assert crowd.hopeless(10 + 33) and not crowd.hopeless(10 + 32)


def test_some_files_are_kept_for_the_console_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1_024, 896), (100, 50), (1, 1), (resource.RLIM_INFINITY, 1 << 31)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert Crowd.of_process().most == most


def counted(served: Served) -> float:
    """Heartbeats that were answered, as the metrics tell."""
    lines = served.console.metrics.text("")[0].decode().splitlines()
    said = [line for line in lines if "requests_total" in line and "/heartbeats" in line and '"2xx"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in said)


def test_the_second_is_answered_at_once(served: Served) -> None:
    already = counted(served)

    async def case(connection: Connection) -> None:
        before = served.whole
        answer = await straight(connection, request(served, 2))
        assert answer is not None and (answer[0], answer[2]) == (200, {"generation": 1})
        assert all(name in answer[1] for name in HARDENED)
        other = await straight(Connection(served), request(served, 7, worker="W1_1"))
        assert other is not None, "on another connection, of another worker"
        assert served.whole == before

    run(served, case)
    job = served.console.job(served.job.job_id)
    job.take_heartbeats()
    assert (job.contacts["W0_1"].beat.seq, job.contacts["W1_1"].beat.seq) == (2, 7)
    assert counted(served) == already + 3, "that which went the ordinary way, and two"


def test_pieces_and_several_at_once_go_the_ordinary_way(served: Served) -> None:
    async def case(connection: Connection) -> None:
        data = request(served, 2)
        for cut in (1, 20, data.index(b"Host"), data.index(b"\r\n\r\n") + 2, len(data) - 1):
            assert [a[0] for a in await connection.ask(data[:cut], data[cut:])] == [200]
        assert [a[0] for a in await connection.ask(data + request(served, 3), answers=2)] == [200, 200]
        assert await straight(connection, request(served, 4)) is not None, "and then it goes on as before"

    run(served, case)


def test_what_looks_like_a_request_inside_of_one_is_none(served: Served) -> None:
    start = f"POST {API}/jobs/{served.job.job_id}/heartbeats HTTP/1.1\r\n".encode()
    host = b"Host: localhost:8501\r\n"

    async def case(connection: Connection) -> None:
        # The parser waits for the rest of a header: together they are one request.
        connection.protocol.data_received(start + b"X-Note: ")
        assert await straight(connection, request(served, 50)) is None
        assert [a[0] for a in await connection.ask()] == [200]
        # The body of one that has no token.
        inner = request(served, 60)
        fresh = Connection(served)
        fresh.protocol.data_received(start + host + f"Content-Length: {len(inner)}\r\n\r\n".encode())
        assert await straight(fresh, inner) is None
        assert [a[0] for a in await fresh.ask()] == [401]

    run(served, case)
    job = served.console.job(served.job.job_id)
    job.take_heartbeats()
    assert job.contacts["W0_1"].beat.seq == 50


def test_the_guards_are_still_asked(served: Served) -> None:
    async def case(connection: Connection) -> None:
        assert await straight(connection, request(served, 2)) is not None
        served.console.tokens.revoke(served.token.id)
        assert [a[0] for a in await connection.ask(request(served, 3))] == [401]
        assert [a[0] for a in await connection.ask(request(served, 4))] == [401]

    run(served, case)


def test_another_leader_is_asked_anew(served: Served) -> None:
    async def case(connection: Connection) -> None:
        served.leader = None
        assert await straight(connection, request(served, 2)) is None

    run(served, case)


def test_what_is_wrong_is_refused_as_ever(served: Served) -> None:
    async def case(connection: Connection) -> None:
        (answer,) = await connection.ask(request(served, -1))
        assert answer[0] == 422 and answer[2]["detail"].startswith("seq: got -1, expected")
        (answer,) = await connection.ask(request(served, 2, incarnation="somebody-else"))
        assert (answer[0], answer[2]["code"]) == (409, "fenced")
        assert await straight(connection, request(served, 3)) is not None

    run(served, case)


def test_who_asks_for_more_than_an_answer_goes_the_ordinary_way(served: Served) -> None:
    async def case(connection: Connection) -> None:
        for line in ("Connection: close", "Expect: 100-continue", "Idempotency-Key: k"):
            other = Connection(served)
            other.protocol.data_received(request(served, 2, line))
            async with asyncio.timeout(60):
                while b"HTTP/1.1 200" not in other.out:
                    await asyncio.sleep(0.001)
            assert await straight(Connection(served), request(served, 3, line)) is None, line

    run(served, case)
