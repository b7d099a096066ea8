"""A worker that hangs, is held for dead and wakes up again: it can do no harm, and may come back anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.launcher.processes import WorkerProcess
from tests.agent.local_jobs import LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}


@pytest.mark.parametrize("told", [at_length(True), False], ids=["told to end", "told nothing"])
def test_a_process_that_no_kill_reaches_does_no_harm(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another host: the launcher's SIGKILL never arrives. The process wakes up in a generation that is over,
    while a successor of its own name joins."""
    victim: dict[str, Any] = {}
    kill, post = WorkerProcess.kill, WorkerProcess.post

    def withheld_kill(entry: WorkerProcess) -> None:
        if entry.process.pid != victim.get("pid") or "over" in victim:
            kill(entry)

    def withheld_post(entry: WorkerProcess, kind: str, **fields: Any) -> None:
        if told or kind != "fenced":
            post(entry, kind, **fields)

    monkeypatch.setattr(WorkerProcess, "kill", withheld_kill)
    monkeypatch.setattr(WorkerProcess, "post", withheld_post)

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 1:
            victim["pid"] = job.launcher.pids["W0_1"]
            job.signal("W0_1", signal.SIGSTOP)
        if "failure" in line:
            os.kill(victim["pid"], signal.SIGCONT)
            job.start("W0_1")
        if len([i for i in job.iterations if i["living"] == 4 and i["generation"] > 1]) >= 4:
            victim["alive"] = _runs(victim["pid"])
            victim["over"] = True
            job.stop()

    job = LocalJob(**GRID, hang_seconds=5.0, on_line=act).run()
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    assert job.dead == ["W0_1"]
    assert victim["alive"] is not told, "one that is told so ends by itself; the other lived on to the end"
    if not told:
        assert {m["kind"] for m in job.void} >= {"alive"}, "it spoke, and nothing that it said counted"
    assert not _runs(victim["pid"])


def _runs(pid: int) -> bool:
    """Is there such a process, and not only what is left of one?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
