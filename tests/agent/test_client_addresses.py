"""A client with the addresses of a console and its standby: real servers on loopback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from openrecycle.agent.config.options import check_url
from openrecycle.agent.coordination.launcher import Halt
from openrecycle.agent.messages.client import (
    ConsoleClient,
    ConsoleRefused,
    ConsoleUnavailable,
    ConsoleWaits,
    JobUnknown,
)
from openrecycle.agent.messages.protocol import ClockReading
from openrecycle.agent.monitoring.console_link import ConsoleCoordination
from openrecycle.planner.jobs.errors import InputError
from tests.golden import golden

GOOD = (200, {"name": "clock", "microseconds": 7})
STANDBY = (503, {"title": "t", "status": 503, "code": "standby", "detail": "this console is a standby: a leads"})


class Answering:
    """A server that says what it is told to, and counts; None: takes a request and says nothing."""

    def __init__(self, answer: tuple[int, object] | None) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.authorization: list[str | None] = []
        self.ending = threading.Event()
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked.append(self.path)
                served.authorization.append(self.headers["Authorization"])
                if served.answer is None:
                    served.ending.wait(60)
                    return
                status, body = served.answer
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def answering(stack: ExitStack, answer: tuple[int, object] | None) -> Answering:
    server = Answering(answer)
    stack.callback(server.close)
    return server


def gone() -> str:
    """An address that nobody listens on any more."""
    server = Answering(GOOD)
    server.close()
    return server.url


def read(client: ConsoleClient) -> int:
    reading = client.get("/clock", ClockReading)
    assert reading is not None
    return reading.microseconds


@pytest.mark.parametrize("text", ["http://a:1, https://b:2/", "http://a:1,https://b:2"])
def test_addresses_have_a_comma_between(text: str) -> None:
    assert check_url(text) == "http://a:1,https://b:2"


@pytest.mark.parametrize("text", ["http://a:1,", "http://a:1,b:2", ",http://a:1", "http://a:1;,http://"])
def test_each_address_must_be_one(text: str) -> None:
    with pytest.raises(InputError, match=golden("several-with-commas-between")):
        check_url(text)


@pytest.mark.parametrize("first", ["gone", "standby", "silent", "broken"])
def test_what_one_does_not_take_goes_to_the_other(stack: ExitStack, first: str) -> None:
    leader = answering(stack, GOOD)
    answers = {"standby": STANDBY, "silent": None, "broken": (502, "a proxy's page")}
    url = gone() if first == "gone" else answering(stack, answers[first]).url
    client = ConsoleClient(f"{url},{leader.url}", timeout=0.5)
    assert read(client) == 7
    assert client.url == leader.url, "and the next one goes there at once"


def test_it_stays_with_the_one_that_answers(stack: ExitStack) -> None:
    first, second = answering(stack, STANDBY), answering(stack, GOOD)
    client = ConsoleClient(f"{first.url},{second.url}")
    for _ in range(3):
        read(client)
    assert (len(first.asked), len(second.asked)) == (1, 3)


def test_when_the_leader_changes_the_client_follows(stack: ExitStack) -> None:
    first, second = answering(stack, GOOD), answering(stack, STANDBY)
    client = ConsoleClient(f"{first.url},{second.url}")
    read(client)
    first.answer, second.answer = STANDBY, GOOD
    assert read(client) == 7 and client.url == second.url


def test_while_nobody_leads_each_is_asked_once_and_the_error_says_so(stack: ExitStack) -> None:
    first, second = answering(stack, STANDBY), gone()
    client = ConsoleClient(f"{first.url},{second}")
    with pytest.raises(ConsoleUnavailable) as error:
        read(client)
    assert golden("answered-503-this-console-is", first.url) in str(error.value)
    assert golden("does-not-answer", second) in str(error.value)
    assert len(first.asked) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(503, "disk_full", ConsoleWaits), (500, "internal", ConsoleUnavailable), (503, "", ConsoleUnavailable)],
)
def test_one_that_fails_does_not_wait(stack: ExitStack, status: int, code: str, kind: type[ConsoleUnavailable]) -> None:
    """A mistake of the console's does not pass as a full disk does; and what says nothing is a proxy."""
    body = {"title": "t", "status": status, "code": code, "detail": "why"} if code else "a proxy's page"
    with pytest.raises(ConsoleUnavailable) as error:
        read(ConsoleClient(answering(stack, (status, body)).url))
    assert type(error.value) is kind


