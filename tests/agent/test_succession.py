"""Who leads next, without processes: there are never two, and what is handed out is what was known."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.coordination.launcher import Coordination, Deploy, Event, Failure, Halt
from openrecycle.agent.launcher.launch import JobFailed, Launcher, Takeover
from openrecycle.agent.launcher.processes import ProcessPool, SpareRanks, WorkerProcess
from openrecycle.agent.launcher.record import RunRecord
from openrecycle.agent.messages.client import LIMIT, Record
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes import succession
from openrecycle.agent.nodes.frames import Frames
from openrecycle.agent.nodes.pool import NodeHub, NodeLink, RemoteProcess, RemoteWorker
from openrecycle.agent.nodes.succession import (
    Copy,
    Follow,
    GiveUp,
    LauncherAnswer,
    Lead,
    LeadStatus,
    Search,
    Spool,
    ask,
    first_to_lead,
    may_go_on,
    may_have_vote,
    may_lead,
)
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.consoles import until
from tests.conftest import examples

RUN = "a run"


@st.composite
def split(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Nodes, those that follow the old lead (itself among them), those that follow a new one, and how many of those
    that are gone either of them knows of."""
    gone, old, new, neither = (draw(st.integers(least, 8)) for least in (0, 1, 1, 0))
    knows_old, knows_new = draw(st.integers(0, gone)), draw(st.integers(0, gone))
    return gone + old + new + neither, old, new, knows_old, knows_new


@given(split())
def test_there_are_never_two_leads(of: tuple[int, int, int, int, int]) -> None:
    nodes, old, new, known_to_old, known_to_new = of
    goes_on, _ = may_go_on(old, nodes - known_to_old)
    begins, _ = may_lead(new, nodes - known_to_new)
    assert not (goes_on and begins)


@given(st.integers(1, 9), st.integers(0, 8))
def test_whoever_is_left_leads_once_all_others_are_known_to_be_gone(left: int, gone: int) -> None:
    assert may_lead(left, left)[0]
    assert may_lead(left, left + gone)[0] == (left > gone)
    assert may_go_on(left, left + gone)[0] == (left >= gone)


def test_of_two_nodes_that_do_not_hear_each_other_only_the_lead_goes_on() -> None:
    assert may_go_on(1, 2)[0] and not may_lead(1, 2)[0]
    assert may_lead(1, 1)[0], "the lead's process is known to have ended"


ages = st.tuples(st.integers(1, 3), st.integers(0, 5))


@given(st.dictionaries(st.integers(0, 9), ages, min_size=1))
def test_all_choose_the_same_and_nothing_newer_is_lost(known: dict[int, tuple[int, int]]) -> None:
    first, _ = first_to_lead(known)
    term = 1 + max(term for term, _ in known.values())
    assert all(may_have_vote(True, term - 1, own, term, known[first])[0] for own in known.values())
    assert first == min(rank for rank, age in known.items() if age == known[first])


