"""The store through which the groups of a generation find each other.

torch serves it, in threads of its own: inside the launcher, and whatever the launcher's Python does. Groups need it
only while they form. Nothing is ever deleted from one, and a gloo group of n workers leaves 8 n² bytes there: so every
few generations a new one takes its place, whose address travels with the generation.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed

START_SECONDS, REPLACE_SECONDS = 30.0, 5.0
"""The launcher does nothing else meanwhile."""
GENERATIONS = 10
"""That one store serves."""


class StoreError(RuntimeError):
    """No store could be started; the sentence says why."""


class RendezvousStore:
    """A running store. host: the address it listens on, which workers must be able to reach."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Raises StoreError where it can't listen there."""
        self._host = host
        self._newest = self._served = 0
        self._before: Any = None
        """For those that train in the generation before, and form another group late."""
        with contextlib.suppress(OSError, ValueError):  # each worker has several connections here
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._now, self.address = _serve(host, START_SECONDS)

    def address_of(self, generation: int) -> tuple[str, int]:
        """Where the groups of that generation form, which is no older than the one before. The launcher asks."""
        if generation > self._newest:
            self._newest = generation
            self._served += 1
            if self._served > GENERATIONS:
                with contextlib.suppress(StoreError):  # for want of a descriptor, say: the one that there is serves on
                    now, self.address = _serve(self._host, REPLACE_SECONDS)
                    self._before, self._now, self._served = self._now, now, 1
        return self.address

    @property
    def keys(self) -> int:
        """How many it holds."""
        return sum(store.num_keys() for store in (self._now, self._before) if store is not None)

    def close(self) -> None:
        """Who waits there is woken."""
        self._now = self._before = None


def _serve(host: str, seconds: float) -> tuple[Any, tuple[str, int]]:
    try:
        # Bound here, because torch's own listener binds every interface of the machine.
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise StoreError(f"no store could be started on {host} ({type(error).__name__})") from None
    return store, (host, port)


class StoreClient:
    """A worker's connections to whichever store the generation names: one per thread that uses it.

    A TCPStore client serialises its calls, and the thread that cancels must not wait for the one
    that waits.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._waiting: Any = None
        self._cancelling: Any = None
        self._spare: list[tuple[tuple[str, int], Any]] = []
        self._lock = threading.Lock()

    def connect(self, address: tuple[str, int], timeout: float) -> Any:
        """The store for the thread that forms groups. Raises RuntimeError (torch's own kinds) or OSError."""
        if address != self._address:
            waiting = _client(address, timeout)
            cancelling = _client(address, timeout)
            with self._lock:
                self._address, self._waiting, self._cancelling = address, waiting, cancelling
        return self._waiting

    def forget(self) -> None:
        """The next `connect` connects anew: somebody else may still be waiting in the connection that there is."""
        with self._lock:
            self._address = None

    def borrow(self, address: tuple[str, int], timeout: float) -> Any:
        """A connection of the caller's own, from any thread. Raises RuntimeError or OSError."""
        with self._lock:
            spare, self._spare = self._spare, []
        return next((client for at, client in spare if at == address), None) or _client(address, timeout)

    def give_back(self, address: tuple[str, int], client: Any) -> None:
        """One that was borrowed, in which nobody waits."""
        with self._lock:
            self._spare = [(address, client)]

    def set_from_another_thread(self, key: str, value: bytes) -> None:
        """Sets `key`; a store that is gone does not matter: whoever waits on it has noticed."""
        with self._lock:
            if self._cancelling is not None:
                with contextlib.suppress(RuntimeError):
                    self._cancelling.set(key, value)


def _client(address: tuple[str, int], timeout: float) -> Any:
    # First with a plain socket: torch's client prints pages about a store that is gone.
    socket.create_connection(address, timeout).close()
    host, port = address
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
