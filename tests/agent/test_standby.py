"""Connections that are made while a generation trains, for the one after it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from openrecycle.agent.config.options import LOOPBACK, Timeouts
from openrecycle.agent.models import compat
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport.communicator import Communicator, Groups, RendezvousStore
from openrecycle.agent.transport.group import Devices, GivenGlooGroup, GlooGroup, TransferError
from openrecycle.planner.jobs.job import Worker, WorkerRank

pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]

PATIENT = Timeouts(form=60.0, transfer=700.0, group=800.0)
GRID = [Worker(pipeline, stage) for pipeline in range(3) for stage in range(2)]
T = TypeVar("T")


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the groups for which somebody has connected."""
    names: list[str] = []

    class Named(GlooGroup):
        def __init__(self, store: Any, name: str, *args: Any) -> None:
            super().__init__(store, name, *args)
            names.append(name)

    monkeypatch.setattr(communicator, "GlooGroup", Named)
    return names


class Job:
    """Workers in threads of this process."""

    def __init__(self, store: RendezvousStore, workers: Sequence[Worker] = GRID, transport: Any = "tagged") -> None:
        self.address = store.address
        self.transport = transport
        self.mine = {w: Communicator(PATIENT, transport=transport) for w in workers}

    def all(self, living: Sequence[Worker], do: Callable[[Worker], T]) -> dict[Worker, T]:
        with ThreadPoolExecutor(len(living)) as pool:
            return dict(zip(living, pool.map(do, living), strict=True))

    def form(self, generation: int, living: Sequence[Worker]) -> dict[Worker, Groups]:
        for worker in living:
            self.mine[worker].cancel(generation)
            self.mine[worker].abandon()

        def form(me: Worker) -> Groups:
            others = [w for w in living if abs(w.stage - me.stage) == 1] if self.transport == "ordered" else []
            return self.mine[me].form(generation, me, living, self.address, neighbours=others)

        return self.all(living, form)

    def stand_by(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self.mine[worker].stand_by()
        until(lambda: all(self.mine[w].stands_by for w in workers))

    def exchange(self, groups: dict[Worker, Groups]) -> None:
        """Rows, a message to each neighbour, and a sum per stage."""
        living = list(groups)

        def work(me: Worker) -> None:
            mine = groups[me]
            rows = mine.gather_rows((me.pipeline, me.stage))
            assert rows == {WorkerRank(w, 0): (w.pipeline, w.stage) for w in living}
            others = [w for w in living if w.stage != me.stage]
            coming = [mine.receive(w, torch.zeros(1), 7) for w in others]
            for pending in [mine.send(w, torch.full((1,), float(me.pipeline)), 7) for w in others]:
                pending.wait()
            assert [int(pending.wait()) for pending in coming] == [w.pipeline for w in others]
            number = torch.full((1,), 10**me.pipeline)
            mine.reduce(number)
            assert int(number) == sum(10**w.pipeline for w in living if w.stage == me.stage)

        self.all(living, work)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@pytest.mark.parametrize("dead", [(Worker(1, 0),), (Worker(0, 0), Worker(2, 1)), (Worker(0, 1), Worker(1, 1))])
def test_survivors_go_on_over_connections_that_they_have(
    dead: tuple[Worker, ...], store: RendezvousStore, formed: list[str]
) -> None:
    """Whoever died, and however many at once. Only a stage that has lost a worker connects, for its sums."""
    job = Job(store)
    job.exchange(job.form(1, GRID))
    job.stand_by(GRID)
    formed.clear()
    living = [w for w in GRID if w not in dead]
    job.exchange(job.form(2, living))
    stages = [[w for w in living if w.stage == stage] for stage in {w.stage for w in dead}]
    assert len(formed) == sum(len(peers) for peers in stages if len(peers) > 1)
    # And again, with what the survivors have made since; the one who goes now is the last of its stage.
    job.stand_by(living)
    formed.clear()
    last = next((w for w in living if sum(other.stage == w.stage for other in living) == 1), living[0])
    living.remove(last)
    job.exchange(job.form(3, living))
    assert not any(name.endswith("/world") for name in formed)


def test_with_transfers_by_order_the_agreement_needs_no_new_connections(
    store: RendezvousStore, formed: list[str]
) -> None:
    job = Job(store, transport="ordered")
    job.exchange(job.form(1, GRID))
    job.stand_by(GRID)
    formed.clear()
    job.exchange(job.form(2, GRID[1:]))
    assert formed and not any(name.endswith("/world") for name in formed)


def test_where_one_has_none_all_connect(store: RendezvousStore, formed: list[str]) -> None:
    """Somebody comes back, takes another's place, or had no connections in time; or a connection broke, and nobody
    died."""
    job = Job(store)
    job.form(1, GRID[:-1])
    job.stand_by(GRID[:-1])
    job.exchange(job.form(2, GRID))

    job.stand_by(GRID)
    job.mine[Worker(0, 0)], job.mine[Worker(2, 1)] = job.mine[Worker(2, 1)], Communicator(PATIENT)
    living = [w for w in GRID if w != Worker(2, 1)]
    job.exchange(job.form(3, living))

    for worker in living[1:]:
        job.mine[worker].stand_by()
    job.exchange(job.form(4, living[:-1]))
    living = living[:-1]
    job.stand_by(living)
    formed.clear()
    job.exchange(job.form(5, living))
    assert sum(name.endswith("/world") for name in formed) == len(living)


def _dies_on_standby(pipe: Connection, me: Worker, living: list[Worker], store: tuple[str, int]) -> None:
    mine = Communicator(PATIENT)
    mine.form(1, me, living, store)
    pipe.recv()
    mine.stand_by()
    while not mine.stands_by:
        time.sleep(0.001)
    pipe.send(None)
    while True:
        time.sleep(60.0)


@pytest.mark.parametrize("connected", [False, True])
def test_a_worker_that_dies_costs_no_survivor_its_connections(connected: bool, store: RendezvousStore) -> None:
    """Killed while they connect, or afterwards: what the survivors train with goes on, and they form the next one."""
    dead, living = GRID[-1], GRID[:-1]
    job = Job(store, living)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_dies_on_standby, args=(theirs, dead, GRID, store.address), daemon=True)
    process.start()
    try:
        groups = job.all(living, lambda me: job.mine[me].form(1, me, GRID, store.address))
        if connected:
            ours.send(None)
            job.stand_by(living)
            ours.recv()
        else:
            for worker in living:
                job.mine[worker].stand_by()
        process.kill()
        process.join()
        one, other = living[0], living[1]
        pending = groups[other].receive(one, torch.zeros(1), 5)
        groups[one].send(other, torch.ones(1), 5).wait()
        assert int(pending.wait()) == 1
        job.exchange(job.form(2, living))
    finally:
        process.kill()
        process.join()


