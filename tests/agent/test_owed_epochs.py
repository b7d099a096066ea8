"""For how long a worker has owed an epoch that it must leave its iteration for: what tells one that hangs."""

from __future__ import annotations

from multiprocessing import Pipe, get_context

import pytest

from agent.processes import WorkerProcess
from planner.job import Worker


@pytest.fixture
def worker() -> WorkerProcess:
    pipe, _ = Pipe()
    return WorkerProcess(Worker(0, 1), "one", get_context("spawn").Process(), pipe, heard_at=0.0)


def test_it_owes_from_the_first_epoch_that_it_leaves_unanswered(worker: WorkerProcess) -> None:
    assert worker.owes_since is None
    worker.told(1, 10.0)
    worker.told(2, 12.0)
    assert worker.owes_since == 10.0
    worker.took_up(2, 2, 13.0)
    assert worker.owes_since is None


def test_who_takes_up_epochs_in_a_storm_of_them_does_not_hang(worker: WorkerProcess) -> None:
    for epoch in range(1, 50):
        worker.told(epoch, float(epoch))
        worker.took_up(epoch - 1, epoch, epoch + 0.5)
        assert worker.owes_since == epoch + 0.5, "the newest since it left for the one before, not the storm's first"
    worker.told(50, 60.0)
    assert worker.owes_since == 49.5, "from here on it says nothing any more"


def test_what_it_has_taken_up_it_does_not_owe(worker: WorkerProcess) -> None:
    worker.told(1, 1.0)
    worker.took_up(1, 1, 2.0)
    worker.told(1, 3.0)  # sent again, as after a boundary that is out of reach
    assert worker.owes_since is None
    worker.took_up(1, 2, 4.0)  # says it late, of an epoch whose successor lets it finish its iteration
    assert worker.owes_since is None
