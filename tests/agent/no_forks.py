"""Imported by a server that processes are forked from, before openrecycle.fork_server takes up how it forks: its
second fork fails, as without memory."""

from __future__ import annotations

import errno
import os

_real = os.fork
_asked = 0


def _fork() -> int:
    global _asked
    _asked += 1
    if _asked == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _real()


os.fork = _fork
