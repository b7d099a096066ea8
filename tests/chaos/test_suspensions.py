"""Processes that stand still while the job trains: no worker is lost and no bit differs. `make chaos`.

Two minutes are tried with all workers only: for the others 25 s are as far beyond every limit. Many suspensions of up
to two minutes, of everybody too, are in tests/benchmarks/bench_liveness.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.launches import Launched
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
OPTIONS = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--pace", "F=20ms,I=20ms,W=20ms")
ITERATIONS = 120
BEGIN = 10
"""Iterations before they are suspended: their ops have been measured."""


class Job:
    """A real launcher and its workers."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._record = folder / "record.jsonl"
        self._before = _processes()
        workload = ("--workload-options", json.dumps(TINY))
        arguments = ("train", "--iterations", str(ITERATIONS), "--record", str(self._record), *OPTIONS, *workload)
        self.launcher = Launched(*arguments, *options, errors=folder / "errors")

    @property
    def lines(self) -> list[dict[str, Any]]:
        text = self._record.read_text() if self._record.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def losses(self) -> list[str]:
        return [line["loss"] for line in self.lines if "iteration" in line]

    def workers(self) -> list[int]:
        """Forked, as the launcher, from the server that is the parent of all of them."""
        server = _parent(self.launcher.pid)
        return sorted(pid for pid in _processes() - self._before - {self.launcher.pid} if _parent(pid) == server)

    def begun(self) -> None:
        deadline = time.monotonic() + 120
        while len(self.losses) < BEGIN:
            assert self.launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)


def _processes() -> set[int]:
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _everybody(job: Job, workers: list[int], seconds: float, dice: random.Random) -> None:
    everybody = [job.launcher.pid, *workers]
    _signal(everybody, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(dice.sample(everybody, len(everybody)), signal.SIGCONT)


def _launcher(job: Job, workers: list[int], seconds: float, dice: random.Random) -> None:
    _signal([job.launcher.pid], signal.SIGSTOP)
    time.sleep(seconds)
    _signal([job.launcher.pid], signal.SIGCONT)


def _workers(job: Job, workers: list[int], seconds: float, dice: random.Random) -> None:
    """All of them; they are woken one after the other, in any order."""
    _signal(workers, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in dice.sample(workers, len(workers)):
        os.kill(pid, signal.SIGCONT)
        time.sleep(dice.uniform(0, 3))


@pytest.fixture(scope="module")
def losses() -> list[str]:
    return fault_free_losses(ITERATIONS, **GRID)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [5, 25])
def test_a_death_while_the_launcher_stands_still(seconds: int, losses: list[str], tmp_path: Path) -> None:
    """The others wait for it, and it does not hold that against them: only the dead one is replaced."""
    job = Job(tmp_path, "--max-restarts", "1", "--restart-delay", "0.2")
    try:
        job.begun()
        victim = random.Random(seconds).choice(job.workers())
        _signal([job.launcher.pid], signal.SIGSTOP)
        _signal([victim], signal.SIGKILL)
        time.sleep(seconds)
        _signal([job.launcher.pid], signal.SIGCONT)
        assert job.launcher.wait(300) == 0
    finally:
        _signal([job.launcher.pid] if _parent(job.launcher.pid) >= 0 else [], signal.SIGCONT)
        job.launcher.end()
    assert len([line for line in job.lines if "failure" in line]) == 1
    assert len([line for line in job.lines if "restart" in line]) == 1
    assert job.losses == losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("suspend", "seconds"),
    [
        *((_everybody, seconds) for seconds in (5, 25)),
        *((_launcher, seconds) for seconds in (5, 25)),
        *((_workers, seconds) for seconds in (5, 25, 120)),
    ],
)
def test_a_suspension(
    suspend: Callable[[Job, list[int], float, random.Random], None], seconds: int, losses: list[str], tmp_path: Path
) -> None:
    job = Job(tmp_path)
    try:
        job.begun()
        workers = job.workers()
        assert len(workers) == 4
        suspend(job, workers, seconds, random.Random(seconds))
        assert job.launcher.wait(300) == 0
    finally:
        _signal([pid for pid in [job.launcher.pid, *job.workers()] if _parent(pid) >= 0], signal.SIGCONT)
        job.launcher.end()
    assert not [line for line in job.lines if "failure" in line]
    assert job.losses == losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [8.0, 15.0])
def test_an_op_that_lets_no_thread_of_its_process_run(seconds: float, tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    options = {"once": str(once), "iteration": 12, "pipeline": 1, "seconds": seconds, "gil": True, **TINY}
    job = LocalJob(
        **GRID,
        iterations=30,
        workload=NamedWorkload("tests.agent.hanging:SlowForward", options),
        timeouts=Timeouts(),
        hang_seconds=6.0,
        pace=0.04,
    ).run()
    assert not once.exists() and job.dead == []
    assert job.losses == fault_free_losses(30, **GRID)
