"""Imported first by the server that workers, and children of a console, are forked from.

Python's collector leaves alone what was imported there: a worker's first full round went through all objects of torch,
and so copied every page that they are on: 0.3 s of CPU and about 150 MB for each worker, in the midst of its training.
And the imports take a sixth less without rounds.

A fork that fails, since there is no memory or there are too many processes, ends the server no more, and with it every
other worker as its launcher saw it: multiprocessing waits for their ends by pipes of this server.

Nor does Ctrl-C end the server while it imports, which takes seconds, with a traceback: multiprocessing ignores it only
from then on. It reaches the whole group, and who started the server decides.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from types import FrameType

_SERVER = os.getpid()
_fork = os.fork


def _before_fork() -> None:
    if os.getpid() == _SERVER:
        gc.freeze()


def _in_worker() -> None:
    if os.getppid() == _SERVER:  # what a worker forks, as a data loader does, is its own affair
        gc.enable()


def _not_here(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _SERVER:  # what is forked takes it as any Python does
        signal.default_int_handler(number, frame)


def _fork_or_go_on() -> int:
    """os.fork for multiprocessing.forkserver.main, which goes on after a connection that was aborted, and ends at any
    other error. Who asked finds its pipe closed: OSError or EOFError."""
    try:
        return _fork()
    except OSError as error:
        asked = dict(sys._getframe(1).f_locals)
        if os.getpid() != _SERVER or not asked.keys() >= {"child_r", "child_w", "fds"}:
            raise
        print(f"a process can't be forked: {error}", file=sys.stderr, flush=True)
        for fd in (asked["child_r"], asked["child_w"], *asked["fds"]):
            os.close(fd)
        raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from None


signal.signal(signal.SIGINT, _not_here)
gc.disable()
os.register_at_fork(before=_before_fork, after_in_child=_in_worker)
os.fork = _fork_or_go_on
