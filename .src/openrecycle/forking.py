"""Processes that are forked from a server, which has imported what they need: a start costs 10 ms instead of 400 ms for
a console's child, or some seconds for a worker, and they share the memory of what is imported.

By multiprocessing's own fork server: nothing is forked from a process that has threads, or somebody else's connections.

A process that ends is taken apart by the system, which gives back its memory first, and closes its connections then: 20
ms for a small worker, and a second for some gigabytes, in which nobody knows. But it closes those of a thread that has
descriptors of its own when that thread ends, and a process's threads end at once: so whoever is to know soon holds the
other end of a pipe that is open in such a thread alone (`ForkedProcess.start_watched`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, parent_process, popen_forkserver, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from openrecycle.scratch import keep_sockets_here

_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]
_READING = threading.Lock()


class _Popen(popen_forkserver.Popen):  # type: ignore[misc]
    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """An exit status is in a pipe, once: of two threads that read it, one would take 255 for it."""
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with _READING:
            status: int | None = super().poll(os.WNOHANG)
            return status

    def is_ending(self, *, ends: bool) -> bool:
        """ends: as of `exit_status`."""
        with _READING:
            if self.returncode is None:
                self.returncode = exit_status(self.pid, ends=ends)
            if self.returncode is None:  # of one that its server has waited for already there is nothing in /proc
                super().poll(os.WNOHANG)
            return self.returncode is not None


_EXITING = 0x4
"""PF_EXITING, in the flags of /proc."""


def exit_status(pid: int, *, ends: bool = False) -> int | None:
    """As multiprocessing has it, of a process that runs no code of its own any more, though the system may still be
    taking it apart: with a CUDA context that takes 0.4 s (H100), in which its connections are closed already. None: it
    runs, or that can't be known. ends: is it known that it ends, so that its code is all there is to ask?"""
    try:
        about = Path(f"/proc/{pid}")
        state, flags, code = _of_task(about)
        if ends and code:
            return os.waitstatus_to_exitcode(code)
        # The first thread may have ended alone.
        if not flags & _EXITING or not all(_of_task(task)[1] & _EXITING for task in (about / "task").iterdir()):
            return None
        if code == 0 and state != "Z":
            return None  # it may not be written yet
        return os.waitstatus_to_exitcode(code)
    except (OSError, ValueError, IndexError):
        return None


def _of_task(about: Path) -> tuple[str, int, int]:
    """(state, flags, exit code)"""
    fields = (about / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[6]), int(fields[49])


_CLOSE_RANGE, _UNSHARE, _LAST = 436, 1 << 1, 2**32 - 1
"""The system call that closes descriptors (since Linux 5.9; the same number on every processor), and what has it give
the thread its own first."""


def _hold_alone(end: Connection) -> None:
    """Has a thread hold this end of a pipe, and nothing else; where that can't be done, the process goes on to."""
    if sys.platform != "linux":
        return
    call, number, held = ctypes.CDLL(None).syscall, end.fileno(), threading.Event()

    def hold() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the process's own threads
            if call(_CLOSE_RANGE, ctypes.c_uint(number + 1), ctypes.c_uint(_LAST), _UNSHARE):
                return
            if number:
                call(_CLOSE_RANGE, ctypes.c_uint(0), ctypes.c_uint(number - 1), 0)
            holds.append(True)
        finally:
            held.set()
        threading.Event().wait()

    holds: list[bool] = []
    threading.Thread(target=hold, name="ends-first", daemon=True).start()
    held.wait()
    if holds:
        end.close()


class ForkedProcess(ForkServerProcess):
    _popen: _Popen
    ends: Connection | None = None
    """Ends as soon as the process does, where it was `start_watched`."""
    _held: Connection | None = None

    def start_watched(self) -> None:
        """As `start`; that it ends is known at once, then, by `ends`."""
        ends, self._held = Pipe(duplex=False)
        try:
            self.start()
            self.ends = ends
        finally:
            self._held.close()

    def run(self) -> None:
        if self._held is not None:
            _hold_alone(self._held)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)

    def is_ending(self) -> bool:
        """Does it run no code of its own any more? From then on `exitcode` is known, and `join` waits for nothing."""
        return self._popen.is_ending(ends=self.ends is not None and self.ends.poll())


