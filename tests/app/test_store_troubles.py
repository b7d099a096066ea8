"""A database that is full, or that a newer version has used: said in words, and before anybody relies on it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from console_server import ROOT
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.api.plans import LARGE
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import AGAIN_SECONDS, LiveJob
from openrecycle.app.observing import history as histories
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Children
from openrecycle.app.server import create_routes
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from tests.agent.launches import Launched
from tests.conftest import NO_BYTECODE, new_database, postgres_cluster
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes

SPEC = {"name": "x", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 9}


def fill(database: Database) -> None:
    """From now on the file has no room for another page."""

    def limit(connection: object, *_: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        cursor.execute("PRAGMA max_page_count=1")  # at least as many as there are
        cursor.close()

    database.engine.dispose()
    event.listen(database.engine, "connect", limit)


def test_on_a_full_disk_it_is_not_ready_and_says_why(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrecycle.app.console.service.PROBE_SECONDS", 0.0)
    console = ConsoleService(Store(database), tolerance=0)
    try:
        asked = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost")
        assert asked.get("/readyz").status_code == 200
        fill(database)
        monkeypatch.setattr("openrecycle.db.store.PROBE_BYTES", 1 << 20)  # more than the pages that are free by now
        answer = asked.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "disk_full")
        assert "full" in answer.json()["detail"] and answer.headers["retry-after"] == "1"
        large = {**SPEC, "pipelines": 64, "stages": 64}
        refused = asked.post("/api/v1/jobs", json=large)
        assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
        assert "OperationalError" not in refused.text
        assert asked.get("/api/v1/jobs").status_code == 200, "what is there can be read"
        assert asked.get("/healthz").status_code == 200, "starting it again would not help"
    finally:
        console.close()


def test_a_file_that_was_deleted_is_said_and_takes_nothing_more(tmp_path: Path) -> None:
    """Else all would go on as if nothing were wrong, and everything since would be lost with the console's end."""
    database = sqlite_in(tmp_path)
    console = ConsoleService(Store(database), tolerance=0)
    try:
        asked = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost")
        assert asked.post("/api/v1/jobs", json=SPEC).status_code == 201
        job = asked.get("/api/v1/jobs").json()["jobs"][0]["job_id"]
        (tmp_path / "console.db").unlink()
        for answer in (
            asked.get("/readyz"),
            asked.post("/api/v1/jobs", json=SPEC),
            asked.get(f"/api/v1/jobs/{job}/history.zip"),
        ):
            assert (answer.status_code, answer.json()["code"]) == (503, "database_gone")
        assert len(asked.get("/api/v1/jobs").json()["jobs"]) == 1
        database.engine.dispose()  # from now on, connections are new
        unread = asked.get(f"/api/v1/jobs/{job}/workers/W0_0/history")
        assert (unread.status_code, unread.json()["code"]) == (503, "database_gone")
        assert not (tmp_path / "console.db").exists(), "nothing has made another one"
    finally:
        console.close()
        database.close()


@pytest.mark.parametrize("silent", [False, True])
def test_a_job_with_nothing_but_heartbeats_to_store_says_that_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """A paused one: its page said that all was well, and the operator's next click failed. silent: no more of them come
    when they could be stored again."""
    monkeypatch.setattr("openrecycle.app.console.service.FLUSH_SECONDS", 0.05)
    database = sqlite_in(tmp_path)
    console = ConsoleService(Store(database), tolerance=0)
    beats = iter(range(1, 10_000))
    try:
        job = JobHere(console, "job").register()
        console.start()
        file, away = tmp_path / "console.db", tmp_path / "away.db"

        def said() -> str:
            job.beat(next(beats), 1, "paused")
            return console.queries.view(job.job_id).sentence

        console.operators.pause(job.job_id, "ada")
        until(lambda: said() and console.operators.choice(job.job_id).stopped, "all have stopped")
        well = said()
        file.rename(away)
        until(lambda: golden("the-file-of-the-database").lower() in said().lower(), "the page says it")
        away.rename(file)
        until(lambda: not console.jobs.find(job.job_id).unstorable if silent else said() == well, "and no more")
    finally:
        console.close()
        database.close()


