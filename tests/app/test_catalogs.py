"""Catalogs of the console: filled by real processes, kept, exported and drawn."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_requests import catalog_request
from ui_console import console_refuses, until

from openrecycle.app.catalogs import service
from openrecycle.app.catalogs.contents import CatalogRequest, needed, stale, summary
from openrecycle.app.catalogs.contents import report as contents_report
from openrecycle.app.catalogs.service import Catalogs, Filling, exported
from openrecycle.app.charts import text
from openrecycle.app.charts.theme import DARK, LIGHT
from openrecycle.app.runtime.processes import Channel
from openrecycle.app.ui import catalog
from openrecycle.app.ui.catalog import catalog_curves
from openrecycle.db.store import Store
from openrecycle.planner.catalogs.catalog import PLANNER_VERSION, CatalogInfo, open_folder
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import canonical_pattern
from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, decode_header, pack, plan_name
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

SMALL = {"pipelines": 2, "stages": 2, "micro_batches": 3, "tolerance": 1}
# Tasks of one plan each, so that it can be caught in the middle.
LONG = {"pipelines": 4, "stages": 4, "micro_batches": 6, "tolerance": 3, "solver": "cp-sat", "time_limit": 30.0}


@pytest.fixture
def catalogs(store: Store) -> Iterator[Catalogs]:
    made = Catalogs(store, processes=1, again_after=())
    yield made
    made.close()


def ended(filling: Filling) -> Filling:
    until(lambda: not filling.running, "the filling ends")
    return filling


@pytest.mark.processes
def test_filling_makes_every_pattern_and_stores_it(catalogs: Catalogs, store: Store) -> None:
    request = catalog_request(**SMALL)
    seen: list[str] = []
    catalogs.on_plans = lambda question, names: seen.extend(names)
    filling = ended(catalogs.fill(request))
    assert (filling.state, filling.why, filling.planned) == ("done", "", 3)
    assert (filling.done, filling.total) == (3, 3)
    report = catalogs.report(request.question, 1)
    assert [(line.failures, line.wanted, line.there) for line in report.lines] == [(0, 1, 1), (1, 2, 2)]
    assert report.covered == 1 and report.missing == 0 and report.by_pattern
    job = request.question.job
    assert report.reference == reference_period(job) / job.ticks_per_unit
    assert sorted(seen) == store.catalog_blobs(report.fingerprint).names()
    for line in report.lines:
        for plan in line.plans:
            document = catalogs.plan(report.fingerprint, plan.name)
            assert check(document) == []
            assert document.metrics.period == plan.period
            assert plan.bound <= plan.period and plan.bound <= period_bound(document.problem())
            assert plan.peak == max(document.metrics.peak_activations.values())
    linear = report.lines[1].linear
    assert linear == pytest.approx(report.lines[0].plans[0].period * 4 / 3)
    again = ended(catalogs.fill(request))
    assert (again.state, again.planned, again.done) == ("done", 0, 3), "nothing is planned twice"


def test_what_a_worker_holds_is_of_the_partition_of_the_plan() -> None:
    layers = (LayerProfile(activation_bytes=10**6, weight_bytes=10**9),) * 4
    job = Job(2, 2, 2, layers=layers, partition=(2, 2))
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"), "partitions")
    plan = make_plan(Problem(job.with_partition((3, 1)), frozenset({Worker(1, 1)})), solver="list")
    header = decode_header(pack(plan, Effort(solver="list")))
    (line,) = contents_report(question, needed(question, 1), "", {"x": header}).lines[1].plans
    assert line.peak_bytes == 3_006_000_000 == max(plan.schedule().peak_bytes.values())


def test_by_bytes_a_worker_holds_no_more_than_it_has() -> None:
    """Though it holds more micro-batches than if each took its larger part all along."""
    job = Job(
        3, 4, 6, profiles=(StageProfile(activation_bytes=3, weight_backward_bytes=1),) * 4, capacity_bytes=(12,) * 4
    )
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("bytes"))
    plan = make_plan(Problem(job, frozenset({Worker(1, 2)}), memory=question.memory), solver="list")
    header = decode_header(pack(plan, Effort(solver="list")))
    report = contents_report(question, needed(question, 1), "", {"x": header})
    (line,) = report.lines[1].plans
    assert line.peak is not None and report.limit is not None
    assert 4 < line.peak <= report.limit and line.peak_bytes == 12


@pytest.mark.processes
def test_several_processes_share_a_filling(store: Store) -> None:
    catalogs = Catalogs(store, processes=2)
    request = catalog_request(pipelines=3, stages=3, micro_batches=3, tolerance=2)
    assert ended(catalogs.fill(request)).state == "done"
    report = catalogs.report(request.question, 2)
    assert report.missing == 0 and report.there == report.wanted > 10
    catalogs.close()


@pytest.mark.processes
def test_cancelled_it_keeps_what_is_made_and_goes_on_from_there(catalogs: Catalogs, store: Store) -> None:
    request = catalog_request(**LONG)
    filling = catalogs.fill(request)
    assert catalogs.fill(request) is filling, "the same request is the same filling"
    until(lambda: len(store.catalog_blobs(filling.fingerprint).names()) >= 2, "some plans are made")
    with console_refuses("filling"):
        catalogs.fill(catalog_request(**LONG | {"tolerance": 2}))
    with console_refuses("filling"):
        catalogs.delete(filling.fingerprint)
    catalogs.cancel(filling.fingerprint)
    until(catalogs.idle, "its process is gone")
    assert filling.state == "cancelled"
    kept = store.catalog_blobs(filling.fingerprint).all()
    assert 2 <= len(kept) < filling.total
    resumed = catalogs.fill(request)
    until(lambda: resumed.total > 0, "it has looked at what is there")
    assert resumed.done >= len(kept)
    catalogs.cancel(filling.fingerprint)
    until(catalogs.idle, "its process is gone")
    after = store.catalog_blobs(filling.fingerprint).all()
    assert kept.items() <= after.items()


@pytest.mark.processes
def test_begun_again_before_the_cancelled_one_has_ended_it_can_be_cancelled_too(catalogs: Catalogs) -> None:
    request = catalog_request(**LONG)
    first = catalogs.fill(request)
    catalogs.cancel(first.fingerprint)
    second = catalogs.fill(request)
    assert second is not first
    until(lambda: first.asked is None, "the first one's process is gone")
    catalogs.cancel(second.fingerprint)
    assert second.state == "cancelled"
    until(catalogs.idle, "its process is gone")


@pytest.mark.processes
def test_a_process_that_dies_is_said_and_what_it_made_is_kept(catalogs: Catalogs, store: Store) -> None:
    filling = catalogs.fill(catalog_request(**LONG))
    until(lambda: bool(store.catalog_blobs(filling.fingerprint).names()), "a plan is made")
    assert filling.asked is not None
    filling.asked.process.kill()
    assert golden("ended-before-it-was-done") in ended(filling).why
    assert filling.state == "failed"
    assert store.catalog_blobs(filling.fingerprint).names()


@pytest.mark.processes
def test_a_filling_whose_process_died_is_begun_again_a_bounded_number_of_times(store: Store) -> None:
    catalogs = Catalogs(store, processes=1, again_after=(0.0, 3600.0))
    filling = catalogs.fill(catalog_request(**LONG))
    for failures in (1, 2):
        asked = filling.asked
        assert asked is not None
        asked.process.kill()
        until(lambda n=failures: filling.failures == n, "it has failed")  # type: ignore[misc]
        assert filling.running and filling.why
        if failures == 1:
            until(lambda old=asked: filling.asked is not old, "it is begun again")  # type: ignore[misc]
    assert filling.again_at is not None
    assert str(filling.failures) in catalog.filling_words(filling)
    catalogs.cancel(filling.fingerprint)
    until(catalogs.idle, "it waits no more")
    assert filling.state == "cancelled"
    catalogs.close()


@pytest.mark.processes
def test_a_filling_that_can_not_succeed_is_not_begun_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "serve_filling", says_it_failed)
    catalogs = Catalogs(store, processes=1, again_after=(3600.0,))
    filling = ended(catalogs.fill(catalog_request(**SMALL)))
    assert (filling.state, filling.failures) == ("failed", 0)
    catalogs.close()


def says_it_failed(channel: Channel, *_: object) -> None:
    """The child."""
    raise InputError("tolerance", 1, "less")


@pytest.mark.processes
def test_no_more_than_two_at_a_time(catalogs: Catalogs) -> None:
    fillings = [catalogs.fill(catalog_request(**LONG | {"micro_batches": m})) for m in (6, 7)]
    with console_refuses("busy"):
        catalogs.fill(catalog_request(**SMALL))
    catalogs.close()
    assert all(not ended(filling).running for filling in fillings)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pipelines": 64, "stages": 64, "micro_batches": 300}, golden("ops-of-one-plan")),
        ({"tolerance": 9}, "tolerance: got 9,"),
        ({"tolerance": 1, "technique": "fault-free"}, golden("fault-free-plans-take-no-failure")),
    ],
)
def test_requests_name_the_field_that_is_wrong(values: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        catalog_request(**values).check()  # type: ignore[arg-type]
    assert words in str(error.value)


@pytest.mark.processes
def test_large_grids_get_one_plan_per_count(catalogs: Catalogs) -> None:
    request = catalog_request(pipelines=8, stages=6, micro_batches=8, tolerance=6)
    assert ended(catalogs.fill(request)).state == "done"
    report = catalogs.report(request.question, 6)
    assert not report.by_pattern
    assert [line.wanted for line in report.lines] == [1] * 7
    assert report.covered == 6
    periods = [line.worst.period for line in report.lines if line.worst]
    assert periods == sorted(periods)


def make(request: CatalogRequest, failed: str = "") -> Plan:
    workers = frozenset(map(Worker.parse, failed.split()))
    return make_plan(request.question.problem(workers), solver="list")


def test_a_better_plan_replaces_a_worse_one_and_no_other(catalogs: Catalogs) -> None:
    request = catalog_request(pipelines=3, stages=4, micro_batches=6)
    plan = make(request, "W1_2")
    worse = plan.model_copy(update={"metrics": plan.metrics.model_copy(update={"period": plan.metrics.period + 1})})
    for kept in (worse, plan, worse):
        catalogs.keep(request.question, kept)
    report = catalogs.report(request.question, 1)
    assert [line.there for line in report.lines] == [0, 1]
    assert report.covered is None
    (line,) = report.lines[1].plans
    assert line.period == plan.metrics.period
    # Pipelines are interchangeable: one plan serves all three workers of the stage.
    for name in ("W0_2", "W1_2", "W2_2"):
        found = catalogs.find(request.question, [Worker.parse(name)])
        assert found is not None
        assert found[0].failed == (name,)
        assert check(found[0]) == []
        assert found[1].startswith(golden("from-the-catalog-planned-ahead"))
    assert catalogs.find(request.question, [Worker(0, 1)]) is None


def test_of_two_plans_that_come_at_once_the_better_is_kept(catalogs: Catalogs) -> None:
    """As from a search that an operator asked for, and from the planning ahead."""
    request = catalog_request(pipelines=3, stages=4, micro_batches=6)
    plan = make(request, "W1_2")
    worse = plan.model_copy(update={"metrics": plan.metrics.model_copy(update={"period": plan.metrics.period + 1})})
    for both in [(plan, worse), (worse, plan)] * 10:
        begin = threading.Barrier(2)

        def keep(one: Plan, begin: threading.Barrier = begin) -> None:
            begin.wait()
            catalogs.keep(request.question, one)

        threads = [threading.Thread(target=keep, args=(one,)) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = catalogs.report(request.question, 1)
        assert [one.period for one in report.lines[1].plans] == [plan.metrics.period]
        catalogs.delete(report.fingerprint)


def test_plans_of_moved_layers_are_kept_in_no_catalog(catalogs: Catalogs, store: Store) -> None:
    """Re-routing can't reach their period."""
    job = Job.uniform(3, 3, 4, layers=12)
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"))
    problems = [Problem(j, frozenset({Worker(1, 2)})) for j in (job.with_partition((5, 4, 3)), job)]
    moved, home = (make_plan(problem, solver="list") for problem in problems)
    assert moved.metrics.period < home.metrics.period
    catalogs.keep(question, moved)
    assert not catalogs.names(question)
    info, (pattern, names) = CatalogInfo.of(question), canonical_pattern([Worker(1, 2)], job)
    row = (plan_name(pattern), 1, pack(moved.renamed(names), Effort(solver="list")))
    store.save_catalog(info.fingerprint, info.model_dump_json(), [row])
    later = Catalogs(store, processes=1)
    assert later.find(question, [Worker(1, 2)]) is None, "one that was kept before is not used"
    later.keep(question, home)
    found = later.find(question, [Worker(1, 2)])
    assert found is not None and found[0].partition == (4, 4, 4)


