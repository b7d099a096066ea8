"""Reports of many workers that are taken together: as if each had come alone, in few transactions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from openrecycle.agent.messages.protocol import Acknowledgement, FailureReport, JobSpec, Registration
from openrecycle.app.api import agents
from openrecycle.app.api.agents import ReportBatcher
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import IncomingReport, LiveJob
from openrecycle.app.jobs.records import read_processes
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.session import Database
from openrecycle.db.store import JobUpdate, Store

pytestmark = pytest.mark.processes

SPEC = JobSpec(name="a job", pipelines=2, stages=2, micro_batches=2, iterations=100)
NAMES = [f"W{p}_{s}" for p in range(2) for s in range(2)]
STATES = ("adopted", "formed", "resumed")


class Counting(Store):
    """Counts its transactions, and fails when it is told to."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.changes: list[JobUpdate] = []
        self.broken = False
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def apply(self, job_id: str, change: JobUpdate) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        if self.broken:
            raise OperationalError("insert", {}, Exception("the disk is full"))
        super().apply(job_id, change)
        self.changes.append(change)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    database = Database(f"sqlite:///{tmp_path / 'console.db'}")
    database.upgrade()
    yield Counting(database)
    database.close()


@pytest.fixture
def console(store: Counting) -> Iterator[ConsoleService]:
    console = ConsoleService(store)
    yield console
    console.close()


def registrations(console: ConsoleService, job_id: str) -> list[IncomingReport]:
    messages = [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7) for name in NAMES]
    return [console.reports.registration(job_id, message)[1] for message in messages]


def acknowledgements(console: ConsoleService, job_id: str, generation: int) -> list[IncomingReport]:
    messages = [
        Acknowledgement(worker=name, incarnation=f"{name}-a", generation=generation, state=state)  # type: ignore[arg-type]
        for state in STATES
        for name in NAMES
    ]
    return console.reports.acknowledgements(job_id, messages)[1]


def test_the_state_and_the_history_are_those_of_reports_that_come_alone(
    console: ConsoleService, store: Counting
) -> None:
    jobs: list[LiveJob] = [console.jobs.find(console.jobs.create(SPEC)[0].job_id) for _ in range(2)]
    together, alone = jobs
    answers = together.apply_all(registrations(console, together.job_id))
    assert [alone.apply(r.event, beside=[r]) for r in registrations(console, alone.job_id)] == answers
    reports = acknowledgements(console, together.job_id, 1)
    answers = together.apply_all(reports)
    assert [alone.apply(r.event, beside=[r]) for r in acknowledgements(console, alone.job_id, 1)] == answers

    def told(job: LiveJob) -> object:
        members = [(m.name, m.state, m.incarnation, m.generation, m.acknowledged) for m in job.state.members.values()]
        rows = console.queries.generations(job.job_id)[0]["acknowledgements"]
        events = [(e["seq"], e["kind"], e["text"]) for e in console.queries.events(job.job_id, 0, 100)]
        stored = read_processes(store.workers(job.job_id))
        assert stored == job.processes
        hosts = {p.incarnation: (p.host, p.pid, p.slot, p.role) for p in stored.values()}
        return members, {(a["worker"], a["state"]) for a in rows}, events, hosts

    assert told(together) == told(alone)
    assert together.state.job_state == "running"


@pytest.mark.parametrize(("most", "expected"), [(1024, [1, 11]), (4, [1, 4, 4, 3])])
def test_what_comes_together_is_stored_in_few_transactions(
    console: ConsoleService, store: Counting, monkeypatch: pytest.MonkeyPatch, most: int, expected: list[int]
) -> None:
    monkeypatch.setattr(agents, "MOST", most)
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    job.apply_all(registrations(console, job_id))
    assert len(store.changes) == 2  # three registrations; the fourth, which opens the generation
    store.changes.clear()
    reports = acknowledgements(console, job_id, 1)

    async def all_at_once() -> list[str]:
        intake = ReportBatcher()
        store.entered.clear()
        store.go_on.clear()
        first = intake.put(job, reports[0])
        await asyncio.to_thread(store.entered.wait, 60)  # it is being stored when the others come
        others = [intake.put(job, report) for report in reports[1:]]
        store.go_on.set()
        return await asyncio.gather(first, *others)

    assert len(asyncio.run(all_at_once())) == len(reports)
    assert [len(change.acknowledgements) for change in store.changes if change.acknowledgements] == expected


def test_a_refused_report_does_not_keep_out_the_others(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    job.apply_all(registrations(console, job_id))
    stranger = Acknowledgement(worker="W0_1", incarnation="of-old", generation=1, state="adopted")
    reports = acknowledgements(console, job_id, 1)
    reports[2:2] = console.reports.acknowledgements(job_id, [stranger])[1]
    answers = job.apply_all(reports)
    refused = [answer for answer in answers if isinstance(answer, ConsoleError)]
    assert [(e.status, e.code) for e in refused] == [(409, "fenced")]
    assert answers.index(refused[0]) == 2
    assert job.state.settled
    assert len(console.queries.generations(job_id)[0]["acknowledgements"]) == 12


def test_without_a_database_all_are_told_and_nothing_has_changed(console: ConsoleService, store: Counting) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    job.apply_all(registrations(console, job_id))
    before, store.broken = job.state, True
    reports = acknowledgements(console, job_id, 1)
    answers = job.apply_all(reports)
    assert [getattr(answer, "status", 0) for answer in answers] == [503] * len(reports)
    assert job.state is before
    store.broken = False
    assert all(isinstance(answer, str) for answer in job.apply_all(reports))
    assert job.state.settled


def test_acknowledgements_do_not_wake_those_that_wait_for_a_generation(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    job.apply_all(registrations(console, job_id))

    async def main() -> int:
        looks: list[int] = []

        def look() -> int | None:
            looks.append(job.state.generation)
            return job.state.generation if job.state.generation > 1 else None

        waiting = asyncio.create_task(job.generation_topic.wait_for(look, 60))
        await asyncio.sleep(0)
        await asyncio.to_thread(job.apply_all, acknowledgements(console, job_id, 1))
        death = FailureReport(worker="W0_1", incarnation="W0_1-a", cause="exit", reporter="launcher")
        await asyncio.to_thread(console.reports.failure, job_id, death)
        assert await waiting == 2
        return len(looks)

    assert asyncio.run(main()) == 2
