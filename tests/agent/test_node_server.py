"""A node that does not lead, in this process, before leads that are silent, or late."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.launcher.processes import RankOf, SpareRank, WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.client import Backoff
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.monitoring.liveness import MOST_OF_A_TURN
from openrecycle.agent.nodes import frames, server, succession
from openrecycle.agent.nodes.pool import NodeHub, RemoteProcess, RemoteWorker
from openrecycle.agent.nodes.role import LedElsewhere
from openrecycle.agent.nodes.server import LeadLost
from openrecycle.agent.nodes.succession import Copy, Lead, LeadStatus, Search, tell
from openrecycle.agent.workers.spec import RunSpec, WorkerSpec, decode_run, encode_run, encode_spec
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent.consoles import until
from tests.agent.node_leads import NODES, RANK, FirstLead, GivenProcesses, Node
from tests.agent.node_runs import free_port
from tests.golden import golden

RUN = "a run"
SILENCE = 4.0


class Asked(LeadStatus):
    """times: that somebody has asked how it stands."""

    times = 0

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.times += 1
        return super().answer(message)


def comes_to(node: Node, hub: NodeHub, what: str) -> None:
    until(lambda: RANK in hub.links or node.ended, what, 20)
    assert RANK in hub.links, (node.said, node.ended)


def copy_for(nodes: dict[int, tuple[str, int]]) -> Copy:
    options = TrainingOptions(job=Job.uniform(3, 1, 3))
    timeouts = dataclasses.replace(options.faults.timeouts, silence=SILENCE)
    options = dataclasses.replace(options, faults=dataclasses.replace(options.faults, timeouts=timeouts))
    job = encode_run(RunSpec(options, NamedWorkload("openrecycle.agent.examples.gpt:Gpt"), (1,), None))
    return Copy(RUN, 1, 1, 0, 0, nodes, {}, 0, "", "plan", job)


@pytest.fixture
def first() -> Iterator[FirstLead]:
    lead = FirstLead()
    yield lead
    lead.close()


@pytest.fixture
def next_lead() -> Iterator[NodeHub]:
    """Has won the second term, and does not lead yet."""
    hub = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, Asked(1, lead=1, term=2, run=RUN))
    yield hub
    hub.close("test")


@contextlib.contextmanager
def node_of(first: FirstLead, next_lead: NodeHub, **parts: Any) -> Iterator[Node]:
    """It has a copy, and its lead is silent from then on. parts: as of Node."""
    node = Node(first.address, **parts)
    try:
        first.welcome()
        assert first.node is not None
        first.hand(copy_for({0: first.address, 1: (next_lead.host, next_lead.port), RANK: first.node}))
        yield node
    finally:
        node.stop()


def test_a_lead_that_stops_within_a_message_keeps_no_node_from_its_end(first: FirstLead, next_lead: NodeHub) -> None:
    with node_of(first, next_lead) as node:
        first.begin_to_say()
    assert isinstance(node.ended, LeadLost) and "SIGTERM" in str(node.ended)


def test_a_lead_that_reads_nothing_keeps_no_node_from_looking_for_another(first: FirstLead, next_lead: NodeHub) -> None:
    """It is stopped, and what workers have said since has filled all buffers on the way to it."""
    with node_of(first, next_lead) as node:
        status = next_lead.lead_status
        assert first.frames is not None and isinstance(status, Asked)
        unknown = [f"{number} {'x' * 20_000}" for number in range(1000)]
        first.frames.send({"kind": "resume", "heard": {}, "workers": unknown})  # of each something is said
        until(lambda: status.times or node.ended, "it to look for another", 20)
        assert node.ended is None, node.said
    assert isinstance(node.ended, LeadLost) and "SIGTERM" in str(node.ended)


class Stepping:
    """A clock that stands but for what it is set forward. read: so often."""

    def __init__(self) -> None:
        self.now, self.read = 0.0, 0

    def __call__(self) -> float:
        self.read += 1
        return self.now

    def step(self, seconds: float) -> None:
        """And a turn of the loop passes."""
        self.now, read = self.now + seconds, self.read
        until(lambda: self.read > read + 3, "a turn", 20)


def test_what_a_node_itself_stood_still_is_no_silence_of_its_lead(first: FirstLead, next_lead: NodeHub) -> None:
    """Also in the turn just over: what the lead has said meanwhile is not read yet."""
    clock, status = Stepping(), next_lead.lead_status
    assert isinstance(status, Asked)
    with node_of(first, next_lead, clock=clock) as node:
        clock.step(0.0)
        clock.step(2 * SILENCE)
        assert not status.times and node.ended is None, node.said
        for _ in range(round(SILENCE / MOST_OF_A_TURN) + 1):
            clock.step(MOST_OF_A_TURN)
        until(lambda: status.times or node.ended, "it to look for another", 20)
        assert node.ended is None, node.said


def test_a_lead_that_does_not_answer_is_not_waited_for(first: FirstLead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    node = Node(first.address)
    first.hear()
    node.stop()
    assert isinstance(node.ended, LeadLost)


def test_a_node_follows_a_lead_that_was_not_ready_for_it_at_first(
    first: FirstLead, next_lead: NodeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection with the silent lead is closed by then."""
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.5)
    with node_of(first, next_lead) as node:
        status = next_lead.lead_status
        assert first.frames is not None and isinstance(status, Asked)
        with pytest.raises(OSError, match="closed"):
            first.frames.receive()  # until the node goes to the next one, which sends it away
        asked = status.times
        until(lambda: status.times > asked or node.ended, "it to look again", 20)
        next_lead.take_over({0: first.address}, frozenset({RANK}))
        assert RANK in next_lead.followers(20), (node.said, node.ended)
    assert isinstance(node.ended, LeadLost), "it was stopped"


