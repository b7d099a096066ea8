"""Forks processes from a server that has imported what they need. A start takes 10 ms instead of 400 ms for a console's
child, or some seconds for a worker, and the processes share the memory of what is imported.

It uses multiprocessing's own fork server, so that nothing is forked from a process that has threads, or connections of
others.

When a process ends, the system first frees its memory and closes its connections afterwards. That takes 20 ms for a
small worker, and a second for some gigabytes; until then nobody else sees the end. But a process's threads end at once,
and a thread that has descriptors of its own closes them when it ends. So a parent that must know soon holds the other
end of a pipe that is open in such a thread alone (`ForkedProcess.start_watched`).
"""

from __future__ import annotations

import contextlib
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
        """Reads the exit status, with a lock: it comes by a pipe and only once, and a second thread that reads it would
        return 255."""
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with _READING:
            status: int | None = super().poll(os.WNOHANG)
            return status

    def is_ending(self, *, ends: bool) -> bool:
        """Does the process run no more code of its own? ends: as in `exit_status`."""
        with _READING:
            if self.returncode is None:
                self.returncode = exit_status(self.pid, ends=ends)
            if self.returncode is None:  # a process that its server has reaped already is no longer in /proc
                super().poll(os.WNOHANG)
            return self.returncode is not None


_EXITING = 0x4
"""The flag PF_EXITING in /proc/PID/stat."""


def exit_status(pid: int, *, ends: bool = False) -> int | None:
    """Return the exit status, in multiprocessing's form, of a process that runs no more code of its own, though the
    system may still be taking it apart: with a CUDA context that takes 0.4 s (H100), and its connections are closed by
    then. None: it still runs, or that can't be determined. ends: it is known to be ending, so a code other than 0 is
    final."""
    try:
        about = Path(f"/proc/{pid}")
        state, flags, code = _of_task(about)
        if ends and code:
            return os.waitstatus_to_exitcode(code)
        # The first thread may have ended while others still run.
        if not flags & _EXITING or not all(_of_task(task)[1] & _EXITING for task in (about / "task").iterdir()):
            return None
        if code == 0 and state != "Z":
            return None  # the code may not be written yet
        return os.waitstatus_to_exitcode(code)
    except (OSError, ValueError, IndexError):
        return None


def _of_task(about: Path) -> tuple[str, int, int]:
    """Return (state, flags, exit code)."""
    fields = (about / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[6]), int(fields[49])


_CLOSE_RANGE, _UNSHARE, _LAST = 436, 1 << 1, 2**32 - 1
"""The system call close_range (since Linux 5.9; its number is the same on every processor), and the flag by which the
calling thread first gets descriptors of its own."""


def _hold_alone(end: Connection) -> None:
    """Lets a new thread hold this end of a pipe and no other descriptor. Where that fails, the process keeps the
    end."""
    if sys.platform != "linux":
        return
    call, number, held = ctypes.CDLL(None).syscall, end.fileno(), threading.Event()

    def hold() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the other threads
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
    """Closes as soon as the process ends, if it was started by `start_watched`."""
    _held: Connection | None = None

    def start_watched(self) -> None:
        """As `start`, but the end of the process is seen at once, by `ends`."""
        ends, self._held = Pipe(duplex=False)
        try:
            self.start()
            self.ends = ends
        finally:
            self._held.close()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # for ps, top and pkill: all have one command line
            Path("/proc/self/comm").write_text(self.name)
        if self._held is not None:
            _hold_alone(self._held)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)

    def is_ending(self) -> bool:
        """Does it run no more code of its own? From then on `exitcode` is known, and `join` does not wait."""
        return self._popen.is_ending(ends=self.ends is not None and self.ends.poll())


class ForkContext(ForkServerContext):
    """multiprocessing's fork server context, with processes whose end is seen sooner."""

    Process: ClassVar[type[ForkedProcess]] = ForkedProcess


_CONTEXT = ForkContext()


def fork_context(preload: Sequence[str] = ()) -> ForkContext:
    """Return the context that starts processes. preload: modules that the server imports, if none runs yet. A process
    that was itself forked from our server uses that same server."""
    if _SERVER._forkserver_pid is not None:
        return _CONTEXT
    if _forked_from_ours():
        # A forked process knows its server's address, but would start another server, which imports everything again.
        _SERVER.ensure_running = lambda: None
    else:
        _CONTEXT.set_forkserver_preload(["openrecycle.fork_server", *preload])
    return _CONTEXT


def start_server(preload: Sequence[str], without: Sequence[str] = (), *, safe_path: bool = False) -> ForkContext:
    """Start the server unless it runs; it imports `preload` while the caller goes on. without: environment variables
    that the server, and so every process forked from it, does not get. safe_path: it imports nothing from the current
    folder. Raises OSError."""
    context = fork_context(preload)
    if _runs() or _forked_from_ours():
        return context  # nothing to start, so the environment, which all threads share, is left alone
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
    """Start the process that removes the semaphores of processes which have ended; tqdm makes one where a layer is
    compiled. A worker that was killed, or that ended without waiting for its threads, leaves its semaphores to that
    process, which would warn of each."""
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
    # From Python 3.14 on a process needs the server's key, which only processes forked from it have.
    return _SERVER._forkserver_pid is None and ours and getattr(_SERVER, "_forkserver_authkey", "") is not None


def end_with_parent(end: Callable[[], object]) -> None:
    """In a process that multiprocessing has started: call `end` once its parent is gone, however that ended."""
    if (parent := parent_process()) is None:
        return

    def follow() -> None:
        parent.join()
        end()

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


def keep_from_children(pipes: Sequence[Connection]) -> None:
    """Close these ends of pipes in everything that this process forks or starts by itself, as a user's code may; also
    the pipe by which the server knows that it is still needed. A child may outlive this process. If it held the pipes,
    neither the processes at the other ends would see that this one is gone, nor the server that all have ended."""
    for number in (_SERVER._forkserver_alive_fd, *(pipe.fileno() for pipe in pipes)):
        if number is not None:
            os.set_inheritable(number, False)

    def let_go() -> None:
        for pipe in pipes:
            pipe.close()
        if _SERVER._forkserver_alive_fd is not None:
            os.close(_SERVER._forkserver_alive_fd)
            # The child may start a server of its own.
            _SERVER._forkserver_alive_fd = _SERVER._forkserver_address = None
            vars(_SERVER).pop("ensure_running", None)

    os.register_at_fork(after_in_child=let_go)
