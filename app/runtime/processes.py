"""How processes of the console log, and its child processes: what takes long, or much memory, is done in one.

A child answers one question after the other, each with a stream of messages. It is forked from a server that has most
of its imports, without what Streamlit leaves behind in its parent, leads a process group of its own, so that what it
starts ends with it, and ends with its parent, however that ends. A question is any tuple that can be pickled; messages
are bytes. Nothing that comes out of a child is unpickled: it may have read what somebody sent.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import structlog

from openrecycle.forking import end_with_parent, start_server
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.words import printable

log = structlog.get_logger()

LEVEL = "OPENRECYCLE_LOG"
"""Environment variable: `warning` for less, `debug` for more. Processes started from here inherit it."""


def _in_print(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What comes from outside may hold what terminals obey, or line breaks, after which a line seems to be another."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


class LogFile:
    """A stream for what is logged, where there is room for it: those who log have other things to do, and are in the
    midst of saying that a disk is full, which may be this one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # a pipe without a reader; one that is closed; none
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def configure_logging() -> None:
    """One line per event on stderr. Nothing that is logged holds a token or a password."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "info").upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _in_print,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(LogFile(sys.stderr or sys.stdout)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(worth_saying)


def worth_saying(record: logging.LogRecord) -> bool:
    """Not the traceback of each request that was given up since the console ends: how many there are is one line."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledError))


SAID_AGAIN_SECONDS = 60.0
_MOST_SAID = 100


class Seldom:
    """Says what may fail many times a second: each is logged at once, and the same again a minute later. The log may be
    on the disk that is full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str], float] = {}

    def warn(self, event: str, *, reason: str, **about: object) -> None:
        """One that differs in what it is `about` alone is the same."""
        if self._is_due(event, reason):
            log.warning(event, reason=reason, **about)

    def failed(self, event: str, error: Exception, **about: object) -> None:
        """With the traceback: it is a mistake of ours."""
        if self._is_due(event, f"{type(error).__name__}: {error}".partition("\n")[0]):
            log.error(event, exc_info=error, **about)

    def _is_due(self, event: str, reason: str) -> bool:
        now, key = self._clock(), (event, reason)
        if now - self._said.get(key, -math.inf) < SAID_AGAIN_SECONDS:
            return False
        if len(self._said) >= _MOST_SAID:
            self._said.clear()
        self._said[key] = now
        return True


_SLICE = 0.2
_PRELOAD = (
    "openrecycle.app.runtime.processes",
    "openrecycle.app.plans.files",
    "openrecycle.app.plans.solving",
    "openrecycle.app.plans.simulations",
    "openrecycle.app.catalogs.contents",
    "openrecycle.app.advice.recommendation",
)
"""What most children do is imported once, in 0.5 s. A database and solvers are imported where they are needed."""


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
    end_with_parent(partial(os.killpg, 0, signal.SIGKILL))
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


def _limit_memory(more: int) -> None:
    """Beyond what this process has: Python raises MemoryError, and Rust ends the process."""
    with suppress(OSError, ValueError):  # a system that does not tell, or has a lower limit
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (has + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


# Before what was made, and before why nothing was: a large document is not wrapped into another one.
_MADE, _WHY = b"+", b"-"


def made(data: bytes) -> bytes:
    """In the child: what `read_answer` reads."""
    return _MADE + data


def why_not(sentence: str) -> bytes:
    """In the child: that nothing is made, and why."""
    return _WHY + sentence.encode()


def read_answer(data: bytes) -> tuple[bytes | None, str]:
    """(what was made, "") or (None, why there is nothing)."""
    return (data[1:], "") if data[:1] == _MADE else (None, data[1:].decode())


def answered(make: Callable[[], bytes]) -> bytes:
    """In the child: what `read_answer` reads. make: may raise PlannerError."""
    try:
        return made(make())
    except PlannerError as error:
        return why_not(str(error))
    except Exception as error:
        return why_not(unexpected(error))


def unexpected(error: Exception, who: str = "the planner") -> str:
    """In the child: the sentence for an error that is a mistake of ours, of which the log says all."""
    log.exception(f"{who} failed", exc_info=error)
    return f"{who} failed ({type(error).__name__}); the console's log says more"


# -- the console -------------------------------------------------------------------------------


def prepare_children() -> ForkServerContext:
    """Has the server that children are forked from begin to import, unless it has, while this process does other
    things. Raises OSError."""
    return start_server(_PRELOAD, safe_path=True)


_UNKNOWN = 255
"""Instead of an exit status, where the server that a process was forked from is gone; the process may live."""


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

    def ended(self, timeout: float = 0.0) -> bool:
        """Waits so many seconds. Its sentinel alone would not do: it is a pipe, which is empty for a moment once the
        exit status has been read."""
        return self.process.exitcode is not None or bool(wait_for([self.process.sentinel], timeout))

    def kill(self) -> None:
        """With the processes that it may have started."""
        if self.process.pid is not None and (not self.ended() or self.process.exitcode == _UNKNOWN):
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
                raise ChildEnded(exitcode=child.process.exitcode if child.ended(5) else None) from None
            finally:
                self._children._rest(self, whole=whole)

    def ended(self, timeout: float = 0.0) -> bool:
        """Has its process ended, so many seconds from now at the latest?"""
        return self._child.ended(timeout)

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
        with self._lock, suppress(OSError):  # there is none: the next question says so
            if self._closed or any(not c.asked and not c.ended() for c in self._children):
                return
            self._expire(self._begin())

    def begin(self, *question: Any, timeout: float | None = None, grace: float = 0.0) -> PendingAnswer:
        """Whoever reads its messages has it answered. timeout: seconds after which it is stopped; grace: seconds more
        after which its process is ended. Raises ChildEnded once this is closed."""
        with self._lock:
            if self._closed:
                raise ChildEnded
            for child in [child for child in self._children if not child.asked and child.ended()]:
                self._drop(child)
            alive = [child for child in self._children if not child.ended()]
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
            child.ended(5)

    def _begin(self) -> _Child:
        context = prepare_children()
        ours, theirs = context.Pipe()
        arguments = theirs, self._work, self._setup, self._memory
        # Daemons may have no children of their own.
        process = context.Process(target=_serve, args=arguments, name=self._name, daemon=not self._nested)
        try:
            process.start()
        except EOFError:
            raise OSError("a process can't be forked") from None
        finally:
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
        child.ended(5)

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
