"""Sums of which each worker gets only what it needs, over real connections: as if all had been summed for all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.stages.gradients import TRAILING, GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.transport import group as transport
from openrecycle.agent.transport.communicator import Communicator, Groups, RendezvousStore
from openrecycle.agent.transport.group import GivenGlooGroup, Group, HostGroup, SummedPart, TransferError
from openrecycle.agent.workers.reduction import GradientReduction
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.planner.jobs.job import Worker

SIZE = 40_000
PEERS = [Worker(p, 0) for p in range(4)]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]


@contextmanager
def connected(count: int, store: RendezvousStore) -> Iterator[tuple[ThreadPoolExecutor, list[Groups]]]:
    """Workers of a stage, each in a thread of its own."""
    living, patient = PEERS[:count], Timeouts(form=60.0, transfer=60.0, group=70.0)
    with ThreadPoolExecutor(count) as pool:
        groups = list(pool.map(lambda me: Communicator(patient).form(1, me, living, store.address), living))
        try:
            yield pool, groups
        finally:
            for one in groups:
                one.close()


def cut(chance: random.Random, count: int) -> list[SummedPart]:
    places = [0, *sorted(chance.sample(range(1, SIZE), 11)), SIZE]
    return [SummedPart(a, b, tuple(chance.sample(range(count), chance.randint(1, count)))) for a, b in pairwise(places)]


def of(groups: Groups) -> Group:
    assert groups.peer_group is not None
    return groups.peer_group


def me_of(groups: Groups) -> Worker:
    assert isinstance(groups.peer_group, GivenGlooGroup)
    return groups.peers[groups.peer_group.rank]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", [lambda group: group, HostGroup], ids=["gloo", "by way of the host"])
def test_who_wants_a_part_gets_its_sum(
    count: int, kind: Callable[[Group], Group], store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PIECE_BYTES", 8 * 1000)  # parts are of several messages
    monkeypatch.setattr(transport, "UNDER_WAY_BYTES", 8 * 3000)
    chance = random.Random(count)
    terms = [torch.randint(-(2**61), 2**61, (2, SIZE)) // count for _ in range(count)]
    parts = [cut(chance, count), cut(chance, count)]

    def both(groups: Groups) -> Tensor:
        mine, group = terms[me_of(groups).pipeline].clone(), kind(of(groups))
        begun = [group.begin_scatter(row, of_row) for row, of_row in zip(mine, parts, strict=True)]
        group.sum(torch.ones(1, dtype=torch.int64))  # beside them
        for pending in reversed(begun):
            pending.wait()
            assert pending.arrived()
        return mine

    with connected(count, store) as (pool, groups):
        found = list(pool.map(both, groups))
    total = torch.stack(terms).sum(dim=0)
    for rank, came in enumerate(found):
        for row, of_row in enumerate(parts):
            for part in of_row:
                if rank in part.ranks:
                    assert torch.equal(came[row, part.start : part.end], total[row, part.start : part.end])


def test_sums_of_floats_are_the_same_on_all_who_want_them(store: RendezvousStore) -> None:
    with connected(4, store) as (pool, groups):
        mine = torch.randn(4, SIZE)
        everybody = [SummedPart(0, SIZE // 2, (2, 0, 1, 3)), SummedPart(SIZE // 2, SIZE, (1, 3, 0, 2))]
        for pending in list(pool.map(lambda g, t: of(g).begin_scatter(t, everybody), groups, mine)):
            pending.wait()
    assert mine.eq(mine[0]).all()


def test_the_memory_of_a_scatter_is_what_is_said_of_it(store: RendezvousStore) -> None:
    """A worker's memory was said without it. The group keeps what the terms came into."""
    terms = torch.ones(3, 2 * transport.UNDER_WAY_BYTES // 8, dtype=torch.int64)
    to_one = [SummedPart(0, terms.shape[1], (0,))]
    with connected(3, store) as (pool, groups):
        given = [of(group) for group in groups]
        for pending in list(pool.map(lambda group, mine: group.begin_scatter(mine, to_one), given, terms)):
            pending.wait()
        taken = [sum(piece.nbytes for piece in group.spare) for group in given if isinstance(group, GivenGlooGroup)]
    assert taken == [transport.scatter_memory(3), 0, 0]


@pytest.mark.parametrize("dies", [False, True], ids=["hangs", "dies"])
def test_who_waits_for_one_that_does_not_come_is_woken(dies: bool, store: RendezvousStore) -> None:
    """And nothing is written any more when it is."""
    parts = [SummedPart(k * SIZE // 8, (k + 1) * SIZE // 8, (k % 3, (k + 1) % 3)) for k in range(8)]
    with connected(3, store) as (_, groups):
        mine = [torch.ones(SIZE, dtype=torch.int64) for _ in groups]
        begun = [of(g).begin_scatter(t, parts) for g, t in zip(groups[:2], mine, strict=False)]
        late = of(groups[0]).begin_scatter(torch.ones(SIZE, dtype=torch.int64), parts)
        if dies:
            groups[2].close()
        else:
            for one in groups[:2]:
                one.cancel()
        for pending in (*begun, late):
            with pytest.raises(TransferError):
                pending.wait()
        for one in groups[:2]:
            one.cancel()
        for pending in begun:
            with pytest.raises(TransferError):
                pending.wait()
        left = [t.clone() for t in mine]
        if not dies:
            with pytest.raises(TransferError):  # its terms would come, and are not taken any more
                of(groups[2]).begin_scatter(torch.ones(SIZE, dtype=torch.int64), parts).wait()
        of(groups[2]).cancel()
        assert all(map(torch.equal, left, mine))
        with pytest.raises(TransferError):
            of(groups[0]).begin_scatter(mine[0], parts).wait()


class Messages:
    """A gloo group as it is when it has forgotten a message: whoever waits for it is not woken."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Messages:
        if self._error is not None and len(tensors[0]) > 1:  # not of who asks to be woken
            raise self._error
        return self

    def wait(self, timeout: timedelta) -> None:
        if timeout < timedelta(seconds=1):
            raise RuntimeError("connection closed")
        threading.Event().wait()


def test_threads_that_are_not_woken_keep_nobody_waiting_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ASK_AGAIN_SECONDS", 2.0)  # for each of them it would be more than the test's time
    group = GivenGlooGroup(Messages(), 0, PEERS[:2], Timeouts())
    begun = [group.begin_scatter(torch.ones(8), [SummedPart(0, 8, (0,))]) for _ in range(60)]
    group.cancel()
    for pending in begun:
        with pytest.raises(TransferError):
            pending.wait()


def test_what_no_connection_is_to_blame_for_is_raised_as_it_is() -> None:
    group = GivenGlooGroup(Messages(MemoryError("no memory")), 0, PEERS[:2], Timeouts())
    begun = [group.begin_scatter(torch.ones(8), [SummedPart(0, 8, (0,))]) for _ in range(2)]
    with pytest.raises(MemoryError):
        begun[0].wait()
    with pytest.raises(TransferError):
        begun[1].wait()


def test_each_worker_gets_the_sums_of_what_it_steps(store: RendezvousStore) -> None:
    """Of parameters that layers share, all do; and of what is of no parameter."""

    def work(groups: Groups) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
        sums = GradientSum(model.parameters(), terms=4, bucket_bytes=1)
        optimizer = StageOptimizer(model, torch.optim.AdamW(model.parameters()), sums, pipelines=3)
        shards, me = optimizer.shards, me_of(groups)
        assert shards is not None
        held = dict.fromkeys(groups.peers, shards.shards_held)
        ownership = assign(groups.peers, held, dict.fromkeys(groups.peers, 0), shards.sizes)
        sharded = ShardedStage(me, groups, optimizer, ownership, print, whole={"0.1.weight"})
        for parameter in sums.parameters:
            sums.add(parameter, torch.full_like(parameter, me.pipeline + 1))
        sums.add_loss(torch.tensor(1.0))
        GradientReduction(sums, sharded.begin_reduce).finish()
        assert sums.loss == 3.0 and sums.part(sums.parameters)[-6 - TRAILING : -TRAILING].eq(3).all()
        six = 6 << 50
        places = map(sums.place_of, shards.parts)
        whole = [n for n, at in enumerate(places) if sums.buffer[at.start : at.stop].eq(six).all()]
        tied = {n for n, name in enumerate(shards.names) if name.startswith("0.1.weight")}
        assert shards.held | tied <= {*whole}
        return [shards.names[n] for n in whole]

    with connected(3, store) as (pool, groups):
        found = list(pool.map(work, groups))
    times = {name: sum(name in one for one in found) for one in found for name in one}
    assert {name.partition("@")[0] for name, count in times.items() if count == 3} == {"0.1.weight"}
    assert {count for name, count in times.items() if not name.startswith("0.1.weight")} == {2}
