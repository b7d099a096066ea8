from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import delete, func, insert, select
from test_store import event, generation, make_job

from openrecycle.db import job_rows
from openrecycle.db.job_rows import Retention
from openrecycle.db.models import AcknowledgementRow, EventSeenRow, JobPlanRow, PlanRow
from openrecycle.db.plan_rows import SavedPlans
from openrecycle.db.session import Database
from openrecycle.db.store import JobUpdate, Store

MANY = {"events": 10**6, "states": 10**6, "generations": 10**6, "plans": 10**6}


@pytest.fixture
def trim(database: Database, monkeypatch: pytest.MonkeyPatch) -> Retention:
    monkeypatch.setattr(job_rows, "ROWS", 3)
    return Retention(database)


def all_of(trim: Retention, job_id: str, **keep: int) -> list[int]:
    """What each step deleted."""
    steps = []
    while count := trim.trim_job(job_id, **{**MANY, **keep}):
        steps.append(count)
    return steps


def test_the_newest_events_stay(trim: Retention, store: Store, database: Database) -> None:
    make_job(store, "a")
    make_job(store, "b")
    for job in ("a", "b"):
        store.apply(job, JobUpdate(events=[event(i) for i in range(1, 12)]))
    store.see_events("a", [1, 2, 11], "Ann")
    assert all_of(trim, "a", events=4) == [3, 3, 1], "a bounded number of rows at a time"
    assert [row["seq"] for row in store.events("a")] == [8, 9, 10, 11]
    assert store.last_event("a") == 11 and len(store.events("b")) == 11
    with database.read() as session:
        assert list(session.scalars(select(EventSeenRow.seq))) == [11]


def test_each_worker_keeps_its_last_state(trim: Retention, store: Store, database: Database) -> None:
    make_job(store)
    rows = [("W0_0", "running"), *[("W1_1", s) for s in ("running", "suspect") * 4]]
    store.apply("job", JobUpdate(events=[event(1)], states=[{"worker": w, "state": s, "at": 1.0} for w, s in rows]))
    assert sum(all_of(trim, "job", states=2)) == 6
    assert [row["state"] for row in store.worker_states("job", "W0_0")] == ["running"]
    assert [row["state"] for row in store.worker_states("job", "W1_1")] == ["running", "suspect"]


def test_acknowledgements_of_old_generations_go(trim: Retention, store: Store, database: Database) -> None:
    make_job(store)
    for number in range(1, 6):
        store.apply("job", JobUpdate(plan=("f", b"{}", [], False), generation=generation(number)))
        with database.write() as session:
            ack = {"job_id": "job", "worker": "W0_0", "incarnation": "a", "state": "adopted", "iteration": 0, "at": 1.0}
            session.execute(insert(AcknowledgementRow).values(generation=number, **ack))
    all_of(trim, "job", generations=2)
    assert [row["generation"] for row in store.acknowledgements("job")] == [4, 5]
    assert len(store.generations("job")) == 5


def test_plans_made_ahead_that_never_ran(trim: Retention, store: Store, database: Database) -> None:
    make_job(store)
    for i in range(6):
        store.put_plan("job", f"f{i}", b"plan", [], True)
        time.sleep(0.002)  # created one after another
    store.apply("job", JobUpdate(plan=("f0", b"{}", [], False), generation=generation(1, "f0")))
    SavedPlans(database).save("f1", b"plan", "kept", {})
    all_of(trim, "job", plans=2)
    assert {row["fingerprint"] for row in store.job_plans("job")} == {"f0", "f4", "f5"}
    assert trim.drop_orphans() == 2
    assert trim.drop_orphans() == 0
    assert [store.plan(f"f{i}") is not None for i in range(6)] == [True, True, False, False, True, True]


def test_a_plan_that_ran_for_a_while_stays(trim: Retention, store: Store, database: Database) -> None:
    """Until newcomers had their state, say: it is a generation's, too."""
    make_job(store)
    for i in range(4):
        store.put_plan("job", f"f{i}", b"plan", [], True)
        time.sleep(0.002)  # created one after another
    store.apply("job", JobUpdate(generation=generation(1, "f1"), later=[(1, {"interim_plan": "f0"})]))
    all_of(trim, "job", plans=1)
    assert {row["fingerprint"] for row in store.job_plans("job")} == {"f0", "f1", "f3"}
    saved = SavedPlans(database)
    saved.save("f0", b"plan", "kept", {})
    with database.write() as session:  # as it was before such plans were linked to the job
        session.execute(delete(JobPlanRow).where(JobPlanRow.fingerprint == "f0"))
    assert saved.forget("f0")
    assert trim.drop_orphans() == 1
    assert [store.plan(f"f{i}") is not None for i in range(4)] == [True, True, False, True]


def test_a_plan_that_is_taken_up_meanwhile_stays(trim: Retention, store: Store, database: Database) -> None:
    """Plans come and lose their last reference while orphans are dropped: nobody's plan is lost."""
    make_job(store)
    stop = threading.Event()
    saved = SavedPlans(database)
    errors: list[BaseException] = []

    def drop() -> None:
        while not stop.is_set():
            try:
                trim.drop_orphans()
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for i in range(40):
            saved.save(f"f{i % 3}", b"{}", "n", {})
            assert store.plan(f"f{i % 3}") == b"{}"
            if i % 2:
                saved.forget(f"f{i % 3}")
    finally:
        stop.set()
        thread.join(30)
    assert errors == []
    with database.read() as session:
        stored = session.scalar(select(func.count()).select_from(PlanRow))
    trim.drop_orphans()
    assert {row["fingerprint"] for row in saved.saved()} <= {f"f{i}" for i in range(3)} and stored is not None
