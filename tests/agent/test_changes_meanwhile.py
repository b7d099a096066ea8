"""A few changes of who is in a job while its network is bad, its clocks are wrong and its console is killed: no bit
differs, and the console's books account for everything once. Many more of them, and other disturbances:
tests/chaos/test_random_changes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.chaotic_job import ChaoticJob
from tests.chaos.disturbances import ConsoleKilled
from tests.chaos.test_random_changes import BAD_NETWORK, on_sqlite, play

pytestmark = pytest.mark.processes

WITHOUT_A_CONSOLE = 3


class TrainsOn(ConsoleKilled):
    """The job trains while the console is gone, before anything happens to a worker."""

    job: ChaoticJob

    def begin(self) -> None:
        super().begin()
        enough = self.job.committed + WITHOUT_A_CONSOLE
        self.job.gate.open(enough)
        self.job.ask(lambda: self.job.committed >= enough, "training without a console")


@pytest.mark.chaos
def test_no_bit_differs_and_the_books_account_for_all(tmp_path: Path) -> None:
    """A kill that the console is not there for, a return, and a kill with it."""
    server = on_sqlite(tmp_path)
    killed = TrainsOn(server)

    def changes(job: ChaoticJob) -> None:
        killed.job = job
        job.change(killed)
        job.change()
        job.change()

    job = play(server, tmp_path, changes, room_for=3, faults=BAD_NETWORK, skew=3600.0)
    assert [deed.split()[0] for deed in job.done] == ["kill", "start", "kill"]
