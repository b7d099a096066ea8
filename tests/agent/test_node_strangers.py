"""Whoever connects to the lead and proves nothing shuts no node out, however it drips."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes import frames, pool, server
from openrecycle.agent.nodes.frames import Frames, greet
from openrecycle.agent.nodes.pool import MAX_STRANGERS, MAX_STRANGERS_OF_ONE, NodeHub, SpreadPool
from openrecycle.agent.nodes.server import LeadLost, NodeServer
from openrecycle.agent.nodes.succession import tell
from openrecycle.agent.workers.spec import MACHINE, RunSpec
from openrecycle.planner.jobs.job import Job
from tests.agent.consoles import until
from tests.golden import golden

TOKEN = "a secret of 20 signs"
WELCOME = {"kind": "welcome", "begun": False, "others": []}


@pytest.fixture
def hub() -> Iterator[NodeHub]:
    hub = NodeHub("127.0.0.1", 0, 3, TOKEN, lambda _: None)
    yield hub
    hub.close("test")


def join(hub: NodeHub, rank: int) -> tuple[Frames, dict[str, object]]:
    met = greet(socket.create_connection((hub.host, hub.port)), TOKEN, "node")
    met.send({"rank": rank, "address": "127.0.0.1"} | MACHINE)
    return met, met.receive(time.monotonic() + 10)


@pytest.mark.chaos
def test_silent_connections_shut_no_node_out(hub: NodeHub) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((hub.host, hub.port))) for _ in range(2 * MAX_STRANGERS)]
        met, answer = join(hub, 1)
        assert answer == WELCOME
        met.close()
        # Those that came first have made way; no address has more than its share.
        for old in silent[: -2 * MAX_STRANGERS_OF_ONE]:
            read_to_its_end(old)


def read_to_its_end(connection: socket.socket) -> None:
    """Until the other side ends it. Raises TimeoutError where it does not."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1024):
            pass


def test_a_share_of_the_strangers_is_all_that_an_address_gets(hub: NodeHub) -> None:
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((hub.host, hub.port))) for _ in range(MAX_STRANGERS_OF_ONE + 5)
        ]
        for old in silent[:5]:
            read_to_its_end(old)
        silent[5].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[5].recv(1)


class SlowListener(socket.socket):
    """Whoever is to accept here is about to, and does not before it is `free`."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=listener.detach())
        self.asked, self.free = threading.Event(), threading.Event()

    def accept(self) -> tuple[socket.socket, Any]:
        self.asked.set()
        self.free.wait(20)
        return super().accept()


def test_where_it_listened_is_not_closed_before_nobody_is_about_to_accept_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What listens next has the number, and would lose a connection."""
    made: list[SlowListener] = []
    create = socket.create_server

    def create_slow(address: tuple[str, int]) -> socket.socket:
        made.append(SlowListener(create(address)))
        return made[-1]

    monkeypatch.setattr(socket, "create_server", create_slow)
    hub = NodeHub("127.0.0.1", 0, 3, TOKEN, lambda _: None)
    (listener,) = made
    assert listener.asked.wait(10)
    closing = threading.Thread(target=hub.close, args=("test",))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and listener.fileno() >= 0
    listener.free.set()
    closing.join(10)
    assert not closing.is_alive() and listener.fileno() < 0


def test_who_knocks_without_end_fills_no_log() -> None:
    said: list[str] = []
    hub = NodeHub("127.0.0.1", 0, 3, TOKEN, said.append)
    try:
        for _ in range(3):
            with socket.create_connection((hub.host, hub.port), 10) as scanner:
                scanner.send(b"GET / HTTP/1.1\r\n\r\n")
                read_to_its_end(scanner)
        with pytest.raises(LeadLost):
            NodeServer(7, 3, (hub.host, hub.port), TOKEN, None, lambda _: None).run(60)
        until(lambda: len(said) > 1, "another reason to be said", 10)
        assert len(said) == 2 and golden("a-node-does-not-speak-tls") in said[0] and "--node-rank" in said[1], said
    finally:
        hub.close("test")


