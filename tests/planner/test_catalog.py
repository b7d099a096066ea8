from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.catalogs.catalog import Catalog, CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import canonical_pattern, parse_workers
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.packed import CatalogQuestion, plan_name, schedule_from_text, to_text
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden

JOB = Job.uniform(3, 2, 3)


def empty() -> Catalog:
    return Catalog(JOB, Technique.STAGGERED, MemoryLimit("uniform"))


@pytest.fixture(scope="module")
def full() -> Catalog:
    catalog = empty()
    for failed in chain.from_iterable(catalog.patterns(2)):
        catalog.add(make_plan(catalog.problem(failed), solver="list", look_ahead=False))
    return catalog


def test_patterns_by_count(full: Catalog) -> None:
    assert [len(row) for row in full.patterns(2)] == [1, 2, 4]
    assert len(full) == 7
    assert Catalog(JOB, Technique.FAULT_FREE, MemoryLimit("1f1b")).patterns(2) == [[frozenset()]]
    with pytest.raises(InputError, match="tolerance"):
        full.patterns(-1)


def test_every_failure_set_within_the_tolerance_is_found_and_fits(full: Catalog) -> None:
    for count in range(3):
        for workers in combinations(JOB.workers(), count):
            plan = full.find(workers)
            assert plan is not None
            assert {Worker.parse(name) for name in plan.failed} == set(workers)
            assert list(plan.workers) == [str(w) for w in sorted(plan.problem().living_workers())]
            assert check(plan) == []


def test_a_renamed_plan_keeps_its_numbers_and_gets_its_own_fingerprint(full: Catalog) -> None:
    one, other = full.find([Worker(0, 1)]), full.find([Worker(2, 1)])
    assert one is not None and other is not None
    assert one.metrics.period == other.metrics.period
    assert one.fingerprint != other.fingerprint


def test_what_two_threads_rename_at_once_is_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the packed form that one of them has made ready is lost."""
    catalog, failed = empty(), [Worker(2, 1)]
    catalog.add(make_plan(catalog.problem([Worker(0, 1)]), solver="list", look_ahead=False))
    rename, others = Plan.renamed, list[Plan | None]()

    def while_another_does(plan: Plan, names: Sequence[int]) -> Plan:
        monkeypatch.setattr(Plan, "renamed", rename)
        others.append(catalog.find(failed))
        return plan.renamed(names)

    monkeypatch.setattr(Plan, "renamed", while_another_does)
    assert catalog.find(failed) is others[0] is not None


def test_plans_that_are_made_ready_are_found_renamed_and_packed() -> None:
    catalog = empty()
    for failed in chain.from_iterable(catalog.patterns(2)):
        catalog.add(make_plan(catalog.problem(failed), solver="list", look_ahead=False))
    dead = Worker(0, 1)
    catalog.make_ready({dead})
    for worker in set(JOB.workers()) - {dead}:
        plan = catalog.find({dead, worker})
        assert plan is not None and plan is catalog.find({worker, dead})
        assert {Worker.parse(name) for name in plan.failed} == {dead, worker}
        assert plan.workers.packed and dict(schedule_from_text(to_text(plan)).ops) == dict(plan.schedule().ops)


@examples(50)
@given(st.permutations(range(3)))
def test_renaming_there_and_back(full: Catalog, names: list[int]) -> None:
    plan = full.find([Worker(0, 1)])
    assert plan is not None
    back = [names.index(p) for p in range(3)]
    assert plan.renamed(names).renamed(back) == plan


def test_a_plan_for_any_member_of_a_pattern_can_be_added() -> None:
    catalog = empty()
    catalog.add(make_plan(catalog.problem({Worker(2, 1)}), solver="list", look_ahead=False))
    plan, why = catalog.plan_for({Worker(1, 1)})
    assert plan.failed == ("W1_1",)
    assert check(plan) == []
    assert why.startswith(golden("from-the-catalog-planned-ahead-for-1-failed"))


def test_the_shorter_plan_is_kept() -> None:
    catalog = empty()
    good = make_plan(catalog.problem(()), solver="list", look_ahead=False)
    worse = good.model_copy(update={"metrics": good.metrics.model_copy(update={"period": good.metrics.period + 1})})
    for plan in (worse, good, worse):
        catalog.add(plan)
    assert catalog.find(()) == good


def test_what_is_not_planned_ahead_is_planned_now(full: Catalog) -> None:
    failed = {Worker(0, 0), Worker(1, 0), Worker(2, 1)}
    assert full.find(failed) is None
    plan, why = full.plan_for(failed)
    assert check(plan) == []
    assert golden("the-list-scheduler-made-one") in why
    assert set(plan.failed) == {str(w) for w in failed}


def test_what_is_packed_is_found_again(full: Catalog) -> None:
    info = CatalogInfo.of(CatalogQuestion(full.job, full.technique, full.memory))
    stored = StoredCatalog(info, MappedBlobs(full.packed()))
    assert {name: stored.plan(name) for name in stored.blobs.names()} == {
        plan_name(frozenset(parse_workers(plan.failed))): plan for plan in full.plans
    }
    found = stored.find([Worker(2, 1)])
    assert found is not None and check(found.plan) == []


def test_bad_input(full: Catalog) -> None:
    with pytest.raises(InputError, match=r"plan\.memory"):
        full.add(
            make_plan(
                Catalog(JOB, Technique.STAGGERED, MemoryLimit("none")).problem(()), solver="list", look_ahead=False
            )
        )
    with pytest.raises(InputError, match=r"plan\.job"):
        other = Catalog(Job.uniform(3, 2, 4), Technique.STAGGERED, MemoryLimit("uniform"))
        full.add(make_plan(other.problem(()), solver="list", look_ahead=False))
    with pytest.raises(InfeasibleError, match=golden("stage-1-has-no-living-peer")):
        full.plan_for(Worker(p, 1) for p in range(3))
    with pytest.raises(InputError, match="W5_0"):
        full.plan_for({Worker(5, 0)})


def test_patterns_are_canonical(full: Catalog) -> None:
    for failed in chain.from_iterable(full.patterns(3)):
        assert canonical_pattern(failed, JOB)[0] == failed


def test_of_plans_equally_short_the_better_proven_is_kept() -> None:
    catalog = empty()
    good = make_plan(catalog.problem(()), solver="list", look_ahead=False)
    unproven = good.model_copy(update={"metrics": good.metrics.model_copy(update={"lower_bound": 1})})
    for plan in (unproven, good, unproven):
        catalog.add(plan)
    assert catalog.find(()) == good
