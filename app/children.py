"""Child processes of the console begin without what Streamlit leaves behind in their parent.

multiprocessing has a spawned child import what `__main__` is in its parent, in case the work was
defined there, and gives it the parent's import path. Ours is never defined there; but Streamlit puts
the page that runs at that moment in the place of `__main__`, and its folder first in the path. The
child would run the whole page, and find pages where it looks for packages (app/ui/planner.py).

OneChild has a long piece of work done in a process that is there for that alone.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openrecycle.app.logs import configure_logging

_PAGES = str(Path(__file__).resolve().parent / "ui")
_original = spawn.get_preparation_data


@wraps(_original)
def _without_pages(name: str) -> dict[str, Any]:
    data = dict(_original(name))
    data.pop("init_main_from_name", None)
    data.pop("init_main_from_path", None)
    data["sys_path"] = [path for path in data["sys_path"] if path != _PAGES]
    return data


def begin_without_pages() -> None:
    """For all processes that this one spawns from now on. Does nothing the second time."""
    spawn.get_preparation_data = _without_pages


class OneChild:
    """A process for each question, one at a time for each OneChild. Thread-safe.

    answer: a function of a module, which the child imports. patience: seconds, beyond which it has gone astray.
    most_bytes: of memory that an answer may take; None: as much as there is.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], *, name: str, patience: float, most_bytes: int | None = None
    ) -> None:
        self._answer, self._name, self._patience, self._most_bytes = answer, name, patience, most_bytes
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._closed = False

    def ask(self, question: bytes) -> bytes:
        """Waits for its turn and for the answer. Raises EOFError or OSError when the process died over it, took too
        long, or is not to be begun any more."""
        with self._turn:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._answer, self._most_bytes), name=self._name, daemon=True
            )
            with self._lock:
                if self._closed:
                    raise EOFError
                self._process = process
                process.start()
            theirs.close()
            try:
                ours.send_bytes(question)
                if not ours.poll(self._patience):
                    raise TimeoutError
                return ours.recv_bytes()
            finally:
                ours.close()
                process.kill()
                process.join(5)

    def close(self) -> None:
        """Ends what runs."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


def _serve(pipe: Connection, answer: Callable[[bytes], bytes], most_bytes: int | None) -> None:
    """The child's life."""
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the console decides
    os.nice(5)
    gc.disable()  # a million lists would be looked through again and again, and all goes with the process
    if most_bytes is not None:
        _limit_memory(most_bytes)
    with suppress(EOFError, OSError):  # the console has gone
        pipe.send_bytes(answer(pipe.recv_bytes()))


def _limit_memory(more: int) -> None:
    """Beyond what this process has: Python raises MemoryError, and Rust ends the process."""
    with suppress(OSError, ValueError):  # a system that does not tell, or has a lower limit
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (has + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
