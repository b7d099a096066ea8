"""Plans under a name, on both kinds of database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, update

from openrecycle.db.models import PlanRow, SavedPlanRow
from openrecycle.db.plan_rows import SavedPlans, keep_plan
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Worker
from openrecycle.planner.plans.packed import packed, unpack
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.databases import on_postgresql, until_waiting

SPEC = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "workers": []}


@pytest.fixture
def plans(database: Database) -> SavedPlans:
    return SavedPlans(database)


def stored(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(PlanRow.fingerprint)))


def test_saved_listed_read_and_forgotten(plans: SavedPlans, store: Store, database: Database) -> None:
    plans.save("a", b'{"plan": 1}', "first", {"period": 29, "failed": ["W1_2"]})
    plans.save("b", b'{"plan": 2}', "second", {"period": 27, "failed": []})
    listed = plans.saved()
    assert {(row["fingerprint"], row["name"], row["period"]) for row in listed} == {
        ("a", "first", 29),
        ("b", "second", 27),
    }
    assert listed[0]["created"] >= listed[1]["created"], "newest first"
    assert store.plan("a") == b'{"plan": 1}'
    assert plans.forget("a")
    assert not plans.has("a") and stored(database) == {"b"}
    assert not plans.forget("a")


def test_saving_again_renames(plans: SavedPlans) -> None:
    plans.save("a", b"{}", "first", {})
    created = plans.saved()[0]["created"]
    plans.save("a", b"{}", "better name", {})
    assert [(row["name"], row["created"]) for row in plans.saved()] == [("better name", created)]


@pytest.fixture(scope="module")
def proofs() -> tuple[Plan, Plan]:
    """The same ops, as two solvers leave them: the second has proven that no plan is shorter."""
    problem = Problem(Job.uniform(2, 3, 4), frozenset({Worker(1, 1)}), memory=MemoryLimit("1f1b"))
    open_ = make_plan(problem, solver="list")
    assert (open_.metrics.lower_bound, open_.metrics.period) == (26, 27)
    metrics = open_.metrics.model_copy(update={"lower_bound": open_.metrics.period, "gap": 0.0})
    return open_, open_.model_copy(update={"metrics": metrics})


def test_the_better_proof_of_the_same_plan_is_kept(proofs: tuple[Plan, Plan], plans: SavedPlans, store: Store) -> None:
    open_, closed = proofs
    name = open_.fingerprint
    store.create_job("job", **SPEC)  # type: ignore[arg-type]
    store.put_plan("job", name, packed(open_), [], False)
    assert plans.save(name, packed(open_), "open", {"lower_bound": 26})
    assert plans.save(name, packed(closed), "closed", {"lower_bound": 27})
    for _ in range(2):
        assert unpack(store.plan(name) or b"") == closed
        assert [(row["name"], row["lower_bound"]) for row in plans.saved()] == [("closed", 27)]
        # Nothing worse takes its place.
        assert not plans.save(name, packed(open_), "closed", {"lower_bound": 26})
        store.put_plan("job", name, packed(open_), [], False)


def test_a_plan_of_a_job_is_stored_once_and_outlives_its_name(
    plans: SavedPlans, store: Store, database: Database
) -> None:
    store.create_job("job", **SPEC)  # type: ignore[arg-type]
    store.put_plan("job", "a", b"{}", [], False)
    assert not plans.has("a"), "not everything that is stored has been saved"
    plans.save("a", b"{}", "kept", {})
    assert stored(database) == {"a"}
    assert plans.forget("a")
    assert store.plan("a") == b"{}" and plans.saved() == []


def test_a_job_that_takes_a_plan_while_it_is_forgotten_has_it(
    plans: SavedPlans, store: Store, database: Database
) -> None:
    store.create_job("job", **SPEC)  # type: ignore[arg-type]
    for turn in range(10):
        name = f"plan{turn}"
        plans.save(name, b"{}", "x", {})
        both = threading.Barrier(2)
        failures: list[BaseException] = []

        def forget(name: str = name, both: threading.Barrier = both) -> None:
            both.wait()
            plans.forget(name)

        other = threading.Thread(target=forget)
        other.start()
        both.wait()
        try:
            store.put_plan("job", name, b"{}", [], False)
        except BaseException as error:
            failures.append(error)
        other.join(30)
        assert failures == [] and store.plan(name) == b"{}"


def test_to_forget_a_plan_waits_until_it_is_saved_again(postgres_url: str) -> None:
    """SQLite has one writer."""
    database = on_postgresql(postgres_url)
    plans = SavedPlans(database)
    plans.save("a", b"{}", "first", {})
    with ThreadPoolExecutor(1) as other:
        with database.write() as session:
            keep_plan(database, session, "a", b"{}")
            forgotten = other.submit(plans.forget, "a")
            until_waiting(database)
            session.execute(update(SavedPlanRow).values(name="again"))
        assert forgotten.result(30)
    assert plans.saved() == [] and stored(database) == set()
    database.close()
