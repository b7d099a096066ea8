"""Processes that are forked from a server, which has imported what they need: a start costs 10 ms instead of 400 ms for
a console's child, or some seconds for a worker, and they share the memory of what is imported.

By multiprocessing's own fork server: nothing is forked from a process that has threads, or somebody else's connections.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any


def fork_context(preload: Sequence[str] = ()) -> ForkServerContext:
    """What starts them. preload: modules that the server imports, where none runs yet. In a process that is itself
    forked from one, that one serves."""
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        return context
    if server._forkserver_address is not None:
        # A forked process knows its server's address, and would start another one, which imports everything again.
        server.ensure_running = lambda: None
    elif preload:
        context.set_forkserver_preload(["openrecycle.fork_server", *preload])
    return context
