"""Settings of the fork server: the server that workers, and children of a console, are forked from imports this first.

The garbage collector does not touch what was imported there. Otherwise a worker's first full collection would go
through all objects of torch and so copy every page that they are on: 0.3 s of CPU and about 150 MB for each worker, in
the midst of its training. And without collections the imports take a sixth less time.

A fork that fails, for lack of memory or because there are too many processes, does not end the server. If it did, the
launcher would take all other workers for dead: multiprocessing waits for their ends by pipes of this server.

Ctrl-C does not end the server with a traceback while it imports, which takes seconds; multiprocessing itself ignores
Ctrl-C only after the imports. It reaches the whole process group, and the process that started the server decides.
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
    if os.getppid() == _SERVER:  # processes that a worker forks itself, as a data loader does, are left alone
        gc.enable()


def _not_here(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _SERVER:  # forked processes handle it as any Python process does
        signal.default_int_handler(number, frame)


def _fork_or_go_on() -> int:
    """os.fork for multiprocessing.forkserver.main, which goes on after an aborted connection, and ends at any other
    error. The process that asked for the fork finds its pipe closed: OSError or EOFError."""
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
