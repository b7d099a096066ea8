"""Plans under a name, on both kinds of database."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select

from openrecycle.db.models import PlanRow
from openrecycle.db.plan_rows import SavedPlans
from openrecycle.db.session import Database
from openrecycle.db.store import Store

SPEC = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "workers": []}


@pytest.fixture
def plans(database: Database) -> SavedPlans:
    return SavedPlans(database)


def stored(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(PlanRow.fingerprint)))


def test_saved_listed_read_and_forgotten(plans: SavedPlans, database: Database) -> None:
    plans.save("a", '{"plan": 1}', "first", {"period": 29, "failed": ["W1_2"]})
    plans.save("b", '{"plan": 2}', "second", {"period": 27, "failed": []})
    listed = plans.saved()
    assert {(row["fingerprint"], row["name"], row["period"]) for row in listed} == {
        ("a", "first", 29),
        ("b", "second", 27),
    }
    assert listed[0]["created"] >= listed[1]["created"], "newest first"
    assert plans.document("a") == '{"plan": 1}'
    assert plans.forget("a")
    assert plans.document("a") is None and not plans.has("a") and stored(database) == {"b"}
    assert not plans.forget("a")


def test_saving_again_renames(plans: SavedPlans) -> None:
    plans.save("a", "{}", "first", {})
    created = plans.saved()[0]["created"]
    plans.save("a", "{}", "better name", {})
    assert [(row["name"], row["created"]) for row in plans.saved()] == [("better name", created)]


def test_a_plan_of_a_job_is_stored_once_and_outlives_its_name(
    plans: SavedPlans, store: Store, database: Database
) -> None:
    store.create_job("job", **SPEC)  # type: ignore[arg-type]
    store.put_plan("job", "a", "{}", [], False)
    assert plans.document("a") is None, "not everything that is stored has been saved"
    plans.save("a", "{}", "kept", {})
    assert stored(database) == {"a"}
    assert plans.forget("a")
    assert store.plan("a") == "{}" and plans.saved() == []


def test_a_job_that_takes_a_plan_while_it_is_forgotten_has_it(
    plans: SavedPlans, store: Store, database: Database
) -> None:
    store.create_job("job", **SPEC)  # type: ignore[arg-type]
    for turn in range(10):
        name = f"plan{turn}"
        plans.save(name, "{}", "x", {})
        both = threading.Barrier(2)
        failures: list[BaseException] = []

        def forget(name: str = name, both: threading.Barrier = both) -> None:
            both.wait()
            plans.forget(name)

        other = threading.Thread(target=forget)
        other.start()
        both.wait()
        try:
            store.put_plan("job", name, "{}", [], False)
        except BaseException as error:
            failures.append(error)
        other.join(30)
        assert failures == [] and store.plan(name) == "{}"
