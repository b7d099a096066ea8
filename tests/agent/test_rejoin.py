"""A worker that returns: the others finish what they are at, let it in at the end of an iteration, and go on."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest

from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.processes import ProcessPool
from openrecycle.planner.jobs.job import Worker
from tests.agent.local_jobs import LocalJob, Message, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}


def _return_after_death(job: LocalJob, line: dict[str, Any]) -> None:
    """W1_1 is dead from iteration 1 on; it is started anew, and the job ends when it has trained a while."""
    if "failure" in line:
        job.start("W1_1")
    full = [i for i in job.iterations if i["living"] == 4 and i["generation"] > 1]
    if len(full) >= 4:
        job.stop()


def test_nothing_is_redone_and_the_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is kept waiting first, for hours if an operator has frozen the plan: it says every second that it
    lives, and that is all that the launcher's time-out (hang_seconds) goes by."""
    waiting: list[tuple[Worker, str]] = []
    heard: list[float] = []
    let_in = LocalCoordination.ready

    def ready(self: LocalCoordination, worker: Worker, incarnation: str, *process: Any) -> None:
        if self._state.current:
            waiting.append((worker, incarnation))
        else:
            let_in(self, worker, incarnation)

    def while_it_waits(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if waiting and worker == "W1_1" and message["kind"] == "alive":
            heard.append(job.pool.running[Worker(1, 1)].heard_at)
            if len(heard) == 3:
                let_in(job.coordination, *waiting.pop())  # type: ignore[arg-type]

    monkeypatch.setattr(LocalCoordination, "ready", ready)
    acts: dict[str, Any] = {"on_line": _return_after_death, "on_message": while_it_waits}
    job = LocalJob(**GRID, kills=("W1_1@1:I1",), pace=0.03, **acts).run()
    assert heard == sorted(set(heard)) and len(heard) == 3, "each time its silence begins anew"
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    assert job.dead == ["W1_1"]
    # Three members left generation 2, each between two iterations and with nothing in flight...
    assert sorted(job.said("left", generation=2, whole=True)) == ["W0_0", "W0_1", "W1_0"]
    assert not job.said("left", generation=2, whole=False) and not job.said("broken", generation=2)
    # ... all four entered generation 3 with the same iteration, the first that the record counts to it.
    (entered,) = {m["iteration"] for _, m in job.messages if m["kind"] == "formed" and m["generation"] == 3}
    assert len(job.said("formed", generation=3)) == 4
    assert next(i["iteration"] for i in job.iterations if i["generation"] == 3) == entered
    assert [i["iteration"] for i in job.iterations] == list(range(len(job.iterations)))


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [at_length("W1_1"), "W0_1", at_length("W0_0")])
def test_a_death_while_a_newcomer_enters(victim: str) -> None:
    """Of the newcomer itself, of the peer that hands it the state (with which the stage would be gone, so
    here there are three), or of somebody else."""
    grid = GRID | {"pipelines": 3}
    struck = []

    def strike(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        # The first to be in generation 3 has no state to hand over or to take: the others are at it now.
        if message["kind"] == "formed" and message["generation"] == 3 and not struck:
            struck.append(victim)
            job.signal(victim, signal.SIGKILL)

    def until_it_trains(job: LocalJob, line: dict[str, Any]) -> None:
        if "failure" in line and not struck:
            job.start("W1_1")
        if struck and len([i for i in job.iterations if i["generation"] > 3]) >= 3:
            job.stop()

    job = LocalJob(**grid, kills=("W1_1@1:I1",), on_message=strike, on_line=until_it_trains).run()
    assert job.losses == fault_free_losses(len(job.losses), **grid)
    assert job.dead == sorted(["W1_1", victim])
    assert job.iterations[-1]["living"] == 5


def test_a_newcomer_whose_process_can_not_be_started_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for it: the others go on, and it is said."""

    def no_memory(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 4:
            monkeypatch.setattr(ProcessPool, "start", no_memory)
            job.start("W1_1")

    job = LocalJob(**GRID, iterations=8, kills=("W1_1@2:F1",), on_line=act).run()
    monkeypatch.undo()
    assert job.losses == fault_free_losses(8, **GRID) and job.dead == ["W1_1"]
    assert any(os.strerror(errno.ENOMEM) in line.get("warning", "") for line in job.lines)
