"""The console as a service, in this process: what happens when a part of it fails."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import console_refuses, until

from openrecycle.agent.coordination.membership import FailureTimeouts, Note
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    Deployment,
    FailureReport,
    Heartbeat,
    Iteration,
    JobFinished,
    JobSpec,
    JobState,
    Registration,
)
from openrecycle.app.console import service
from openrecycle.app.console.service import ConsoleService, get_console, set_console
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.security.access import RateLimit
from openrecycle.app.server import create_routes
from openrecycle.db.access import audit_row
from openrecycle.db.job_rows import JobRows
from openrecycle.db.session import Database
from openrecycle.db.store import JobUpdate, Record, Store
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Worker
from tests.app.flaky_database import FlakyDatabase
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes

SPEC = JobSpec(name="job", pipelines=3, stages=2, micro_batches=3, iterations=50)
NAMES = [f"W{p}_{s}" for p in range(3) for s in range(2)]


def disk_is_full() -> OperationalError:
    return OperationalError("insert", {}, Exception("database or disk is full"))


def refused_row() -> IntegrityError:
    return IntegrityError("insert", {}, Exception("UNIQUE constraint failed"))


class Troubled(Store):
    """refuse: what is called with each change before it is stored; lose: once it is, before whoever stores it knows.
    plans_fit: there is room for plans made ahead. readable: iterations can be read. trouble: makes what is raised where
    that is not so."""

    refuse: Callable[[JobUpdate], object] | None = None
    lose: Callable[[], object] | None = None
    plans_fit = True
    trouble: Callable[[], Exception] = staticmethod(disk_is_full)
    asked_for_iterations = 0
    readable = True

    def put_plan(self, *plan: Any) -> bool:
        if not self.plans_fit:
            raise self.trouble()
        return super().put_plan(*plan)

    def iterations(self, *which: Any, **how: Any) -> list[Record]:
        if not self.readable:
            self.asked_for_iterations += 1
            raise self.trouble()
        return super().iterations(*which, **how)

    def apply(self, job_id: str, change: JobUpdate) -> bool:
        if self.refuse:
            self.refuse(change)
        stored = super().apply(job_id, change)
        if self.lose:
            self.lose()
        return stored


@pytest.fixture
def store(database: Database) -> Troubled:
    return Troubled(database)


@pytest.fixture
def console(store: Troubled) -> Iterator[ConsoleService]:
    console = ConsoleService(store)
    console.start()
    yield console
    console.close()


def register_all(console: ConsoleService, job_id: str) -> None:
    console.reports.register(
        job_id, [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7) for name in NAMES]
    )


def resume(console: ConsoleService, job_id: str, generation: int, names: list[str]) -> None:
    for name in names:
        for state in ("adopted", "formed", "resumed"):
            message = Acknowledgement(worker=name, incarnation=f"{name}-a", generation=generation, state=state)  # type: ignore[arg-type]
            console.reports.acknowledge(job_id, [message])


def exited(worker: str) -> FailureReport:
    return FailureReport(worker=worker, incarnation=f"{worker}-a", cause="exit", reporter="launcher", detail="gone")


def test_what_can_not_be_stored_has_not_happened(console: ConsoleService, store: Troubled) -> None:
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    resume(console, created.job_id, 1, NAMES)
    before = console.jobs.find(created.job_id).state

    def refuse(*_: object) -> None:
        raise disk_is_full()

    store.refuse = refuse
    for _ in range(2):  # before it has read the job back, and after that
        with pytest.raises(ConsoleError) as error:
            console.reports.failures(created.job_id, [exited("W1_1")])
        assert (error.value.status, error.value.code) == (503, "disk_full")
        said = console.queries.sentence(console.jobs.find(created.job_id))
        assert said == golden("the-console-can-decide-nothing")
    assert console.jobs.find(created.job_id).state.generation == before.generation
    assert console.reports.deployment(created.job_id, 1) is None
    # The launcher sends its report again, and now there is room.
    store.refuse = None
    console.reports.failures(created.job_id, [exited("W1_1")])
    deployment = Deployment.model_validate_json(console.reports.deployment(created.job_id, 1) or "")
    assert deployment.failed == ("W1_1",)
    job = console.jobs.find(created.job_id)
    assert golden("the-console-can-decide-nothing") not in console.queries.sentence(job)
    console.reports.finish(created.job_id, JobFinished(state="finished"))
    store.refuse = refuse
    with pytest.raises(ConsoleError):
        job.record(Note("info", "plan", "made too late"))
    assert job.state.over and golden("the-console-can-decide-nothing") not in console.queries.sentence(job)


@pytest.mark.parametrize("ours", [False, True])
def test_a_disk_that_is_full_is_said_in_a_line_and_a_mistake_of_ours_with_its_traceback(
    console: ConsoleService, store: Troubled, capsys: pytest.CaptureFixture[str], ours: bool
) -> None:
    """Of each plan made ahead, and of each tick, which there are four of in a second."""
    store.trouble = refused_row if ours else disk_is_full
    store.plans_fit = False
    job = console.jobs.find(console.jobs.create(SPEC)[0].job_id)
    until(lambda: 3 < job.plans.ahead.wanted == job.plans.ahead.made)
    register_all(console, job.job_id)
    store.readable = False
    done = Iteration(iteration=0, loss=1.0, loss_hex=(1.0).hex(), seconds=1.0, generation=1, living=6)
    console.reports.committed(job.job_id, [done])
    until(lambda: store.asked_for_iterations > 4)
    times = {golden("plans-made-ahead-could-not"): job.plans.ahead.wanted}
    times[golden("a-tick-failed") if ours else golden("a-tick-could-not-be")] = store.asked_for_iterations
    said = "".join(capsys.readouterr())
    for sentence, failed in times.items():
        assert 1 <= said.count(sentence) <= failed / 2, "and again after a minute, if this took one"
    assert ("Traceback" in said) == ours


def test_the_same_warning_comes_again_after_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    seldom = Seldom(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        seldom.warn("it fails", reason="full", job="a")
        seldom.warn("it fails", reason="away", job="a")
    said = "".join(capsys.readouterr())
    assert (said.count("full"), said.count("away")) == (2, 2)


def test_a_commit_whose_answer_was_lost_is_found_again(console: ConsoleService, store: Troubled) -> None:
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    resume(console, created.job_id, 1, NAMES)

    def connection_lost() -> None:
        raise OperationalError("commit", {}, Exception("server closed the connection unexpectedly"))

    store.lose = connection_lost
    with pytest.raises(ConsoleError) as error:
        console.reports.failures(created.job_id, [exited("W1_1")])
    assert error.value.status == 503
    store.lose = None
    assert not console.reports.failures(created.job_id, [exited("W1_1")]).refused
    deployment = Deployment.model_validate_json(console.reports.deployment(created.job_id, 1) or "")
    assert (deployment.generation, deployment.failed) == (2, ("W1_1",))
    resume(console, created.job_id, 2, [name for name in NAMES if name != "W1_1"])
    assert console.queries.view(created.job_id).state is JobState.RUNNING
    texts = [event.text for event in console.queries.view(created.job_id).events]
    assert golden("the-database-failed-for-a") in texts


def test_a_plan_for_a_large_grid_comes_from_the_child(console: ConsoleService) -> None:
    console.plans.ahead.plans_ahead = False
    created, _ = console.jobs.create(SPEC)
    console.jobs.find(created.job_id).plans.inline_ops = 0
    register_all(console, created.job_id)
    until(lambda: console.jobs.find(created.job_id).state.generation == 1)
    console.reports.failures(created.job_id, [exited("W2_0")])
    until(lambda: console.jobs.find(created.job_id).state.generation == 2)
    deployment = Deployment.model_validate_json(console.reports.deployment(created.job_id, 1) or "")
    assert console.plans.cache.plan(deployment.plan_fingerprint).failed == ("W2_0",)


def test_a_plan_whose_generation_could_not_be_stored_is_asked_for_again(
    console: ConsoleService, store: Troubled
) -> None:
    console.plans.ahead.plans_ahead = False
    created, _ = console.jobs.create(SPEC)
    console.jobs.find(created.job_id).plans.inline_ops = 0
    register_all(console, created.job_id)
    until(lambda: console.jobs.find(created.job_id).state.generation == 1)
    refused = threading.Event()

    def no_generations(change: JobUpdate) -> None:
        if change.generation:
            refused.set()
            raise OperationalError("insert", {}, Exception("database is locked"))

    store.refuse = no_generations
    console.reports.failures(created.job_id, [exited("W2_0")])
    assert refused.wait(30)
    store.refuse = None
    until(lambda: console.jobs.find(created.job_id).state.generation == 2)


def test_a_plan_for_all_workers_that_nobody_makes_any_more_is_asked_for_again(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where speeds have changed while it was made: all wait for a plan without nobody."""
    make_now, asked = console.plans.ahead.make_now, list[tuple[str, ...]]()

    def given_up_at_first(job: LiveJob, failed: tuple[str, ...]) -> None:
        asked.append(failed)
        if len(asked) > 1:
            make_now(job, failed)
        else:
            job.plans.give_up()

    monkeypatch.setattr(console.plans.ahead, "make_now", given_up_at_first)
    console.plans.ahead.plans_ahead = False
    created, _ = console.jobs.create(SPEC)
    job = console.jobs.find(created.job_id)
    job.plans.inline_ops = 0
    register_all(console, created.job_id)
    until(lambda: job.state.generation == 1)
    assert asked == [(), ()]


