"""`python -m agent ...` in a process of its own that need not import torch first.

It is forked from the server that the jobs of a test process share, which has all imports done, and so are its
workers: on a machine with two cores most of a short job is otherwise the import of torch, twice. From the
command line on it is what a user starts. How the program starts and ends by itself is for the tests that
spawn it: test_cli_launch, test_two_nodes, test_resilient_trainer and others.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from openrecycle.agent.launcher.processes import preload, start_server
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers import worker

_PROGRAM = str(Path(__file__).resolve().parents[2] / "agent" / "__main__.py")


def warm() -> None:
    """The server that forks all of them; its imports go on while the caller does other things."""
    start_server(
        [
            *preload(NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {})),
            "openrecycle.agent.cli",
            "tests.agent.nan_model",
        ]
    )


class Launched:
    """One such process; what it and its workers write to standard error is in the file `errors`.

    As subprocess.Popen: pid, poll, wait, terminate."""

    def __init__(self, *arguments: str, errors: Path) -> None:
        warm()
        self._errors = errors
        where = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        # No daemon where it runs, which may have no children; here one, so that nothing waits for it at the end.
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(arguments, str(errors), where), daemon=True
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("agent", timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def end(self) -> None:
        """Tells it to end, unless it has, and waits until it and its workers have."""
        if self.poll() is None:
            self.terminate()
        try:
            self.wait(30)
        finally:
            # Shown with a test that fails.
            sys.stderr.write(self._errors.read_text() if self._errors.exists() else "")


def _run(arguments: tuple[str, ...], errors: str, where: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # A server of its own would import everything again.
    forkserver._forkserver._forkserver_address = where  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined,method-assign]
    _print_to(errors)
    worker.main = functools.partial(_work, errors)  # type: ignore[assignment]
    sys.argv = [_PROGRAM, *arguments]
    from openrecycle.agent.cli import main

    main()


def _work(errors: str, *arguments: Any) -> None:
    """In a worker's process, where `worker.main` is still what it was."""
    _print_to(errors)
    worker.main(*arguments)


def _print_to(errors: str) -> None:
    for descriptor, path in ((1, os.devnull), (2, errors)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
