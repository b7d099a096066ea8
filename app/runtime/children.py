"""Child processes of the console: what takes long, or much memory, is done in one.

A child answers one question after the other, each with a stream of messages. It is spawned without what Streamlit
leaves behind in its parent, leads a process group of its own, so that what it starts ends with it, and ends with its
parent, however that ends. A question is any tuple that can be pickled; messages are bytes. Nothing that comes out of a
child is unpickled: it may have read what somebody sent.

TaskQueue has one piece of work done at a time, the most urgent first: plans and advice are made so. A solver in a
thread of the console would hold up its heartbeats; in a child it can also be ended.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import pickle
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from openrecycle.app.runtime.logs import configure_logging
from openrecycle.app.runtime.patches import OP_BYTES, building
from openrecycle.planner.jobs.errors import PlannerError

log = structlog.get_logger()

_SLICE = 0.2


# -- the child ---------------------------------------------------------------------------------


class Channel:
    """The child's end of the pipe. Thread-safe: solvers report from threads of their own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def say(self, message: bytes) -> None:
        """One message of the answer, not empty."""
        with self._lock:
            try:
                self._pipe.send_bytes(message)
            except OSError:
                os._exit(0)  # the console has gone

    def wanted(self) -> bool:
        """Does anybody still want (more of) the answer?"""
        return not self._pipe.poll()


Work = Callable[..., None]
"""Called in the child with its Channel and the question's parts. A function of a module, which the child imports."""


def _serve(pipe: Connection, work: Work, setup: Callable[[], object] | None, memory: int | None) -> None:
    """The child's life. An empty message is for the question before: its answer is not wanted any more."""
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the console decides
    os.setpgid(0, 0)
    os.nice(5)  # training may run on the same machine
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if memory is not None:
        _limit_memory(memory)
    if setup is not None:
        setup()
    channel = Channel(pipe)
    with suppress(EOFError, OSError):  # the console has gone
        while True:
            question = pipe.recv_bytes()
            if not question:
                continue
            try:
                work(channel, *pickle.loads(question))
            except Exception:
                log.exception("work in a child process failed")
                return
            channel.say(b"")


