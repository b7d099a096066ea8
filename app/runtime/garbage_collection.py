"""When memory is looked through for what refers to itself, and what is not looked at then.

A console holds millions of objects: some hundred for each worker of a large job, half a million for a plan of 2,048.
Python begins a round when there are so many more than before, and goes by all that is young, or by everything. But
each heartbeat takes the place of another, so that with thousands of workers most of what lives is young, and rounds
took half of the processor's time and up to 0.5 s each, in which no heartbeat is answered. So `GarbageCollection`
makes the rounds of the console's process, rarely. (Streamlit's, after every run of a script, so also after each
refresh of each viewer's page, are off: see app.server.)
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Fewer ops than this are looked through in a few milliseconds.
LARGE_OPS = 20_000
# Of the JSON of an op, about.
OP_BYTES = 80
# Between two rounds over everything; and over what is new since the last of either, which is kept out afterwards:
# what of it is in a cycle is found by the next whole one.
WHOLE_SECONDS, NEW_SECONDS = 900.0, 60.0
# No more of the time than this goes into either: looking through what a console of 8,192 workers holds takes a second.
SHARE = 0.001
# Sooner, where there are so many objects more than before, or so much more is held.
NEW_OBJECTS, NEW_BYTES = 200_000, 256 * 2**20
# A whole one as well, where memory has grown so much since the last one, but not within so many seconds of it: as long
# as a large job's workers register, all grows.
GROWTH, GROWN_BYTES, GROWN_SECONDS = 1.25, 64 * 2**20, 300.0
LOOK_SECONDS = 1.0

_lock = threading.Lock()
_building = 0
_kept = False  # are the rounds of this process made here?
_last_whole = -WHOLE_SECONDS


class GarbageCollection:
    """Makes the rounds of this process instead of Python, in a thread of its own, from `start` to `close`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_house, name="house-keeping", daemon=True)

    def start(self) -> None:
        global _kept
        with _lock:
            _kept = True
            gc.disable()
        self._thread.start()

    def close(self) -> None:
        global _kept
        self._stop.set()
        self._thread.join()
        with _lock:
            _kept = False
            gc.enable()

    def _keep_house(self) -> None:
        whole = new = timed(whole=True)
        while not self._stop.wait(LOOK_SECONDS):
            more = gc.get_count()[0]
            which = due(time.monotonic(), new, whole, more, resident_bytes())
            if which is not None:
                new = timed(new.kept_out + more, whole=which)
                whole = new if which else whole


@dataclass(frozen=True)
class Round:
    """at: when it ended, of the monotonic clock, in seconds. took: seconds of a processor; on a busy machine a round
    lasts many times as long, which must not make the next one rare. held: bytes that the process held then. kept_out:
    about so many objects are left to the next whole one."""

    at: float
    took: float
    held: int
    kept_out: int = 0


def timed(kept_out: int = 0, *, whole: bool) -> Round:
    """Makes a round. kept_out: as Round has it, of one that is not whole."""
    began = time.thread_time()
    held = make_round(whole=whole)
    took = time.thread_time() - began
    # To count them takes as long as a part of the round.
    return Round(time.monotonic(), took, held, gc.get_freeze_count() if whole else kept_out)


def due(now: float, last: Round, last_whole: Round, more: int, resident: int) -> bool | None:
    """Is a round to be made now, and a whole one? None: no.

    last: of either kind. more: objects than at the last; resident: bytes that the process holds now.
    """
    since = now - last_whole.at
    grown = resident > GROWTH * last_whole.held + GROWN_BYTES
    if since >= (GROWN_SECONDS if grown else max(WHOLE_SECONDS, last_whole.took / SHARE)):
        return True
    much = more >= max(NEW_OBJECTS, last.kept_out / 4) or resident > GROWTH * last.held + NEW_BYTES
    return False if much or now - last.at >= max(NEW_SECONDS, last.took / SHARE) else None


def make_round(*, whole: bool) -> int:
    """Looks through all that is new, or through everything, and keeps it out from then on; returns the bytes that the
    process then holds. Does nothing while a large plan is built."""
    with _lock:
        if not _building:
            _look(whole=whole)
    return resident_bytes()


def _look(*, whole: bool) -> None:
    global _last_whole
    if whole:
        gc.unfreeze()
        _last_whole = time.monotonic()
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def settle(ops: int) -> None:
    """Call when a plan of so many ops has been read: all that lives now is not looked through any more.

    What is let go of is freed as ever, by its reference count; what is in a cycle, by a round that a later
    call makes.
    """
    if ops > LARGE_OPS:
        with _lock:
            _whole_if_due()
            gc.freeze()


@contextmanager
def building(ops: int) -> Iterator[None]:
    """Around the reading or making of a plan of so many ops: no round begins meanwhile, and at the end it is
    settled."""
    global _building
    if ops <= LARGE_OPS:
        yield
        return
    with _lock:
        _whole_if_due()
        _building += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            gc.freeze()
            _building -= 1
            if not (_building or _kept):
                gc.enable()


def _whole_if_due() -> None:
    if not (_kept or _building) and time.monotonic() - _last_whole >= WHOLE_SECONDS:
        _look(whole=True)
