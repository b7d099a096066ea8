"""The Simulate page in its states, run as Streamlit runs it; its simulations run in real child processes."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere

from app.observing.job_history import history
from app.simulations import DRAWN, HISTORY

TIMEOUT, COVERS = 60, "covers"
pytestmark = pytest.mark.usefixtures("console")


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> JobHere:
    made = JobHere(here.console, "with a past").register().commit(0, 9, 1)
    return made.die("W1_2").heal("W1_2", 2).commit(10, 15, 2)


def open_page() -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    test.run().switch_page("simulate.py").run()
    for name in ("sim_pipelines", "sim_stages", "sim_micro_batches"):
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


def pinned(test: AppTest) -> str:
    value = test.query_params[COVERS]
    return value if isinstance(value, str) else value[0]


def test_a_models_shape_is_simulated() -> None:
    test = open_page()
    assert not test.exception and not test.error
    assert test.selectbox(key="model").value == "gpt-3-6.7b"
    assert COVERS not in test.query_params


def test_without_a_policy_there_is_nothing_to_simulate() -> None:
    test = open_page()
    test.multiselect(key="policies").set_value([]).run()
    assert "Policies: got 'none', expected at least one to simulate" in test.error[0].value


def test_a_link_to_a_jobs_own_history_ends_where_its_sender_saw_it_end(here: ConsoleHere, job: JobHere) -> None:
    now = history(here.console, job.job_id)[1]
    test = open_history(job)
    assert pinned(test) == f"{job.job_id}:{now:.0f}"
    assert not [b for b in test.button if b.key == "simulate-to-now"]

    link = open_history(job, f"{job.job_id}:5")
    assert pinned(link) == f"{job.job_id}:5"
    assert any("it has gone on since" in html.proto.body for html in link.get("html"))
    link.button(key="simulate-to-now").click().run()
    assert pinned(link) == f"{job.job_id}:{now:.0f}"
    link.selectbox(key="trace").set_value(DRAWN).run()
    assert COVERS not in link.query_params


@pytest.mark.parametrize("wrong", ["other-job:5", "nonsense", "{job}:-3", "{job}:1e9"])
def test_an_end_that_is_none_is_left_out(here: ConsoleHere, job: JobHere, wrong: str) -> None:
    test = open_history(job, wrong.format(job=job.job_id))
    assert pinned(test) == f"{job.job_id}:{history(here.console, job.job_id)[1]:.0f}"