@pytest.mark.xdist_group("full disk")
def test_a_full_disk_of_postgresql_is_said_in_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a disk of its own, which is filled up, and has room again; then the server is gone."""
    monkeypatch.setattr("openrecycle.app.console.service.PROBE_SECONDS", 0.0)
    with ExitStack() as stack:
        cluster = ExitStack()
        stack.push(cluster)
        database = Database(new_database(cluster.enter_context(postgres_cluster(disk_mib=128))))
        stack.callback(database.close)
        database.upgrade()
        console = ConsoleService(Store(database), tolerance=0)
        stack.callback(console.close)
        asked = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost")
        for _ in range(3):
            assert asked.get("/readyz").status_code == 200
        with database.engine.connect() as connection:
            filler = connection.scalar(text("show data_directory")) + "/filler"
            with pytest.raises(OperationalError, match="No space left"):
                rows = "select repeat('x', 1000000) from generate_series(1, 1000)"
                connection.execute(text(f"copy ({rows}) to '{filler}'"))
        answer = asked.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "disk_full")
        refused = asked.post("/api/v1/jobs", json={**SPEC, "pipelines": 64, "stages": 64})
        assert (refused.status_code, refused.json()["code"]) == (503, "disk_full")
        assert asked.get("/api/v1/jobs").status_code == 200, "what is there can be read"
        assert asked.get("/healthz").status_code == 200, "starting it again would not help"
        with database.engine.connect() as connection:
            connection.execute(text(f"copy (select 1) to '{filler}'"))
        assert asked.get("/readyz").status_code == 200, "there is room again"
        assert asked.post("/api/v1/jobs", json=SPEC).status_code == 201
        cluster.close()
        gone = asked.get("/readyz")
        assert (gone.status_code, gone.json()["code"]) == (503, "unavailable")
        assert golden("it-does-not-answer") in gone.json()["detail"], gone.text


def test_a_file_that_may_not_grow_is_said_in_words(tmp_path: Path) -> None:
    """As above, with the system's own limit, in a process of its own."""
    script = """
import resource, sys
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.session import Database
from openrecycle.db.store import Store
database = Database(sys.argv[1])
database.upgrade()
console = ConsoleService(Store(database), tolerance=0)
console.ready()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
import openrecycle.app.console.service
openrecycle.app.console.service.PROBE_SECONDS = 0.0
try:
    console.ready()
except ConsoleError as error:
    print(error.code, error.detail)
"""
    command = [sys.executable, "-c", script, f"sqlite:///{tmp_path / 'console.db'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | NO_BYTECODE)
    assert done.stdout.startswith(("disk_f", "read_only")), (done.stdout, done.stderr)
    assert "OperationalError" not in done.stdout


def test_a_database_of_a_newer_version_is_one_sentence(database: Database, tmp_path: Path) -> None:
    with database.write() as session:
        session.execute(text("update alembic_version set version_num = '9999'"))
    url, errors = f"sqlite:///{tmp_path / 'console.db'}", tmp_path / "errors"
    command = ("serve", "--port", "0", "--api-only", "--database-url", url)
    assert Launched(*command, errors=errors, module="openrecycle.app").wait(120) == 2
    said = errors.read_text()
    assert "another version" in said and "Traceback" not in said and said.count("\n") == 1


def test_a_plan_of_another_job_is_none_of_this_ones(database: Database) -> None:
    console = ConsoleService(Store(database), tolerance=0)
    try:
        asked = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost")
        made = [console.jobs.create(JobSpec.model_validate(SPEC | {"micro_batches": n}))[0].job_id for n in (2, 3)]
        plan = console.jobs.find(made[0]).plans.catalog.plan_for([])[0]
        console.jobs.find(made[0]).plans.file_plan(plan)
        path = f"/api/v1/jobs/{{}}/plans/{plan.fingerprint}"
        assert asked.get(path.format(made[0])).status_code == 200
        assert asked.get(path.format(made[1])).status_code == 404
    finally:
        console.close()


def test_a_database_that_fails_within_an_answer_is_said_in_words(here: ConsoleHere) -> None:
    """Not at its first query."""
    job = JobHere(here.console, "fails").register()
    asked = TestClient(Starlette(routes=create_routes(here.console)), base_url="http://localhost")
    path = f"/api/v1/jobs/{job.job_id}/workers/W0_0/history"
    assert asked.get(path).status_code == 200

    def fail(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "FROM worker_state" in statement:
            raise OperationalError(statement, {}, RuntimeError("away"))

    event.listen(here.database.engine, "before_cursor_execute", fail)
    try:
        refused = asked.get(path)
    finally:
        event.remove(here.database.engine, "before_cursor_execute", fail)
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")


@pytest.mark.parametrize("within", [False, True])
def test_a_job_whose_change_can_not_be_stored_is_not_read_back_at_every_tick(
    here: ConsoleHere, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """within: the change fails after a tick, before something else that is done in the same turn."""
    job, read_at = JobHere(here.console, "unstored").register(), list[float]()
    read, failed = here.store.newest_generation, threading.Event()

    def reading(job_id: str) -> object:
        # Others may read it back at each moment, with changes of their own: here plans that were made ahead.
        if job_id == job.job_id and threading.current_thread().name == "console-ticks":
            read_at.append(time.monotonic())
        return read(job_id)

    monkeypatch.setattr(here.store, "newest_generation", reading)

    def fail(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            raise OperationalError(statement, {}, RuntimeError("database or disk is full"))

    def consider(live: LiveJob) -> None:
        if live.job_id == job.job_id and not failed.is_set():
            failed.set()
            with pytest.raises(ConsoleError):
                job.die("W1_2")
            live.record()

    event.listen(here.database.engine, "before_cursor_execute", fail)
    try:
        if within:
            monkeypatch.setattr(here.console.operators, "consider", consider)
            until(failed.is_set, "it fails")
        else:
            with pytest.raises(ConsoleError):
                job.die("W1_2")
        until(lambda: len(read_at) > 2, "it is tried again")
    finally:
        event.remove(here.database.engine, "before_cursor_execute", fail)
    assert min(later - one for one, later in pairwise(read_at)) > 0.9 * AGAIN_SECONDS
    until(lambda: not here.console.jobs.find(job.job_id).unstorable, "there is room again")


def test_a_machine_that_has_no_process_left_is_said_in_words(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: Children) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    console = ConsoleService(Store(database))
    console.plans.ahead.held_ops = 1  # they are a catalog's
    try:
        asked = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost/api/v1/")
        job = job_doc(Job.uniform(2, 2, 2)).model_dump(mode="json")
        monkeypatch.setattr(Children, "_begin", none_left)
        created = asked.post("jobs", json=SPEC)
        assert created.status_code == 201, "plans are made when they are needed"
        history = f"jobs/{created.json()['job_id']}/history.zip"
        assert asked.post("solves", json={"kind": "plan", "job": job}).json()["state"] == "failed"
        answers = [
            asked.post("catalogs", json={"job_id": created.json()["job_id"], "tolerance": 1}),
            asked.post("plans", json={"name": "mine", "plan": {"text": "x" * LARGE}}),
            asked.get(history),
        ]
        monkeypatch.setattr(histories, "scratch", lambda: str(tmp_path / "nowhere"))
        answers.append(asked.get(history))
    finally:
        monkeypatch.undo()
        console.close()
    for answer in answers:
        said = answer.json()
        assert (answer.status_code, said["code"], answer.headers.get("retry-after")) == (503, "unavailable", "1"), said
        assert "nowhere" not in said["detail"]
