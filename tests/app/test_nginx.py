"""The nginx example of app/docs, run: TLS outside, a real console inside."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from console_server import ROOT, ConsoleServer

from openrecycle.agent.messages.client import ConsoleClient, ConsoleRefused, ConsoleUnavailable
from openrecycle.agent.messages.protocol import Deployment
from tests.golden import golden

NGINX = next((p for p in map(shutil.which, ("nginx", "/usr/sbin/nginx")) if p), None)
TOKEN = "a-token-for-the-tests"
NAME = "console.example.org"

pytestmark = [
    pytest.mark.xdist_group("nginx"),
    pytest.mark.skipif(NGINX is None, reason="no nginx found: install the package nginx-light to run its tests"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl found: it makes the test's certificate"),
    pytest.mark.processes,
]


class Proxy:
    """nginx with the example, the names of files and ports alone changed."""

    def __init__(self, folder: Path, console: int) -> None:
        self.port, plain = (_free_port() for _ in range(2))
        self.certificate = folder / "certificate.pem"
        made = ("-keyout", str(folder / "key.pem"), "-out", str(self.certificate), "-subj", f"/CN={NAME}")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-days", "2", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1", *made),
            ],
            check=True,
            capture_output=True,
        )
        example = (ROOT / "app" / "docs" / "nginx.conf").read_text()
        for old, new in (
            ("listen 443 ssl;", f"listen 127.0.0.1:{self.port} ssl;"),
            ("listen 80;", f"listen 127.0.0.1:{plain};"),
            ("server 127.0.0.1:8501;", f"server 127.0.0.1:{console};"),
            (f"/etc/ssl/certs/{NAME}.pem", str(self.certificate)),
            (f"/etc/ssl/private/{NAME}.key", str(folder / "key.pem")),
        ):
            assert old in example
            example = example.replace(old, new)
        (folder / "site.conf").write_text(example)
        temporary = "".join(
            f"{kind}_temp_path {folder / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"daemon off;\nmaster_process off;\npid {folder / 'pid'};\nerror_log {folder / 'error.log'};\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{temporary}include {folder / 'site.conf'};\n}}\n"
        )
        self.plain = f"http://127.0.0.1:{plain}"
        self.root = f"https://127.0.0.1:{self.port}"
        assert NGINX is not None
        self.process = subprocess.Popen(
            [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except OSError:
                time.sleep(0.02)
        self.close()
        raise AssertionError(f"nginx does not answer: {(folder / 'error.log').read_text()}")

    def close(self) -> None:
        self.process.terminate()
        _, self.errors = self.process.communicate(timeout=60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    console = ConsoleServer(
        f"sqlite:///{folder / 'console.db'}", "--host-name", NAME, environment={"OPENRECYCLE_TOKEN": TOKEN}
    )
    try:
        proxy = Proxy(folder, console.port)
        yield proxy
        proxy.close()
    finally:
        console.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[requests.Session]:
    with requests.Session() as client:
        client.verify = str(proxy.certificate)
        client.trust_env = False
        yield client


def test_people_sign_in_over_tls(proxy: Proxy, client: requests.Session) -> None:
    client.headers["Accept"] = "text/html"
    page = client.get(proxy.root, timeout=60)
    assert page.url == f"{proxy.root}/login?next=%2F"
    assert page.headers["Strict-Transport-Security"] == "max-age=31536000"
    headers = {"Origin": proxy.root}
    done = client.post(page.url, data={"token": TOKEN}, headers=headers, timeout=60, allow_redirects=False)
    assert (done.status_code, done.headers["Location"]) == (303, "/")
    cookie = done.headers["Set-Cookie"]
    assert all(part in cookie for part in ("Secure", "HttpOnly", "SameSite=strict"))
    assert "window.__streamlit" in client.get(proxy.root, timeout=60).text
    foreign = {"Origin": "https://evil.example"}
    assert client.post(page.url, data={"token": TOKEN}, headers=foreign, timeout=60).status_code == 403
    sent = f"openrecycle_session={client.cookies['openrecycle_session']}"
    assert (_websocket(proxy, sent), _websocket(proxy, "")) == (101, 403)


def test_agents_report_through_it(proxy: Proxy, client: requests.Session) -> None:
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    base = f"{proxy.root}/api/v1/jobs"
    spec = {"name": "job", "pipelines": 2, "stages": 1, "micro_batches": 2, "iterations": 9}
    made = client.post(base, json=spec, timeout=60)
    assert made.status_code == 201
    client.headers["Authorization"] = f"Bearer {made.headers['OpenRecycle-Agent-Token']}"
    path = f"{base}/{made.json()['job_id']}"
    worker = {"worker": "W0_0", "incarnation": "a"}
    came = {"registrations": [{**worker, "host": "node1", "pid": 1}]}
    assert client.post(f"{path}/workers", json=came, timeout=60).status_code == 200
    beat = {**worker, "seq": 1, "generation": 0, "iteration": 0, "phase": "waiting"}
    assert client.post(f"{path}/heartbeats", json={"heartbeats": [beat]}, timeout=60).status_code == 200
    assert client.get(f"{path}/deployment", params={"wait": 0.2}, timeout=60).status_code == 204
    assert client.post(f"{path}/pause", timeout=60).status_code == 403


def test_agents_can_be_told_of_an_authority_of_ones_own(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "")
    with pytest.raises(ConsoleUnavailable, match=re.escape(golden("has-a-certificate-that-is-not"))):
        ConsoleClient(proxy.root, token=TOKEN).get("/jobs/none", Deployment)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(proxy.certificate))
    with pytest.raises(ConsoleRefused, match="none"):
        ConsoleClient(proxy.root, token=TOKEN).get("/jobs/none", Deployment)


def test_strangers_and_other_names_are_turned_away(proxy: Proxy, client: requests.Session) -> None:
    assert client.get(f"{proxy.root}/api/v1/jobs", timeout=60).status_code == 401
    other = client.get(f"{proxy.root}/api/v1/jobs", headers={"Host": "other.example"}, timeout=60)
    assert (other.status_code, other.json()["code"]) == (421, "wrong_host")
    moved = client.get(f"{proxy.plain}/schedule", headers={"Host": NAME}, timeout=60, allow_redirects=False)
    assert (moved.status_code, moved.headers["Location"]) == (301, f"https://{NAME}/schedule")


def test_an_address_that_a_client_claims_does_not_count(proxy: Proxy, client: requests.Session) -> None:
    """Else whoever guesses tokens could have a new address for each."""
    answers = []
    for i in range(201):  # right tokens came from here before, so that this address has 200 tries of its own
        headers = {"Authorization": "Bearer guess", "X-Forwarded-For": f"10.0.0.{i}"}
        answers.append(client.get(f"{proxy.root}/api/v1/jobs", headers=headers, timeout=60).status_code)
    assert (answers[0], answers[-1]) == (401, 429)


def _websocket(proxy: Proxy, cookie: str) -> int:
    """The status with which a page's WebSocket is answered."""
    host = f"127.0.0.1:{proxy.port}"
    request = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: {host}\r\nOrigin: https://{host}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: streamlit\r\n"
        + (f"Cookie: {cookie}\r\n" if cookie else "")
        + "\r\n"
    )
    context = ssl.create_default_context(cafile=str(proxy.certificate))
    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        connection.sendall(request.encode())
        return int(connection.recv(100).split()[1])
