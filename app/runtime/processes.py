"""Child processes of the console (`Children`), for work that takes long or much memory; and how processes log.

A child answers one question after the other, each with a stream of messages. It is forked from a server that has most
of its imports, and none of the state that Streamlit leaves in the console's process. It leads a process group of its
own, so that processes which it starts end with it, and it ends with its parent, however that ends. A question is any
tuple that can be pickled. A message is bytes or a JSON object; an error that ends the answer is raised here too, as
ConsoleError. Nothing from a child is unpickled, since it may have read what somebody sent.
"""

from __future__ import annotations

import json
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
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Any, TextIO

import structlog

from openrecycle.agent.messages.protocol import ConsoleError
from openrecycle.forking import end_with_parent, start_server
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.words import printable

log = structlog.get_logger()

LEVEL = "OPENRECYCLE_LOG"
"""Environment variable: `warning` for less, `debug` for more. Processes started from here inherit it."""


def _in_print(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Makes strings printable: text from outside may hold control codes for terminals, or line breaks that fake other
    log lines."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


class LogFile:
    """The stream of the log, which ignores failed writes. Code that logs must go on, and what it reports may be that a
    disk is full, which may be the log's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # a pipe without a reader; a closed stream; no stream
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


def configure_logging() -> None:
    """Sets up the log: one line per event on stderr. Nothing that is logged holds a token or a password."""
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
    """Filters out the traceback of each request that is cancelled because the console ends; one line gives their
    number."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledError))


SAID_AGAIN_SECONDS = 60.0
_MOST_SAID = 100


class Seldom:
    """Logs failures that may happen many times a second: at once, and the same one again after a minute at the
    earliest. The log may be on the disk that is full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str], float] = {}

    def warn(self, event: str, *, reason: str, **about: object) -> None:
        """Logs a warning. Warnings that differ only in `about` count as the same."""
        if self._is_due(event, reason):
            log.warning(event, reason=reason, **about)

    def failed(self, event: str, error: Exception, **about: object) -> None:
        """Logs an error that is a fault of the console's own code, with its traceback."""
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
"""Imported once by the server that children are forked from, in 0.5 s. A database and solvers are imported only by the
children that need them."""


# -- the child ---------------------------------------------------------------------------------

# The first byte of what a child sends: bytes follow, or an error as JSON. A JSON object is sent as it is, and an empty
# message at the end of an answer.
_BYTES, _ERROR = b"+", b"-"


class Channel:
    """The child's end of the pipe. Thread-safe: solvers report from threads of their own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def say(self, message: bytes | Mapping[str, Any]) -> None:
        """Sends one message of the answer: bytes, or an object for JSON."""
        self.send(_BYTES + message if isinstance(message, bytes) else json.dumps(message).encode())

    def send(self, encoded: bytes) -> None:
        with self._lock:
            try:
                self._pipe.send_bytes(encoded)
            except OSError:
                os._exit(0)  # the console has gone

    def wanted(self) -> bool:
        """Says whether the console still wants (more of) the answer."""
        return not self._pipe.poll()

    def check(self) -> None:
        """Raises Unwanted when the console does not want more."""
        if not self.wanted():
            raise Unwanted


class Unwanted(Exception):
    """Ends work whose answer is not wanted any more."""


Work = Callable[..., None]
"""Called in the child with its Channel and the question's parts. A function of a module, which the child imports. What
it raises is raised where the console reads the answer: ConsoleError as it is, PlannerError as a ConsoleError (422), and
all else as one that says what failed; then the process ends."""


def _serve(pipe: Connection, work: Work, setup: Callable[[], object] | None, memory: int | None) -> None:
    """Answers questions until the console is gone; the child's main function. An empty message means that the answer to
    the question before is not wanted any more; one that comes late is skipped."""
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
            except Unwanted:
                pass
            except Exception as error:
                why, ends = _refusal(error), not isinstance(error, ConsoleError | PlannerError)
                channel.send(_ERROR + json.dumps([why.status, why.code, why.said, why.field, ends]).encode())
                if ends:
                    return
            channel.send(b"")


def _refusal(error: Exception) -> ConsoleError:
    """Makes what the console raises for an error of the work."""
    if isinstance(error, PlannerError):
        return ConsoleError.invalid(error)
    name = current_process().name
    if not isinstance(error, ConsoleError) or error.status >= 500:  # its cause is not sent
        log.error("work in a child process failed", process=name, exc_info=error)
    if isinstance(error, ConsoleError):
        return error
    if isinstance(error, OSError):  # the machine is short of disk, processes or open files
        why = error.strerror or type(error).__name__
        return ConsoleError(503, "unavailable", f"the {name} process can't do this now ({why}); try again")
    if isinstance(error, MemoryError):
        return ConsoleError(413, "too_large", f"the {name} process would need more memory than there is")
    said = f"the {name} process failed ({type(error).__name__}); the console's log says more"
    return ConsoleError(500, "internal", said)


def _limit_memory(more: int) -> None:
    """Limits the memory that this process may take beyond what it has, in bytes. Above it Python raises MemoryError,
    and Rust ends the process."""
    with suppress(OSError, ValueError):  # the system does not tell how much it has, or has a lower limit
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (has + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


# -- the console -------------------------------------------------------------------------------


def prepare_children() -> ForkServerContext:
    """Starts the server that children are forked from, unless it runs, and returns at once: the server does its imports
    meanwhile. Raises OSError."""
    return start_server(_PRELOAD, safe_path=True)


_UNKNOWN = 255
"""The exit status that Python reports if the server that a process was forked from is gone; the process may live."""


class ChildEnded(ConsoleError):
    """Raised when no process could be started for a question, or the process ended before its answer was whole. The
    sentence says so of the process called `name`.

    missing: why none could be started. late: seconds after which it was ended, since it took too long; instead: what a
    person may do then. exitcode: its exit status if it ended by itself, if known (below 0: minus the signal's number).
    limited: it might take only so much memory.
    """

    def __init__(
        self,
        name: str,
        *,
        missing: OSError | None = None,
        late: float | None = None,
        instead: str = "",
        exitcode: int | None = None,
        limited: bool = False,
    ) -> None:
        self.missing, self.late, self.exitcode = missing is not None, late is not None, exitcode
        status, code = 503, "unavailable"
        if missing is not None:
            said = f"can't be started ({missing.strerror or missing}); try again"
        elif late is not None:
            status, code = 413, "too_large"
            said = f"was not done after {round(late, 1):g} s, and was ended" + (f"; {instead}" if instead else "")
        else:
            if limited and exitcode == -signal.SIGABRT:  # the next one would have no more
                status, code = 413, "too_large"
            said = "ended before it was done" + ("" if exitcode is None else f" (exit status {exitcode})")
            said += "; perhaps memory was not enough" if exitcode in _SHORT_OF_MEMORY else ""
        super().__init__(status, code, f"the {name} process {said}")


_SHORT_OF_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)
"""How the system ends a process that takes too much memory, and how Rust does."""


@dataclass(eq=False)
class _Child:
    """A child process. asked: the questions that it answers or is about to get. turn: held while one is answered. uses:
    how many it has had."""

    process: BaseProcess
    pipe: Connection
    uses: int = 0
    asked: list[PendingAnswer] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, timeout: float = 0.0) -> bool:
        """Says whether the process ends within `timeout` seconds. The exit code is looked at too: the sentinel is a
        pipe that is empty for a moment after the exit status has been read."""
        return self.process.exitcode is not None or bool(wait_for([self.process.sentinel], timeout))

    def kill(self) -> None:
        """Kills the process, and those that it may have started."""
        if self.process.pid is not None and (not self.ended() or self.process.exitcode == _UNKNOWN):
            with suppress(OSError):
                if os.getpgid(self.process.pid) == self.process.pid:
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()


class PendingAnswer:
    """A question, and the child that answers it or is to. stopped: when the answer was no longer wanted, in monotonic
    seconds."""

    def __init__(
        self, children: Children, child: _Child, question: tuple[Any, ...], timeout: float | None, grace: float
    ) -> None:
        self._children, self.child, self._question = children, child, question
        self._timeout, self._grace = timeout, grace
        self.stopped: float | None = None

    @property
    def process(self) -> BaseProcess:
        return self.child.process

    def messages(self) -> Generator[Any]:
        """Sends the question and yields the messages of the answer, for one reader: bytes, or a dict for a JSON object.
        Raises ConsoleError for what the work raised, and ChildEnded. If the reader stops before the end, the process is
        ended."""
        while True:
            child = self.child
            with child.turn:
                if self.child is child:  # otherwise it was killed for the question before, and there is another
                    yield from self._answer(child)
                    return

    def _answer(self, child: _Child) -> Generator[Any]:
        whole = False
        why: ConsoleError | None = None
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
                        raise self._children.ended(late=time.monotonic() - begin)
                    self.stop()
                elif not (message := child.pipe.recv_bytes()):
                    whole = True
                    break
                elif message[:1] == _ERROR:
                    status, code, said, field, ends = json.loads(message[1:])
                    why = ConsoleError(status, code, said, field=field)
                    if ends:  # not waited for: threads that the work has left may keep it
                        raise why
                else:
                    yield message[1:] if message[:1] == _BYTES else json.loads(message)
        except (EOFError, OSError):
            exitcode = child.process.exitcode if child.ended(5) else None
            raise why or self._children.ended(exitcode=exitcode) from None
        finally:
            self._children._rest(self, whole=whole)
        if why is not None:
            raise why

    def ended(self, timeout: float = 0.0) -> bool:
        """Says whether its process ends within `timeout` seconds."""
        return self.child.ended(timeout)

    def waiting(self) -> bool:
        """Says whether `messages` has something to read now: a message, or that the process is gone."""
        with suppress(OSError):
            return self.child.pipe.poll()
        return True

    def stop(self) -> None:
        """Tells the child that the rest of the answer is not wanted. The answer ends soon, with what there is by
        then."""
        with self._children._lock:
            if self.stopped is None and self in self.child.asked:
                self.stopped = time.monotonic()
                if not self._question:
                    self._tell()

    def end(self) -> None:
        """Kills its process. Messages that it has sent can still be read."""
        with self._children._lock:
            if self in self.child.asked:
                self.child.kill()

    def _tell(self) -> None:
        with suppress(OSError):
            self.child.pipe.send_bytes(b"")

    def _limit(self, begin: float) -> float:
        """Returns until when to wait for the answer, in monotonic seconds."""
        if self.stopped is not None:
            return self.stopped + self._grace
        return math.inf if self._timeout is None else begin + self._timeout


class Children:
    """The processes for one kind of work, one for each question at a time. Thread-safe.

    work: see Work. name: of its processes, for the system and for people: `planning`. setup: called once in each
    process, before its first question. keep: seconds for which one idle process is kept; 0: each ends after its answer.
    most: how many questions `ask` has answered at a time; None: any number. memory: bytes that a process may take
    beyond what it begins with. nested: its processes start processes themselves. instead: see ChildEnded.
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
        instead: str = "",
    ) -> None:
        self._work, self._name, self._setup = work, name, setup
        self._keep, self._memory, self._nested, self._instead = keep, memory, nested, instead
        self._places = None if most is None else threading.BoundedSemaphore(most)
        self._lock = threading.RLock()
        self._children: list[_Child] = []
        self._closed = False

    def prepare(self) -> None:
        """Starts a process if none is idle, so that the next question need not wait for its imports."""
        with self._lock, suppress(OSError):  # if none can be started, the next question reports that
            if self._closed or any(not c.asked and not c.ended() for c in self._children):
                return
            self._expire(self._begin())

    def begin(self, *question: Any, timeout: float | None = None, grace: float = 0.0) -> PendingAnswer:
        """Assigns a question to a process; it is sent when the caller reads `messages`. timeout: seconds after which
        the answer is stopped; grace: seconds after that until the process is killed. Raises ChildEnded if none can be
        started, and after `close`."""
        with self._lock:
            if self._closed:
                raise self.ended()
            for child in [child for child in self._children if not child.asked and child.ended()]:
                self._drop(child)
            alive = [child for child in self._children if not child.ended()]
            # A process that was told to stop will be free in a moment, and has its imports already.
            free = (c for c in alive if not c.asked or (self._keep and len(c.asked) == 1 and c.asked[0].stopped))
            try:
                child = min(free, key=lambda c: len(c.asked), default=None) or self._begin()
            except OSError as error:
                raise self.ended(missing=error) from error
            asked = PendingAnswer(self, child, question, timeout, grace)
            self._give(child, asked)
            return asked

    def _give(self, child: _Child, asked: PendingAnswer) -> None:
        asked.child = child
        child.asked.append(asked)
        child.uses += 1

    def ended(self, **how: Any) -> ChildEnded:
        return ChildEnded(self._name, instead=self._instead, limited=self._memory is not None, **how)

    def ask(self, *question: Any, timeout: float | None = None, wait: float | None = None) -> list[Any]:
        """Returns the whole answer (see PendingAnswer.messages). wait: seconds to wait while `most` others are
        answered; None: any time. Raises ConsoleError, also after that wait."""
        if self._places is not None and not self._places.acquire(timeout=wait):
            raise ConsoleError(503, "unavailable", f"all {self._name} processes are busy; try again in a minute")
        try:
            return list(self.begin(*question, timeout=timeout).messages())
        finally:
            if self._places is not None:
                self._places.release()

    def close(self) -> None:
        """Kills all processes, and starts no more."""
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
        # A daemonic process of multiprocessing may not have children of its own.
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
        """Notes that an answer is over. whole: it came to its end, so that the process can take another question."""
        child = asked.child
        with self._lock:
            child.asked.remove(asked)
            if child.asked and whole:
                return
            idle = any(other is not child and not other.asked for other in self._children)
            if whole and self._keep and not idle and not self._closed:
                self._expire(child)
                return
            # Those that waited for their turn have another process. If none can be started, they find this one ended.
            with suppress(OSError):
                while child.asked and not self._closed:
                    self._give(self._begin(), child.asked[-1])
                    child.asked.pop()
            self._drop(child)
        child.ended(5)

    def _drop(self, child: _Child) -> None:
        if child in self._children:
            self._children.remove(child)
        child.kill()
        if not child.asked:
            child.pipe.close()

    def _expire(self, child: _Child) -> None:
        """Drops an idle process after `keep` seconds, unless it gets a question before that."""
        if not 0 < self._keep < threading.TIMEOUT_MAX:
            return

        def no_longer(uses: int = child.uses) -> None:
            with self._lock:
                if not child.asked and child.uses == uses:
                    self._drop(child)

        timer = threading.Timer(self._keep, no_longer)
        timer.daemon = True
        timer.start()
