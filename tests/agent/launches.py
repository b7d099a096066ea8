"""`python -m agent ...`, or a console, in a process of its own that need not import torch and the program first.

It is forked from the server that the jobs of a test process share, which has all imports done, and so are its
workers: on a machine with two cores most of a short job is otherwise the import of torch, twice. From the
command line on it is what a user starts. How the program starts and ends by itself is for the tests that
spawn it: test_cli_launch, test_two_nodes, test_resilient_trainer and others.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from openrecycle.agent.launcher.processes import preload, start_worker_server
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers import worker

_PROGRAM = str(Path(__file__).resolve().parents[2] / "agent" / "__main__.py")


_WARM = {
    *preload(NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {})),
    *(f"openrecycle.agent.examples.{name}" for name in ("tensor_parallel", "fully_sharded")),
    "openrecycle.agent.cli",
    "openrecycle.agent.jobs.trainer",
    "openrecycle.app.cli",
    "openrecycle.app.server",
    "openrecycle.cli",
    # What a launcher and a console import as they start. Nothing that starts a thread, as pyarrow does: what is
    # forked from the server would lack it.
    *(f"openrecycle.agent.{name}" for name in ("launcher.launch", "nodes.pool", "coordination.local")),
    *("openrecycle.agent.monitoring.console_link", "alembic.command", "pydantic.v1", "sqlite3"),
    *("uvicorn.lifespan.on", "uvicorn.loops.uvloop", "uvicorn.protocols.websockets.websockets_sansio_impl"),
    # What tests train is unpickled in each worker, with the module of the test.
    "tests.conftest",
    "tests.golden",
    "tests.agent.nan_model",
    "tests.agent.mapped",
}


_warm_server: list[int] = []


def warm(*more: str) -> None:
    """The server that forks all of them; its imports go on while the caller does other things. more: modules that it
    imports, too. Where one runs that has not all of these, as a console in this process has it, another takes its
    place."""
    if not _WARM.issuperset(more):
        _WARM.update(more)
        _warm_server.clear()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None and server._forkserver_pid not in _warm_server:
        os.close(server._forkserver_alive_fd)  # it ends
        server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
    start_worker_server(sorted(_WARM))
    _warm_server[:] = [server._forkserver_pid]


class Launched:
    """One such process; what it and its workers write to standard error is in the file `errors`.

    prints: what it prints is there; None: nowhere. alone: as one that is started from a shell, in a process group of
    its own, which its workers belong to, as the server does that forks them; the file `errors` has what they print,
    too. environment: what is changed there; None: is not set. module: run instead of the agent's command line.
    As subprocess.Popen: pid, returncode, poll, wait, send_signal, terminate, kill."""

    def __init__(
        self,
        *arguments: str,
        errors: Path,
        prints: Path | None = None,
        alone: bool = False,
        environment: Mapping[str, str | None] | None = None,
        module: str | None = None,
    ) -> None:
        warm()
        self.arguments, self._errors = arguments, errors
        if prints is None:
            prints = errors if alone else Path(os.devnull)
        for path in (errors, prints):
            path.touch()
        where = None if alone else forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        told = _Told(arguments, str(errors), str(prints), where, environment or {}, module)
        # No daemon where it runs, which may have no children; here one, so that nothing waits for it at the end.
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=(told,), daemon=True)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        if self.poll() in (None, 255):  # 255: the server that would say that it lives has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Tells it to end, unless it has, and waits until it and its workers have."""
        if self.poll() is None:
            self.terminate()
        try:
            self.wait(30)
        finally:
            # Shown with a test that fails.
            sys.stderr.write(self._errors.read_text() if self._errors.exists() else "")


@dataclass(frozen=True)
class _Told:
    """See Launched. where: the server that is to fork the workers; None: one of its own."""

    arguments: tuple[str, ...]
    errors: str
    prints: str
    where: str | None
    environment: Mapping[str, str | None]
    module: str | None


def _run(told: _Told) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if told.where is None:
        os.setsid()
    _print_to(told.prints, 1)
    _print_to(told.errors, 2)
    if told.where is not None:
        worker.main = functools.partial(_work, told.errors)  # type: ignore[assignment]
    # One that is spawned would import everything again.
    forkserver._forkserver._forkserver_address = told.where or _fork_server()  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined,method-assign]
    for name, value in told.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv = [_PROGRAM, *told.arguments]
    if told.module is not None:
        runpy.run_module(told.module, run_name="__main__", alter_sys=True)
        return
    from openrecycle.agent.cli import main

    main()


def _fork_server() -> str:
    """A server as multiprocessing spawns it, which has this process's imports and ends with it; its address."""
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        theirs, ours = os.pipe()
        if not os.fork():
            try:
                os.close(ours)
                forkserver.main(listener.detach(), theirs, [])  # type: ignore[attr-defined]
            finally:
                os._exit(0)
    os.close(theirs)
    forkserver._forkserver._forkserver_alive_fd = ours  # type: ignore[attr-defined]
    return str(address)


def _work(errors: str, *arguments: Any) -> None:
    """In a worker's process, where `worker.main` is still what it was."""
    _print_to(os.devnull, 1)
    _print_to(errors, 2)
    worker.main(*arguments)


def _print_to(path: str, descriptor: int) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)
