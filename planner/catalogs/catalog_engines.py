"""Where the plans of a catalog are made: in this process, or in others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Protocol

from openrecycle.planner.catalogs.catalog_task import Blobs, Task, work
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.solvers.base import Cancelled

# Seconds after which a wait for the next result looks whether it is to stop.
POLL = 0.2


class Engine(Protocol):
    """Runs tasks and yields what each made, in any order.

    Once `cancelled` is true no further task is begun; those under way are waited for.
    """

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]: ...


class InlineEngine:
    """One after the other in this process."""

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]:
        for task in tasks:
            if cancelled and cancelled():
                return
            yield work(task)


class LocalEngine:
    """`jobs` processes on this machine. Raises PlannerError when one of them dies.

    Spawned, 0.4 s each, and not forked from the server of openrecycle.forking: so they have the process group, the
    niceness and the limit on memory of whoever plans, which is a console's child or a command line, and end with it.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def run(self, tasks: Iterator[Task], cancelled: Cancelled | None) -> Iterator[Blobs]:
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
            with _no_ctrl_c():
                pending: set[Future[Blobs]] = {pool.submit(work, task) for task in islice(tasks, self._jobs + 1)}
            while pending:
                done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                stop = bool(cancelled and cancelled())
                if stop:
                    pending = {future for future in pending if not future.cancel()}
                for future in done:
                    with _alive():
                        blobs = future.result()
                    yield blobs
                    if not stop:
                        with _alive(), _no_ctrl_c():
                            pending |= {pool.submit(work, task) for task in islice(tasks, 1)}


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise PlannerError(
            "a planning process died, perhaps for lack of memory; what was planned is kept, "
            "and the same command goes on from there (fewer --jobs need less memory)"
        ) from None


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Processes that are started inside never see SIGINT, not even before `_prepare`: they inherit the
    mask. This thread gets what came meanwhile at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_engine(jobs: int | None) -> Engine:
    """jobs: processes, by default one per core. Raises InputError."""
    count = os.cpu_count() or 1 if jobs is None else jobs
    if not 1 <= count <= 1024:
        raise InputError("--jobs", count, "a number of processes from 1 to 1024")
    return InlineEngine() if count == 1 else LocalEngine(count)


def _prepare() -> None:
    """In a new process: Ctrl-C is for the parent, and no process outlives it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def follow() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
