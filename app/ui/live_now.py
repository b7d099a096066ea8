"""What a refresh of Live reads of the database, all at once. No Streamlit here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from openrecycle.app.console.operators import Choice
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.console.view import JobView
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.app.observing.rollout import RollOut
from openrecycle.app.runtime.errors import ConsoleError

# A database that hangs refuses nothing: it does not answer at all, and a page that waited for it would stand still
# without a word. So a page waits no longer than this.
READ_SECONDS = 3.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Now:
    """at: POSIX seconds."""

    view: JobView
    choice: Choice
    measured: MeasuredIteration | None
    roll_out: RollOut | None
    at: float


def read_now(console: ConsoleService, job_id: str, iterations: int, events: int) -> Now:
    """The newest so many iterations and events. Raises ConsoleError: 404; 503, also when it takes seconds."""

    def read() -> Now:
        at = time.time()
        view = console.queries.view(job_id, iterations, events)
        choice = console.operators.choice(job_id)
        return Now(
            view,
            choice,
            console.measuring.iteration(console.jobs.find(job_id)),
            console.roll_outs.of(console.jobs.find(job_id)),
            at,
        )

    return _shared.read((id(console), job_id, events), read)


class SharedReads:
    """Thread-safe. Who asks for what is being read already waits for that; so a database that hangs holds one thread
    for each thing that is looked at, however many look and however often. seconds: how long each waits."""

    def __init__(self, seconds: float = READ_SECONDS) -> None:
        self._seconds = seconds
        self._reads: dict[Hashable, tuple[float, Future[Any]]] = {}  # since when, by monotonic seconds
        self._lock = threading.Lock()

    def read(self, what: Hashable, read: Callable[[], Result]) -> Result:
        """Its result, or what it raises; ConsoleError (503) when it takes too long. what: equal for equal reads."""
        with self._lock:
            found = self._reads.get(what)
            if found is None:
                found = self._reads[what] = time.monotonic(), Future()
                threading.Thread(target=self._run, args=(what, found[1], read), name="page read", daemon=True).start()
        began, future = found
        if not wait([future], self._seconds).done:
            seconds = time.monotonic() - began
            raise ConsoleError(503, "unavailable", f"the database has not answered for {seconds:.0f} s")
        return future.result()  # type: ignore[no-any-return]

    def _run(self, what: Hashable, future: Future[Any], read: Callable[[], object]) -> None:
        try:
            end = partial(future.set_result, read())
        except BaseException as error:  # whoever waits raises it
            end = partial(future.set_exception, error)
        with self._lock:
            del self._reads[what]
        end()


_shared = SharedReads()
