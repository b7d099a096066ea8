"""`openrecycle serve`: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole
from typer.testing import CliRunner

from openrecycle.app.cli import cli
from tests.agent.launches import Launched
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

TOKEN = "a-token-for-the-tests"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        errors, prints = Path(folder, "errors"), Path(folder, "prints")
        changed = {"DATABASE_URL": None, "OPENRECYCLE_TOKEN": None, **environment}
        process = Launched(
            *("serve", *options), errors=errors, prints=prints, environment=changed, module="openrecycle.app"
        )
        try:
            status = process.wait(60)
        finally:
            process.kill()
        return subprocess.CompletedProcess(["serve", *options], status, prints.read_text(), errors.read_text())


def here(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `run`, in this process: what is refused before anything is started."""
    clean = {"DATABASE_URL": None, "OPENRECYCLE_TOKEN": None}
    done = CliRunner().invoke(cli, ["serve", *options], env={**clean, **environment})
    return subprocess.CompletedProcess(["serve", *options], done.exit_code, done.stdout, done.stderr)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    for part in parts:
        assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_another_host_needs_a_token() -> None:
    done = here("--host", "0.0.0.0", "--port", "0")
    assert_refused(done, "--host 0.0.0.0 can be reached from other machines", "OPENRECYCLE_TOKEN", "--token-file")


def test_a_short_token_is_none() -> None:
    assert_refused(here("--port", "0", OPENRECYCLE_TOKEN="short"), "at least 16 printable characters")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    done = here("--port", "0", "--token-file", str(path))
    assert_refused(done, f"has mode {mode:04o}, expected 0600")
    assert TOKEN not in done.stderr


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(here("--token-file", str(tmp_path / "none")), "can't be read: No such file or directory")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(run("--port", str(port)), f"--port: {port} is taken on 127.0.0.1")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--port", "70000"), "--port: got 70000"),
        at_length(("--host", "nowhere.invalid"), "--host"),
        at_length(("--port", "0", "--database-url", "mysql://a:secret@b/c"), "got a mysql database"),
        (("--port", "0", "--database-url", "postgresql://a:secret@127.0.0.1:1/c?none=1"), golden("cant-be-used")),
    ],
)
def test_settings_that_make_no_console(options: tuple[str, ...], part: str) -> None:
    # With a token, so that a foreign host is not refused for want of one.
    done = run(*options, OPENRECYCLE_TOKEN=TOKEN)
    assert_refused(done, part)
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--suspect", "0.5"), "--suspect: got 0.5,"),
        (("--dead", "3"), "--dead: got 3.0,"),
    ],
)
def test_time_outs_that_are_none(options: tuple[str, ...], part: str) -> None:
    assert_refused(here(*options), part)


def test_the_default_database_is_a_file_in_the_state_folder_that_two_consoles_do_not_share(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    server = ForkedConsole("", "--api-only", environment=state)
    try:
        assert (tmp_path / "openrecycle" / "console.db").is_file()
        assert (tmp_path / "openrecycle").stat().st_mode & 0o077 == 0
        assert_refused(run("--port", "0", **state), "in use by another console")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("number", "pages"),
    [
        (signal.SIGTERM, True),
        at_length(signal.SIGINT, False),
        at_length(signal.SIGTERM, False),
        at_length(signal.SIGINT, True),
    ],
)
def test_it_ends_and_leaves_no_process(tmp_path: Path, number: int, pages: bool) -> None:
    server = ConsoleServer(f"sqlite:///{tmp_path / 'console.db'}", *([] if pages else ["--api-only"]))
    try:
        agents = Agents(server)
        agents.register_all()
        agents.heartbeat("W0_0", iteration=41)
        children = _descendants(server.process.pid)
        assert children, "plans are made in a child process"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            # A long-poll is waiting while the signal comes.
            path = f"/api/v1{agents.path('/deployment')}?after=9&wait=50"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
            # Raises if the console waits for that poll.
            server.stop(number)
        assert server.process.returncode == 0, server.errors
        for pid in children:
            _wait_gone(pid)
        assert not any("Traceback" in line for line in server.errors), server.errors
    finally:
        server.close()
    # What was only in memory has been written.
    again = ForkedConsole(server.database_url, "--api-only")
    try:
        workers = {w["name"]: w for w in again.get(agents.path("/workers")).json()["workers"]}
        assert workers["W0_0"]["iteration"] == 41
    finally:
        again.close()


def test_the_planning_process_does_not_outlive_a_killed_console(tmp_path: Path) -> None:
    server = ConsoleServer(f"sqlite:///{tmp_path / 'console.db'}", "--api-only")
    try:
        children = _descendants(server.process.pid)
        assert children, "plans are made in a child process"
        server.stop(signal.SIGKILL)
        for pid in children:
            _wait_gone(pid)
    finally:
        server.close()


def test_pages_and_api_share_a_port_and_a_token_guards_everything_but_health(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    server = ForkedConsole(f"sqlite:///{tmp_path / 'console.db'}", "--token-file", str(token_file), "--host", "0.0.0.0")
    try:
        assert requests.get(f"{server.root}/healthz", timeout=10).status_code == 200
        for path in ("/", "/api/v1/jobs", "/readyz", "/_stcore/health", "/static/x.js", "/api/v1/openapi.json"):
            assert requests.get(server.root + path, timeout=10).status_code == 401, path
        assert server.get("/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        with requests.Session() as browser:
            browser.headers["Accept"] = "text/html"
            page = browser.get(f"{server.root}/?job=1", timeout=10)
            assert page.url.endswith("/login?next=%2F%3Fjob%3D1")
            assert golden("this-console-asks-who-you") in page.text
            done = browser.post(page.url, data={"token": TOKEN}, timeout=10, allow_redirects=False)
            assert (done.status_code, done.headers["Location"]) == (303, "/?job=1")
            page = browser.get(server.root, timeout=10)
            assert page.status_code == 200 and "<html" in page.text
            assert page.headers["X-Content-Type-Options"] == "nosniff"
            assert browser.get(f"{server.root}/_stcore/health", timeout=10).text == "ok"
            unknown = browser.get(f"{server.base}/nothing", timeout=10)
            assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
            assert browser.get(f"{server.base}/jobs", timeout=10).json() == {"jobs": [], "next": None}
        assert _websocket_status(server, "") == 403
        cookie = "; ".join(f"{c.name}={c.value}" for c in browser.cookies)
        assert _websocket_status(server, cookie) == 101
        server.stop()
        assert not any(TOKEN in line for line in server.errors)
    finally:
        server.close()


def _websocket_status(server: ConsoleServer, cookie: str) -> int:
    request = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nOrigin: {server.root}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: streamlit\r\n"
        + (f"Cookie: {cookie}\r\n" if cookie else "")
        + "\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request.encode())
        return int(connection.recv(100).split()[1])


def _descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def _wait_gone(pid: int) -> None:
    """Fails after a while. A zombie counts as gone: whoever adopted it has yet to notice."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