@pytest.mark.processes
def test_damaged_plans_count_as_missing_and_are_made_again(catalogs: Catalogs, store: Store) -> None:
    request = catalog_request(**SMALL)
    info = CatalogInfo.of(request.question)
    name = plan_name(canonical_pattern([Worker(0, 1)], request.question.job)[0])
    store.save_catalog(info.fingerprint, info.model_dump_json(), [(name, 1, b"ORP1 and rubbish")])
    assert catalogs.report(request.question, 1).there == 0
    assert catalogs.find(request.question, [Worker(0, 1)]) is None
    assert ended(catalogs.fill(request)).planned == 3
    assert catalogs.find(request.question, [Worker(1, 1)]) is not None


def test_catalogs_of_other_op_times_or_planners_are_stale(catalogs: Catalogs, store: Store) -> None:
    request = catalog_request(**SMALL)
    question = request.question
    slower = catalog_request(**SMALL, durations={"F": 2.0}).question
    elsewhere = catalog_request(**SMALL | {"stages": 3}).question
    old = CatalogInfo.of(question).model_copy(update={"planner_version": "0"})
    blob = (plan_name(frozenset()), 0, pack(make(request), Effort(solver="list")))
    for info in (CatalogInfo.of(question), CatalogInfo.of(slower), CatalogInfo.of(elsewhere), old):
        store.save_catalog(info.fingerprint, info.model_dump_json(), [blob])
    why = {catalog.fingerprint: reason for catalog, reason in stale(question, catalogs.list())}
    assert why == {
        CatalogInfo.of(slower).fingerprint: golden("other-op-times"),
        old.fingerprint: golden("made-by-version-0-of", PLANNER_VERSION),
    }
    states = catalog.stored_table(catalogs.list(), ["x"] * 4, time.time())
    assert len(states["plans"]) == 4 and set(states["plans"]) == {1}
    catalogs.delete(old.fingerprint)
    assert len(catalogs.list()) == 3
    with console_refuses("unknown_catalog"):
        catalogs.delete(old.fingerprint)
    assert summary({"info": "{}", "fingerprint": "x"}) is None


