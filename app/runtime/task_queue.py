"""Long work in a child process, one piece at a time, the most urgent first: plans and advice are made so.

A solver in a thread of the console's process would hold up its heartbeats; in a child it can also be ended. What is
made is for the feature that asks: it hands in the function that the child runs.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import structlog

from openrecycle.app.runtime.patches import OP_BYTES, building
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children, read_answer

log = structlog.get_logger()

URGENT, AHEAD = 0, 1

# A plan is tried again once when the child that made it died; then its request is at fault.
_ATTEMPTS = 2
_TRY_AGAIN_SECONDS = 1.0


Serve = Callable[[Channel, Any], None]
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class Request(Protocol[Made_co]):
    """What the child gets. owner: what `cancel` goes by (the job's id). timeout: seconds that its work may take; None:
    any. makes: is what comes of it new, and not just looked up?"""

    @property
    def owner(self) -> str: ...
    @property
    def makes(self) -> bool: ...
    @property
    def timeout(self) -> float | None: ...
    def read(self, document: bytes) -> Made_co: ...


Done = Callable[[Made | None, str], None]
"""Called with (what was made, "") or (None, why there is nothing), in the maker's own thread."""


class TaskQueue:
    """Owns the child process. Thread-safe. `done` callbacks run one after the other. serve: what the child does with a
    request (see `answered`). on_made: called with everything that was made, and not just looked up, before them."""

    def __init__(self, serve: Serve, name: str, *, on_made: Callable[[Any], None] = lambda made: None) -> None:
        self._on_made = on_made
        self._queue: queue.PriorityQueue[tuple[int, int, Request[Any] | None, Done[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._cancelled: set[str] = set()
        self._stopping = False
        self._children = Children(serve, name=name, keep=math.inf)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *, child: bool = True) -> None:
        """child: starts the process now, so that the first request need not wait for it."""
        if child:
            self._children.prepare()
        self._thread.start()

    def submit(self, request: Request[Made], done: Done[Made], *, priority: int = AHEAD) -> None:
        self._queue.put((priority, next(self._order), request, done))

    def cancel(self, owner: str) -> None:
        """Forgets what `owner` still waits for; its callbacks are not called."""
        self._cancelled.add(owner)

    def close(self) -> None:
        """Ends the child, whatever it does, and waits for both."""
        self._stopping = True
        self._queue.put((-1, next(self._order), None, lambda made, why: None))
        self._children.close()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            _, _, request, done = self._queue.get()
            if request is None or self._stopping:
                return
            if request.owner in self._cancelled:
                continue
            try:
                made, why = self._solve(request)
            except Exception as error:  # somebody waits for this one, and others for those that come after it
                log.exception("what the planning process said can't be read", job=request.owner)
                made, why = None, f"what the planning process said can't be read ({type(error).__name__})"
            if self._stopping:
                return
            if request.owner not in self._cancelled:
                try:
                    if made is not None and request.makes:
                        self._on_made(made)
                    done(made, why)
                except Exception:
                    log.exception("what was made could not be filed", job=request.owner)

    def _solve(self, request: Request[Made]) -> tuple[Made | None, str]:
        attempts = 0
        while attempts < _ATTEMPTS and not self._stopping:
            try:
                made, why = read_answer(self._children.ask(request, timeout=request.timeout))
            except ChildEnded as ended:
                if ended.late:
                    return None, f"it took more than {request.timeout:g} s"
                if self._stopping:
                    return None, "the console is stopping"
                log.warning("the planning process died; starting another", job=request.owner)
                attempts += 1
                continue
            except OSError as error:  # no process, or no file, to be had: somebody waits for this plan all the same
                log.warning("the planning process can't be started; trying again", job=request.owner, reason=str(error))
                time.sleep(_TRY_AGAIN_SECONDS)
                continue
            if made is None:
                return None, why
            with building(len(made) // OP_BYTES):
                return request.read(made), ""
        return None, "the planning process died over it"
