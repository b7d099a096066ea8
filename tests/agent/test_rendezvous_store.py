"""Where the groups of a generation find each other: in the launcher, whatever its Python does."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from openrecycle.agent.transport.communicator import GENERATIONS, RendezvousStore, StoreClient, StoreError

KEYS = 5
WAIT = timedelta(seconds=60)


def test_what_generations_leave_behind_does_not_pile_up(store: RendezvousStore) -> None:
    clients = {store.address: StoreClient().borrow(store.address, 20)}
    empty = clients[store.address].num_keys()
    for generation in range(1, 4 * GENERATIONS):
        before, address = store.address, store.address_of(generation)
        # As one that still trains in the generation before, and forms a group late.
        clients[before].set(f"generation{generation - 1}/late", b"here")
        client = clients.setdefault(address, StoreClient().connect(address, 20))
        for key in range(KEYS):
            client.set(f"generation{generation}/{key}", b"here")
        assert client.check([f"generation{generation}/0"])
        assert store.address_of(generation) == address, "whoever is told of it again"
        held = [keys for keys in map(keys_of, clients.values()) if keys is not None]
        assert len(held) <= 2 and max(held) - empty <= GENERATIONS * (KEYS + 1) + 1
    assert len(clients) == 4


def keys_of(client: Any) -> int | None:
    """How many its store holds; None: there is no such store any more."""
    try:
        return int(client.num_keys())
    except RuntimeError:
        return None


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
            assert client.get(str(number)) == b"here", "of what is set by others nobody knows when it has come"
        assert clients[0].num_keys() >= 200
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_address_that_this_host_lacks_is_named() -> None:
    with pytest.raises(StoreError, match=r"203\.0\.113\.1"):
        RendezvousStore("203.0.113.1")
