"""Plans that are read: large ones come from their columns."""

from __future__ import annotations

import pytest

from openrecycle.app.plans.library import PlanCache
from openrecycle.db.plan_rows import SavedPlans
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job, Problem, Worker
from openrecycle.planner.plans.packed import packed
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan


@pytest.fixture
def plan(database: Database) -> Plan:
    plan = make_plan(Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)})), solver="list")
    SavedPlans(database).save(plan.fingerprint, plan.to_json(), "a plan", {})
    return plan


def read(database: Database, plan: Plan) -> Plan | None:
    cache = PlanCache(Store(database))
    assert cache.rerouted(plan.fingerprint)["W0_2"] == 3
    return cache.get(plan.fingerprint)


def test_small_plans_are_stored_as_documents(database: Database, plan: Plan) -> None:
    found = read(database, plan)
    assert found == plan
    assert Store(database).plan_columns(plan.fingerprint) is None


def test_a_plan_in_columns_is_read_from_them_and_they_go_with_it(database: Database, plan: Plan) -> None:
    SavedPlans(database).forget(plan.fingerprint)
    SavedPlans(database).save(plan.fingerprint, packed(plan)._replace(document=b"nonsense"), "a plan", {})
    assert read(database, plan) == plan
    SavedPlans(database).forget(plan.fingerprint)
    assert Store(database).plan_columns(plan.fingerprint) is None


def test_damaged_columns_do_no_harm(database: Database, plan: Plan) -> None:
    SavedPlans(database).forget(plan.fingerprint)
    SavedPlans(database).save(plan.fingerprint, packed(plan)._replace(columns=b"nonsense"), "a plan", {})
    assert read(database, plan) == plan
