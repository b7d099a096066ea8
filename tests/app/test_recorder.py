"""From heartbeats to the history that is read of a worker, with a real database and a real console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import text
from ui_console import console_refuses

from openrecycle.agent.coordination.membership import Note
from openrecycle.agent.messages.protocol import Heartbeat, JobFinished, JobSpec, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.recorder import MAX_SAMPLES, Recorder, clock_offset
from openrecycle.app.runtime.errors import ConsoleError, SettingsError
from openrecycle.app.runtime.settings import RetentionLimits, seconds
from openrecycle.db.heartbeats import Level
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.databases import history_bytes
from tests.golden import golden

pytestmark = pytest.mark.processes

SPEC = JobSpec(name="job", pipelines=2, stages=2, micro_batches=2, iterations=50)


@pytest.fixture
def console(database: Database) -> Iterator[ConsoleService]:
    """Its threads do not run: the tests say when a minute is over."""
    console = ConsoleService(Store(database))
    yield console
    console.close()


@pytest.fixture
def job(console: ConsoleService) -> LiveJob:
    created, _ = console.jobs.create(SPEC)
    for place in range(4):
        name = f"W{place // 2}_{place % 2}"
        console.reports.register(created.job_id, [Registration(worker=name, incarnation="a", host="h", pid=7)])
    return console.jobs.find(created.job_id)


def beat(job: LiveJob, seq: int, worker: str = "W1_0", incarnation: str = "a", **more: object) -> None:
    fields = {"op_milliseconds": {"F": 10.0 + seq}, "resident_bytes": 2**30, "phase": "training", **more}
    job.heard(Heartbeat(worker=worker, incarnation=incarnation, seq=seq, generation=1, iteration=seq, **fields))  # type: ignore[arg-type]


def test_what_is_not_written_yet_is_read_too(console: ConsoleService, job: LiveJob) -> None:
    for seq in range(3):
        beat(job, seq)
    beat(job, 1)  # comes late: it shows that the worker lives, and no more
    job.take_heartbeats()
    now = time.time()
    before = console.recorder.series(job, "W1_0", now - 60, now + 60)
    assert before.step == 1 and sum(before.beats) == 3
    assert set(before.metrics) == {"F", "resident_bytes", "silence_seconds"}
    assert before.iteration[-1] == 2 and set(before.phase) == {"training"}
    console.recorder.write(float("inf"))
    after = console.recorder.series(job, "W1_0", now - 60, now + 60)
    assert after == before
    low, high = after.metrics["F"].low, after.metrics["F"].high
    assert (min(v for v in low if v), max(v for v in high if v)) == (10, 12)
    assert console.recorder.series(job, "W0_0", now - 60, now + 60).at == ()
    assert console.recorder.series(job, "W1_0", now - 60, now + 60, Level.HOUR).step == 3600


def test_only_minutes_that_are_over_are_written(console: ConsoleService, job: LiveJob, database: Database) -> None:
    beat(job, 0)
    job.take_heartbeats()
    console.recorder.write(time.time() - 10)
    assert history_bytes(database, job.job_id) == {}
    console.recorder.write(time.time() + 10)
    assert set(history_bytes(database, job.job_id)) == {Level.SECOND, Level.MINUTE}
    assert len(job.measurements.recording.peek(2, clock_offset())) == 0


def test_a_process_that_is_new_has_not_been_silent(console: ConsoleService, job: LiveJob) -> None:
    beat(job, 0)
    job.take_heartbeats()
    console.reports.register(job.job_id, [Registration(worker="W1_0", incarnation="b", host="h", pid=8)])
    beat(job, 0, incarnation="b")
    job.take_heartbeats()
    rows = job.measurements.recording.peek(2, clock_offset())
    assert len(rows) == 2 and rows.counts[:, 6].tolist() == [0, 0]


def test_heartbeats_wait_for_a_database_that_fails(console: ConsoleService, job: LiveJob, database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("alter table heartbeat rename to elsewhere"))
    beat(job, 0)
    job.take_heartbeats()
    console.recorder.write(float("inf"))
    with database.engine.begin() as connection:
        connection.execute(text("alter table elsewhere rename to heartbeat"))
    console.recorder.write(0)
    now = time.time()
    assert console.recorder.series(job, "W1_0", now - 60, now + 60).beats == (1,)


def test_however_many_jobs_have_been_heard_all_of_it_is_written(database: Database) -> None:
    """What is bounded is what a database that fails has refused: of that the newest is kept."""
    console = ConsoleService(Store(database))
    console.recorder.most_waiting = 2
    jobs = [console.jobs.find(console.jobs.create(SPEC)[0].job_id) for _ in range(5)]

    def hear() -> None:
        for job in jobs:
            beat(job, round(time.monotonic() * 1000))
            job.take_heartbeats()

    def written() -> list[int]:
        found = (console.recorder.series(job, "W1_0", time.time() - 60, time.time() + 60) for job in jobs)
        return [sum(series.beats) for series in found]

    try:
        for job in jobs:
            console.reports.register(job.job_id, [Registration(worker="W1_0", incarnation="a", host="h", pid=7)])
        hear()
        console.recorder.write(float("inf"))
        assert written() == [1] * 5
        with database.write() as session:
            session.execute(text("ALTER TABLE heartbeat RENAME TO away"))
        hear()
        console.recorder.write(float("inf"))
        with database.write() as session:
            session.execute(text("ALTER TABLE away RENAME TO heartbeat"))
        console.recorder.write(float("inf"))
        assert written() == [1, 1, 1, 2, 2]
    finally:
        console.close()


def test_a_console_that_ends_writes_the_rest(database: Database) -> None:
    console = ConsoleService(Store(database))
    console.start()
    try:
        created, _ = console.jobs.create(SPEC)
        console.reports.register(created.job_id, [Registration(worker="W1_0", incarnation="a", host="h", pid=7)])
        beat(console.jobs.find(created.job_id), 0)
    finally:
        console.close()
    again = ConsoleService(Store(database))
    again.start()
    try:
        now = time.time()
        assert again.recorder.series(again.jobs.find(created.job_id), "W1_0", now - 120, now + 60).beats == (1,)
    finally:
        again.close()


def test_old_samples_expire(console: ConsoleService, job: LiveJob, database: Database) -> None:
    """At a fixed time of day: what is rolled up when depends on where in its hour a sample lies."""
    beat(job, 0)
    job.take_heartbeats()
    taken = job.measurements.recording.peek(2, clock_offset())
    ten_past = 1_800_000_000 // 86_400 * 86_400 + 600
    keep = RetentionLimits()
    recorder = Recorder(database, list, keep, list)
    recorder.heartbeats.add(job.job_id, [replace(taken, at=np.array([ten_past]))])
    assert set(history_bytes(database, job.job_id)) == {Level.SECOND, Level.MINUTE}
    recorder.tidy(ten_past + keep.seconds + 61)
    assert set(history_bytes(database, job.job_id)) == {Level.MINUTE}
    recorder.tidy(ten_past + 3600 + 180)
    assert set(history_bytes(database, job.job_id)) == {Level.MINUTE, Level.HOUR}
    recorder.tidy(ten_past + keep.minutes + 3700)
    assert set(history_bytes(database, job.job_id)) == {Level.HOUR}
    recorder.tidy(ten_past + keep.hours + 90_000)
    assert history_bytes(database, job.job_id) == {}
    recorder.trim()


def test_of_a_job_that_is_over_nothing_more_is_looked_for(
    console: ConsoleService, job: LiveJob, database: Database
) -> None:
    recorder = Recorder(database, lambda: [job], RetentionLimits(events=1000), lambda: [job.job_id])

    def kept(more: int) -> int:
        job.record(*(Note("info", "job", f"line {job.feed.last} {n}") for n in range(more)))
        recorder.trim()
        return len(console.queries.events(job.job_id, 0, 2000))

    assert (kept(1200), kept(4)) == (1000, 1000)
    console.reports.finish(job.job_id, JobFinished(state="stopped"))
    assert (kept(1), kept(2)) == (1000, 1002)


def test_the_step_follows_what_is_asked_for(console: ConsoleService, job: LiveJob) -> None:
    now = time.time()
    for since, step in ((now - 600, 1), (now - 3600, 60), (now - 86_400, 60), (now - 3 * 86_400, 3600)):
        assert console.recorder.series(job, "W0_0", since, now).step == step
    with console_refuses("unknown_worker"):
        console.recorder.series(job, "W9_9", now - 1, now)
    with console_refuses("invalid", "until"):
        console.recorder.series(job, "W0_0", now, now)
    with pytest.raises(ConsoleError, match=f"at most {MAX_SAMPLES:,} samples"):
        console.recorder.series(job, "W0_0", now - 86_400, now, Level.SECOND)


def test_how_long_things_are_kept() -> None:
    assert [seconds(t, "--keep-hours") for t in ("90s", "15m", "48h", "400d")] == [90, 900, 172_800, 34_560_000]
    for wrong in ("", "15", "1.5h", "-3m", "4w", "9999999999s"):
        with pytest.raises(SettingsError, match="--keep-hours: got"):
            seconds(wrong, "--keep-hours")
    with pytest.raises(SettingsError, match=golden("keep-minutes-got-60-s-expected")):
        RetentionLimits(minutes=60)
    with pytest.raises(SettingsError, match="--keep-events"):
        RetentionLimits(events=5)


def test_a_worker_that_has_not_come_yet_has_a_detail(console: ConsoleService) -> None:
    job_id = console.jobs.create(SPEC)[0].job_id
    detail = console.queries.worker_detail(console.queries.view(job_id), "W1_1", time.time())
    assert detail.stays == () and detail.op_times == ()
