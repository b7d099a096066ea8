"""Micro-batches that are read beside the training: by a process of each worker, in the order in which it needs them.

They come over in shared memory, as torch gives tensors from process to process. A micro-batch depends on its place
alone, so that it does not matter who reads it: what was read for nothing is dropped, and where that process is gone the
worker reads by itself. The process ends with its worker, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import torch
import torch.multiprocessing  # how tensors go through a pipe

from openrecycle.agent.models.data import own_numbers
from openrecycle.agent.models.streams import StreamBatches
from openrecycle.forking import fork_context

log = logging.getLogger("openrecycle")

Place = tuple[int, int, int]
"""(iteration, pipeline, micro-batch)."""


_BROKEN = (OSError, EOFError, RuntimeError, pickle.PickleError)
"""What the two processes meet where one of them is gone, or, by torch, where shared memory can't be had or is gone: the
data have no part in it."""


@dataclass(frozen=True)
class Read:
    """Reads micro-batches with the seed of their place."""

    make_batch: Callable[[int, int, int], Any]
    seed: int

    def __call__(self, place: Place) -> Any:
        with own_numbers("data", self.seed, *place):
            return self.make_batch(*place)

    @property
    def stream(self) -> StreamBatches | None:
        return self.make_batch if isinstance(self.make_batch, StreamBatches) else None


class ReadAhead:
    """A process that reads `count` micro-batches ahead. Of one thread."""

    def __init__(self, read: Read, count: int) -> None:
        self._read, self._count = read, count
        self._wanted: set[Place] = set()
        self._expected: list[Place] = []
        self._asked: list[Place] = []
        self._there: dict[Place, tuple[bool, Any]] = {}
        """Whether it could be read, and it, or what was raised."""
        self._process: multiprocessing.process.BaseProcess | None
        self._process, self._pipe = _started(read)
        if read.stream is not None:
            read.stream.forget()

    @property
    def pid(self) -> int | None:
        """None where it is gone."""
        return None if self._process is None else self._process.pid

    def expect(self, places: Sequence[Place]) -> None:
        """These are wanted next, in this order. What was expected before is not."""
        self._wanted = set(places)
        self._there = {place: found for place, found in self._there.items() if place in self._wanted}
        self._expected = [place for place in places if place not in self._asked and place not in self._there]
        self._ask()

    def take(self, place: Place) -> Any:
        """Waits for it. Raises what reading it raises."""
        self._wanted.add(place)
        try:
            if place not in self._there and place not in self._asked:
                self._send(place)
            while place not in self._there and self._process is not None:
                self._receive()
        except _BROKEN as error:
            self._gone(error)
        if place in self._expected:
            self._expected.remove(place)
        if place not in self._there:
            return self._read(place)
        self._wanted.remove(place)
        fine, found = self._there.pop(place)
        self._ask()
        if not fine:
            raise found
        return found

    def _ask(self) -> None:
        try:
            while self._process is not None and self._pipe.poll():
                self._receive()
            while self._expected and len(self._asked) + len(self._there) < self._count:
                self._send(self._expected.pop(0))
        except _BROKEN as error:
            self._gone(error)

    def _send(self, place: Place) -> None:
        if self._process is None:
            return
        stream = self._read.stream
        news = stream.take_news() if stream is not None else []
        while news and self._asked:  # neither side must wait for the other to take what is large
            self._receive()
        self._pipe.send((place, pickle.dumps(news)))
        self._asked.append(place)

    def _receive(self) -> None:
        place, fine, found, news = self._pipe.recv()
        self._asked.remove(place)
        if place in self._wanted:
            self._there[place] = fine, found if fine else pickle.loads(found)
        stream = self._read.stream
        if stream is not None:
            stream.merge(pickle.loads(news))
            stream.prune(place[0])

    def _gone(self, error: Exception) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join(1.0)
            self._pipe.close()
            log.warning(
                "data: the process that reads ahead is gone (exit code %s, %s); the worker reads by itself",
                process.exitcode,
                type(error).__name__,
            )
        self._asked, self._expected = [], []


def _started(read: Read) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Not forked from this process: a child would keep its connections open beyond its end, and peers would not see
    it."""
    # A worker is a daemon of its launcher's, and those may have no children; this one ends with it all the same.
    multiprocessing.current_process().daemon = False
    context = fork_context()
    ours, theirs = context.Pipe(duplex=True)
    # Pickled here: a process's arguments would move the tensors among them to shared memory.
    payload, threads = pickle.dumps(read), torch.get_num_threads()
    process = context.Process(target=_serve, args=(payload, threads, theirs), name="read-ahead", daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(payload: bytes, threads: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    torch.set_num_threads(threads)
    read: Read = pickle.loads(payload)
    stream = read.stream
    with contextlib.suppress(*_BROKEN):
        while True:
            place, offered = pipe.recv()
            if stream is not None:
                stream.merge(pickle.loads(offered))
            try:
                found = read(place)
            except Exception as error:
                found, fine = _sendable(error), False
            else:
                fine = True
            news = pickle.dumps(stream.take_news() if stream is not None else [])
            try:
                pipe.send((place, fine, found, news))
            except (OSError, RuntimeError):
                raise  # where there is no shared memory left, the worker itself can read it all the same
            except Exception as error:  # a micro-batch that can't be sent
                pipe.send((place, False, _sendable(error), news))
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _sendable(error: Exception) -> bytes:
    """The exception with its notes, and the traceback as its cause."""
    where = error.__traceback__
    for sent in (error, RuntimeError(f"{type(error).__name__}: {error}")):
        sent.__notes__ = list(getattr(error, "__notes__", ()))
        with contextlib.suppress(Exception):
            payload = pickle.dumps(ExceptionWithTraceback(sent, where))
            pickle.loads(payload)
            return payload
    raise error