def _end_with(parent: BaseProcess) -> None:
    """Also when the console was killed in the middle of long work."""
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _limit_memory(more: int) -> None:
    """Beyond what this process has: Python raises MemoryError, and Rust ends the process."""
    with suppress(OSError, ValueError):  # a system that does not tell, or has a lower limit
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (has + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


# -- the console -------------------------------------------------------------------------------


class ChildEnded(Exception):
    """A process was gone before its answer was whole. late: it took too long, and was ended. exitcode: else, where it
    is known (below 0: minus the signal's number)."""

    def __init__(self, *, late: bool = False, exitcode: int | None = None) -> None:
        super().__init__("it took too long" if late else f"exit status {exitcode}")
        self.late, self.exitcode = late, exitcode

    @property
    def killed(self) -> bool:
        """By the system, perhaps, which had too little memory."""
        return self.exitcode == -signal.SIGKILL


@dataclass(eq=False)
class _Child:
    """asked: the questions that it has, or is about to get. turn: held while one is answered."""

    process: BaseProcess
    pipe: Connection
    uses: int = 0
    asked: list[PendingAnswer] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        """With the processes that it may have started."""
        if self.process.pid is not None and self.process.is_alive():
            with suppress(OSError):
                if os.getpgid(self.process.pid) == self.process.pid:
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()


class PendingAnswer:
    """A question, and who answers it. stopped: when it was stopped, monotonic seconds."""

    def __init__(
        self, children: Children, child: _Child, question: tuple[Any, ...], timeout: float | None, grace: float
    ) -> None:
        self._children, self._child, self._question = children, child, question
        self._timeout, self._grace = timeout, grace
        self.stopped: float | None = None

    @property
    def process(self) -> BaseProcess:
        return self._child.process

    def messages(self) -> Generator[bytes]:
        """The answer, for one reader. Raises ChildEnded. Whoever leaves before the end has the process ended."""
        child, whole = self._child, False
        with child.turn:
            begin = time.monotonic()
            try:
                child.pipe.send_bytes(pickle.dumps(self._question))
                self._question = ()
                if self.stopped is not None:
                    self._tell()
                while True:
                    limit = self._limit(begin)
                    if not child.pipe.poll(min(_SLICE, max(0.0, limit - time.monotonic()))):
                        if time.monotonic() < limit:
                            continue
                        if self.stopped is not None:
                            raise ChildEnded(late=True)
                        self.stop()
                    elif message := child.pipe.recv_bytes():
                        yield message
                    else:
                        whole = True
                        return
            except (EOFError, OSError):
                child.process.join(5)
                raise ChildEnded(exitcode=child.process.exitcode) from None
            finally:
                self._children._rest(self, whole=whole)

    def waiting(self) -> bool:
        """Is there a message now?"""
        with suppress(OSError):
            return self._child.pipe.poll()
        return True  # that the process is gone

    def stop(self) -> None:
        """The answer is not wanted any more: it ends soon, with what there is by then."""
        with self._children._lock:
            if self.stopped is None and self in self._child.asked:
                self.stopped = time.monotonic()
                if not self._question:
                    self._tell()

    def end(self) -> None:
        """Ends its process. What it has said can still be read."""
        with self._children._lock:
            if self in self._child.asked:
                self._child.kill()

    def _tell(self) -> None:
        with suppress(OSError):
            self._child.pipe.send_bytes(b"")

    def _limit(self, begin: float) -> float:
        """Until when it is waited for, monotonic seconds."""
        if self.stopped is not None:
            return self.stopped + self._grace
        return math.inf if self._timeout is None else begin + self._timeout


class Children:
    """The processes for one kind of work: as many as there are questions at a time. Thread-safe.

    work: see Work. setup: called once in each process, before its first question. keep: seconds for which a process
    without a question is kept, one at most; 0: each ends after its answer. most: `ask` has so many questions answered
    at a time; None: all. memory: bytes that a process may take beyond what it begins with. nested: it starts processes
    itself.
    """

    def __init__(
        self,
        work: Work,
        *,
        name: str,
        setup: Callable[[], object] | None = None,
        keep: float = 0.0,
        most: int | None = None,
        memory: int | None = None,
        nested: bool = False,
    ) -> None:
        self._work, self._name, self._setup = work, name, setup
        self._keep, self._memory, self._nested = keep, memory, nested
        self._places = None if most is None else threading.BoundedSemaphore(most)
        self._lock = threading.RLock()
        self._children: list[_Child] = []
        self._closed = False

    def prepare(self) -> None:
        """Has a process ready, so that the next question need not wait for its imports."""
        with self._lock:
            if self._closed or any(not c.asked and c.process.is_alive() for c in self._children):
                return
            self._expire(self._begin())

    def begin(self, *question: Any, timeout: float | None = None, grace: float = 0.0) -> PendingAnswer:
        """Whoever reads its messages has it answered. timeout: seconds after which it is stopped; grace: seconds more
        after which its process is ended. Raises ChildEnded once this is closed."""
        with self._lock:
            if self._closed:
                raise ChildEnded
            alive = [child for child in self._children if child.process.is_alive()]
            # One that was told to stop is ready in a moment, and begins with what it knows.
            free = (c for c in alive if not c.asked or (self._keep and len(c.asked) == 1 and c.asked[0].stopped))
            child = min(free, key=lambda c: len(c.asked), default=None) or self._begin()
            asked = PendingAnswer(self, child, question, timeout, grace)
            child.asked.append(asked)
            child.uses += 1
            return asked

    def ask(self, *question: Any, timeout: float | None = None, wait: float | None = None) -> bytes:
        """All messages of the answer in one. wait: seconds for a place, where `most` are taken; None: as long as it
        takes. Raises ChildEnded; TimeoutError when there was no place."""
        if self._places is not None and not self._places.acquire(timeout=wait):
            raise TimeoutError
        try:
            return b"".join(self.begin(*question, timeout=timeout).messages())
        finally:
            if self._places is not None:
                self._places.release()

    def close(self) -> None:
        """Ends what runs, and begins nothing any more."""
        with self._lock:
            self._closed, children = True, list(self._children)
            for child in children:
                child.kill()
        for child in children:
            child.process.join(5)

    def _begin(self) -> _Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = theirs, self._work, self._setup, self._memory
        # Daemons may have no children of their own.
        process = context.Process(target=_serve, args=arguments, name=self._name, daemon=not self._nested)
        process.start()
        theirs.close()
        child = _Child(process, ours)
        self._children.append(child)
        return child

    def _rest(self, asked: PendingAnswer, *, whole: bool) -> None:
        """Its answer is over. whole: the process can take another question."""
        child = asked._child
        with self._lock:
            child.asked.remove(asked)
            if child.asked and whole:
                return
            idle = any(other is not child and not other.asked for other in self._children)
            if whole and self._keep and not idle and not self._closed:
                self._expire(child)
                return
            self._drop(child)
        child.process.join(5)

    def _drop(self, child: _Child) -> None:
        if child in self._children:
            self._children.remove(child)
        child.kill()
        if not child.asked:
            child.pipe.close()

    def _expire(self, child: _Child) -> None:
        """Of one that has nothing to do."""
        if not 0 < self._keep < threading.TIMEOUT_MAX:
            return

        def no_longer(uses: int = child.uses) -> None:
            with self._lock:
                if not child.asked and child.uses == uses:
                    self._drop(child)

        timer = threading.Timer(self._keep, no_longer)
        timer.daemon = True
        timer.start()


URGENT, AHEAD = 0, 1

# A plan is tried again once when the child that made it died; then its request is at fault.
_ATTEMPTS = 2


Serve = Callable[[Channel, bytes], None]
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class Request(Protocol[Made_co]):
    """owner: what `cancel` goes by (the job's id). timeout: seconds that its work may take; None: any. makes: is what
    comes of it new, and not just looked up?"""

    @property
    def owner(self) -> str: ...
    @property
    def makes(self) -> bool: ...
    @property
    def timeout(self) -> float | None: ...
    def to_json(self) -> bytes: ...
    def read(self, document: bytes) -> Made_co: ...


Done = Callable[[Made | None, str], None]
"""Called with (what was made, "") or (None, why there is nothing), in the maker's own thread."""


class TaskQueue:
    """Owns the child process. Thread-safe. `done` callbacks run one after the other. serve: what the child does with a
    request (see `answered`). on_made: called with everything that was made, and not just looked up, before them."""

    def __init__(self, serve: Serve, name: str, *, on_made: Callable[[Any], None] = lambda made: None) -> None:
        self._name = name
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
            made, why = self._solve(request)
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
        for _ in range(_ATTEMPTS):
            try:
                made, why = read_answer(self._children.ask(request.to_json(), timeout=request.timeout))
            except ChildEnded as ended:
                if ended.late:
                    return None, f"it took more than {request.timeout:g} s"
                if self._stopping:
                    return None, "the console is stopping"
                log.warning("the planning process died; starting another", job=request.owner)
                continue
            if made is None:
                return None, why
            with building(len(made) // OP_BYTES):
                return request.read(made), ""
        return None, "the planning process died over it"


# Before what was made, and before why nothing was: a large document is not wrapped into another one.
_MADE, _WHY = b"+", b"-"


def read_answer(data: bytes) -> tuple[bytes | None, str]:
    """(what was made, "") or (None, why there is nothing)."""
    return (data[1:], "") if data[:1] == _MADE else (None, data[1:].decode())


def answered(request: bytes, make: Callable[[dict[str, Any]], bytes]) -> bytes:
    """In the child: what `read_answer` reads. make: from the request's JSON; may raise PlannerError."""
    asked = json.loads(request)
    try:
        return _MADE + make(asked)
    except PlannerError as error:
        return _WHY + str(error).encode()
    except Exception as error:
        log.exception("the planner failed", failed=asked.get("failed"))
        return _WHY + f"the planner failed ({type(error).__name__}); the console's log says more".encode()