def test_a_byte_now_and_then_does_not_stretch_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frames, pool):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 1.0)
    hub = NodeHub("127.0.0.1", 0, 3, TOKEN, lambda _: None)
    try:
        with socket.create_connection((hub.host, hub.port)) as slow:
            begin = time.monotonic()
            ended = threading.Event()
            with contextlib.suppress(OSError):
                for _ in range(300):
                    slow.send(b"x")
                    if ended.wait(0.1):
                        break
            assert time.monotonic() - begin < 20
            read_to_its_end(slow)
    finally:
        hub.close("test")


def test_a_node_that_is_refused_tries_again_where_the_reason_passes(hub: NodeHub) -> None:
    first, answer = join(hub, 1)
    assert answer == WELCOME
    answering = threading.Thread(target=_tell_the_time, args=(first,), daemon=True)
    answering.start()
    until(lambda: 1 in hub.links, "the first node to be there", 10)
    said: list[str] = []
    again = NodeServer(1, 3, (hub.host, hub.port), TOKEN, None, said.append)
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(again.run(60)))
    thread.start()
    until(lambda: any("tried again" in line for line in said), "the node to be turned away", 20)
    first.close()
    until(lambda: any("works for" in line for line in said), "the node to be taken", 30)
    hub.close("the job is over", finished=True)
    thread.join(20)
    assert outcome == [golden("the-job-is-over")]


def test_a_node_that_comes_while_the_job_ends_is_told_so(hub: NodeHub) -> None:
    met, answer = join(hub, 1)
    assert answer == WELCOME
    first = met.receive()  # the lead compares clocks: the node is not among its links yet
    hub.close("the job is over", finished=True)
    while first["kind"] == "clock":
        met.send({"kind": "clock", "at": time.monotonic_ns()})
        first = met.receive()
    over = {"kind": "over", "reason": golden("the-job-is-over"), "finished": True}
    assert [first, met.receive()] == [over, {"kind": "bye"}]
    met.close()


def test_a_node_that_comes_while_its_launcher_leaves_for_the_lead_goes_there(hub: NodeHub) -> None:
    met, _ = join(hub, 1)
    first = met.receive()  # as above
    tell((hub.host, hub.port), TOKEN, {"kind": "led", "lead": ("127.0.0.1", 7)})
    hub.close("")
    while first["kind"] == "clock":
        met.send({"kind": "clock", "at": time.monotonic_ns()})
        first = met.receive()
    assert first == {"kind": "moved", "lead": ["127.0.0.1", 7]}
    met.close()


def test_a_node_of_a_job_that_does_not_come_to_its_end_has_not_succeeded(hub: NodeHub) -> None:
    """Kubernetes would not start it again for the job's next try, which would wait for it."""
    node = NodeServer(1, 3, (hub.host, hub.port), TOKEN, None, lambda _: None)
    ended: list[LeadLost] = []

    def run() -> None:
        with pytest.raises(LeadLost) as outcome:
            node.run(60)
        ended.append(outcome.value)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: 1 in hub.links, "the node to be there", 30)
    workers = SpreadPool([], hub, {})
    workers.hand_out(RunSpec(TrainingOptions(job=Job(3, 1, 3)), NamedWorkload("a:b")), lambda: None, last=True)
    workers.kill_all("so")
    thread.join(30)
    assert [str(error) for error in ended] == [f"{golden('the-job-is-over')}: so"]


