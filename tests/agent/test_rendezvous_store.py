"""Where the groups of a generation find each other: in the launcher, whatever its Python does."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from openrecycle.agent.transport.communicator import GENERATIONS, RendezvousStore, StoreClient, StoreError

KEYS = 5
WAIT = timedelta(seconds=60)


def test_what_generations_leave_behind_does_not_pile_up(store: RendezvousStore) -> None:
    held = store.keys
    for generation in range(1, 4 * GENERATIONS):
        before, address = store.address, store.address_of(generation)
        # As one that still trains in the generation before, and forms a group late.
        StoreClient().borrow(before, 20).set(f"generation{generation - 1}/late", b"here")
        client = StoreClient().connect(address, 20)
        for key in range(KEYS):
            client.set(f"generation{generation}/{key}", b"here")
        assert client.check([f"generation{generation}/0"])
        assert store.address_of(generation) == address, "whoever is told of it again"
        assert store.keys - held <= 2 * GENERATIONS * (KEYS + 1) + 2
    assert store.keys - held >= KEYS


def test_whoever_waits_there_when_it_ends_is_woken() -> None:
    store = RendezvousStore()
    with ThreadPoolExecutor(1) as pool:
        client = StoreClient().connect(store.address, 20)
        waiting = pool.submit(client.wait, ["nobody sets it"], WAIT)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        store.close()
        with pytest.raises(RuntimeError):
            waiting.result(20)


def test_it_has_room_for_all_workers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        store = RendezvousStore()
        clients = [StoreClient().borrow(store.address, 20) for _ in range(200)]
        for number, client in enumerate(clients):
            client.set(str(number), b"here")
        assert store.keys >= 200
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_address_that_this_host_lacks_is_named() -> None:
    with pytest.raises(StoreError, match=r"203\.0\.113\.1"):
        RendezvousStore("203.0.113.1")
