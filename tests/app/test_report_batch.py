"""Reports of many workers that are taken together: as if each had come alone, in few transactions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from openrecycle.agent.coordination.membership import LeadTerm, Mode, ModeSet
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    BatchReply,
    FailureReport,
    JobFinished,
    JobSpec,
    RefusedReport,
    Registration,
)
from openrecycle.app.api.agents import ReportBatcher
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob, read_processes
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.session import Database
from openrecycle.db.store import JobUpdate, Store
from tests.databases import sqlite_in

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

    def apply(self, job_id: str, change: JobUpdate) -> bool:
        if self.broken:
            raise OperationalError("insert", {}, Exception("the disk is full"))
        self.changes.append(change)
        return super().apply(job_id, change)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    database = sqlite_in(tmp_path)
    yield Counting(database)
    database.close()


@pytest.fixture
def console(store: Counting) -> Iterator[ConsoleService]:
    console = ConsoleService(store)
    yield console
    console.close()


REGISTRATIONS = [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7) for name in NAMES]
ACKNOWLEDGEMENTS = [
    Acknowledgement(worker=name, incarnation=f"{name}-a", generation=1, state=state)  # type: ignore[arg-type]
    for state in STATES
    for name in NAMES
]


def test_the_state_and_the_history_are_those_of_reports_that_come_alone(
    console: ConsoleService, store: Counting
) -> None:
    jobs: list[LiveJob] = [console.jobs.find(console.jobs.create(SPEC)[0].job_id) for _ in range(2)]
    together, alone = jobs
    assert console.reports.register(together.job_id, REGISTRATIONS).taken == len(NAMES)
    assert [console.reports.register(alone.job_id, [one]).taken for one in REGISTRATIONS] == [1] * len(NAMES)
    assert console.reports.acknowledge(together.job_id, ACKNOWLEDGEMENTS).taken == len(ACKNOWLEDGEMENTS)
    for one in ACKNOWLEDGEMENTS:
        assert console.reports.acknowledge(alone.job_id, [one]).taken == 1

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


def test_what_comes_together_is_stored_in_few_transactions(console: ConsoleService, store: Counting) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    console.reports.register(job_id, REGISTRATIONS)
    assert [change.generation is not None for change in store.changes] == [True]
    store.changes.clear()
    console.reports.acknowledge(job_id, ACKNOWLEDGEMENTS)
    assert [len(change.acknowledgements) for change in store.changes] == [len(ACKNOWLEDGEMENTS)]


def test_what_launchers_act_on_lasts_and_no_acknowledgement_but_the_last_waits_for_the_disk(
    console: ConsoleService, store: Counting
) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    store.changes.clear()
    console.reports.register(job_id, [Registration(worker=n, incarnation=f"{n}-a", host="h", pid=1) for n in NAMES])
    assert store.changes[-1].generation is not None and all(change.lasting for change in store.changes)
    store.changes.clear()
    for state in STATES:
        for name in NAMES:
            said = Acknowledgement(worker=name, incarnation=f"{name}-a", generation=1, state=state)  # type: ignore[arg-type]
            console.reports.acknowledge(job_id, [said])
    assert [change.lasting for change in store.changes] == [False] * 11 + [True]
    exited = FailureReport(worker="W0_0", incarnation="W0_0-a", cause="exit", reporter="launcher", detail="gone")
    console.reports.failures(job_id, [exited])
    assert store.changes[-1].lasting


def test_a_refused_report_does_not_keep_out_the_others(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    console.reports.register(job_id, REGISTRATIONS)
    stranger = Acknowledgement(worker="W0_1", incarnation="of-old", generation=1, state="adopted")
    reply = console.reports.acknowledge(job_id, [*ACKNOWLEDGEMENTS[:2], stranger, *ACKNOWLEDGEMENTS[2:]])
    assert [(report.index, report.worker, report.code) for report in reply.refused] == [(2, "W0_1", "fenced")]
    assert reply.taken == len(ACKNOWLEDGEMENTS)
    assert console.jobs.find(job_id).state.settled
    assert len(console.queries.generations(job_id)[0]["acknowledgements"]) == 12


def ended(name: str, detail: str = "was killed", **more: Any) -> FailureReport:
    about = {"worker": name, "incarnation": f"{name}-a", "cause": "exit", "reporter": "launcher", "detail": detail}
    return FailureReport.model_validate(about | more)


@pytest.fixture
def training(console: ConsoleService) -> LiveJob:
    """A job of three pipelines and two stages, which all train."""
    return began(console)


def began(console: ConsoleService, **fields: Any) -> LiveJob:
    spec = JobSpec.model_validate(SPEC.model_dump() | {"pipelines": 3} | fields)
    job = console.jobs.find(console.jobs.create(spec)[0].job_id)
    names = list(job.state.members)
    console.reports.register(
        job.job_id, [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7) for name in names]
    )
    said = [{"worker": n, "incarnation": f"{n}-a", "generation": 1, "state": s} for s in STATES for n in names]
    console.reports.acknowledge(job.job_id, [Acknowledgement.model_validate(one) for one in said])
    assert job.state.settled
    return job


def test_failures_that_come_together_are_one_transaction_and_one_generation(
    console: ConsoleService, store: Counting, training: LiveJob
) -> None:
    store.changes.clear()
    raised = ended("W0_0", cause="exception", generation=1)
    assert not console.reports.failures(training.job_id, [ended("W1_0"), raised, ended("W1_1")]).refused
    assert [change.generation and change.generation["failed"] for change in store.changes] == [("W1_0", "W1_1")]
    said = [row["worker"] for row in store.changes[0].events if row["kind"] == "failure"]
    assert said == ["W1_0", "W0_0", "W1_1"]


def test_a_fenced_process_keeps_no_failure_out(console: ConsoleService, training: LiveJob) -> None:
    fenced = ended("W0_1", cause="exception", generation=1, incarnation="of-old")
    reports = [ended("W1_0"), fenced, ended("W9_9"), ended("W1_1")]
    for _ in range(2):  # the first answer may be lost
        reply = console.reports.failures(training.job_id, reports)
        codes = [(one.index, one.worker, one.code) for one in reply.refused]
        assert codes == [(1, "W0_1", "fenced"), (2, "W9_9", "unknown_worker")]
        assert (reply.taken, reply.generation) == (2, 2)
    assert training.state.current is not None and training.state.current.failed == ("W1_0", "W1_1")


def test_a_job_that_has_halted_by_the_last_of_them_opens_no_generation(
    console: ConsoleService, store: Counting, training: LiveJob
) -> None:
    store.changes.clear()
    assert not console.reports.failures(training.job_id, [ended(f"W{p}_1") for p in range(3)]).refused
    assert training.state.halted and training.state.generation == 1 and len(store.changes) == 1
    assert training.plans.asked_for is None


def test_a_failure_that_an_operator_is_asked_about_ends_the_wait_for_the_plan_before(
    console: ConsoleService, training: LiveJob
) -> None:
    training.apply(ModeSet(Mode.MANUAL, 600.0, "ada"))
    raised = ended("W0_0", cause="exception", generation=1)
    console.reports.failures(training.job_id, [raised, ended("W1_0"), ended("W1_1")])
    assert training.state.choosing and training.state.generation == 1
    assert training.state.pending is not None and training.state.pending.failed == ("W1_0", "W1_1")


def test_without_a_database_no_failure_has_happened(
    console: ConsoleService, store: Counting, training: LiveJob
) -> None:
    before, store.broken = training.state, True
    with pytest.raises(ConsoleError) as failed:
        console.reports.failures(training.job_id, [ended("W1_0"), ended("W1_1")])
    assert failed.value.status == 503 and training.state is before
    store.broken = False
    assert console.reports.failures(training.job_id, [ended("W1_0"), ended("W1_1")]).generation == 2


def test_who_has_moved_and_died_is_known_to_have(console: ConsoleService, store: Counting) -> None:
    """The last worker of a stage is gone, so one of another stage takes its place; that one is gone, too."""
    job = began(console, checkpoints=True)
    names = ("W0_1", "W1_1", "W2_1", "W2_0")
    assert not console.reports.failures(job.job_id, [ended(name, f"died as {name}") for name in names]).refused
    current = job.state.current
    assert current is not None and (current.number, len(current.living)) == (2, 2)
    assert {*current.incarnations.values()} == {"W0_0-a", "W1_0-a"}
    gone = {f"{name}-a" for name in names}
    assert {i for i, process in job.processes.items() if process.ended} == gone
    assert read_processes(store.workers(job.job_id)) == job.processes


def test_workers_that_come_back_together_join_in_one_generation(console: ConsoleService, training: LiveJob) -> None:
    console.reports.failures(training.job_id, [ended("W1_0"), ended("W1_1")])
    survivors = [n for n in training.state.members if not n.startswith("W1")]
    said = [{"worker": n, "incarnation": f"{n}-a", "generation": 2, "state": s} for s in STATES for n in survivors]
    console.reports.acknowledge(training.job_id, [Acknowledgement.model_validate(one) for one in said])
    back = [Registration(worker=n, incarnation=f"{n}-b", host="h", pid=7) for n in ("W1_0", "W1_1")]
    assert console.reports.register(training.job_id, back).generation == 3
    assert training.state.current is not None and training.state.current.joining == ("W1_0", "W1_1")


def test_who_follows_generations_itself_is_told_which_are_not_its_own(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    own = [one.model_copy(update={"own_loop": True}) for one in REGISTRATIONS]
    assert console.reports.register(job_id, own[:1]).before == {"W0_0": 0}
    assert console.reports.register(job_id, REGISTRATIONS[1:3]).before == {}, "their launcher follows for them"
    # The last one opens the first generation, which all are in; asked again, since the answer was lost, it is the same.
    for _ in range(2):
        assert console.reports.register(job_id, own[3:]).before == {"W1_1": 0}
    again = own[3].model_copy(update={"incarnation": "W1_1-b"})
    assert console.reports.register(job_id, [again]).before == {"W1_1": 1}


def test_who_has_closed_stays_out_however_often_the_job_is_read_back(console: ConsoleService, store: Counting) -> None:
    job = began(console, own_loop=True)
    closed = ended("W1_0", "closed its reporter", cause="closed", reporter="W1_0")
    assert not console.reports.failures(job.job_id, [closed]).refused
    before = job.state
    assert before.members["W1_0"].closed and before.generation == 1 and not before.pending
    assert console.queries.list_jobs()[0].living == 5
    again = ConsoleService(store)
    try:
        again.start()
        assert again.jobs.find(job.job_id).state.members["W1_0"].closed
        assert not again.reports.failures(job.job_id, [closed, ended("W1_1")]).refused
        assert again.jobs.find(job.job_id).state.pending or again.jobs.find(job.job_id).state.generation == 2
    finally:
        again.close()


def test_without_a_database_nothing_has_changed_and_all_is_to_be_sent_again(
    console: ConsoleService, store: Counting
) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    console.reports.register(job_id, REGISTRATIONS)
    before, store.broken = job.state, True
    with pytest.raises(ConsoleError) as failed:
        console.reports.acknowledge(job_id, ACKNOWLEDGEMENTS)
    assert failed.value.status == 503
    assert job.state is before
    store.broken = False
    assert not console.reports.acknowledge(job_id, ACKNOWLEDGEMENTS).refused
    assert job.state.settled


def test_acknowledgements_do_not_wake_those_that_wait_for_a_generation(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    console.reports.register(job_id, REGISTRATIONS)

    async def main() -> int:
        looks: list[int] = []

        def look() -> int | None:
            looks.append(job.state.generation)
            return job.state.generation if job.state.generation > 1 else None

        waiting = asyncio.create_task(job.generation_topic.wait_for(look, 60))
        await asyncio.sleep(0)
        await asyncio.to_thread(console.reports.acknowledge, job_id, ACKNOWLEDGEMENTS)
        death = FailureReport(worker="W0_1", incarnation="W0_1-a", cause="exit", reporter="launcher")
        await asyncio.to_thread(console.reports.failures, job_id, [death])
        assert await waiting == 2
        return len(looks)

    assert asyncio.run(main()) == 2


def test_who_waits_for_a_generation_is_sent_away_once_the_job_ends(console: ConsoleService) -> None:
    """A loop of its own that waits for the others would learn 20 s late that they are done."""
    job_id = console.jobs.create(SPEC)[0].job_id
    job = console.jobs.find(job_id)
    console.reports.register(job_id, REGISTRATIONS)

    async def main() -> None:
        waiting = asyncio.create_task(job.generation_topic.wait_for(lambda: None, 600))
        await asyncio.sleep(0)
        await asyncio.to_thread(console.reports.finish, job_id, JobFinished(state="finished"))
        await asyncio.wait_for(waiting, 60)
        # Who asks again waits, and does not ask without a pause.
        waiting = asyncio.create_task(job.generation_topic.wait_for(lambda: None, 600))
        await asyncio.sleep(0)
        assert job.generation_topic.followed
        job.generation_topic.close()
        await waiting

    asyncio.run(main())


def test_what_is_posted_while_a_job_stores_is_taken_together_and_answered_apart() -> None:
    taken: list[list[str]] = []
    stores, stored = threading.Event(), threading.Event()

    def take(job_id: str, messages: Sequence[Acknowledgement], sender: LeadTerm | None) -> BatchReply:
        taken.append([message.worker for message in messages])
        stores.set()
        assert stored.wait(60)
        against = [(i, m.worker) for i, m in enumerate(messages) if m.worker == "W1_0"]
        refused = tuple(RefusedReport(index=i, worker=worker, code="fenced", detail="") for i, worker in against)
        return BatchReply(generation=3, taken=len(messages) - len(refused), refused=refused)

    async def all_at_once() -> list[BatchReply]:
        together, parts = ReportBatcher(take), [ACKNOWLEDGEMENTS[:1], ACKNOWLEDGEMENTS[:4], ACKNOWLEDGEMENTS[2:4]]
        posts = [asyncio.create_task(together.post("job", parts[0]))]
        assert await asyncio.to_thread(stores.wait, 60)
        posts += [asyncio.create_task(together.post("job", part)) for part in parts[1:]]
        gone = asyncio.create_task(together.post("job", ACKNOWLEDGEMENTS[:1]))
        await asyncio.sleep(0)
        gone.cancel()
        stored.set()
        return await asyncio.gather(*posts)

    first, second, third = asyncio.run(all_at_once())
    assert taken == [NAMES[:1], [*NAMES, *NAMES[2:], *NAMES[:1]]]
    assert (first.taken, second.taken, third.taken) == (1, 3, 1)
    assert [r.index for r in second.refused] == [2] and [r.index for r in third.refused] == [0]


def test_all_whose_reports_can_not_be_stored_are_told(console: ConsoleService, store: Counting) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    store.broken = True

    async def both() -> list[BatchReply | BaseException]:
        together = ReportBatcher(console.reports.register)
        posts = [together.post(job_id, REGISTRATIONS[:1]), together.post(job_id, REGISTRATIONS[1:])]
        return await asyncio.gather(*posts, return_exceptions=True)

    assert [getattr(answer, "status", 0) for answer in asyncio.run(both())] == [503, 503]
