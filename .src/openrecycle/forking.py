"""Processes that are forked from a server, which has imported what they need: a start costs 10 ms instead of 400 ms for
a console's child, or some seconds for a worker, and they share the memory of what is imported.

By multiprocessing's own fork server: nothing is forked from a process that has threads, or somebody else's connections.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

_READING = threading.Lock()


class _Popen(popen_forkserver.Popen):  # type: ignore[misc]
    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """An exit status is in a pipe, once: of two threads that read it, one would take 255 for it."""
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with _READING:
            status: int | None = super().poll(os.WNOHANG)
            return status


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


_CONTEXT = _Context()


def fork_context(preload: Sequence[str] = ()) -> ForkServerContext:
    """What starts them. preload: modules that the server imports, where none runs yet. In a process that is itself
    forked from one of ours, that one serves."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        return _CONTEXT
    ours = server._forkserver_address is not None and "openrecycle.fork_server" in sys.modules
    if ours and getattr(server, "_forkserver_authkey", "") is not None:  # from Python 3.14 on nobody else knows the key
        # A forked process knows its server's address, and would start another one, which imports everything again.
        server.ensure_running = lambda: None
    else:
        _CONTEXT.set_forkserver_preload(["openrecycle.fork_server", *preload])
    return _CONTEXT


def start_server(preload: Sequence[str], without: Sequence[str] = (), *, safe_path: bool = False) -> ForkServerContext:
    """Starts the server, unless it runs; it imports `preload` while the caller goes on. without: environment variables
    that it, and with it all processes, does not get. safe_path: it imports nothing from the current folder. Raises
    OSError."""
    context = fork_context(preload)
    kept = {name: os.environ.pop(name, None) for name in (*without, "PYTHONSAFEPATH")}
    if safe_path or kept["PYTHONSAFEPATH"] is not None:
        os.environ["PYTHONSAFEPATH"] = kept["PYTHONSAFEPATH"] or "1"
    try:
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    finally:
        os.environ.pop("PYTHONSAFEPATH", None)
        os.environ.update({name: value for name, value in kept.items() if value is not None})
    return context
