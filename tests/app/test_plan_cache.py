"""Stored plans that are read."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from openrecycle.app.plans.library import PlanCache
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.models import PlanRow
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
    SavedPlans(database).save(plan.fingerprint, packed(plan), "a plan", {})
    return plan


def read(database: Database, plan: Plan) -> Plan | None:
    cache = PlanCache(Store(database))
    assert cache.rerouted(plan.fingerprint)["W0_2"] == 3
    return cache.get(plan.fingerprint)


def test_a_plan_is_read_as_it_was_saved(database: Database, plan: Plan) -> None:
    found = read(database, plan)
    assert found == plan and found.to_json() == plan.to_json()


def test_a_plan_that_is_asked_for_has_the_proof_that_another_has_stored_since(database: Database, plan: Plan) -> None:
    metrics = plan.metrics.model_copy(update={"lower_bound": 1.0})
    unproven, cache = plan.model_copy(update={"metrics": metrics}), PlanCache(Store(database))
    with database.write() as session:
        session.execute(update(PlanRow).values(data=packed(unproven)))
    assert cache.plan(plan.fingerprint) == unproven != plan
    SavedPlans(database).save(plan.fingerprint, packed(plan), "a plan", {})
    assert cache.plan(plan.fingerprint) == plan
    assert cache.plan(plan.fingerprint) is cache.plan(plan.fingerprint), "it is read once"


def test_what_is_stored_under_the_name_of_another_plan_is_none_until_the_plan_is_saved_again(
    database: Database, plan: Plan
) -> None:
    other = make_plan(Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2), Worker(0, 0)})), solver="list")
    assert other.metrics.lower_bound > plan.metrics.lower_bound, "nor is its bound that of this one"
    with database.write() as session:
        session.execute(update(PlanRow).values(data=packed(other)))
    cache = PlanCache(Store(database))
    assert cache.get(plan.fingerprint) is None
    with pytest.raises(ConsoleError) as refused:
        cache.plan(plan.fingerprint)
    assert refused.value.status == 404
    SavedPlans(database).save(plan.fingerprint, packed(plan), "a plan", {})
    assert cache.plan(plan.fingerprint) == plan


def test_a_damaged_plan_is_none_until_it_is_saved_again(database: Database, plan: Plan) -> None:
    cache, data = PlanCache(Store(database)), packed(plan)
    SavedPlans(database).forget(plan.fingerprint)
    SavedPlans(database).save(plan.fingerprint, data[:-1] + bytes([data[-1] ^ 1]), "a plan", {})
    assert cache.get(plan.fingerprint) is None and cache.rerouted(plan.fingerprint) == {}
    with pytest.raises(ConsoleError) as refused:
        cache.plan(plan.fingerprint)
    assert refused.value.status == 404
    SavedPlans(database).save(plan.fingerprint, data, "a plan", {})
    assert cache.get(plan.fingerprint) == plan
