"""A queue of long work for one child process, which does one request at a time, the most urgent first.

Plans and advice are made in this way. A solver in a thread of the console's process would delay the answers to
heartbeats; a child does not, and can be ended. The feature that makes the queue gives it the function that the child
runs.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children

log = structlog.get_logger()

URGENT, AHEAD = 0, 1

# A request is tried again once if the child died over it; a second death is taken to be the request's fault.
_ATTEMPTS = 2
_TRY_AGAIN_SECONDS = 1.0


Serve = Callable[[Channel, Any], None]
Made = TypeVar("Made")
Done = Callable[[Made | None, str], None]
"""Called with (what was made, "") or (None, why there is nothing), in the queue's own thread."""


class QueuedRequest(NamedTuple):
    """A request on its way. The arguments are those of TaskQueue.submit."""

    owner: str
    request: object
    done: Done[Any]
    makes: bool


class TaskQueue(Generic[Made]):
    """Owns the child process, and a thread that passes requests to it and calls their `done`, one after the other.
    Thread-safe.

    serve: what the child does with a request; it says one message, which `read` parses. timeout: seconds that the work
    may take; None: any. on_made: called before `done` with each result that was newly made, and not just
    looked up.
    """

    def __init__(
        self,
        serve: Serve,
        name: str,
        read: Callable[[bytes], Made],
        *,
        timeout: float | None = None,
        on_made: Callable[[Made], None] = lambda made: None,
    ) -> None:
        self._read, self._timeout, self._on_made = read, timeout, on_made
        self._queue: queue.PriorityQueue[tuple[int, int, QueuedRequest | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._open = Counter[str]()
        """How many requests of each owner have no answer yet."""
        self._cancelled = set[str]()
        """Owners whose open requests are dropped, for as long as they have any."""
        self._lock = threading.Lock()
        self._stopping = False
        self._children = Children(serve, name=name, keep=math.inf)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *, child: bool = True) -> None:
        """Starts the thread. child: also starts the process, so that the first request need not wait for it."""
        if child:
            self._children.prepare()
        self._thread.start()

    def submit(
        self, owner: str, request: object, done: Done[Made], *, priority: int = AHEAD, makes: bool = True
    ) -> None:
        """owner: the name for `cancel`, such as the job's id. makes: whether the result is newly made."""
        with self._lock:
            self._open[owner] += 1
        self._queue.put((priority, next(self._order), QueuedRequest(owner, request, done, makes)))

    def cancel(self, owner: str) -> None:
        """Drops the requests of `owner` that have no answer yet, and what comes while there are any. Their callbacks
        are not called."""
        with self._lock:
            if owner in self._open:
                self._cancelled.add(owner)

    def close(self) -> None:
        """Ends the child, whatever it does, and waits for both."""
        self._stopping = True
        self._queue.put((-1, next(self._order), None))
        self._children.close()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            _, _, task = self._queue.get()
            if task is None or self._stopping:
                return
            self._do(task)
            with self._lock:
                self._open[task.owner] -= 1
                if not self._open[task.owner]:
                    del self._open[task.owner]
                    self._cancelled.discard(task.owner)

    def _do(self, task: QueuedRequest) -> None:
        if task.owner in self._cancelled:
            return
        try:
            made, why = self._solve(task)
        except Exception as error:  # this request needs an answer, and the thread has to live for the next ones
            log.exception("what the planning process said can't be read", job=task.owner)
            made, why = None, f"what the planning process said can't be read ({type(error).__name__})"
        if self._stopping or task.owner in self._cancelled:
            return
        try:
            if made is not None and task.makes:
                self._on_made(made)
            task.done(made, why)
        except Exception:
            log.exception("what was made could not be filed", job=task.owner)

    def _solve(self, task: QueuedRequest) -> tuple[Made | None, str]:
        attempts = 0
        while not self._stopping:
            try:
                (made,) = self._children.ask(task.request, timeout=self._timeout)
            except ChildEnded as ended:
                if ended.missing:  # the system is short of processes or files; the request still needs its answer
                    log.warning("a request waits for a process", job=task.owner, reason=ended.detail)
                    time.sleep(_TRY_AGAIN_SECONDS)
                    continue
                attempts += 1
                if ended.late or attempts == _ATTEMPTS:
                    return None, ended.detail
                log.warning("a request is tried again", job=task.owner, reason=ended.detail)
            except ConsoleError as refused:
                return None, refused.detail
            else:
                return self._read(made), ""
        return None, "the console is stopping"
