"""Child processes that answer one question after the other, each with a stream of messages, and are kept in between.

A process takes a second to begin, and what it has found out for one question often serves the next: somebody who
changes a number on a page waits for neither.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from openrecycle.app.logs import configure_logging

# Of a process that nobody asks anything.
KEEP_SECONDS = 300.0

# (question, is the answer still wanted?) -> messages, none of them empty.
Answer = Callable[[bytes, Callable[[], bool]], Iterator[bytes]]
# Called with each message, and with None after the last, or when there will be no more.
Take = Callable[[bytes | None], None]


@dataclass(eq=False)
class _Child:
    process: BaseProcess
    pipe: Connection
    number: int = 0
    take: Take | None = None  # None: it is idle, or about to be


@dataclass(frozen=True)
class Asked:
    """A question that is being answered."""

    child: _Child
    number: int

    @property
    def process(self) -> BaseProcess:
        return self.child.process


class KeptChildren:
    """As many as there are questions at a time; one is kept. Thread-safe.

    answerer: a function of a module, which the child imports; called there once, it returns what answers.
    """

    def __init__(self, answerer: Callable[[], Answer], *, name: str, keep: float = KEEP_SECONDS) -> None:
        self._answerer, self._name, self._keep = answerer, name, keep
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._closed = False

    def prepare(self) -> None:
        """Begins a process, unless there is one: somebody is about to ask."""
        with self._lock:
            if not self._children and not self._closed:
                self._rest(self._begin())

    def ask(self, question: bytes, take: Take) -> Asked:
        """Has `take` called from a thread of ours."""
        with self._lock:
            idle = (child for child in self._children if child.take is None and child.process.is_alive())
            child = next(idle, None) or self._begin()
            child.number += 1
            child.take = take
            with suppress(OSError):  # it has just died, which its reader notices
                child.pipe.send_bytes(b"%d %b" % (child.number, question))
            return Asked(child, child.number)

    def cancel(self, asked: Asked, *, soon: bool) -> None:
        """Nothing of it comes any more. soon: it heeds that within a moment; else its process is ended."""
        child = asked.child
        with self._lock:
            if child.take is None or child.number != asked.number:
                return
            take, child.take = child.take, None
            if soon:
                with suppress(OSError):
                    child.pipe.send_bytes(b"")
            else:
                child.number += 1
                self._end(child)
        take(None)

    def close(self) -> None:
        """Ends what runs."""
        with self._lock:
            self._closed = True
            children, self._children = self._children, []
            for child in children:
                child.process.terminate()

    def _begin(self) -> _Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._answerer), name=self._name, daemon=True)
        process.start()
        theirs.close()
        child = _Child(process, ours)
        self._children.append(child)
        threading.Thread(target=self._read, args=(child,), name=self._name, daemon=True).start()
        return child

    def _read(self, child: _Child) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, _, message = child.pipe.recv_bytes().partition(b" ")
                with self._lock:
                    take = child.take if int(number) == child.number else None
                    if not message and int(number) == child.number:
                        child.take = None
                        self._rest(child)
                if take is not None:
                    take(message or None)
        with self._lock:
            self._end(child)
            take, child.take = child.take, None
        child.pipe.close()
        child.process.join(5)
        if take is not None:
            take(None)

    def _rest(self, child: _Child) -> None:
        """Of one that has nothing to do: another one is enough, and none after a while."""
        if any(other is not child and other.take is None for other in self._children):
            self._end(child)
            return
        timer = threading.Timer(self._keep, self._no_longer, (child, child.number))
        timer.daemon = True
        timer.start()

    def _no_longer(self, child: _Child, number: int) -> None:
        with self._lock:
            if child.take is None and child.number == number:
                self._end(child)

    def _end(self, child: _Child) -> None:
        if child in self._children:
            self._children.remove(child)
        child.process.terminate()


def _serve(pipe: Connection, answerer: Callable[[], Answer]) -> None:
    """The child's life. An empty question is for the one before: its answer is not wanted any more."""
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the console decides
    os.nice(5)
    answer = answerer()
    with suppress(EOFError, OSError):  # the console has gone
        while True:
            number, _, question = pipe.recv_bytes().partition(b" ")
            if not number:
                continue
            for message in answer(question, lambda: not pipe.poll()):
                pipe.send_bytes(number + b" " + message)
                if pipe.poll():
                    break
            pipe.send_bytes(number + b" ")