class ForkContext(ForkServerContext):
    """multiprocessing's own, with processes whose end is known sooner."""

    Process: ClassVar[type[ForkedProcess]] = ForkedProcess


_CONTEXT = ForkContext()


def fork_context(preload: Sequence[str] = ()) -> ForkContext:
    """What starts them. preload: modules that the server imports, where none runs yet. In a process that is itself
    forked from one of ours, that one serves."""
    if _SERVER._forkserver_pid is not None:
        return _CONTEXT
    if _forked_from_ours():
        # A forked process knows its server's address, and would start another one, which imports everything again.
        _SERVER.ensure_running = lambda: None
    else:
        _CONTEXT.set_forkserver_preload(["openrecycle.fork_server", *preload])
    return _CONTEXT


def start_server(preload: Sequence[str], without: Sequence[str] = (), *, safe_path: bool = False) -> ForkContext:
    """Starts the server, unless it runs; it imports `preload` while the caller goes on. without: environment variables
    that it, and with it all processes, does not get. safe_path: it imports nothing from the current folder. Raises
    OSError."""
    context = fork_context(preload)
    if _runs() or _forked_from_ours():
        return context  # the environment is the whole process's: it is changed for no more than a start
    keep_sockets_here()
    kept = {name: os.environ.pop(name, None) for name in (*without, "PYTHONSAFEPATH")}
    if safe_path or kept["PYTHONSAFEPATH"] is not None:
        os.environ["PYTHONSAFEPATH"] = kept["PYTHONSAFEPATH"] or "1"
    try:
        _start_tracker()
        _SERVER.ensure_running()
    finally:
        os.environ.pop("PYTHONSAFEPATH", None)
        os.environ.update({name: value for name, value in kept.items() if value is not None})
    return context


def _start_tracker() -> None:
    """What removes the semaphores of processes that have ended, as tqdm makes one where a layer is compiled. Those of a
    worker that was killed, or that ended without waiting for its threads, are left to it: it would warn of each."""
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, "ignore:resource_tracker:UserWarning")))
    try:
        resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        if given is not None:
            os.environ["PYTHONWARNINGS"] = given


def _runs() -> bool:
    """Has this process started a server that has not ended?"""
    if _SERVER._forkserver_pid is None:
        return False
    try:
        return os.waitid(os.P_PID, _SERVER._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _forked_from_ours() -> bool:
    ours = _SERVER._forkserver_address is not None and "openrecycle.fork_server" in sys.modules
    # From Python 3.14 on nobody else knows the key.
    return _SERVER._forkserver_pid is None and ours and getattr(_SERVER, "_forkserver_authkey", "") is not None


def end_with_parent(end: Callable[[], object]) -> None:
    """In a process that multiprocessing has started: `end` is called once its parent is gone, however that ended."""
    if (parent := parent_process()) is None:
        return

    def follow() -> None:
        parent.join()
        end()

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


def keep_from_children(pipes: Sequence[Connection]) -> None:
    """Whatever this process forks or starts by itself, as a user's code may, gets neither these ends of pipes nor that
    by which its server knows that it is needed: a child may outlive it, and neither those at the other ends would see
    that it is gone, nor the server that all have ended."""
    for number in (_SERVER._forkserver_alive_fd, *(pipe.fileno() for pipe in pipes)):
        if number is not None:
            os.set_inheritable(number, False)

    def let_go() -> None:
        for pipe in pipes:
            pipe.close()
        if _SERVER._forkserver_alive_fd is not None:
            os.close(_SERVER._forkserver_alive_fd)
            # It may start a server of its own.
            _SERVER._forkserver_alive_fd = _SERVER._forkserver_address = None
            vars(_SERVER).pop("ensure_running", None)

    os.register_at_fork(after_in_child=let_go)
