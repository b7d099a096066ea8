"""The store through which the groups of a generation find each other: a process of its own that may die, or hang.

Groups need it only while they form. So its loss at any moment costs running iterations nothing,
and the next generation forms over a new one, whose address travels with the generation. That is why one that does not
answer need not be known to hang: a new one in its place does no harm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch.distributed

dist: Any = torch.distributed

START_SECONDS = 30.0
ASK_SECONDS = 1.0
"""So often a store is asked whether it answers."""
HANG_SECONDS = 5.0
"""Without an answer for so long, it is given up. Of time in which whoever waits for it could run."""
_LOOK_SECONDS = 1.0
"""Most that passes between two looks of one who could run."""


class StoreError(RuntimeError):
    """No store could be started; the sentence says why."""


class Unanswered:
    """For how long one that is asked again and again has not answered. No clock: times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._looked, self._answers, self._waited = now, 0, 0.0

    def look(self, now: float, answers: int) -> float:
        """answers: so far. Seconds without one; whoever stood still between two looks has waited for _LOOK_SECONDS."""
        self._waited += min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        if answers != self._answers:
            self._answers, self._waited = answers, 0.0
        return self._waited


class RendezvousStore:
    """A running store. host: the address it listens on, which workers must be able to reach."""

    def __init__(self, context: BaseContext, host: str = "127.0.0.1", seconds: float = START_SECONDS) -> None:
        """Raises StoreError when it does not come up in so many seconds."""
        ours, theirs = context.Pipe(duplex=True)
        # BaseContext has no type for Process: each start method brings its own.
        self.process = context.Process(target=serve, args=(host, theirs), name="store", daemon=True)  # type: ignore[attr-defined]
        self._pipe = ours
        try:
            self.process.start()
            theirs.close()
            # Second by second: it counts for one, however long this process and the store are suspended.
            if not any(ours.poll(1.0) for _ in range(round(seconds))):
                self.process.kill()
                raise StoreError(f"the store on {host} did not come up in {seconds:.0f} s")
            self.address: tuple[str, int] = (host, int(ours.recv_bytes()))
        except (EOFError, OSError, ValueError) as error:
            theirs.close()
            raise StoreError(f"the store could not be started, or listen, on {host} ({type(error).__name__})") from None
        self._killed = threading.Event()
        self._answers, self._unanswered = 0, Unanswered(time.monotonic())
        threading.Thread(target=self._ask, name="store answers", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Has it not answered for HANG_SECONDS? To be asked in every turn of a loop."""
        return self._unanswered.look(time.monotonic(), self._answers) > HANG_SECONDS

    def wait_again(self) -> None:
        """It is to be given as much time as at first."""
        self._unanswered = Unanswered(time.monotonic())

    def _ask(self) -> None:
        """Ends with the store, which answers as workers are answered: by torch's own server."""
        client = None
        while not self._killed.is_set():
            try:
                client = client or _client(self.address, HANG_SECONDS)
                client.check(["does it answer?"])
                self._answers += 1
            except (RuntimeError, OSError):
                client = None  # it may be this process that could not ask, for want of a descriptor
            self._killed.wait(ASK_SECONDS)

    def kill(self) -> None:
        self._killed.set()
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(5.0)
        self._pipe.close()


def serve(host: str, pipe: Connection) -> None:
    """The process: serves until the launcher is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Bound here, because torch's own listener binds every interface of the machine.
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        pipe.send_bytes(str(port).encode())
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        del store
    # Not sys.exit: the server's thread may sit in a request of a worker that was killed.
    os._exit(0)


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