def test_a_worker_that_the_lead_before_did_not_come_to_start_has_ended(first: FirstLead, next_lead: NodeHub) -> None:
    """The next lead knows it from its copy, and would wait for its first word for two minutes."""
    with node_of(first, next_lead) as node:
        next_lead.take_over({0: first.address}, frozenset({RANK}))
        first.close()
        link = next_lead.followers(20).get(RANK)
        assert link is not None, (node.said, node.ended)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = link.adopt("never started", theirs)
        link.post({"kind": "resume", "heard": {}, "workers": ["another node's", "never started"]})
        process.join(20)
        assert not process.is_alive() and process.exitcode is None
        assert RemoteWorker(Worker(0, 0), "never started", process, ours, 0.0, node=link).ending == golden("not-found")


@pytest.mark.parametrize(
    ("heard", "silent", "spare"),
    [
        pytest.param([()], False, [("dead", 0), ("dead", 1)], id="begun just before"),
        pytest.param([("begun",)], False, [], id="at fault"),
        pytest.param([("begun",)], True, [("begun", 1)], id="silent"),
        pytest.param([("begun",), ()], False, [], id="at fault, two leads ago"),
        pytest.param([("begun",), ()], True, [("begun", 1)], id="silent, two leads ago"),
        pytest.param([()], True, [("begun", 1)], id="silent, and no copy was taken"),
    ],
)
def test_what_is_spare_of_a_worker_that_the_next_lead_does_not_have(
    heard: list[tuple[str, ...]], silent: bool, spare: list[RankOf], first: FirstLead, next_lead: NodeHub
) -> None:
    """The lead before was lost as it began it, or had it ended. Ranks are told of once they have ended."""
    ours, theirs = multiprocessing.Pipe()
    processes = [RemoteProcess(lambda: None) for _ in range(2)]
    came = [SpareRank(("dead", rank), 4 + rank) for rank in range(2)]
    entry = WorkerProcess(Worker(0, 0), "", processes[0], ours, 0.0, slots=(4, 5), siblings=(processes[1],))
    entry.made_of = tuple(spare.rank for spare in came)
    pool = GivenProcesses([entry])
    pool.spares.add(0, came)
    spec = encode_spec(WorkerSpec(Worker(0, 0), "begun", decode_run(copy_for({}).job), True))
    with node_of(first, next_lead, make_pool=lambda _: pool) as node, theirs:
        assert first.frames is not None
        first.frames.send({"kind": "start", "spec": spec, "fill": [["dead", 0], ["dead", 1]]})
        until(lambda: pool.asked or node.ended, "it to be begun", 20)
        if silent:
            first.frames.send({"kind": "end", "incarnation": "begun"})
            until(lambda: entry.asked, "it to be told", 20)
        next_lead.take_over({0: first.address}, frozenset({RANK}))
        first.close()
        link = next_lead.followers(20)[RANK]
        for one in heard:  # what a further lead does not know is in its copy no more
            link.post({"kind": "resume", "heard": dict.fromkeys(one, 0), "workers": []})
        until(lambda: entry.fenced, "it to be ended", 20)
        time.sleep(0.2)
        assert link.resumed == (silent or heard != [()]) and not link.spares, "it still runs"
        for process, code in zip(processes, (-9, channel.FENCED), strict=True):
            process.ended(code)
        until(lambda: not pool.entries, "its end", 20)
        until(lambda: link.resumed and (link.spares == spare or node.ended), "its word", 20)
        assert link.spares == spare and len(pool.spares.on(0)) == len(spare)


def test_a_node_that_comes_too_late_to_follow_comes_back_as_a_new_one(first: FirstLead, next_lead: NodeHub) -> None:
    with node_of(first, next_lead) as node:
        next_lead.take_over({RANK: first.node or first.address}, frozenset())
        next_lead.followers(0)
        first.close()
        comes_to(node, next_lead, "it to come back")
        assert next_lead.links[RANK].resumes == (0, 0), "it has nothing of before"
        assert next_lead.members[RANK] != first.node, "where it listened nobody does, so it was gone"