@pytest.mark.processes
def test_an_export_holds_every_plan(catalogs: Catalogs, tmp_path: Path) -> None:
    request = catalog_request(**SMALL)
    fingerprint = ended(catalogs.fill(request)).fingerprint
    with zipfile.ZipFile(io.BytesIO(exported(catalogs, fingerprint))) as archive:
        archive.extractall(tmp_path)
    opened = open_folder(tmp_path / fingerprint)
    assert opened.info == catalogs.stored(fingerprint).info and len(opened) == len(catalogs.blobs(fingerprint)) > 0
    assert opened.find([Worker(1, 0)]) is not None


def says_and_dies(channel: Channel, request: CatalogRequest, *_: object) -> None:
    """The child."""
    channel.say({"done": 0, "total": 3})
    channel.say(plan_name(frozenset()).encode() + b"\0" + pack(make(request), Effort(solver="list")))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_the_last_plans_of_a_process_that_ends_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "serve_filling", says_and_dies)
    catalogs = Catalogs(store, processes=1, again_after=())
    filling = ended(catalogs.fill(catalog_request(**SMALL)))
    assert (filling.state, filling.total) == ("failed", 3)
    assert store.catalog_blobs(filling.fingerprint).names() == [plan_name(frozenset())]
    catalogs.close()