@given(ages, ages, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_a_vote_is_given_once_and_for_no_older_copy(
    own: tuple[int, int], age: tuple[int, int], promised: int, term: int, free: bool
) -> None:
    granted, _ = may_have_vote(free, promised, own, term, age)
    assert granted == (free and term > promised and age >= own)


# -- what a node keeps ----------------------------------------------------------------------------


@examples(30)
@given(st.lists(st.text(max_size=20), max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_the_record_reaches_a_node_whatever_it_has_of_it(texts: list[str], has: int, cut: int) -> None:
    lead, node = Spool(), Spool()
    lead.add({"warning": text} for text in texts)
    node.add({"warning": text} for text in texts[:has])
    for message in lead.messages(min(has, len(texts)), len(texts)):
        node.cut(message["first"])
        node.add_text(json.loads(json.dumps(message["text"])))
    assert [line["warning"] for line in node.lines()] == texts
    node.cut(cut)
    assert [line["warning"] for line in node.lines()] == texts[:cut] and len(node) == min(cut, len(texts))


class CountingSpool(Spool):
    """read: lines; handed: messages for a node."""

    read = handed = 0

    def lines(self, first: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
        for line in super().lines(first, end):
            self.read += 1
            yield line

    def messages(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        for message in super().messages(first, end):
            self.handed += 1
            yield message


class SlowFrames(Frames):
    """Of a node that takes nothing until it is `let`; sent: what it has taken since."""

    def __init__(self) -> None:
        own, self._other = socket.socketpair()
        super().__init__(own, "a token", "lead")
        self.let, self._closed = threading.Event(), threading.Event()
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        if message["kind"] != "clock":
            self.let.wait(20)
            self.sent.append(message)

    def receive(self, until: float | None = None, *, most: int | None = None) -> dict[str, Any]:
        if until is None:
            self._closed.wait()
            raise ConnectionResetError
        return {"kind": "clock", "at": time.monotonic_ns()}

    def close(self) -> None:
        self._closed.set()
        self.let.set()
        super().close()
        self._other.close()


def test_whoever_decides_reads_no_record_for_a_node_that_comes_back() -> None:
    """It would hear nobody meanwhile: with 500,000 lines the other nodes chose another lead."""
    spool, frames = CountingSpool(), SlowFrames()
    spool.add({"iteration": number} for number in range(100_000))
    link = NodeLink(frames, 1, "host", lambda _: None, time.monotonic() + 10)
    try:
        link.hand(replace(copy_of({}), lines=100_000), spool)
        assert spool.handed <= 1, "the next one waits until that is taken"
        spool.add([{"iteration": 100_000}])  # it belongs to the next copy
        frames.let.set()
        until(lambda: frames.sent and frames.sent[-1]["kind"] == "copy", "the node to have all", 20)
        lines = "".join(message["text"] for message in frames.sent[:-1]).splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == list(range(100_000))
        assert spool.handed > 1
    finally:
        link.close()


def test_all_workers_of_a_lost_node_have_ended_once_the_launcher_can_know_of_one() -> None:
    """Each turn of the launcher that finds some of them costs a generation."""
    frames, found, over = SlowFrames(), list[bool](), threading.Event()
    link = NodeLink(frames, 1, "host", lambda _: over.set(), time.monotonic() + 10)
    entries = list[RemoteWorker]()

    class Waking:
        """The end of a pipe, which wakes the launcher when it is closed."""

        def close(self) -> None:
            found.extend(entry.has_ended([]) for entry in entries)

    with contextlib.ExitStack() as ends:
        for stage in range(3):
            process = link.adopt(f"i{stage}", cast("Any", Waking()))
            ends.callback(os.close, process.sentinel)
            ours, theirs = multiprocessing.Pipe()
            ends.enter_context(ours)
            ends.enter_context(theirs)
            entries.append(RemoteWorker(Worker(0, stage), f"i{stage}", process, ours, 0.0, node=link))
        frames.close()
        assert over.wait(20) and found == [True] * 9
    link.close()


def test_a_line_of_a_long_record_takes_little_memory() -> None:
    """For as long as the job lasts; the line itself is in a file."""
    spool, lines = Spool(), 10_000
    spool.add([{"iteration": 0}])
    tracemalloc.start()
    try:
        for number in range(lines):
            spool.add([{"iteration": number, "loss": "0x1.8p+1"}])
        # Other threads of this process may be at work.
        here = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, succession.__file__)])
        assert 0 < sum(trace.size for trace in here.traces) < 16 * lines
    finally:
        tracemalloc.stop()
    assert len(spool) == lines + 1


@examples(30)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_the_newest_losses_are_found_from_the_end(has_loss: list[bool], most: int) -> None:
    spool = CountingSpool()
    spool.add({"iteration": i, "loss": str(i)} if loss else {"warning": ""} for i, loss in enumerate(has_loss))
    losses = [(i, str(i)) for i, loss in enumerate(has_loss) if loss]
    assert spool.newest_losses(most) == losses[-most:]
    needed = len(has_loss) - losses[-most][0] if len(losses) >= most else len(has_loss)
    assert spool.read < needed + most, "who leads next waits for it"


@examples(30)
@given(st.lists(st.booleans(), max_size=60), st.integers(0, 70), st.integers(0, 70))
def test_iterations_are_found_in_the_record(has_loss: list[bool], first: int, last: int) -> None:
    spool = Spool()
    spool.add({"iteration": i, "loss": "x"} if loss else {"warning": ""} for i, loss in enumerate(has_loss))
    numbers = [i for i, loss in enumerate(has_loss) if loss and first <= i <= last]
    assert [line["iteration"] for line in spool.iterations(first, last)] == numbers


def test_a_long_record_is_taken_over_whole(tmp_path: Path) -> None:
    """Longer than what may wait for a slow disk, and longer than one read of it."""
    spool, path, said = Spool(), tmp_path / "run.jsonl", list[str]()
    before, after = [{"iteration": i, "loss": "0x1" + "0" * 40} for i in range(3 * LIMIT)], {"final": {}}
    spool.add(before)
    record = Record(path, said.append, spool.parts())
    spool.add([after])  # as the launcher does with each of its lines
    record(after)
    assert record.close() and not said
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*before, after]


def copy_of(nodes: dict[int, tuple[str, int]], term: int = 1, number: int = 1, lead: int = 0) -> Copy:
    return Copy(RUN, term, number, lead, 0, nodes, {}, 0, "", "plan", {"a": 1})


def test_a_copy_needs_to_tell_the_plan_once() -> None:
    first = copy_of({0: ("h", 1), 2: ("i", 2)})
    message = json.loads(json.dumps(copy_of({0: ("h", 1)}, number=2).to_message()))
    del message["plan"], message["job"]
    second = Copy.of(message, first)
    assert second.plan == "plan" and second.job == {"a": 1} and second.age == (1, 2) and second.nodes == {0: ("h", 1)}
    with pytest.raises(ValueError, match="Copy"):
        Copy.of({"run": "x"})


def test_a_node_that_has_promised_to_follow_hears_the_old_lead_no_more() -> None:
    lead_status = LeadStatus(1)
    lead_status.follow(0, 0)
    assert lead_status.take(copy_of({}))
    vote = {"kind": "vote", "run": RUN, "term": 2, "rank": 2, "age": [1, 1]}
    assert not lead_status.answer(vote)["granted"], "its lead is there"
    lead_status.lose_lead()
    assert not lead_status.answer(vote | {"age": [1, 0]})["granted"], "it knows more"
    assert lead_status.answer(vote)["granted"] and not lead_status.answer(vote)["granted"]
    assert not lead_status.take(copy_of({}, number=2)) and not lead_status.hear() and not lead_status.stand(2)
    assert lead_status.follow(2, 2) and lead_status.take(copy_of({}, 2, 1, 2)) and not lead_status.follow(0, 1)


def test_times_and_workers_of_the_record_are_taken_over() -> None:
    record = RunRecord(1, 1000)
    one, two = Worker(0, 0), Worker(1, 0)
    record.generation_opened(1, {one, two}, 1000)
    for worker in (one, two):
        record.formed(worker, 1, 0, 1500)
        record.committed_by(worker, 0, (0.5).hex(), 2000)
    record.died(two, 3500)
    document = json.loads(json.dumps(record.saved()))
    successor = RunRecord.restored(1, document, [(0, (0.5).hex())], 1000)
    assert successor.committed == 1 and successor.newest == 1
    successor.generation_opened(2, {one}, 2600)
    successor.left(one, 2700)
    successor.formed(one, 2, 1, 2800)
    about = successor.committed_by(one, 1, (0.25).hex(), 3000)
    (failure,) = about.recoveries
    assert [i.iteration for i in about.iterations] == [1] and failure.worker == "W1_0"
    assert failure.unblocked_ms == pytest.approx(200 / 1e6) and failure.resumed_ms == pytest.approx(500 / 1e6)


class Decides(Coordination):
    """Hands out one generation, and then ends the job. failures: that it was told of."""

    def __init__(self, *deployed: Deploy) -> None:
        self._events: list[Event] = [*deployed, Halt("enough")]
        self.failures: list[Failure] = []

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def poll(self, now: float) -> list[Event]:
        return [self._events.pop(0)]


class OneWorker(ProcessPool):
    """Has one, which is no process. copy and unfinished: what it would hand out to other nodes, and tell them."""

    def __init__(self, worker: Worker) -> None:
        ours, self._theirs = multiprocessing.Pipe()
        nobody: Any = None
        self.entry = RemoteWorker(worker, "i1", RemoteProcess(lambda: None), ours, time.monotonic(), node=nobody)
        self.spares, self._aside, self.running = SpareRanks(), [], {worker: self.entry}
        self.copy: dict[str, Any] = {}
        self.unfinished = ""

    def start(self, *arguments: Any, **options: Any) -> WorkerProcess:
        return self.entry

    def hand_out(self, run: Any, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        self.copy = saved() or self.copy
        return ""

    def kill_all(self, unfinished: str = "") -> None:
        self.unfinished = unfinished


def test_who_takes_over_and_has_lost_nobody_has_all_form_anew() -> None:
    """What workers had said to the lead before, and a console had not heard yet, nobody says again: of a generation
    that not all are known to train in it would never let anybody in."""
    job = Job(1, 1, 1)
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
    plan, _ = catalog.plan_for(())
    deployment = Deployment(generation=1, plan_fingerprint=plan.fingerprint, living=("W0_0",), failed=(), joining=())
    run = RunSpec(TrainingOptions(job=job, iterations=3), NamedWorkload("a:b"))
    pool = OneWorker(Worker(0, 0))
    with pytest.raises(JobFailed, match="enough"):
        Launcher(run, Decides(Deploy(deployment, plan)), lambda line: None, catalog, pool).run()
    document = json.loads(json.dumps(pool.copy)) | {"workers": [{**pool.entry.told(), "node": 0}]}
    takeover = Takeover(document, 0, plan, (), {}, 0, (), lambda: False, "node 0, which led, is lost")
    coordination = Decides()
    with pytest.raises(JobFailed, match="enough"):
        Launcher(run, coordination, lambda line: None, catalog, pool, takeover).run()
    assert pool.unfinished == "enough", "the other nodes' commands are to fail as well"
    (failure,) = coordination.failures
    assert failure[:5] == ("exception", Worker(0, 0), "i1", 1, "node 0, which led, is lost")


# -- over sockets ---------------------------------------------------------------------------------


def launcher(rank: int) -> NodeHub:
    return NodeHub("127.0.0.1", 0, 3, "", lambda _: None, LeadStatus(rank))


def found(search: Search) -> Lead | Follow | GiveUp:
    until(lambda: search.outcome is not None, "the search to end", 30)
    assert search.outcome is not None
    return search.outcome


def test_a_disk_that_is_full_by_then_keeps_no_node_from_its_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a connection needs of the disk a launcher has taken at its start, for the side that it was not on yet, too;
    and says then that it can't have it."""
    token, missing = "token of a full disk", str(tmp_path / "missing")
    status = LeadStatus(1, lead=0, term=1, run="a run")
    hub = NodeHub("127.0.0.1", 0, 3, token, lambda _: None, status)
    try:
        status.lose_lead()
        monkeypatch.setattr(tempfile, "tempdir", missing)
        answer = ask((hub.host, hub.port), token, "a run", {"term": 2, "rank": 2, "age": (1, 1)})
        assert isinstance(answer, LauncherAnswer), "and not: silent"
        with pytest.raises(InputError, match="TMPDIR"):
            NodeHub("127.0.0.1", 0, 3, f"another {token}", lambda _: None)
    finally:
        hub.close("")


def test_the_lowest_of_those_that_are_left_leads_and_the_others_find_it() -> None:
    hubs = {rank: launcher(rank) for rank in (1, 2)}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()
    nodes = {0: gone, **{rank: (hub.host, hub.port) for rank, hub in hubs.items()}}
    searches = {}
    try:
        for hub in hubs.values():
            hub.lead_status.follow(0, 0)
            assert hub.lead_status.take(copy_of(nodes))
            hub.lead_status.lose_lead()
        for rank, hub in hubs.items():
            searches[rank] = Search(hub.lead_status, copy_of(nodes), "")
        assert found(searches[1]) == Lead(2, frozenset({2}), frozenset({0}))
        assert found(searches[2]) == Follow(1, 2)
    finally:
        for hub in hubs.values():
            hub.close("")


def test_one_that_is_silent_is_not_gone_and_two_do_not_lead_without_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = launcher(1)
        try:
            assert ask(silent.getsockname(), "", RUN) == "silent"
            nodes = {0: silent.getsockname(), 1: (hub.host, hub.port)}
            hub.lead_status.follow(0, 0)
            assert hub.lead_status.take(copy_of(nodes))
            hub.lead_status.lose_lead()
            search = Search(hub.lead_status, copy_of(nodes), "")
            search.join(1.5)
            assert search.outcome is None and not hub.lead_status.leads
            assert hub.lead_status.hear(), "it is its lead still"
            search.cancel()
        finally:
            hub.close("")


def test_a_lead_that_is_there_leads_on() -> None:
    hub, lead = launcher(1), NodeHub("127.0.0.1", 0, 2, "", lambda _: None, LeadStatus(0, lead=0, term=1, run=RUN))
    try:
        nodes = {0: (lead.host, lead.port), 1: (hub.host, hub.port)}
        hub.lead_status.follow(0, 0)
        assert hub.lead_status.take(copy_of(nodes))
        hub.lead_status.lose_lead()
        assert isinstance(found(Search(hub.lead_status, copy_of(nodes), "")), GiveUp)
        assert ask((lead.host, lead.port), "", "another run") == "gone"
    finally:
        hub.close("")
        lead.close("")


def test_a_new_lead_that_has_handed_out_no_copy_yet_leads_on() -> None:
    """Whoever follows it already has nobody to go to, and stays with it; the one that led before counts no more."""
    hub, new, old = (
        NodeHub("127.0.0.1", 0, 3, "", lambda _: None, status)
        for status in (LeadStatus(2), LeadStatus(1, lead=1, term=2, run=RUN), LeadStatus(0, lead=0, term=1, run=RUN))
    )
    try:
        nodes = {rank: (one.host, one.port) for rank, one in enumerate((old, new, hub))}
        hub.lead_status.follow(0, 0)
        assert hub.lead_status.take(copy_of(nodes))
        hub.lead_status.lose_lead()
        assert found(Search(hub.lead_status, copy_of(nodes), "")) == Follow(1, 2)
        assert hub.lead_status.follow(1, 2)
        hub.lead_status.lose_lead()
        assert isinstance(found(Search(hub.lead_status, copy_of(nodes), "")), GiveUp)
    finally:
        for one in (hub, new, old):
            one.close("")


def test_a_node_that_stood_or_voted_in_vain_comes_back_to_the_lead_that_leads_on() -> None:
    """Of five nodes two did not hear the lead for a while. Neither ever could, as it had promised to leave it."""
    statuses = [LeadStatus(0, lead=0, term=1, run=RUN), *map(LeadStatus, range(1, 5))]
    hubs = [NodeHub("127.0.0.1", 0, 5, "", lambda _: None, status) for status in statuses]
    searches = list[Search]()
    try:
        nodes = {rank: (hub.host, hub.port) for rank, hub in enumerate(hubs)}
        for status in statuses[1:]:
            status.follow(0, 0)
            assert status.take(copy_of(nodes))
        stood, voted = statuses[1:3]
        for status in (stood, voted):
            status.lose_lead()
        assert stood.stand(2)
        assert voted.answer({"kind": "vote", "run": RUN, "term": 2, "rank": 1, "age": [1, 1]})["granted"]
        searches.append(Search(voted, copy_of(nodes), ""))
        searches[0].join(1)
        assert searches[0].outcome is None, "the one that it voted for may lead yet"
        searches.append(Search(stood, copy_of(nodes), ""))
        given_up = found(searches[1])
        assert isinstance(given_up, GiveUp) and given_up.to == Follow(0, 2) and stood.follow(0, 2)
        given_up = found(searches[0])
        assert isinstance(given_up, GiveUp) and given_up.to == Follow(0, 2)
        # Until it has come back anew it gives no other promise.
        assert voted.follow(0, 2)
        vote = {"kind": "vote", "run": RUN, "term": 3, "rank": 4, "age": [1, 1]}
        assert not voted.answer(vote)["granted"] and not stood.answer(vote)["granted"]
    finally:
        for search in searches:
            search.cancel()
        for hub in hubs:
            hub.close("")


def test_a_node_that_has_voted_again_meanwhile_does_not_come_back() -> None:
    status = LeadStatus(1, lead=0, term=1, run=RUN)
    status.lose_lead()
    assert status.stand(2)
    term, whom = status.promise
    assert (term, whom) == (2, 1)
    assert status.answer({"kind": "vote", "run": RUN, "term": 3, "rank": 4, "age": [1, 1]})["granted"]
    assert not status.follow(0, term) and status.promise == (3, 4)