def test_a_node_whose_lead_goes_on_without_it_comes_back(next_lead: NodeHub) -> None:
    """The connection with a lead that lives is broken."""
    next_lead.take_over({}, frozenset())
    node = Node((next_lead.host, next_lead.port))
    try:
        until(lambda: RANK in next_lead.links, "it to come", 20)
        link = next_lead.links[RANK]
        copy = copy_for({1: (next_lead.host, next_lead.port), RANK: next_lead.members[RANK]})
        link.post(dataclasses.replace(copy, term=2, lead=1).to_message())
        until(lambda: link.acked == 1, "it to have a copy", 20)
        link.close()
        until(lambda: next_lead.links.get(RANK, link) is not link or node.ended, "it to come back", 20)
        assert RANK in next_lead.links, (node.said, node.ended)
    finally:
        node.stop()


class LastAnswer(Asked):
    """The launcher ends as soon as it has been asked."""

    hub: NodeHub

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        answer = super().answer(message)
        self.hub.close("")
        return answer


def test_a_node_that_comes_back_finds_who_leads_once_that_one_is_lost_too() -> None:
    status = LastAnswer(1, lead=1, term=2, run=RUN)
    going = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, status)
    status.hub = going
    other = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, LeadStatus(0, lead=1, term=2, run=RUN))
    going.take_over({}, frozenset())
    node = Node((going.host, going.port))
    try:
        until(lambda: RANK in going.links, "it to come", 20)
        link = going.links[RANK]
        nodes = {0: (other.host, other.port), 1: (going.host, going.port), RANK: going.members[RANK]}
        link.post(dataclasses.replace(copy_for(nodes), term=2, lead=1).to_message())
        until(lambda: link.acked == 1, "it to have a copy", 20)
        link.close()
        until(lambda: status.times, "it to look who leads", 20)
        other.take_over({}, frozenset())
        comes_to(node, other, "it to come to the next lead")
    finally:
        node.stop()
        other.close("test")
        going.close("")


def test_a_node_that_knows_others_outlives_node_0_before_it_knows_the_job() -> None:
    """It has come back to node 0, which all nodes come to at first: then, too, the job is under way."""
    front = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None)
    other = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, LeadStatus(1))
    node = Node((front.host, front.port), (other.host, other.port))
    try:
        comes_to(node, front, "it to come")
        front.close("")
        other.take_over({}, frozenset())
        comes_to(node, other, "it to come to the next lead")
    finally:
        node.stop()
        other.close("test")
        front.close("")


@pytest.mark.parametrize("rank", [RANK, 0])
def test_a_node_that_has_come_to_a_lead_outlives_it_before_it_knows_the_job(rank: int) -> None:
    """It has joined a job that is under way, and has no copy yet: it is not counted among those that choose. Node 0
    listens at the same address all along."""
    going = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, LeadStatus(1, lead=1, term=2, run=RUN))
    going.take_over({}, frozenset())
    status = LeadStatus(other := RANK - rank, lead=1, term=2, run=RUN)
    next_lead = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, status)
    next_lead.lead = going.host, going.port
    if rank:
        node = Node((next_lead.host, next_lead.port), rank=rank)
    else:
        node = Node(("127.0.0.1", free_port()), (going.host, going.port), rank=rank)
        going.members[other] = next_lead.host, next_lead.port
    search: Search | None = None
    try:
        until(lambda: rank in going.links or node.ended, "it to come", 20)
        nodes = {1: (going.host, going.port), other: (next_lead.host, next_lead.port), rank: going.members[rank]}
        copy = dataclasses.replace(copy_for(nodes), term=2, lead=1)
        assert status.take(copy)
        going.close("")
        status.lose_lead()
        search = Search(status, copy, "")
        search.join(20)
        assert search.outcome == Lead(3, frozenset(), frozenset({1, rank})), (node.said, node.ended)
        next_lead.take_over({}, frozenset())
        until(lambda: rank in next_lead.links or node.ended, "it to come to the next lead", 20)
        assert rank in next_lead.links, (node.said, node.ended)
    finally:
        if search is not None:
            search.cancel()
        node.stop()
        next_lead.close("test")
        going.close("")


def test_a_node_waits_for_its_lead_that_was_lost_before_the_job_began() -> None:
    """It knows nobody else; whoever leads next does it where all look for their lead."""
    port = free_port()
    hub = NodeHub("127.0.0.1", port, NODES, "", lambda _: None)
    node = Node((hub.host, port))
    try:
        comes_to(node, hub, "it to come")
        hub.close("")
        hub = NodeHub("127.0.0.1", port, NODES, "", lambda _: None)
        comes_to(node, hub, "it to come back")
    finally:
        node.stop()
        hub.close("test")