# -- what is drawn of it -----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("colours", [LIGHT, DARK])
@pytest.mark.parametrize(
    "values", [SMALL, {"pipelines": 8, "stages": 6, "micro_batches": 8, "tolerance": 4, "memory": "none"}]
)
def test_curves_and_tables_say_the_same(catalogs: Catalogs, colours: object, values: dict[str, object]) -> None:
    request = catalog_request(**values)
    ended(catalogs.fill(request))
    report = catalogs.report(request.question, request.tolerance)
    figure = catalog_curves(report, colours, revision="x")  # type: ignore[arg-type]
    drawn = {trace.name: list(trace.y) for trace in figure.data if trace.name}
    table = catalog.counts_table(report)
    assert drawn["Longest plan" if report.by_pattern else "Plan"] == table["longest period (slots)"]
    assert drawn[golden("proven-lower-bound")] == table[golden("its-lower-bound-slots")]
    assert ("Shortest plan" in drawn) == report.by_pattern
    assert drawn["Linear: fault-free × workers / living"][0] == table["longest period (slots)"][0]
    words = catalog.chart_words(report)
    assert words.startswith(golden("period-by-number-of-failures"))
    assert {card.label for card in catalog.cards(report)} >= {"Plans", "Covered", "Proven optimal"}
    kept = next(card for card in catalog.cards(report) if card.label == "Throughput kept")
    whole, longest = report.lines[0].plans[0].period, table["longest period (slots)"][request.tolerance]
    assert kept.value == text.percent(whole / longest), "of the longest plan, against the fault-free one"
    workers = report.question.job.pipelines * report.question.job.stages
    assert f"{workers - request.tolerance:,} of {workers:,} workers" in kept.note
