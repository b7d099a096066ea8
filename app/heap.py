"""Keeps large plans out of the collector's rounds.

Streamlit calls `gc.collect` after every run of a script, so also after each refresh of each viewer's
page. A plan of 2,048 workers is half a million objects, and looking through them takes some 0.2 s each time.
"""

from __future__ import annotations

import gc
import threading

# Fewer ops than this are looked through in a few milliseconds.
LARGE_OPS = 20_000

_lock = threading.Lock()


def settle(ops: int) -> None:
    """Call when a plan of so many ops has been read: all that lives now is not looked through any more.

    What is let go of is freed as ever, by its reference count; what is in a cycle, at the next call.
    """
    if ops > LARGE_OPS:
        with _lock:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