def test_a_node_that_is_refused_for_good_gives_up(hub: NodeHub) -> None:
    with pytest.raises(LeadLost, match="--node-rank"):
        NodeServer(7, 3, (hub.host, hub.port), TOKEN, None, lambda _: None).run(60)


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_that_was_told_of_another_number_of_nodes_gives_up(hub: NodeHub, nodes: int) -> None:
    """As the lead it would turn others away, or wait for some that do not exist."""
    # It says something where it is taken, and would wait for the job.
    node: NodeServer = NodeServer(1, nodes, (hub.host, hub.port), TOKEN, None, lambda _: node.stop(signal.SIGTERM))
    with pytest.raises(LeadLost, match=f"--nodes: got {nodes}, expected 3"):
        node.run(60)
    assert not hub.links


def test_an_address_that_this_host_lacks_is_named_at_once(hub: NodeHub) -> None:
    with pytest.raises(LeadLost, match=r"--node-address: got 203\.0\.113\.1"):
        NodeServer(1, 3, (hub.host, hub.port), TOKEN, "203.0.113.1", lambda _: None).run(10)


def test_waiting_has_an_end(hub: NodeHub) -> None:
    first, _ = join(hub, 1)
    threading.Thread(target=_tell_the_time, args=(first,), daemon=True).start()
    until(lambda: 1 in hub.links, "the first node to be there", 10)
    with pytest.raises(LeadLost, match="within 0 s"):
        NodeServer(1, 3, (hub.host, hub.port), TOKEN, None, lambda _: None).run(0.1)
    first.close()


def test_who_waits_for_a_lead_that_does_not_answer_says_so_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STARTING_SECONDS", 0.0)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        node.stop(signal.SIGTERM)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        node = NodeServer(1, 3, taken.getsockname(), TOKEN, None, say)
        with pytest.raises(LeadLost, match=r"^stopped"):
            node.run(3600)
    (waiting,) = said
    assert "3,600" in waiting or "3600" in waiting


def _tell_the_time(met: Frames) -> None:
    with contextlib.suppress(OSError):
        while True:
            if met.receive()["kind"] == "clock":
                met.send({"kind": "clock", "at": time.monotonic_ns()})


@pytest.mark.parametrize(
    "hello",
    [
        {"rank": 1} | MACHINE,
        {"rank": 1, "address": ""} | MACHINE,
        {"rank": 1, "address": 5} | MACHINE,
        {"rank": 1, "address": "127.0.0.1", "more": "x" * pool.HELLO_BYTES} | MACHINE,
        {"rank": 1, "address": "127.0.0.1", "resumes": [1]} | MACHINE,
    ],
    ids=("no address", "an empty one", "a number", "64 KiB", "half of what it has"),
)
def test_a_node_that_says_nonsense_of_itself_is_not_welcome(hub: NodeHub, hello: dict[str, object]) -> None:
    if "resumes" in hello:
        hub.take_over({}, frozenset({1}))
    met = greet(socket.create_connection((hub.host, hub.port)), TOKEN, "node")
    met.send(hello)
    with contextlib.suppress(OSError):
        assert met.receive(time.monotonic() + 10)["kind"] == "refused"
    with pytest.raises(ConnectionError):
        met.receive(time.monotonic() + 10)
    assert not hub.links


@pytest.mark.parametrize("clock", [float("inf"), "1", None, 1 << 70], ids=str)
def test_a_clock_that_is_none_ends_the_connection(hub: NodeHub, clock: object) -> None:
    met, _ = join(hub, 1)
    assert met.receive(time.monotonic() + 10) == {"kind": "clock"}
    met.send({"kind": "clock", "at": clock})
    with pytest.raises(ConnectionError):
        met.receive(time.monotonic() + 10)
    assert not hub.links


def test_who_does_not_tell_the_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HANDSHAKE_SECONDS", 1.0)
    hub = NodeHub("127.0.0.1", 0, 3, TOKEN, lambda _: None)
    try:
        met, answer = join(hub, 1)
        assert answer == WELCOME
        assert met.receive(time.monotonic() + 10) == {"kind": "clock"}
        with pytest.raises(ConnectionError):
            met.receive(time.monotonic() + 10)
        met.close()
    finally:
        hub.close("test")