def _stops_before_it_has_all(me: Worker, living: list[Worker], store: tuple[str, int]) -> None:
    groups = Communicator(PATIENT).form(1, me, living, store)
    coming = groups.receive(living[0], torch.zeros(_LARGE), 5)
    os.kill(os.getpid(), signal.SIGSTOP)
    coming.wait()


_LARGE = 1 << 24
"""Elements of a tensor of which the system takes a part, until its receiver reads on."""


def test_whoever_sends_to_a_worker_that_dies_on_the_way_is_woken(store: RendezvousStore) -> None:
    """gloo forgets a send that is half written."""
    me, dead = living = GRID[:2]
    mine = Communicator(PATIENT)
    process = multiprocessing.get_context("forkserver").Process(
        target=_stops_before_it_has_all, args=(dead, living, store.address), daemon=True
    )
    process.start()
    try:
        groups = mine.form(1, me, living, store.address)
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        sending = groups.send(dead, torch.zeros(_LARGE), 5)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(sending.wait)
            process.kill()
            process.join()
            mine.cancel(2)
            with pytest.raises(TransferError):
                waiting.result(60)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_whoever_waits_for_any_rank_is_woken(trains: bool, late: bool, store: RendezvousStore) -> None:
    """Also who begins to wait when the group has been cancelled."""
    job = Job(store)
    groups = job.form(1, GRID)
    if trains:
        for mine in groups.values():
            mine.look_ahead()
    first = groups[GRID[0]]
    pending = [first.receive(w, torch.zeros(1), 5) for w in GRID[1:]]
    woken = []

    def wait(index: int) -> None:
        try:
            pending[index].wait()
        except TransferError:
            woken.append(index)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(pending))]
    if late:
        job.mine[GRID[0]].cancel(2)
    for thread in threads:
        thread.start()
    if not late:
        job.mine[GRID[0]].cancel(2)
    for thread in threads:
        thread.join()
    assert sorted(woken) == list(range(len(pending)))