@pytest.fixture
def lead() -> Iterator[NodeHub]:
    """Of a job that has begun, and not where all nodes look for theirs."""
    hub = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, LeadStatus(1, lead=1, term=2, run=RUN))
    hub.take_over({}, frozenset())
    yield hub
    hub.close("test")


def test_a_node_that_comes_once_its_launcher_knows_who_leads_goes_there(lead: NodeHub) -> None:
    """Those that had come before are told by then, and this launcher is about to be one of the nodes."""
    front = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None)
    tell((front.host, front.port), "", {"kind": "led", "lead": (lead.host, lead.port)})
    with pytest.raises(LedElsewhere):
        front.wait_for_all(5)
    node = Node((front.host, front.port))
    try:
        until(lambda: RANK in front.links or RANK in lead.links, "it to come", 20)
        front.close("")
        comes_to(node, lead, "it to come to the lead")
    finally:
        node.stop()
        front.close("")


def test_a_node_whose_lead_is_lost_before_it_knows_the_job_asks_the_others(lead: NodeHub) -> None:
    """It has come where all look for their lead, and nobody else is known to it but by that one's word."""
    front = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None)
    front.take_over({1: (lead.host, lead.port)}, frozenset())
    node = Node((front.host, front.port))
    try:
        comes_to(node, front, "it to come")
        front.close("")
        comes_to(node, lead, "it to come to the next lead")
    finally:
        node.stop()
        front.close("")


def test_a_lead_that_is_silent_before_it_has_told_of_the_job_is_left(
    first: FirstLead, next_lead: NodeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stopped, and its connection does not break: those who are to choose another would wait for this node,
    which knows nothing. One whose job has not begun may be silent for long: it waits for other nodes."""
    monkeypatch.setattr(server, "FIRST_COPY_SECONDS", 0.2)
    next_lead.take_over({}, frozenset())
    node = Node((next_lead.host, next_lead.port), first.address)
    try:
        first.welcome()
        assert first.frames is not None
        with pytest.raises(TimeoutError):
            first.frames.receive(time.monotonic() + 1.0)
        first.frames.close()
        first.welcome(begun=True)
        comes_to(node, next_lead, "it to come to the next lead")
    finally:
        node.stop()


@contextlib.contextmanager
def answering(says: bytes) -> Iterator[tuple[str, int]]:
    """Where whoever connects is told that; b"": by a program that is stopped, for which the system answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(says)
                        connection.recv(1 << 16)

        if says:
            threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("says", [pytest.param(b"", id="stopped"), pytest.param(b"SSH-2.0\r\n", id="another program")])
def test_where_no_lead_is_to_be_had_the_next_is_asked(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frames, server):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.5)
    lead = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None)
    with answering(says) as first_asked:
        node = Node((lead.host, lead.port), first_asked)
        try:
            comes_to(node, lead, "it to come")
        finally:
            node.stop()
            lead.close("test")


def test_a_node_goes_on_asking_the_lead_that_it_was_told_of() -> None:
    front = NodeHub("127.0.0.1", 0, NODES, "", lambda _: None, LeadStatus(0))
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        front.lead = host, port = reserved.getsockname()
        node = Node((front.host, front.port))
        try:
            until(lambda: node.said, "it to be told", 20)
            front.close("")
            lead = NodeHub(host, port, NODES, "", lambda _: None)
            try:
                comes_to(node, lead, "it to come")
            finally:
                lead.close("test")
        finally:
            node.stop()
            front.close("")


class Pauses(Backoff):
    """taken: how long each would be, in seconds; they take no time."""

    taken: ClassVar[list[float]] = []

    def seconds(self) -> float:
        self.taken.append(super().seconds())
        return 0.0


def test_a_node_pauses_until_a_lead_tells_it_of_the_job(
    first: FirstLead, next_lead: NodeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes it in, and hangs up each time, would be kept busy."""
    monkeypatch.setattr(Pauses, "taken", [])
    monkeypatch.setattr(server, "Backoff", Pauses)
    node = Node((next_lead.host, next_lead.port), first.address)
    try:
        for _ in range(5):
            first.welcome()
            assert first.frames is not None
            first.frames.close()
        first.welcome()
        assert first.node is not None
        assert min(Pauses.taken[4:]) > max(Pauses.taken[:1])
        before = len(Pauses.taken)
        first.hand(copy_for({0: first.address, 1: (next_lead.host, next_lead.port), RANK: first.node}))
        next_lead.take_over({RANK: first.node}, frozenset())
        next_lead.followers(0)
        first.close()  # too late to follow the next one
        comes_to(node, next_lead, "it to come back")
        assert Pauses.taken[before] <= 0.1, "as at first"
    finally:
        node.stop()
