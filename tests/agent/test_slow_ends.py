"""A process that was killed and is not all gone yet, as one with a CUDA context is for 0.4 s, is known to be dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.launcher.processes import WorkerProcess
from openrecycle.forking import exit_status, fork_context
from openrecycle.planner.jobs.job import Worker
from tests.agent.consoles import until
from tests.agent.launches import warm
from tests.agent.local_jobs import LocalJob
from tests.golden import golden

pytestmark = pytest.mark.processes

_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


def _forked(code: int) -> int:
    pid = os.fork()
    if not pid:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL])
def test_how_a_process_has_ended_is_known_before_it_is_waited_for(code: int) -> None:
    pid = _forked(code)
    try:
        assert exit_status(pid) == code
    finally:
        os.waitpid(pid, 0)
    assert exit_status(pid) is None


def test_of_one_that_runs_nothing_is_known() -> None:
    assert exit_status(os.getpid()) is None


@pytest.fixture
def server() -> Iterator[int]:
    """That all workers are forked from, and that waits for them."""
    warm()
    pid = _SERVER._forkserver_pid
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_one_that_its_server_has_waited_for_has_ended(server: int) -> None:
    """The system knows it no more."""
    process = fork_context().Process(target=int, daemon=True)
    process.start()
    assert wait([process.sentinel], 20)
    assert process.is_ending() and process.exitcode == 0


@pytest.mark.parametrize("lingers", [True, False])
def test_one_that_lingers_is_looked_at_before_its_pipe_ends(server: int, lingers: bool) -> None:
    process = fork_context().Process(target=time.sleep, args=(600.0,), daemon=True)
    process.start()
    ours, _theirs = multiprocessing.Pipe()  # whose other end stays open
    entry = WorkerProcess(Worker(0, 0), "first", process, ours, 0.0, lingers=lingers)
    assert not entry.has_ended([])
    os.kill(server, signal.SIGSTOP)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    assert entry.has_ended([]) is lingers
    if lingers:
        assert process.exitcode == -signal.SIGKILL
    os.kill(server, signal.SIGCONT)
    process.join(60.0)
    assert process.exitcode == -signal.SIGKILL


def test_the_end_of_one_is_told_by_a_thread_that_has_nothing_else_open(server: int) -> None:
    """Its other connections are closed once its memory is given back, which takes long."""
    process = fork_context().Process(target=time.sleep, args=(600.0,), daemon=True)
    process.start_watched()
    ours, _theirs = multiprocessing.Pipe()  # whose other end stays open
    entry = WorkerProcess(Worker(0, 0), "first", process, ours, 0.0)
    try:
        (end,) = [one for one in entry.sentinels if one is not process.sentinel]
        whose = f"pipe:[{os.fstat(end.fileno()).st_ino}]"  # type: ignore[union-attr]
        tasks = Path(f"/proc/{process.pid}/task")

        def opened(task: Path) -> list[str]:
            found = list[str]()
            for one in (task / "fd").iterdir():
                with suppress(FileNotFoundError):  # it has just been closed
                    found.append(str(one.readlink()))
            return found

        until(lambda: whose not in opened(tasks / str(process.pid)), "the process to let go of it", 60)
        assert [opened(task) for task in tasks.iterdir() if task.name != str(process.pid)] == [[whose]]
        assert not wait(entry.sentinels, 0) and not entry.has_ended([])
        os.kill(server, signal.SIGSTOP)  # nobody else says that it has ended
        process.kill()
        assert wait(entry.sentinels, 20) == [end] and not entry.looked_for
        entry.has_ended([end])
        assert end not in entry.sentinels and entry.looked_for, "it is asked from then on, and waited for no more"
        until(lambda: entry.has_ended([]), "its exit code", 20)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()


def test_survivors_go_on_while_the_dead_one_is_taken_apart(server: int) -> None:
    def on_line(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 1:
            os.kill(server, signal.SIGSTOP)  # nobody sees its children end
            job.signal("W1_1", signal.SIGKILL)
        elif "failure" in line:
            os.kill(server, signal.SIGCONT)
        elif "iteration" in line and line["living"] == 5:
            job.stop()

    job = LocalJob(on_line=on_line, iterations=500, grace=10.0)
    job.run()
    assert job.dead == ["W1_1"]
    assert job.iterations[-1]["generation"] == 2
    # How it ended is known, too, though nobody has waited for it; and no link is blamed.
    assert [line["warning"] for line in job.lines if "warning" in line] == [golden("w1-1-was-killed-by-sigkill")]
