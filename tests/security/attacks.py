"""What strangers try on a console, against one that this starts on loopback: `python -m tests.security.attacks`.

Every attack is bounded in time and number, and says in a line what became of it. Without a token (`OPEN`) and with one
(`GUARDED`). Each raises AssertionError where it had its way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import requests

from tests.app.console_server import ConsoleServer, ForkedConsole

TOKEN = "the token of the attacked console"
SHARE = 60
# What a head may have, and some time more.
HEAD_BYTES, HEAD_SECONDS, LATE = 64 * 1024, 30.0, 15.0
SEND_SECONDS = 30.0
SPEC = {"name": "x", "pipelines": 1, "stages": 2, "micro_batches": 1, "iterations": 5}
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"

Attack = Callable[[ConsoleServer], str]
OPEN: list[Attack] = []
GUARDED: list[Attack] = []


def on(*lists: list[Attack]) -> Callable[[Attack], Attack]:
    def note(attack: Attack) -> Attack:
        for attacks in lists:
            attacks.append(attack)
        return attack

    return note


@contextmanager
def console(*, guarded: bool) -> Iterator[ConsoleServer]:
    """Loopback is no proxy here, so that its share of the connections counts."""
    environment = {"OPENRECYCLE_TOKEN": TOKEN} if guarded else {}
    with tempfile.TemporaryDirectory() as folder:
        options = ("--api-only", "--tolerance", "0", "--proxy", "192.0.2.1", "--connections-per-address", str(SHARE))
        server = ForkedConsole(f"sqlite:///{folder}/console.db", *options, environment=environment)
        try:
            yield server
        finally:
            server.close()


def alive(server: ConsoleServer) -> None:
    assert requests.get(f"{server.root}/healthz", timeout=10).status_code == 200


def connect(server: ConsoleServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and all that came, up to the end; 0: nothing did."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while part := connection.recv(65536):
            data += part
    return (int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0), bytes(data)


def poured(server: ConsoleServer, start: bytes, piece: bytes, most: int = 64 * 1024 * 1024) -> tuple[int, int]:
    """(status, bytes that the console has taken) of a request that begins so and never ends."""
    with connect(server) as connection:
        connection.sendall(start)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most:
                connection.sendall(piece)
                sent += len(piece)
        return answer(connection)[0], sent


@on(OPEN, GUARDED)
def a_head_without_end(server: ConsoleServer) -> str:
    for what, start, piece in (
        ("headers", REQUEST, b"X-Filler: " + b"x" * 8000 + b"\r\n"),
        ("one header", REQUEST + b"X-Filler: ", b"x" * 8192),
        ("a path", b"GET /", b"x" * 8192),
        ("line breaks", b"", b"\r\n" * 4096),
    ):
        status, sent = poured(server, start, piece)
        # What the system holds for both ends of a connection comes on top.
        assert sent < 32 * 1024 * 1024, f"{what}: {sent:,} bytes were taken"
        assert status in (0, 400, 431), f"{what}: {status}"
    alive(server)
    return "is cut at 64 KiB, 431"


@on(OPEN, GUARDED)
def trailers_without_end(server: ConsoleServer) -> str:
    start = b"POST /api/v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    start += b"1\r\nx\r\n0\r\nX-Filler: "
    _, sent = poured(server, start, b"x" * 8192)
    assert sent < 32 * 1024 * 1024, f"{sent:,} bytes were taken"
    alive(server)
    return "are cut at 64 KiB"


@on(OPEN)
def a_head_that_drips(server: ConsoleServer) -> str:
    begin = time.monotonic()
    with connect(server) as slow, connect(server) as silent:
        slow.sendall(REQUEST + b"X-Drip: ")
        slow.settimeout(1.0)
        status, data = 0, b""
        while time.monotonic() < begin + HEAD_SECONDS + LATE:
            try:
                slow.sendall(b"x")
                data = slow.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            status = int(data.split(b" ", 2)[1]) if data else status
            break
        took = time.monotonic() - begin
        assert took < HEAD_SECONDS + LATE, "it was let drip"
        assert status in (0, 408), status
        silent.settimeout(LATE)
        assert silent.recv(1) == b"", "a silent connection stays"
    alive(server)
    return f"ends after {took:.0f} s, 408; so does a silent connection"


@on(OPEN)
def answers_that_are_not_read(server: ConsoleServer) -> str:
    """Beside each other: one that reads nothing, and one that reads slowly, which is let."""
    document = requests.get(f"{server.base}/openapi.json", timeout=30)
    asked, size = 200, len(document.content)
    request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(server) as idle, connect(server) as slow:
        for connection in (idle, slow):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request * asked)
        taken, end = 0, time.monotonic() + SEND_SECONDS + LATE
        while time.monotonic() < end:
            taken += len(slow.recv(8192))
            time.sleep(0.01)
        got = len(answer(idle)[1])
        assert got < asked * size, "all of it was kept for whoever did not read"
        assert taken > 500_000 and slow.recv(8192), "one that reads slowly was cut off"
    alive(server)
    return f"are given up after {SEND_SECONDS:.0f} s: {got:,} of {asked * size:,} bytes"


@on(OPEN, GUARDED)
def silent_connections(server: ConsoleServer) -> str:
    with contextlib.ExitStack() as stack:
        for _ in range(5 * SHARE):
            stack.enter_context(connect(server))
        alive(server)
    return f"{5 * SHARE} of one address (share: {SHARE}): others are served"


@on(OPEN, GUARDED)
def odd_hosts_and_origins(server: ConsoleServer) -> str:
    def ask(*headers: bytes) -> int:
        with connect(server) as connection:
            connection.sendall(b"POST /api/v1/jobs HTTP/1.1\r\n" + b"".join(h + b"\r\n" for h in headers))
            connection.sendall(b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
            return answer(connection)[0]

    for origin in (b"http://[", b"http://[::1", b"//", b"null", b"http://evil.example"):
        assert ask(b"Host: localhost", b"Origin: " + origin) in (400, 403), origin
    for host in (b"localhost:80:80", b"[::1]x", b"localhost/evil", b"evil@localhost", b"a b", b"[", b"localhost:port"):
        assert ask(b"Host: " + host) in (400, 421), host
    assert ask(b"Host: localhost", b"Host: evil.example") == 400
    return "are refused with 400, 403 or 421"


@on(OPEN, GUARDED)
def a_body_beyond_its_limit(server: ConsoleServer) -> str:
    for size in (3 * 1024 * 1024, 40 * 1024 * 1024):
        with connect(server) as connection:
            head = "POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Authorization: Bearer {TOKEN}\r\nContent-Length: {size}\r\n\r\n".encode())
            connection.sendall(b" " * size)
            status, data = answer(connection)
        assert status == 413 and b"too_large" in data, (size, status, data[:200])
    return "is refused with 413, which can be read"


@on(OPEN)
def what_a_proxy_passes_on(server: ConsoleServer) -> str:
    passed = {
        "X-Forwarded-For": "127.0.0.1",
        "X-Forwarded-Host": "console.example.org",
        "X-Forwarded-Proto": "https",
        "Forwarded": "for=203.0.113.7",
        "X-Real-IP": "203.0.113.7",
        "Via": "1.1 proxy",
        "CF-Connecting-IP": "203.0.113.7",
        "Host": "console.example.org",
    }
    for name, value in passed.items():
        refused = requests.get(f"{server.base}/jobs", headers={name: value}, timeout=10)
        assert refused.status_code in (403, 421), (name, refused.status_code)
        assert len(refused.json()["detail"]) > 20, "it is said in a sentence"
    assert requests.get(f"{server.base}/jobs", timeout=10).status_code == 200
    return "is refused with a sentence"


@on(OPEN)
def fields_twice_and_values_of_another_kind(server: ConsoleServer) -> str:
    def post(text: str) -> int:
        headers = {"Content-Type": "application/json"}
        return requests.post(f"{server.base}/jobs", data=text.encode(), headers=headers, timeout=10).status_code

    good = json.dumps(SPEC)
    assert post(good) == 201
    assert post(good[:-1] + ', "stages": 3}') == 422
    for name, value in (("pipelines", True), ("stages", "2"), ("seed", 1.5), ("iterations", True), ("name", 5)):
        assert post(json.dumps({**SPEC, name: value})) == 422, (name, value)
    return "are refused with 422"


@on(OPEN)
def jobs_without_an_end_to_plan(server: ConsoleServer) -> str:
    for stages in (4096, 16_384):
        job = server.post("/jobs", {**SPEC, "stages": stages})
        assert job.status_code == 201, job.text
        began = time.monotonic()
        alive(server)
        assert time.monotonic() - began < 5.0
    return "are taken, and nobody waits for them"


@on(GUARDED)
def everything_without_a_token(server: ConsoleServer) -> str:
    document = requests.get(f"{server.base}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
    asked = 0
    for path, operations in document.json()["paths"].items():
        for method in operations:
            url = f"{server.base}{path}".replace("{", "").replace("}", "")
            while (refused := requests.request(method, url, timeout=30)).status_code == 429:
                time.sleep(1.0)
            assert refused.status_code == 401, (method, path, refused.status_code)
            asked += 1
    return f"{asked} operations: 401"


@on(GUARDED)
def tokens_that_are_guessed(server: ConsoleServer) -> str:
    def ask(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.get(f"{server.base}/jobs", headers=headers, timeout=10).status_code

    assert ask(TOKEN) == 200
    assert [ask(f"a guess, number {n}") for n in range(40)] == [401] * 40
    assert ask(TOKEN) == 200, "its owner is locked out"
    guesses = [ask(f"another guess, number {n}") for n in range(200)]
    assert 429 in guesses, "guessing has no end"
    return "200 a minute from where the right one came before; 20 from elsewhere"


@on(GUARDED)
def signing_others_out(server: ConsoleServer) -> str:
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Referer": "http://evil.example/"},
        {"Origin": "http://evil.example"},
    ):
        refused = requests.get(f"{server.root}/logout", headers=headers, allow_redirects=False, timeout=10)
        assert refused.status_code == 403 and "set-cookie" not in refused.headers, headers
    own = requests.get(f"{server.root}/logout", headers={"Sec-Fetch-Site": "same-origin"}, allow_redirects=False)
    assert own.status_code == 303
    return "a page of another address can't"


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.security.attacks", description=__doc__).parse_args()
    for guarded, attacks in ((False, OPEN), (True, GUARDED)):
        with console(guarded=guarded) as server:
            for attack in attacks:
                print(f"{'with a token' if guarded else 'without'}: {attack.__name__.replace('_', ' ')}", end=": ")
                print(attack(server), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