@pytest.mark.parametrize(("reused", "looks"), [(False, ""), (False, "before"), (False, "after"), (True, "")])
def test_a_cancelled_group_ends_what_has_carried_something_and_begins_nothing_in_the_rest(
    reused: bool, looks: str, store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was posted and dropped ends at both ends, though nobody waits for it here. reused: what polls gets the
    number of what another thread closes just then. looks: when the group looks ahead: what is posted later, ends,
    too."""
    job, members, device = Job(store), GRID[:3], compat.gloo_device
    closed = [select.epoll() for _ in range(3 * 8 * reused)]

    def make_device(address: str) -> Any:
        for other in closed[:8]:
            other.close()
        del closed[:8]
        return device(address)

    monkeypatch.setattr(compat, "gloo_device", make_device)
    groups = job.all(
        members, lambda me: GlooGroup(_client(store), "some", members.index(me), members, PATIENT, Devices(LOOPBACK))
    )
    first, second, third = groups.values()
    before = _connections()
    if looks == "before":
        first.look_ahead()
    first.receive(1, torch.zeros(1), 5)
    if looks == "after":
        first.look_ahead()
    first.cancel()
    with pytest.raises(TransferError):
        second.receive(0, torch.zeros(1), 6).wait()
    until(lambda: _connections() <= before - 2)
    waits = third.receive(0, torch.zeros(1), 5)
    with pytest.raises(TransferError):
        first.send(2, torch.zeros(1), 5)
    assert not waits.arrived()
    first.close()
    with pytest.raises(TransferError):
        waits.wait()
    until(lambda: _connections() <= before - 4)
    pending = third.receive(1, torch.zeros(1), 5)
    second.send(2, torch.ones(1), 5).wait()
    assert int(pending.wait()) == 1


def test_a_worker_that_loses_peers_keeps_its_device(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has a thread that wakes a hundred times a second."""
    job, made, device = Job(store), list[str](), compat.gloo_device

    def make_device(address: str) -> Any:
        made.append(address)
        return device(address)

    monkeypatch.setattr(compat, "gloo_device", make_device)
    for generation in (1, 2, 3):
        living = GRID[: len(GRID) + 1 - generation]
        job.exchange(job.form(generation, living))
        job.stand_by(living)
    assert len(made) == len(GRID)


def test_groups_that_connect_at_once_or_after_one_that_could_not_have_other_devices() -> None:
    """Connections are told apart by when they were made, and a peer may still connect for the group that failed."""
    devices, broken = Devices(LOOPBACK), RuntimeError("no peer came")
    with devices.lent() as first, devices.lent() as second:
        assert first is not second
    with devices.lent() as kept:
        assert kept in (first, second)
    with contextlib.suppress(RuntimeError), devices.lent() as left:
        assert left is kept
        raise broken
    with devices.lent() as fresh:
        assert fresh not in (first, second)
    devices.retire()
    with devices.lent() as other:
        assert other is not fresh


class _Held(torch.distributed.Store):
    """A rank's view of a store, in which it finds what others set once it is `let`. told: it has set something."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self._shared, self.told, self.let = shared, threading.Event(), threading.Event()

    def set(self, key: str, value: Any) -> None:
        self._shared.set(key, value)
        self.told.set()

    def get(self, key: str) -> Any:
        self.let.wait()
        return self._shared.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60.0)) -> None:
        self.let.wait()
        self._shared.wait(keys, timeout)

    def has_extended_api(self) -> bool:
        return False


def _connects_late() -> None:
    members, shared, devices = GRID[:2], torch.distributed.HashStore(), [Devices(LOOPBACK) for _ in range(2)]
    hasty = Timeouts(form=0.5)

    def make(name: str, rank: int, view: Any, timeouts: Timeouts) -> GlooGroup | None:
        with contextlib.suppress(RuntimeError):
            return GlooGroup(view, name, rank, members, timeouts, devices[rank])
        return None

    with ThreadPoolExecutor(2) as pool:
        used = list(pool.map(lambda rank: make("used", rank, shared, PATIENT), range(2)))
        found = []
        # One of the two is connected to, and waits for that in vain; the other one connects.
        for punctual in (0, 1):
            held = _Held(shared)
            late = pool.submit(make, f"late for {punctual}", 1 - punctual, held, PATIENT)
            held.told.wait()
            found.append(make(f"late for {punctual}", punctual, shared, hasty))
            sockets = _connections()
            held.let.set()
            assert late.result() is not None
            if found[-1] is None:
                assert _connections() == sockets + 1  # that of the one who is late
    assert None in found
    one, other = used
    assert one is not None and other is not None
    coming = one.receive(1, torch.zeros(1), 5)
    other.send(0, torch.ones(1), 5).wait()
    assert int(coming.wait()) == 1


def test_a_peer_that_comes_when_its_group_was_given_up_reaches_nobody() -> None:
    """It connects where groups in use are heard, and what waited for it is no more: that ended the process."""
    process = multiprocessing.get_context("forkserver").Process(target=_connects_late)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_groups_that_are_heard_at_one_device_end_one_by_one(store: RendezvousStore) -> None:
    job, members = Job(store), GRID[:3]
    devices = {w: Devices(LOOPBACK) for w in members}

    def make(name: str) -> Callable[[Worker], GlooGroup]:
        return lambda me: GlooGroup(_client(store), name, members.index(me), members, PATIENT, devices[me])

    some, other, last = (job.all(members, make(name)) for name in ("some", "other", "last"))
    for ended, left in ((other, (some, last)), (last, (some,))):
        for group in ended.values():
            group.cancel()
            group.close()
        with pytest.raises(TransferError):
            ended[members[0]].receive(1, torch.zeros(1), 5).wait()
        for groups in left:
            coming = groups[members[0]].receive(1, torch.zeros(1), 5)
            groups[members[1]].send(0, torch.ones(1), 5).wait()
            assert int(coming.wait()) == 1


def test_what_is_posted_while_a_group_is_cancelled_ends_with_it(store: RendezvousStore) -> None:
    members = GRID[:2]

    class Cancelled:
        """Between the post and what comes after it."""

        def __init__(self, group: Any) -> None:
            self.recv = group.recv
            self.posts = group.send

        def send(self, *arguments: Any) -> Any:
            first.cancel()
            return self.posts(*arguments)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(
            lambda rank: torch.distributed.ProcessGroupGloo(_client(store), rank, 2, timedelta(seconds=60.0)), range(2)
        )
    first, second = GivenGlooGroup(Cancelled(one), 0, members, PATIENT), GivenGlooGroup(other, 1, members, PATIENT)
    with pytest.raises(TransferError):
        first.send(1, torch.ones(1), 5)
    with pytest.raises(TransferError):
        second.receive(0, torch.zeros(1), 6).wait()


def _client(store: RendezvousStore) -> Any:
    host, port = store.address
    return torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False)


def test_old_connections_are_closed_once_the_next_generation_trains(store: RendezvousStore) -> None:
    """Those that were left in haste, too."""
    job = Job(store)
    job.exchange(job.form(1, GRID))
    job.stand_by(GRID)
    before = _connections()
    for generation, living in enumerate((GRID[:-1], GRID[:-2]), start=2):
        job.exchange(job.form(generation, living))
        job.stand_by(living)
    until(lambda: _connections() < before)


def _connections() -> int:
    """Sockets of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found
