"""What a console says of workers that their launcher starts again by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrecycle.agent.messages.protocol import Acknowledgement, FailureReport, JobSpec, Registration, Restart
from openrecycle.app.jobs.live_job import process_rows, read_processes
from openrecycle.app.jobs.states import PlannedRestart, ProcessState
from openrecycle.app.ui.worker_dialog import facts_html
from tests.app.played_launcher import PlayedJob
from tests.golden import golden

pytestmark = pytest.mark.processes

NAMES = [f"W{p}_{s}" for p in range(3) for s in range(2)]
SPEC = JobSpec(name="a job", pipelines=3, stages=2, micro_batches=2, iterations=100, max_restarts=3)


class Job(PlayedJob):
    def __init__(self, path: Path, job_id: str | None = None) -> None:
        super().__init__(path, SPEC, job_id)

    def begin(self) -> None:
        for name in NAMES:
            self.register(name, f"{name}-a")
        self.take_up()

    def register(self, name: str, incarnation: str) -> None:
        self.console.reports.register(self.id, [Registration(worker=name, incarnation=incarnation, host="a", pid=7)])

    def take_up(self) -> None:
        live = self.console.jobs.find(self.id).state
        assert live.current is not None
        for state in ("adopted", "formed", "resumed"):
            for name in live.current.living:
                about = {"worker": name, "incarnation": live.members[name].incarnation, "state": state}
                said = Acknowledgement.model_validate(about | {"generation": live.generation})
                self.console.reports.acknowledge(self.id, [said])

    def report(self, name: str, incarnation: str, restart: Restart | None = None, age: float = 0.0) -> None:
        about = {"worker": name, "incarnation": incarnation, "cause": "exit", "reporter": "launcher"}
        report = FailureReport.model_validate(about | {"detail": "was killed", "age_milliseconds": 1000 * age})
        self.console.reports.failures(self.id, [report.model_copy(update={"restart": restart})])

    def dies(self, name: str, restart: Restart, age: float = 0.0) -> None:
        """As a launcher tells of it."""
        incarnation = f"{name}-a"
        self.report(name, incarnation)
        self.report(name, incarnation, restart, age)
        self.take_up()

    @property
    def sentence(self) -> str:
        return self.console.queries.view(self.id).sentence

    def dialog(self, name: str) -> str:
        detail = self.console.queries.worker_detail(self.console.queries.view(self.id), name, time.time())
        return facts_html(detail)


def test_before_training_it_is_said_who_starts_a_worker_again(tmp_path: Path) -> None:
    job = Job(tmp_path / "console.db")
    try:
        for name in NAMES[:-1]:
            job.register(name, f"{name}-a")
        for number, by_itself in ((3, True), (4, False)):
            job.report("W1_1", "W1_1-a", Restart(number=number, most=3, seconds=600.0 if by_itself else 0.0))
            assert (golden("waiting-for-you-to-restart") in job.sentence) != by_itself
            assert job.sentence.endswith(".") and "W1_1" in job.sentence
    finally:
        job.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "console.db")
    job.begin()
    yield job
    job.close()


def test_live_and_the_dialog_say_when_it_is_started_again(job: Job) -> None:
    job.dies("W1_1", Restart(number=2, most=3, seconds=600.0))
    words = golden("started-again-in-10-min")
    assert f"W1_1 is {words}" in job.sentence and words in job.dialog("W1_1")
    assert words not in job.dialog("W0_1")


def test_the_time_that_the_report_took_has_passed_by_then(job: Job) -> None:
    job.dies("W1_1", Restart(number=2, most=3, seconds=20.0), age=30.0)
    assert golden("about-to-be-started-again") in job.sentence


def test_workers_of_a_lost_node_are_said_together(job: Job) -> None:
    for name in ("W1_0", "W1_1"):
        job.dies(name, Restart(number=2, most=3, seconds=10.0, node=4))
    assert f"W1_0 and W1_1 are {golden('started-again-as-soon-as')}" in job.sentence


def test_one_that_ends_before_it_registers_is_tried_again(job: Job) -> None:
    """The console has never heard of that process: it is about the one before."""
    job.dies("W1_1", Restart(number=1, most=3, seconds=10.0))
    job.report("W1_1", "W1_1-b", Restart(number=2, most=3, seconds=600.0))
    assert golden("started-again-in-10-min") in job.sentence
    job.report("W1_1", "W1_1-c", Restart(number=4, most=3))
    words = golden("not-started-again-by-itself")
    assert words in job.sentence and words in job.dialog("W1_1")


def test_of_one_that_is_back_nothing_is_said(job: Job) -> None:
    job.dies("W1_1", Restart(number=2, most=3, seconds=600.0))
    job.register("W1_1", "W1_1-b")
    job.take_up()
    # Late, of the process that is gone.
    job.report("W1_1", "W1_1-a", Restart(number=3, most=3, seconds=600.0))
    assert "started again" not in job.sentence and "started again" not in job.dialog("W1_1")


def test_a_console_that_begins_anew_knows_it_still(job: Job, tmp_path: Path) -> None:
    job.dies("W1_1", Restart(number=2, most=3, seconds=600.0))
    again = Job(tmp_path / "console.db", job.id)
    try:
        assert golden("started-again-in-10-min") in again.sentence
        assert again.console.queries.view(again.id).spec.max_restarts == 3
    finally:
        again.close()


def test_what_is_stored_of_a_process_is_read_by_a_version_with_other_fields() -> None:
    process = ProcessState("a", "host", 7, (("W0_0", 1.0),), "failed", "killed", (7, 8), (1,))
    planned = ProcessState("b", "host", 9, (("W0_0", 2.0),), "failed", "killed", restart=PlannedRestart(1, 3, 5.0, 0))
    (row,), _ = process_rows({"a": process, "b": planned}, {"a": process})
    assert read_processes([row]) == {"a": process, "b": planned}
    first, second = json.loads(row["processes"])
    assert "restart" not in first and "ranks" not in second, "what is as usual takes no room, and is not missed"
    second["restart"]["new"] = first["new"] = "of a later version"
    assert read_processes([{"processes": json.dumps([first, second])}]) == {"a": process, "b": planned}
    with pytest.raises(ValueError, match="object"):
        read_processes([{"processes": json.dumps([[*first.values()]])}])
