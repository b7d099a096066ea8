"""The Catalog page in every state, run as Streamlit runs it, over a real console."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, errors, turn_to, until

from openrecycle.agent.messages.protocol import JobFinished
from openrecycle.app.catalogs.contents import CatalogRequest
from openrecycle.app.console.service import set_console
from openrecycle.planner.catalogs.catalog import PLANNER_VERSION, CatalogInfo
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, pack, plan_name
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    """One for all: each test has a job of its own, for which nothing is planned ahead but what the page has made."""
    made = ConsoleHere(tmp_path_factory.mktemp("catalogs"))
    made.console.plans.ahead.plans_ahead = False
    set_console(made.console)
    yield made
    set_console(None)
    made.close()


def open_page(**query: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=30)
    for name, value in query.items():
        test.query_params[name] = value
    turn_to(test, "catalog").run()
    assert not test.exception, test.exception[0].message
    return test


def words(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    parts += [m.value for kind in ("markdown", "caption", "warning") for m in test.get(kind)]
    return "\n".join([*parts, *errors(test)])


def small(here: ConsoleHere, micro_batches: int, **changes: object) -> JobHere:
    """A job that has three plans for up to one failure. In no other test a job has as many micro-batches."""
    return JobHere(
        here.console,
        f"{micro_batches} micro-batches",
        **{"pipelines": 2, "stages": 2, "micro_batches": micro_batches, "durations": {}} | changes,
    )


def question_of(job: JobHere) -> CatalogQuestion:
    return job.console.jobs.find(job.job_id).plans.question


def filled(job: JobHere, tolerance: int = 1) -> str:
    filling = job.console.catalogs.fill(CatalogRequest(question_of(job), tolerance))
    until(lambda: not filling.running, "the catalog is filled")
    assert filling.state == "done", filling.why
    return filling.fingerprint


def shown_table(test: AppTest, caption: str) -> dict[str, list[str]]:
    """What a reader sees of the table of that name, by its columns."""
    made = next(e.proto.body for e in test.get("html") if f'aria-label="{caption}"' in e.proto.body)
    names = [unescape(name) for name in re.findall(r"<th role=\"columnheader\"[^>]*>(.*?)</th>", made)]
    rows = re.findall(r"<tr role=\"row\">(<th role=\"rowheader\".*?)</tr>", made)
    cells = [re.findall(r"<t[hd] [^>]*>(?:<span.*?</span>)?(.*?)</t[hd]>", row) for row in rows]
    return {name: [unescape(row[i]) for row in cells] for i, name in enumerate(names)}


def test_without_a_job_there_are_stored_catalogs_alone(tmp_path: Path, here: ConsoleHere) -> None:
    alone = ConsoleHere(tmp_path)
    try:
        set_console(alone.console)
        assert golden("makes-plans-ahead-for-any-grid") in words(open_page())
        job = small(alone, 2)
        fingerprint = filled(job)
        alone.console.reports.finish(job.job_id, JobFinished(state="finished"))
        alone.console.histories.delete(job.job_id, "ann")
        test = open_page()
        assert not test.get("plotly_chart") and not [b for b in test.button if b.key == "fill"]
        assert shown_table(test, "Stored catalogs")["plans"] == ["3"]
        test.button(key=f"show-catalog-{fingerprint}").click().run()
        assert not test.exception and test.get("plotly_chart")
    finally:
        set_console(here.console)
        alone.close()


def test_what_is_missing_is_filled(here: ConsoleHere) -> None:
    job = small(here, 2)
    test = open_page(job=job.job_id)
    assert golden("nothing-is-planned-ahead-for") in words(test)
    assert not test.get("plotly_chart")
    test.button(key="fill").click().run()
    filling = here.console.catalogs.filling(CatalogInfo.of(question_of(job)).fingerprint)
    assert filling is not None
    until(lambda: not filling.running, "the catalog is filled")
    test.run()
    assert "3 plans made in" in words(test)
    assert "all there" in words(test)
    figure = json.loads(test.get("plotly_chart")[0].proto.spec)
    assert "Linear: fault-free × workers / living" in {trace.get("name") for trace in figure["data"]}
    counts = shown_table(test, "Figures by failures")
    assert counts["failures"] == ["0", "1"] and counts["missing"] == ["0", "0"]
    assert counts["longest period (slots)"][0].isdecimal()
    assert test.button(key="fill").disabled, "nothing is missing"
    test.selectbox(key="cat_solver").set_value("cp-sat").run()
    assert not test.button(key="fill").disabled, "another solver may find shorter ones"


def test_a_job_shows_its_own_catalog(here: ConsoleHere) -> None:
    job = JobHere(here.console, "plans ahead")
    filled(job)
    test = open_page(job=job.job_id)
    assert test.number_input(key=f"cat_tolerance-{job.job_id}").value == here.console.tolerance == 1
    assert "all there" in words(test)
    test.number_input(key=f"cat_tolerance-{job.job_id}").set_value(2).run()
    assert "16 missing" in words(test)
    assert "asked for 2" in words(test)
    assert "milliseconds" not in words(test)
    link = open_page(job=job.job_id, **{f"cat_tolerance-{job.job_id}": "2"})
    assert "16 missing" in words(link), "a link shows what its sender saw"


def test_while_it_is_filled_there_is_progress_and_cancel(here: ConsoleHere) -> None:
    job = small(here, 6, pipelines=4, stages=4)
    test = open_page(job=job.job_id, cat_solver="CP-SAT (may prove it optimal)", cat_seconds="60.0")
    test.number_input(key=f"cat_tolerance-{job.job_id}").set_value(2).run()
    test.button(key="fill").click().run()
    filling = here.console.catalogs.filling(CatalogInfo.of(question_of(job)).fingerprint)
    assert filling is not None and filling.running
    assert filling.request == CatalogRequest(question_of(job), 2, "cp-sat", 60.0)
    until(lambda: filling.done >= 1, "a plan is there")
    test.run()
    (progress,) = test.get("progress")
    assert golden("plans-are-there-after") in progress.proto.text
    assert not [button for button in test.button if button.key == "fill"]
    test.button(key="cancel-fill").click().run()
    until(here.console.catalogs.idle, "its process is gone")
    test.run()
    assert golden("fill-goes-on-from-there") in words(test)
    assert test.button(key="fill").label == "Fill"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"job": "nobody"}, "job: got 'nobody'"),
        ({"catalog": "0" * 32}, "catalog: got '00000000000000000000000000000000'"),
    ],
)
def test_what_is_wrong_is_said(here: ConsoleHere, query: dict[str, str], expected: str) -> None:
    assert expected in words(open_page(**query))


def test_more_failures_than_the_job_can_have_are_refused(here: ConsoleHere) -> None:
    job = small(here, 9)
    test = open_page(job=job.job_id, **{f"cat_tolerance-{job.job_id}": "3"})
    assert "tolerance: got 3," in words(test)


def test_two_fillings_are_enough(here: ConsoleHere) -> None:
    jobs = [small(here, m, pipelines=4, stages=4) for m in (7, 8)]
    fillings = [here.console.catalogs.fill(CatalogRequest(question_of(job), 2, "cp-sat", 60.0)) for job in jobs]
    test = open_page(job=small(here, 7).job_id)
    test.button(key="fill").click().run()
    assert golden("2-catalogs-are-being-filled") in words(test)
    for filling in fillings:
        here.console.catalogs.cancel(filling.fingerprint)
    until(here.console.catalogs.idle, "they are gone")


def test_a_stored_catalog_by_its_link_and_what_is_stale(here: ConsoleHere) -> None:
    store = here.store
    job = small(here, 5)
    fingerprint, question = filled(job), question_of(job)
    old = CatalogInfo.of(question).model_copy(update={"planner_version": "0"})
    blob = pack(make_plan(question.problem(frozenset())), Effort(solver="list"))
    store.save_catalog(old.fingerprint, old.model_dump_json(), [(plan_name(frozenset()), 0, blob)])
    test = open_page(job=job.job_id)
    states = shown_table(test, "Stored catalogs")
    stale_words = f"stale: made by version 0 of the planner, now {PLANNER_VERSION}"
    assert sorted(set(states["state"]) - {"another question"}) == [stale_words, "this one"]
    stale = open_page(catalog=old.fingerprint)
    assert golden("this-catalog-is-stale-version") in words(stale)
    assert "all there" in words(stale), "for as many failures as it was made"
    assert [b.label for b in stale.button if b.key == "fill"] == [], "no job uses it, so nothing is added to it"
    shown = open_page(catalog=fingerprint)
    assert "Covered" in words(shown)
    assert golden("2-pipelines-2-stages-5") in words(shown)
    shown.selectbox(key="stored").set_value(old.fingerprint).run()
    assert old.fingerprint[:8] in next(m.value for m in shown.markdown if m.value.startswith("**Delete"))
    shown.button(key=f"act-kill-catalog-{old.fingerprint}").click().run()
    left = [c.fingerprint for c in here.console.catalogs.list()]
    assert fingerprint in left and old.fingerprint not in left
    shown.button(key="leave-catalog").click().run()
    assert not shown.exception and "catalog" not in shown.query_params


def test_a_catalog_that_another_operator_has_deleted_takes_no_other_one_with_it(here: ConsoleHere) -> None:
    jobs = [small(here, count) for count in (3, 4)]
    made = [filled(job) for job in jobs]
    test = open_page(job=jobs[0].job_id)
    test.selectbox(key="stored").set_value(made[1]).run()
    here.console.catalogs.delete(made[1])
    test.button(key=f"act-kill-catalog-{made[1]}").click().run()
    assert not test.exception and made[0] in [c.fingerprint for c in here.console.catalogs.list()]


def test_the_source_of_the_question_follows_the_address(here: ConsoleHere) -> None:
    first, second, third = (JobHere(here.console, name) for name in ("back", "and", "forth"))
    test = open_page(job=third.job_id)
    test.selectbox(key="catalog-job").select(second.job_id).run()
    assert test.query_params["job"] == second.job_id
    test.query_params["job"] = first.job_id  # the browser's Back, twice
    test.run()
    (source,) = (box for box in test.selectbox if box.label == "Plans for")
    assert source.value == test.query_params["job"] == first.job_id


def test_a_job_is_chosen_here_as_on_other_pages(here: ConsoleHere) -> None:
    """In the same words and order."""
    over = JobHere(here.console, "over", iterations=1).register().commit(0, 0, 1).finish()
    JobHere(here.console, "runs").register()
    choices = [open_page(job=over.job_id).selectbox(key="catalog-job").options]
    test = turn_to(AppTest.from_file(MAIN, default_timeout=30), "live").run()
    choices.append(test.selectbox(key="job-picker").options)
    assert choices[0] == choices[1] and choices[0][0].startswith("runs · ")
    assert f"over · finished · {over.job_id}" in choices[0]


def test_large_grids_say_that_they_have_one_plan_per_count(here: ConsoleHere) -> None:
    job = small(here, 8, pipelines=8, stages=6)
    filled(job, 4)
    test = open_page(job=job.job_id, **{f"cat_tolerance-{job.job_id}": "4"})
    until(lambda: "One plan per number of failures" in words(test.run()), "it is known what there is to plan")
    assert golden("one-plan-per-count-reached") in words(test)


def test_a_link_shows_its_job_when_there_is_a_newer_one(here: ConsoleHere) -> None:
    job = JobHere(here.console, "first of two").register()
    sent = open_page()
    address = {name: str(value) for name, value in sent.query_params.items()}
    assert sent.query_params["job"] in (job.job_id, [job.job_id])
    newer = JobHere(here.console, "second of two", pipelines=2, stages=2).register()
    got = open_page(job=job.job_id)
    assert set(address) == {"job"} and got.selectbox(key="catalog-job").value == job.job_id != newer.job_id
    assert sent.number_input[0].value == got.number_input[0].value


def test_a_plan_opens_on_schedule(here: ConsoleHere) -> None:
    job = small(here, 10)
    fingerprint = filled(job)
    test = open_page(job=job.job_id)
    test.selectbox(key="cat_count").set_value(0).run()
    assert shown_table(test, golden("plans-of-one-number-of"))["failed"] == ["none"]
    test.selectbox(key="cat_count").set_value(1).run()
    without = next(each for each in test.selectbox if each.label == "Without")
    other = without.options[1]
    without.select(other).run()
    link = {name: test.query_params[name] for name in ("cat_count", "cat_plan") if name in test.query_params}
    assert open_page(job=job.job_id, **link).selectbox(key="cat_plan").value == test.query_params["cat_plan"]
    test = open_page(job=job.job_id, cat_count="99", cat_plan="nonsense")
    test.button(key="open-plan").click().run()
    assert not test.exception, test.exception[0].message
    name = here.console.catalogs.report(question_of(job), 1).lines[1].plans[0].name
    assert test.query_params["plan"] in (f"catalog:{fingerprint}:{name}", [f"catalog:{fingerprint}:{name}"])
    assert "slots" in words(test)
    assert json.loads(test.get("plotly_chart")[0].proto.spec)["data"]
