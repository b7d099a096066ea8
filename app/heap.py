"""Keeps large plans out of the collector's rounds.

A plan of 2,048 workers is half a million objects, and looking through them takes some 0.2 s each time,
in which no heartbeat is answered. Python begins such rounds while a plan is read, and whenever enough is
new. (Streamlit's, after every run of a script, so also after each refresh of each viewer's page, are off: see
app.server.)
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Fewer ops than this are looked through in a few milliseconds.
LARGE_OPS = 20_000
# Of the JSON of an op, about.
OP_BYTES = 80
# What is in a cycle and was kept out is looked for so many seconds later at the earliest.
ROUND_SECONDS = 3_600.0

_lock = threading.Lock()
_building = 0
_last_round = -ROUND_SECONDS


def settle(ops: int) -> None:
    """Call when a plan of so many ops has been read: all that lives now is not looked through any more.

    What is let go of is freed as ever, by its reference count; what is in a cycle, by a round that a later
    call makes.
    """
    if ops > LARGE_OPS:
        with _lock:
            _round_if_due()
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
        _round_if_due()
        _building += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            gc.freeze()
            _building -= 1
            if not _building:
                gc.enable()


def _round_if_due() -> None:
    global _last_round
    if time.monotonic() - _last_round >= ROUND_SECONDS:
        gc.unfreeze()
        gc.collect()
        _last_round = time.monotonic()
