"""Catalogs in use: a console's jobs fill them, share them, and look plans up at a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from ui_console import ConsoleHere, JobHere, until

from openrecycle.app.catalogs import service
from openrecycle.app.catalogs.contents import CatalogRequest
from openrecycle.app.catalogs.service import Filling, info_of
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.packed import unpack
from openrecycle.planner.plans.plan import Plan
from tests.golden import golden

pytestmark = pytest.mark.processes


def ended(filling: Filling) -> str:
    until(lambda: not filling.running)
    return filling.state


def solved(here: ConsoleHere) -> float:
    """How many plans solvers have made."""
    (solves,) = here.console.metrics.solve_seconds.collect()
    return sum(sample.value for sample in solves.samples if sample.name.endswith("_count"))


def test_a_second_job_begins_with_the_first_ones_plans(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path)
    first = here.console.jobs.find(JobHere(here.console, "first").job_id)
    until(lambda: first.plans.ahead.made == first.plans.ahead.wanted)
    until(lambda: len(here.console.catalogs.names(first.plans.question)) == 5)
    before = solved(here)
    second = here.console.jobs.find(JobHere(here.console, "second").job_id)
    until(lambda: len(here.console.queries.job_plans(second.job_id)) == 5)
    assert solved(here) == before, "nothing was planned again"
    here.close()


def test_a_filling_improves_what_a_running_job_uses_at_the_next_failure(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path)
    here.console.plans.ahead.plans_ahead = False
    job = JobHere(here.console, "waits for its plans").register()
    question = here.console.jobs.find(job.job_id).plans.question
    request = CatalogRequest(question, 1, solver="cp-sat", time_limit=5)
    assert ended(here.console.catalogs.fill(request)) == "done"
    job.die("W1_2")
    view = here.console.queries.view(job.job_id)
    opened = next(event.text for event in view.events if event.kind == "generation")
    assert golden("from-the-catalog-planned-ahead-for-1") in opened
    stored = here.console.catalogs.find(question, [Worker(1, 2)])
    assert stored is not None and view.plan is not None
    assert view.plan.metrics.period == stored[0].metrics.period
    here.close()


def test_plans_too_large_for_memory_stay_in_the_catalog_until_they_are_needed(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path)
    here.console.plans.ahead.held_ops = 1
    job = JobHere(here.console, "large")
    live = here.console.jobs.find(job.job_id)
    live.plans.inline_ops = 1
    assert live.plans.ahead.wanted == 5, "the full grid, and one failure on each of four stages"
    until(lambda: live.plans.ahead.made == 5)
    job.register()
    assert [plan.failed for plan in live.plans.catalog.plans] == [()], "only what it needed"
    job.die("W1_2")
    until(lambda: here.console.queries.view(job.job_id).generation == 2)
    opened = next(event.text for event in here.console.queries.view(job.job_id).events if event.kind == "generation")
    assert golden("from-the-catalog-planned-ahead-for") in opened
    again = here.console.jobs.find(JobHere(here.console, "the same again").job_id)
    assert (again.plans.ahead.made, again.plans.ahead.wanted) == (5, 5), "it is there at once"
    here.close()


def test_a_job_whose_plans_could_not_be_made_since_others_were_gets_them_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ConsoleHere(tmp_path)
    here.console.plans.ahead.held_ops = 1
    monkeypatch.setattr(service, "MAX_FILLING", 0)
    job = here.console.jobs.find(JobHere(here.console, "one too many").job_id)
    assert job.plans.ahead.wanted == 0
    monkeypatch.setattr(service, "MAX_FILLING", 1)
    until(lambda: job.plans.ahead.made == job.plans.ahead.wanted == 5)
    here.close()


def _of_others(plan: Plan, names: Iterable[int]) -> Plan:
    """Not renamed at all: a sound plan, for other failures."""
    return plan


def test_a_plan_at_hand_that_is_for_other_failures_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ConsoleHere(tmp_path)
    job = JobHere(here.console, "small").register()
    live = here.console.jobs.find(job.job_id)
    until(lambda: live.plans.ahead.made == 5)
    (made_for,) = next(plan.failed for plan in live.plans.catalog.plans if [name[3] for name in plan.failed] == ["2"])
    other = "W1_2" if made_for != "W1_2" else "W0_2"
    monkeypatch.setattr(Plan, "renamed", _of_others)
    job.die(other)
    until(lambda: here.console.queries.view(job.job_id).generation == 2)
    view = here.console.queries.view(job.job_id)
    opened = next(event.text for event in view.events if event.kind == "generation")
    assert "made now (list)" in opened
    assert view.plan is not None and view.plan.failed == (other,)
    assert check(view.plan) == []
    here.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_plan_is_fitted_beside_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    for limit in (
        "openrecycle.app.jobs.job_plans.INLINE_OPS",
        "openrecycle.app.jobs.job_plans.LARGE_OPS",
        "openrecycle.app.plans.service.LARGE_OPS",
        "openrecycle.app.plans.service.HELD_OPS",
    ):
        monkeypatch.setattr(limit, 1)
    here = ConsoleHere(tmp_path)
    job = JobHere(here.console, "large", micro_batches=90).register()
    live = here.console.jobs.find(job.job_id)
    until(lambda: live.plans.ahead.made == 5 and here.console.queries.view(job.job_id).generation == 1)
    located = here.console.catalogs.located(live.plans.question, ("W1_2",))
    assert located is not None
    if damaged:
        broken = replace(located, stored=located.stored[:-1] + bytes([located.stored[-1] ^ 1]))
        monkeypatch.setattr(here.console.catalogs, "located", lambda question, failed: broken)
    job.die("W1_2")
    until(lambda: here.console.queries.view(job.job_id).generation == 2)
    view = here.console.queries.view(job.job_id)
    opened = next(event.text for event in view.events if event.kind == "generation")
    assert ("made now (list)" if damaged else located.origin) in opened
    expected = here.console.catalogs.find(live.plans.question, [Worker(1, 2)])
    assert expected is not None and view.plan is not None
    assert damaged or view.plan.fingerprint == expected[0].fingerprint, "made for W1_2 itself, it has other ties"
    assert check(view.plan) == []
    data = here.console.queries.packed_plan(job.job_id, view.plan.fingerprint)
    assert unpack(data) == view.plan, "agents get the same"
    here.close()


def test_the_filling_of_a_job_that_ends_ends_with_it(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path, tolerance=3)
    here.console.plans.ahead.held_ops = 1
    jobs = [JobHere(here.console, f"job {i}", pipelines=8, stages=16, micro_batches=64) for i in range(2)]
    plans = [here.console.jobs.find(job.job_id).plans for job in jobs]
    until(lambda: all(each.ahead.wanted for each in plans))
    filling = here.console.catalogs.filling(info_of(plans[0].question).fingerprint)
    assert filling is not None
    jobs[0].finish()
    assert filling.running, "another job of the same question waits for it"
    jobs[1].finish()
    assert filling.state == "cancelled"
    until(here.console.catalogs.idle)
    here.close()


def test_no_filling_begins_for_a_job_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path, tolerance=3)
    here.console.plans.ahead.plans_ahead = False
    job = here.console.jobs.find(JobHere(here.console, "large", pipelines=8, stages=16, micro_batches=64).job_id)
    here.console.plans.ahead.plans_ahead, here.console.plans.ahead.held_ops = True, 1
    here.console.histories.delete(job.job_id, "ada")
    here.console.plans.ahead.make_ahead(job)
    filling = here.console.catalogs.filling(info_of(job.plans.question).fingerprint)
    assert filling is None or filling.state == "cancelled"
    until(here.console.catalogs.idle)
    here.close()
