"""The Simulate page in its states, run as Streamlit runs it; its simulations run in real child processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, turn_to, until

from openrecycle.app.plans.simulations import DRAWN, HISTORY, parse_request
from openrecycle.app.ui.simulate import SHOWN, policy_words, ratio_words
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.plan import job_doc
from tests.conftest import at_length
from tests.golden import golden

TIMEOUT, COVERS = 60, "covers"
pytestmark = [pytest.mark.usefixtures("console"), pytest.mark.processes]


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> JobHere:
    made = JobHere(here.console, "with a past").register().commit(0, 9, 1)
    return made.die("W1_2").heal("W1_2", 2).commit(10, 15, 2)


def open_page(**params: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    for name, word in params.items():
        test.query_params[name] = word
    turn_to(test, "simulate").run()
    for name in ("sim_pipelines", "sim_stages", "sim_micro_batches"):
        if name not in params:
            test.number_input(key=name).set_value(2)
    return test.run()


def open_history(job: JobHere, covers: str = "") -> AppTest:
    test = open_page()
    test.selectbox(key="sim_job").set_value(job.job_id).run()
    if covers:
        test.query_params[COVERS] = covers
    test.selectbox(key="trace").set_value(HISTORY).run()
    assert not test.exception and not test.error
    return test


def html(test: AppTest) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


def until_done(test: AppTest) -> AppTest:
    def done() -> bool:
        page = html(test.run())
        assert not test.error, [said.value for said in test.error]
        return "parts are there." in page

    until(done, "it is simulated")
    return test


def pinned(test: AppTest) -> str:
    value = test.query_params[COVERS]
    return value if isinstance(value, str) else value[0]


def test_a_models_shape_is_simulated() -> None:
    test = open_page()
    assert not test.exception and not test.error
    assert test.selectbox(key="model").value == "gpt-3-6.7b"
    assert COVERS not in test.query_params
    for chart in test.get("plotly_chart"):
        layout = json.loads(chart.proto.spec)["layout"]  # it shows all there is, so no link can miss a zoom
        assert layout["dragmode"] is False
        assert all(layout[axis]["fixedrange"] for axis in layout if axis.startswith(("xaxis", "yaxis")))


@pytest.mark.parametrize(
    ("field", "beyond"),
    [
        ("stages", 600),
        at_length("pipelines", 1025),
        ("hours", 8761),
        at_length("repair", 10_001),
        at_length("host_mtbf", 1e8),
    ],
)
def test_a_link_beyond_what_is_simulated_says_so_at_its_field(field: str, beyond: float) -> None:
    test = open_page(**{f"sim_{field}": f"{beyond:g}"})
    most = test.number_input(key=f"sim_{field}").max
    assert not test.exception and not test.error and f"to {most:.10g}" in html(test)
    parse_request(**{field: most})  # what the field allows is not refused


def test_without_a_policy_there_is_nothing_to_simulate() -> None:
    test = open_page()
    test.multiselect(key="policies").set_value([]).run()
    assert golden("choose-at-least-one-policy") in html(test)
    assert not test.error and not test.get("plotly_chart")


def test_a_jobs_own_history_is_simulated_in_the_unit_of_its_length(here: ConsoleHere, job: JobHere) -> None:
    test = until_done(open_history(job))
    assert golden("all-5-parts-are-there") in html(test)
    assert "1 worker lost" in html(test)
    chart = json.loads(test.get("plotly_chart")[0].proto.spec)
    assert chart["layout"]["xaxis"]["title"]["text"] == "seconds"
    assert max(chart["data"][0]["x"]) == pytest.approx(here.console.queries.past_failures(job.job_id)[1], abs=1)


def test_a_jobs_slots_are_as_long_as_its_iterations_say(here: ConsoleHere) -> None:
    slots = {"durations": {}, "paced": False, "demo": False}
    untried = JobHere(here.console, "slots untried", **slots).register()
    assert here.console.queries.unit_seconds(untried.job_id) is None
    tried = JobHere(here.console, "in slots", **slots).register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2)
    plan = here.console.queries.view(tried.job_id).plan
    assert plan is not None and plan.job.time_unit == "slot" and plan.failed
    for over in (False, True):  # its plans are in the database then
        if over:
            tried.finish()
            until(lambda: not len(here.console.jobs.find(tried.job_id).plans.catalog), "it has let go of its plans")
        test = open_page()
        test.selectbox(key="sim_job").set_value(tried.job_id).run()
        assert not test.exception and not test.error
        request = test.session_state[SHOWN]
        healthy = next(p for p in here.store.job_plans(tried.job_id) if not p["failed"])
        period = here.console.plans.cache.plan(healthy["fingerprint"]).metrics.period
        assert request.unit_seconds == pytest.approx(1.0 / period, rel=0.05), "each iteration took a second"


def test_a_job_with_a_slow_worker_is_simulated_with_workers_that_are_alike(here: ConsoleHere) -> None:
    slow = replace(Job.uniform(3, 4, 6, time_unit="ms"), speeds=((Worker(1, 2), 0.5),))
    job = JobHere(here.console, "with a slow one", durations={}, profile=job_doc(slow), paced=False, demo=False)
    test = open_page()
    test.selectbox(key="sim_job").set_value(job.job_id).run()
    assert not test.exception and not test.error
    request = test.session_state[SHOWN]
    assert request.job == job_doc(replace(slow, speeds=())) and request.unit_seconds is None


def test_a_history_without_a_failure_says_so_and_is_not_simulated(here: ConsoleHere) -> None:
    calm = JobHere(here.console, "nothing has happened").register().commit(0, 9, 1)
    test = open_history(calm)
    assert golden("all-policies-would-have-trained") in html(test)
    assert not test.get("plotly_chart") and "or-card" not in html(test)


def test_one_policy_is_compared_with_none() -> None:
    test = open_page(sim_hours="20")
    test.multiselect(key="policies").set_value(["drop-replica"]).run()
    page = html(until_done(test))
    assert "Best here" in page and golden("against-the-last") not in page


def test_policies_that_are_as_good_as_the_best_are_named_with_it() -> None:
    """Nothing fails in an hour, so all train equally much."""
    test = open_page(sim_hours="1", sim_mtbf="100000")
    test.multiselect(key="policies").set_value(names := ["drop-replica", "recycle", "ours"]).run()
    cards = html(until_done(test)).split("or-cards")[1]
    assert all(policy_words(name) in cards for name in names)


def test_how_the_best_is_told_from_the_worst() -> None:
    assert [ratio_words(27.2, worst) for worst in (27.2, 20.0, 0.01, 0.0)] == [
        "1.00 ×",
        "1.36 ×",
        "2,720 ×",
        "trains nothing",
    ]


def test_a_link_to_a_jobs_own_history_ends_where_its_sender_saw_it_end(here: ConsoleHere, job: JobHere) -> None:
    now = here.console.queries.past_failures(job.job_id)[1]
    test = open_history(job)
    assert pinned(test) == f"{job.job_id}:{now:.0f}"
    assert not [b for b in test.button if b.key == "simulate-to-now"]

    link = open_history(job, f"{job.job_id}:5")
    assert pinned(link) == f"{job.job_id}:5"
    assert any(golden("it-has-gone-on-since") in html.proto.body for html in link.get("html"))
    link.button(key="simulate-to-now").click().run()
    assert pinned(link) == f"{job.job_id}:{now:.0f}"
    link.selectbox(key="trace").set_value(DRAWN).run()
    assert COVERS not in link.query_params


@pytest.mark.parametrize("wrong", [at_length("other-job:5"), at_length("nonsense"), at_length("{job}:-3"), "{job}:1e9"])
def test_an_end_that_is_none_is_left_out(here: ConsoleHere, job: JobHere, wrong: str) -> None:
    test = open_history(job, wrong.format(job=job.job_id))
    assert pinned(test) == f"{job.job_id}:{here.console.queries.past_failures(job.job_id)[1]:.0f}"