def test_a_plan_that_could_not_even_be_asked_for_is_asked_for_again(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_now, refused = console.plans.ahead.make_now, list[RuntimeError]()

    def no_thread_at_first(job: LiveJob, failed: tuple[str, ...]) -> None:
        if not refused:
            refused.append(RuntimeError("can't start new thread"))
            raise refused[0]
        make_now(job, failed)

    monkeypatch.setattr(console.plans.ahead, "make_now", no_thread_at_first)
    console.plans.ahead.plans_ahead = False
    job = console.jobs.find(console.jobs.create(SPEC)[0].job_id)
    job.plans.inline_ops = 0
    with pytest.raises(RuntimeError):
        register_all(console, job.job_id)
    until(lambda: job.state.generation == 1)


def test_a_plan_is_made_where_the_look_for_a_stored_one_fails(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(question: object, failed: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(console.catalogs, "find", fails)
    console.plans.ahead.plans_ahead = False
    job = console.jobs.find(console.jobs.create(SPEC)[0].job_id)
    job.plans.inline_ops = 0
    register_all(console, job.job_id)
    until(lambda: job.state.generation == 1)


def test_reports_that_come_at_once_are_taken_one_after_the_other(console: ConsoleService, store: Store) -> None:
    spec = SPEC.model_copy(update={"pipelines": 5})
    created, _ = console.jobs.create(spec)
    names = [f"W{p}_{s}" for p in range(5) for s in range(2)]
    start, errors = threading.Barrier(len(names)), list[BaseException]()

    def live(name: str) -> None:
        try:
            start.wait()
            console.reports.register(
                created.job_id, [Registration(worker=name, incarnation=f"{name}-a", host="h", pid=7)]
            )
            start.wait()
            if name in ("W0_0", "W1_1", "W2_0", "W3_1"):
                console.reports.failures(created.job_id, [exited(name)])
            else:
                resume(console, created.job_id, 1, [name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    generations = store.generations(created.job_id)
    assert [e["generation"] for e in generations] == [1, 2, 3, 4, 5]
    assert [len(e["failed"]) for e in generations] == [0, 1, 2, 3, 4]
    events = store.events(created.job_id, limit=1000)
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    for generation in generations:
        assert list(console.plans.cache.plan(generation["plan_fingerprint"]).failed) == generation["failed"]


def test_a_job_that_no_plan_fits_halts_and_says_why(console: ConsoleService, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: LiveJob, failed: tuple[str, ...]) -> None:
        job.plans.plan_made(failed, None, "no schedule exists: x")

    monkeypatch.setattr(console.plans.ahead, "make_now", refuse)
    created, _ = console.jobs.create(SPEC)
    monkeypatch.setattr(console.jobs.find(created.job_id).plans, "plan_now", lambda failed: None)
    register_all(console, created.job_id)
    view = console.queries.view(created.job_id)
    assert view.state is JobState.HALTED
    assert view.sentence == golden("halted-there-is-no-plan")


def test_after_each_failure_beyond_the_tolerance_the_next_is_planned(store: Store) -> None:
    console = ConsoleService(store, tolerance=0)
    console.start()
    try:
        created, _ = console.jobs.create(SPEC)
        job = console.jobs.find(created.job_id)
        register_all(console, created.job_id)
        resume(console, created.job_id, 1, NAMES)
        until(lambda: {len(p["failed"]) for p in console.queries.job_plans(created.job_id)} == {0, 1})
        until(lambda: job.plans.ahead.made == job.plans.ahead.wanted == 3)
        console.reports.failures(created.job_id, [exited("W0_1")])
        until(lambda: {len(p["failed"]) for p in console.queries.job_plans(created.job_id)} == {0, 1, 2})
        assert golden("planned-ahead-for-1-failed") in console.queries.view(created.job_id).events[0].text
    finally:
        console.close()


def test_a_view_shows_what_is_known(console: ConsoleService) -> None:
    created, _ = console.jobs.create(SPEC)
    job_id = created.job_id
    register_all(console, job_id)
    resume(console, job_id, 1, NAMES)
    beat = Heartbeat(
        worker="W0_0",
        incarnation="W0_0-a",
        seq=5,
        generation=1,
        iteration=9,
        phase="training",
        op_milliseconds={"F": 1.5},
        resident_bytes=10,
    )
    console.reports.heartbeats(job_id, [beat])
    console.reports.heartbeats(job_id, [beat.model_copy(update={"seq": 4, "iteration": 8})])
    until(lambda: console.queries.view(job_id).workers[0].iteration > 0)
    view = console.queries.view(job_id)
    first = view.workers[0]
    assert (first.name, first.state, first.iteration, first.phase) == ("W0_0", RoleState.RUNNING, 9, "training")
    assert (first.op_milliseconds, first.host, first.pid, first.acknowledged) == ({"F": 1.5}, "h", 7, "resumed")
    assert first.heartbeat_age is not None
    assert 0 <= first.heartbeat_age < 30
    assert view.plan is not None
    assert view.plan.failed == ()
    assert [e.seq for e in view.events] == sorted((e.seq for e in view.events), reverse=True)
    assert view.figures is not None and view.figures.fault_free is None  # its times are slots
    assert console.queries.list_jobs()[0].name == "job"


def test_heartbeats_are_stored_some_at_a_time_and_none_is_forgotten(store: Store) -> None:
    console = ConsoleService(store)  # not started: nobody else stores
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    job = console.jobs.find(created.job_id)

    def hear(seq: int, *names: str) -> None:
        for name in names:
            beat = Heartbeat(worker=name, incarnation=f"{name}-a", seq=seq, generation=1, iteration=2, phase="training")
            console.reports.heartbeats(created.job_id, [beat])
        job.take_heartbeats()

    hear(1, *NAMES)
    some = [row["name"] for row in job.measurements.unsaved(3)]
    assert some == NAMES[:3]
    hear(2, *NAMES)  # those that were stored wait behind the others
    rest = job.measurements.unsaved(len(NAMES))
    assert [row["name"] for row in rest] == [*NAMES[3:], *some]
    assert {row["seq"] for row in rest} == {2}
    assert job.measurements.unsaved(1) == []


def test_the_rate_that_a_paced_job_can_reach_is_predicted(console: ConsoleService) -> None:
    times = {"F": 40.0, "I": 40.0, "W": 40.0}
    spec = SPEC.model_copy(update={"paced": True, "durations": times, "samples_per_micro_batch": 4})
    created, _ = console.jobs.create(spec)
    register_all(console, created.job_id)
    view = console.queries.view(created.job_id)
    assert view.plan is not None
    until(lambda: console.jobs.find(created.job_id).baseline is not None)
    figures = console.queries.view(created.job_id).figures
    assert figures is not None and figures.baseline is not None and figures.baseline.source == "planned"
    assert figures.fault_free == pytest.approx(3 * 3 * 4 / (view.plan.metrics.period / 1000))


def test_a_job_that_can_not_be_read_back_does_not_stop_the_others(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, in a sentence; and a person deletes it."""
    console = ConsoleService(store)
    console.start()
    good, _ = console.jobs.create(SPEC)
    bad, cut, old = (console.jobs.create(SPEC, key)[0].job_id for key in ("runs", "over", "old"))
    console.reports.finish(cut, JobFinished(state="finished"))
    console.close()
    with store.database.write() as session:
        session.execute(text("update job set spec = '{}' where id in (:bad, :cut)"), {"bad": bad, "cut": cut})
        session.execute(text("update worker set processes = '[7]' where job_id = :old"), {"old": old})
    capsys.readouterr()
    again = ConsoleService(store, failure_timeouts=FailureTimeouts())
    again.start()
    try:
        for _ in range(3):
            again.jobs.follow()
        assert [job.job_id for job in again.queries.list_jobs()] == [good.job_id]
        for key in ("runs", "over", "old"):
            with console_refuses("idempotency_conflict"):
                again.jobs.create(SPEC, key)
        said = "".join(capsys.readouterr())
        assert said.count(golden("a-stored-job-is-left-out")) == 3 and "Traceback" not in said
        assert all(said.count(job_id) == 1 for job_id in (bad, cut, old)) and f"name={SPEC.name}" in said
        again.histories.delete(bad, "ada")
        assert again.jobs.create(SPEC, "runs")[1], "its key is free"
        assert again.jobs.left_out(cut) == SPEC.name
        JobRows(store.database).hide(cut, audit_row("ada", "delete"))  # by the command line
        again.jobs.follow()
        assert again.jobs.left_out(cut) is None, "another may come under its id"
        with console_refuses("unknown_job"):
            again.histories.delete(bad, "ada")
    finally:
        again.close()


def test_a_mistake_of_ours_in_reading_a_job_has_its_traceback(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mistaken(Store):
        def workers(self, job_id: str) -> list[Record]:
            raise AttributeError("workers")

    job_id = secrets.token_hex(6)
    console = ConsoleService(Mistaken(database))
    Store(database).create_job(
        job_id, name="job", spec=SPEC.model_dump_json(), state="starting", created_at=1.0, workers=[]
    )
    console.start()
    try:
        assert console.queries.list_jobs() == []
        said = "".join(capsys.readouterr())
        assert "Traceback" in said and job_id in said
    finally:
        console.close()


def test_what_is_old_depends_on_how_seldom_workers_speak(store: Store) -> None:
    console = ConsoleService(store, failure_timeouts=FailureTimeouts(heartbeat=10.0, suspect=30.0, dead=90.0))
    console.start()
    try:
        created, _ = console.jobs.create(SPEC)
        assert console.queries.view(created.job_id).suspect_seconds == created.suspect_seconds == 30.0
    finally:
        console.close()


def test_a_damaged_plan_does_not_stop_its_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    console = ConsoleService(store)
    console.start()
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    console.close()
    with store.database.write() as session:
        session.execute(text("update plan set data = :rubbish"), {"rubbish": b"rubbish"})
    again, looked_after = ConsoleService(store), threading.Event()
    again.plans.ahead.plans_ahead = False  # the same one would be made anew
    monkeypatch.setattr(again.accounts, "consider", lambda job: looked_after.set())  # the last that a tick does
    again.start()
    try:
        assert again.jobs.find(created.job_id).state.generation == 1
        assert looked_after.wait(30)
        assert again.queries.view(created.job_id).plan is None
        assert created.job_id in again.metrics.text("")[0].decode()
    finally:
        again.close()


def test_a_damaged_plan_that_is_in_memory_is_stored_again(console: ConsoleService, store: Store) -> None:
    """Otherwise the launcher would ask for it again and again, and take the console for away."""
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    job = console.jobs.find(created.job_id)
    assert job.state.current is not None
    in_force = job.state.current.plan_fingerprint
    until(lambda: len(store.job_plans(job.job_id)) > 1, "a plan made ahead")
    other = next(r["fingerprint"] for r in store.job_plans(job.job_id) if r["fingerprint"] != in_force)
    whole = console.queries.packed_plan(job.job_id, in_force)
    with store.database.write() as session:
        session.execute(text("update plan set data = :rubbish"), {"rubbish": b"rubbish"})
    with console_refuses("unknown_plan"):
        console.queries.packed_plan(job.job_id, other)
    assert console.queries.packed_plan(job.job_id, in_force) == whole == store.plan(in_force)
    job.plans.let_go()
    with store.database.write() as session:
        session.execute(text("update plan set data = :rubbish"), {"rubbish": b"rubbish"})
    with console_refuses("unknown_plan"):
        console.queries.packed_plan(job.job_id, in_force)


@pytest.mark.parametrize(
    ("own_loop", "per_second", "guarded", "warned"),
    [(True, 5, True, 1), (True, 6, True, 0), (False, 5, True, 0), (True, 5, False, 0)],
)
def test_a_job_whose_heartbeats_one_token_may_not_send_says_so(
    console: ConsoleService,
    monkeypatch: pytest.MonkeyPatch,
    own_loop: bool,
    per_second: float,
    guarded: bool,
    warned: int,
) -> None:
    """Of six workers, each of which sends its own once a second. A console without a token has no such limit."""
    monkeypatch.setattr(service, "AGENTS", RateLimit(per_second, 100))
    monkeypatch.setattr(console.security.access, "guarded", guarded)
    job_id = console.jobs.create(SPEC.model_copy(update={"own_loop": own_loop}))[0].job_id
    events = console.queries.events(job_id, 0, 100)
    assert sum((event["severity"], event["kind"]) == ("warning", "console") for event in events) == warned


def test_a_job_begins_though_a_warning_can_not_be_stored(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it would hear that it is not there, and ask for another one."""

    def away(*_: object) -> None:
        raise ConsoleError(503, "unavailable", "the database is away")

    monkeypatch.setattr(service, "AGENTS", RateLimit(5, 100))
    monkeypatch.setattr(console.security.access, "guarded", True)
    monkeypatch.setattr(LiveJob, "record", away)
    created, new = console.jobs.create(SPEC.model_copy(update={"own_loop": True}))
    assert new
    until(lambda: console.jobs.find(created.job_id).plans.catalog.find(()), "a plan made ahead")


def test_the_plans_for_the_next_failure_are_packed_before_it(console: ConsoleService) -> None:
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    catalog = console.jobs.find(created.job_id).plans.catalog

    def packed(worker: Worker) -> bool:
        plan = catalog.find([worker])
        return plan is not None and bool(plan.workers.packed)

    until(lambda: all(map(packed, catalog.job.workers())))


def test_one_thread_packs_the_plans_of_all_jobs(console: ConsoleService, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ready = set[threading.Thread](), set[int]()

    def make_ready(catalog: Catalog, failed: Collection[Worker]) -> None:
        threads.add(threading.current_thread())
        ready.add(id(catalog))
        raise RuntimeError("the plans of one job are damaged")

    monkeypatch.setattr(Catalog, "make_ready", make_ready)
    jobs = [console.jobs.create(SPEC)[0].job_id for _ in range(3)]
    for job_id in jobs:
        register_all(console, job_id)
    until(lambda: ready == {id(console.jobs.find(job_id).plans.catalog) for job_id in jobs})
    assert len(threads) == 1


def test_plans_of_a_job_that_is_over_are_in_the_database_alone(console: ConsoleService) -> None:
    created, _ = console.jobs.create(SPEC)
    register_all(console, created.job_id)
    job = console.jobs.find(created.job_id)
    until(lambda: job.plans.ahead.made == job.plans.ahead.wanted > 0)
    before = {plan.fingerprint for plan in console.sources.job_catalog(job).plans}
    console.reports.finish(job.job_id, JobFinished(state="finished"))
    until(lambda: not len(job.plans.catalog))
    assert {plan.fingerprint for plan in console.sources.job_catalog(job).plans} == before


def test_of_jobs_that_are_over_for_long_a_line_is_kept(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OVER_SHOWN", 1), ("FLUSH_SECONDS", 0.0)):
        monkeypatch.setattr(f"openrecycle.app.console.service.{name}", value)
    ids = [console.jobs.create(SPEC)[0].job_id for _ in range(4)]
    for job_id in ids[:3]:
        console.reports.finish(job_id, JobFinished(state="finished"))
    before = console.queries.list_jobs()
    followed = console.jobs.find(ids[0])
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(asyncio.run, followed.topic.wait_for(lambda: None, 30))
        until(lambda: followed.topic.followed)
        monkeypatch.setattr("openrecycle.app.console.service.OVER_SECONDS", 0.0)
        until(lambda: {job.job_id for job in console.jobs.live()} == {ids[0], ids[2], ids[3]})
        followed.topic.close()
        waits.result()
    until(lambda: {job.job_id for job in console.jobs.live()} == set(ids[2:]))
    assert console.queries.list_jobs() == before
    assert console.jobs.find(ids[1]).state.over


def test_jobs_that_are_over_are_read_when_somebody_asks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    console = ConsoleService(store)
    console.start()
    ids = [console.jobs.create(SPEC.model_copy(update={"name": f"job {n}"}))[0].job_id for n in range(4)]
    register_all(console, ids[0])
    for job_id, state in zip(ids, ("finished", "stopped", "finished"), strict=False):
        console.reports.finish(job_id, JobFinished(state=state, reason="as asked"))  # type: ignore[arg-type]
    before = console.queries.list_jobs()
    assert before[-1].sentence == golden("the-job-has-finished-as") and before[-1].living == 6
    console.close()
    monkeypatch.setattr("openrecycle.app.console.service.OVER_SHOWN", 1)
    again = ConsoleService(store)
    again.start()
    try:
        assert {job.job_id for job in again.jobs.live()} == {ids[3], ids[2]}, "the one that is not over; the newest"
        assert again.queries.list_jobs() == before
        assert again.metrics.registry.get_sample_value("openrecycle_jobs", {"state": "finished"}) == 2
        assert again.jobs.find(ids[1]).state.over_reason == "as asked"
        assert {job.job_id for job in again.jobs.live()} == {*ids[1:]} and again.queries.list_jobs() == before
        again.histories.delete(ids[0], "ada")
        assert [job.job_id for job in again.queries.list_jobs()] == ids[:0:-1]
        with console_refuses("unknown_job"):
            again.jobs.find(ids[0])
    finally:
        again.close()


def test_nothing_is_stored_of_a_job_that_was_deleted_while_somebody_had_it(console: ConsoleService) -> None:
    """As the tick has that was at other jobs meanwhile. Its rows may be there still, or be gone."""
    job = console.jobs.find(console.jobs.create(SPEC)[0].job_id)
    console.histories.delete(job.job_id, "ada")
    for _ in range(2):
        with console_refuses("unknown_job"):
            job.record(Note("info", "job", "too late"))
        with console_refuses("unknown_job"):
            job.tick()
        until(lambda: not JobRows(console.database).hidden(), "its rows are deleted")


def test_the_console_of_this_process(console: ConsoleService) -> None:
    set_console(None)
    with pytest.raises(RuntimeError, match=golden("no-console-runs-in-this")):
        get_console()
    set_console(console)
    assert get_console() is console
    set_console(None)


def test_after_a_restart_what_is_known_of_a_worker_is_as_old_as_it_is(store: Store) -> None:
    before = ConsoleService(store)
    before.start()
    job_id = before.jobs.create(SPEC)[0].job_id
    register_all(before, job_id)
    beat = Heartbeat(worker="W0_0", incarnation="W0_0-a", seq=5, generation=1, iteration=9, phase="training")
    before.reports.heartbeats(job_id, [beat])
    before.close()
    with store.database.write() as session:
        session.execute(text("UPDATE worker SET heard_at = heard_at - 600"))
    console = ConsoleService(store)
    console.start()
    try:

        def age() -> float:
            return console.queries.view(job_id).workers[0].heartbeat_age or 0.0

        assert age() >= 600
        labels = {"job": job_id, "quantile": "1"}
        told = console.metrics.registry.get_sample_value("openrecycle_job_heartbeat_age_seconds", labels)
        assert told is not None and told >= 600, "it is the same for Prometheus"
        state = console.queries.view(job_id).workers[0].state
        assert state is not RoleState.FAILED, "the time without a console is no silence"
        console.reports.heartbeats(job_id, [beat.model_copy(update={"seq": 6})])
        until(lambda: age() < 600)
    finally:
        console.close()


def test_a_worker_of_a_job_that_is_over_was_heard_when_it_was_and_not_when_the_machine_began(store: Store) -> None:
    before = ConsoleService(store)
    before.start()
    job_id = before.jobs.create(SPEC)[0].job_id
    register_all(before, job_id)
    beat = Heartbeat(worker="W0_0", incarnation="W0_0-a", seq=5, generation=1, iteration=9, phase="training")
    before.reports.heartbeats(job_id, [beat])
    before.reports.finish(job_id, JobFinished(state="finished"))
    before.close()
    with store.database.write() as session:
        session.execute(text("UPDATE worker SET heard_at = heard_at + 86400 WHERE name = 'W0_0'"))
    console = ConsoleService(store)
    console.start()
    try:
        heard, never, *_ = console.queries.view(job_id).workers
        assert heard.heartbeat_age is not None and heard.heartbeat_age < 60, "no sooner than when this console began"
        assert never.heartbeat_age is None
    finally:
        console.close()


class LookedTooEarly(Store):
    """Whoever asks for a key's job does so before it is committed."""

    def job_of_key(self, idempotency_key: str) -> Record | None:
        return None


@pytest.mark.parametrize("kind", [Store, LookedTooEarly])
def test_a_job_whose_commit_was_not_acknowledged_is_there_for_who_asks_again(tmp_path: Path, kind: type[Store]) -> None:
    database = sqlite_in(tmp_path, FlakyDatabase)
    console = ConsoleService(kind(database), tolerance=0)
    try:
        database.fault = "answer lost"
        with pytest.raises(ConsoleError) as lost:
            console.jobs.create(SPEC, "key")
        assert lost.value.status == 503
        database.heal()
        for _ in range(2):
            created, new = console.jobs.create(SPEC, "key")
            assert not new and [job.job_id for job in console.jobs.live()] == [created.job_id]
        assert console.jobs.find(created.job_id).plans.ahead.wanted, "plans are made ahead as for any new one"
        register_all(console, created.job_id)
    finally:
        console.close()
        database.close()


class Beside(Database):
    """Says what was asked of it in an event loop."""

    wrong = 0

    def _look(self) -> None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            self.wrong += 1

    @contextmanager
    def read(self) -> Iterator[Session]:
        self._look()
        with super().read() as session:
            yield session

    @contextmanager
    def write(self, *, lasting: bool = True) -> Iterator[Session]:
        self._look()
        with super().write(lasting=lasting) as session:
            yield session


PROCESS = {"worker": "W0_0", "incarnation": "W0_0-a"}
BEAT = PROCESS | {"seq": 1, "generation": 1, "iteration": 0, "phase": "training"}
ASKED = [
    ("GET", "events", None),
    ("GET", "deployment?after=9", None),
    ("GET", "commands", None),
    ("GET", "catalog", None),
    ("GET", "workers/W0_0/history", None),
    ("GET", "history.zip", None),
    ("POST", "heartbeats", {"heartbeats": [BEAT]}),
    ("POST", "logs", PROCESS | {"lines": []}),
    ("POST", "finish", {"state": "finished"}),
]


def test_the_event_loop_reads_no_job_that_is_over(tmp_path: Path) -> None:
    """Thousands of its workers would be read while no heartbeat is heard."""
    database = sqlite_in(tmp_path, Beside)
    console = ConsoleService(Store(database), tolerance=0)
    ids = [console.jobs.create(SPEC)[0].job_id for _ in ASKED]
    for job_id in ids:
        register_all(console, job_id)
        console.reports.finish(job_id, JobFinished(state="finished"))
    console.close()
    again = ConsoleService(Store(database), tolerance=0)
    again.jobs.follow()
    try:
        client = TestClient(Starlette(routes=create_routes(again)), base_url="http://localhost")
        for job_id, (method, what, body) in zip(ids, ASKED, strict=True):
            answer = client.request(method, f"/api/v1/jobs/{job_id}/{what}", json=body)
            assert answer.status_code in (200, 204), (what, answer.text)
            assert job_id in {job.job_id for job in again.jobs.live()}, what
            assert not database.wrong, what
    finally:
        again.close()
        database.close()
