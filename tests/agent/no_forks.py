"""Imported by a server that processes are forked from: its second fork fails, as without memory."""

from __future__ import annotations

import errno
import os

from openrecycle import fork_server

_real = fork_server._fork
_asked = 0


def _fork() -> int:
    global _asked
    _asked += 1
    if _asked == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _real()


fork_server._fork = _fork
