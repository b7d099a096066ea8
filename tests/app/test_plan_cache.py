"""Plans that are read: large ones are put into columns in the background, and come from those afterwards."""

from __future__ import annotations

import time

import pytest

from openrecycle.app.plans import library
from openrecycle.app.plans.library import PlanCache
from openrecycle.db.plan_rows import PlanColumns, SavedPlans
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, Problem, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan


@pytest.fixture
def plan(database: Database) -> Plan:
    plan = make_plan(Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)})), solver="list")
    SavedPlans(database).save(plan.fingerprint, plan.to_json(), "a plan", {})
    return plan


def read(database: Database, plan: Plan) -> Plan | None:
    cache = PlanCache(Store(database))
    try:
        assert cache.rerouted(plan.fingerprint)["W0_2"] == 3
        return cache.get(plan.fingerprint)
    finally:
        cache.close()


def test_small_plans_are_stored_as_documents(database: Database, plan: Plan) -> None:
    found = read(database, plan)
    assert found == plan
    assert PlanColumns(database).get(plan.fingerprint) is None


@pytest.mark.processes
def test_a_large_plan_is_put_into_columns_once_it_was_read(
    database: Database, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LARGE_OPS", 10)
    cache = PlanCache(Store(database))
    assert cache.get(plan.fingerprint) == plan
    deadline = time.monotonic() + 120
    while PlanColumns(database).get(plan.fingerprint) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cache.close()
    assert read(database, plan) == plan
    SavedPlans(database).forget(plan.fingerprint)
    assert PlanColumns(database).get(plan.fingerprint) is None


def test_damaged_columns_do_no_harm(database: Database, plan: Plan) -> None:
    columns = PlanColumns(database)
    columns.put(plan.fingerprint, columns.deflated_document(plan.fingerprint) or b"", b"nonsense")
    assert columns.get(plan.fingerprint) == b"nonsense"
    assert read(database, plan) == plan


def test_a_plan_that_is_gone_gets_no_columns(database: Database) -> None:
    PlanColumns(database).put("0123", b"document", b"nonsense")
    assert PlanColumns(database).get("0123") is None
