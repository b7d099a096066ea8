"""How long a worker waits for the others of a generation, and that a newer one ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.transport.communicator import Communicator, Groups, RendezvousStore, StoreClient
from openrecycle.agent.transport.group import TransferError
from openrecycle.planner.jobs.job import Worker
from tests.golden import golden

TIMEOUTS = Timeouts(form=1.0, transfer=60.0, group=90.0)


class NobodyComes:
    """A store at which the others are not ready in time."""

    def __init__(self) -> None:
        self.waited: list[timedelta] = []

    def add(self, key: str, amount: int) -> int:
        return amount

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def get(self, key: str) -> bytes:
        self.waited.append(self._timeout)
        raise RuntimeError("wait timeout")


@pytest.mark.parametrize(("at_iteration_end", "seconds"), [(False, TIMEOUTS.form), (True, TIMEOUTS.transfer)])
def test_who_joins_waits_for_the_iteration_in_hand(
    at_iteration_end: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long one takes: to give up would interrupt it."""
    communicator, store = Communicator(TIMEOUTS), NobodyComes()
    monkeypatch.setattr(StoreClient, "connect", lambda self, address, timeout: store)
    me, peer = Worker(0, 0), Worker(1, 0)
    with pytest.raises(TransferError, match=golden("generation-2-did-not-come")):
        communicator.form(2, me, [me, peer], ("127.0.0.1", 1), at_iteration_end=at_iteration_end)
    assert store.waited == [timedelta(seconds=seconds)]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@pytest.mark.processes
@pytest.mark.timeout(100)
def test_a_newer_generation_ends_the_wait_for_peers_that_do_not_connect(store: RendezvousStore) -> None:
    """Two peers were ready, and are gone before they connect: another death, say. gloo would wait for one after the
    other, here minutes each."""
    patient = Timeouts(form=150.0, transfer=700.0, group=800.0)
    living = [Worker(pipeline, 0) for pipeline in range(3)]
    communicators = [Communicator(patient) for _ in living]
    with ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(communicators[0].form, 1, living[0], living, store.address)
        gone = StoreClient().connect(store.address, 60.0)
        for _ in living[1:]:
            gone.add("generation1/ready", 1)
        gone.set("generation1/go", b"go")  # whoever is last says so
        connects = "connect-generation-1"
        until(lambda: connects in [thread.name for thread in threading.enumerate()] or waiting.done())
        for communicator in communicators:
            communicator.cancel(2)
        with pytest.raises(TransferError, match=golden("generation-1-is-superseded-by")):
            waiting.result()

        # They all meet again in generation 2, though what waits for generation 1 inside of gloo waits on.
        def meet(rank: int) -> Groups:
            groups = communicators[rank].form(2, living[rank], living, store.address)
            number = torch.full((1,), rank + 1)
            groups.reduce(number)
            assert number.item() == 6
            return groups

        groups = list(pool.map(meet, range(3)))
    assert [g.generation for g in groups] == [2, 2, 2]


@pytest.mark.processes
@pytest.mark.timeout(100)
def test_a_generation_that_is_superseded_before_it_connects_does_not_begin_to(store: RendezvousStore) -> None:
    communicator, me = Communicator(TIMEOUTS), Worker(0, 0)
    communicator.cancel(3)
    with pytest.raises(TransferError, match=golden("generation-2-is-superseded-by")):
        communicator.form(2, me, [me], store.address)
    assert communicator.form(3, me, [me], store.address).generation == 3