def test_one_that_hangs_is_not_asked_first_again(stack: ExitStack) -> None:
    silent, standby = answering(stack, None), answering(stack, STANDBY)
    client = ConsoleClient(f"{silent.url},{standby.url}", timeout=0.3)
    with pytest.raises(ConsoleUnavailable):
        read(client)
    standby.answer = GOOD
    assert read(client) == 7
    assert len(silent.asked) == 1


def test_an_answer_that_is_no_plan_is_none(stack: ExitStack) -> None:
    with pytest.raises(ConsoleUnavailable):
        ConsoleClient(answering(stack, GOOD).url).plan("/jobs/a", "b")


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n"])
def test_a_file_of_authorities_that_names_none_is_said_to(
    text: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console would answer."""
    file = tmp_path / "ca.pem"
    file.write_text(text)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(file))
    client = ConsoleClient(answering(stack, GOOD).url.replace("http:", "https:"))
    with pytest.raises(ConsoleUnavailable) as raised:
        client.get("/clock", ClockReading)
    assert golden("no-certificate-can-be-read", file) in str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "there", "why"),
    [
        ("http", False, golden("no-answer-since-refused")),
        ("https", True, golden("no-answer-since-no-tls")),
        ("http", True, golden("no-answer-since-timeout")),
    ],
)
def test_why_no_answer_came_is_said_in_words(scheme: str, there: bool, why: str, stack: ExitStack) -> None:
    """Not as the name of an exception. https:// before a console without a proxy is an easy mistake."""
    url = answering(stack, None if scheme == "http" else GOOD).url if there else gone()
    with pytest.raises(ConsoleUnavailable) as raised:
        read(ConsoleClient(url.replace("http", scheme), timeout=0.2 if scheme == "http" else 30.0))
    assert why in str(raised.value)


def test_a_proxy_that_reaches_no_console_is_not_taken_for_one_without_tls(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def closes() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=closes, daemon=True).start()
    with pytest.raises(ConsoleUnavailable) as raised:
        read(ConsoleClient(f"https://127.0.0.1:{listener.getsockname()[1]}"))
    assert golden("no-answer-since-closed") in str(raised.value)


def test_an_answer_that_ends_before_its_first_piece_is_a_closed_connection(stack: ExitStack) -> None:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def begins() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    threading.Thread(target=begins, daemon=True).start()
    with pytest.raises(ConsoleUnavailable) as raised:
        read(ConsoleClient(f"http://127.0.0.1:{server.getsockname()[1]}"))
    assert golden("no-answer-since-closed") in str(raised.value)


def certificate(folder: Path) -> Path:
    """A file with a certificate for this machine, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "console")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    file = folder / "console.pem"
    file.write_bytes(signed.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    return file


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_proxy_that_asks_for_a_clients_certificate_is_said_to(
    version: ssl.TLSVersion, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    asks = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asks.load_cert_chain(file)
    asks.minimum_version = asks.maximum_version = version
    asks.verify_mode = ssl.CERT_REQUIRED
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def refuse() -> None:
        connection, _ = server.accept()
        with connection:
            # The request that is on its way already is read: else the system would send a reset, and drop the alert.
            plain = connection.dup()
            with suppress(ssl.SSLError):
                asks.wrap_socket(connection, server_side=True)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(65536):
                pass
            plain.close()

    threading.Thread(target=refuse, daemon=True).start()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(file))
    with pytest.raises(ConsoleUnavailable) as raised:
        read(ConsoleClient(f"https://127.0.0.1:{server.getsockname()[1]}"))
    assert golden("no-answer-since-no-client-certificate") in str(raised.value)


def test_a_proxy_that_answers_that_it_wants_a_clients_certificate_is_said_to(stack: ExitStack) -> None:
    """As nginx does, which first takes the connection."""
    no = answering(stack, (400, "<title>400 No required SSL certificate was sent</title>"))
    with pytest.raises(ConsoleUnavailable) as raised:
        read(ConsoleClient(no.url))
    assert golden("no-answer-since-no-client-certificate") in str(raised.value)


def test_a_refusal_is_an_answer(stack: ExitStack) -> None:
    no = (404, {"title": "t", "status": 404, "code": "unknown_job", "detail": "no such job"})
    first, second = answering(stack, no), answering(stack, GOOD)
    client = ConsoleClient(f"{first.url},{second.url}")
    with pytest.raises(ConsoleRefused, check=lambda error: error.problem.code == "unknown_job"):
        read(client)
    assert second.asked == []
    first.answer = (401, {"title": "t", "status": 401, "code": "unauthorized", "detail": "Authorization: none"})
    with pytest.raises(ConsoleRefused, match="--token-file"):
        read(client)


def test_a_token_may_end_with_a_newline(stack: ExitStack) -> None:
    """As one that was read from a file does."""
    console = answering(stack, GOOD)
    assert read(ConsoleClient(console.url, token="a-token-of-this-console\n")) == 7
    assert console.authorization == ["Bearer a-token-of-this-console"]


def test_a_job_that_was_known_is_asked_for_again(stack: ExitStack) -> None:
    """A console without its job's database is no reason for a job to end."""
    no = (404, {"title": "t", "status": 404, "code": "unknown_job", "detail": "no such job"})
    first, second = answering(stack, no), answering(stack, no)
    client = ConsoleClient(f"{first.url},{second.url}", known=True)
    with pytest.raises(JobUnknown):
        read(client)
    second.answer = GOOD
    assert read(client) == 7


@pytest.mark.parametrize(("status", "code"), [(401, "unauthorized"), (403, "token_needed"), (421, "wrong_host")])
def test_who_was_taken_before_is_no_reason_for_a_job_to_end(status: int, code: str, stack: ExitStack) -> None:
    """The console was started again without its token, or without the name that its proxy has: people mend that."""
    no = (status, {"title": "t", "status": status, "code": code, "detail": "settings"})
    server = answering(stack, no)
    with pytest.raises(ConsoleRefused):
        read(ConsoleClient(server.url))
    client = ConsoleClient(server.url, known=True)
    with pytest.raises(ConsoleUnavailable, match="settings"):
        read(client)
    server.answer = GOOD
    assert read(client) == 7
    coordination = ConsoleCoordination(lambda: ConsoleClient(server.url, known=True), "job", lambda text: None)
    server.answer, server.asked = no, []
    try:
        while len([path for path in server.asked if "deployment" in path]) < 2:
            assert not any(isinstance(event, Halt) for event in coordination.poll(0.0))
            time.sleep(0.01)
    finally:
        coordination.close(lambda: True)


@pytest.mark.parametrize("page", ["default backend - 404", {"detail": "Not Found"}])
def test_a_404_that_is_not_the_consoles_is_a_proxys(page: object, stack: ExitStack) -> None:
    """Whose console is being started again: no reason for a job to end."""
    first, second = answering(stack, (404, page)), answering(stack, GOOD)
    assert read(ConsoleClient(f"{first.url},{second.url}")) == 7
    with pytest.raises(ConsoleUnavailable) as error:
        read(ConsoleClient(first.url))
    assert f"{first.url} answered 404" in str(error.value)


def test_long_polls_are_short_where_another_console_may_have_taken_over(stack: ExitStack) -> None:
    only, other = answering(stack, GOOD), answering(stack, GOOD)
    ConsoleClient(only.url).get("/clock", ClockReading, wait=20)
    ConsoleClient(f"{only.url},{other.url}").get("/clock", ClockReading, wait=20)
    assert [path.partition("?")[2] for path in only.asked] == ["wait=20", "wait=5.0"]
