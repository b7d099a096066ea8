"""Live's hand on the plan: frozen and not, planned again, taken up worker by worker."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, JobHere, until

from openrecycle.agent.messages.protocol import Acknowledgement
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.console.view import GenerationProgress, RollOut
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.ui.live import roll_out_html
from tests.golden import golden

pytestmark = pytest.mark.processes


def open_live(job_id: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=30)
    test.query_params["job"] = job_id
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def html(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    return "\n".join(parts + [m.value for kind in ("markdown", "caption") for m in test.get(kind)])


def test_the_plan_is_frozen_and_thawed(console: ConsoleService) -> None:
    job = JobHere(console, "frozen").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    assert not test.button(key="replan").disabled
    test.button(key="freeze").click().run()
    assert not test.exception
    assert console.operators.choice(job.job_id).frozen_by == golden("operator-in-the-browser")
    assert test.button(key="freeze").label == "Unfreeze"
    assert test.button(key="replan").disabled, "it would be refused"
    assert golden("the-plan-is-frozen-by") in html(test)
    test.button(key="freeze").click().run()
    assert console.operators.choice(job.job_id).frozen_by == ""
    assert "frozen" not in html(test).split('class="or-cards"')[0].split("or-says")[1]


def test_a_plan_is_asked_for_and_the_page_says_what_became_of_it(console: ConsoleService) -> None:
    job = JobHere(console, "asked").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    test.selectbox(key="replan-solver").select("list").run()
    test.number_input(key="replan-seconds").set_value(5.0).run()
    test.button(key="replan").click().run()
    assert not test.exception
    replan = console.plans.replanning.status(job.job_id)
    assert replan is not None and (replan.solver, replan.seconds) == ("list", 5.0)

    def over() -> bool:
        found = console.plans.replanning.status(job.job_id)
        return found is not None and found.outcome != "planning"

    until(over, "the new plan has been judged")
    page = html(test.run())
    assert "Planned again" in page and golden("the-plan-in-force-stays-it") in page
    assert golden("asked-for-a-new-plan") in page


def test_the_search_is_seen_and_stopped(console: ConsoleService) -> None:
    slow = {"F": 40.0, "I": 52.0, "W": 28.0}
    job = JobHere(console, "long search", pipelines=6, stages=6, micro_batches=12, durations=slow, memory="7")
    job.register().commit(0, 3, 1)
    job.die("W0_1").resume(2)
    console.plans.replanning.start(job.job_id, "cp-sat", 300.0, "ada")
    test = open_live(job.job_id)
    assert "Planning again: " in html(test) and golden("s-of-at-most-5") in html(test)
    test.button(key="replan-stop").click().run()
    assert not test.exception and golden("best-plan-so-far-counts") in test.toast[0].value

    def over() -> bool:
        found = console.plans.replanning.status(job.job_id)
        return found is not None and found.outcome != "planning"

    until(over, "the search has ended")
    assert not [b for b in open_live(job.job_id).button if b.key == "replan-stop"]


def test_each_workers_step_is_seen_as_a_plan_rolls_out(console: ConsoleService) -> None:
    job = JobHere(console, "rolling").register().commit(0, 9, 1)
    assert golden("generation-1-all-12-workers") in html(open_live(job.job_id))
    job.die("W1_2")
    until(lambda: console.queries.view(job.job_id).generation == 2, "generation 2 opens")

    def acknowledge(worker: str, *states: str) -> None:
        for state in states:
            ack = Acknowledgement(worker=worker, incarnation=f"{worker}-a", generation=2, state=state)  # type: ignore[arg-type]
            console.reports.acknowledge(job.job_id, [ack])

    acknowledge("W0_0", "adopted")
    acknowledge("W0_1", "adopted", "formed")
    acknowledge("W0_2", "adopted", "formed", "resumed")
    states = {w.name: w.state for w in console.queries.view(job.job_id).workers}
    assert (states["W0_2"], states["W2_2"]) == (RoleState.REROUTED, RoleState.RUNNING), "who has not said so does not"
    test = open_live(job.job_id)
    page = html(test)
    assert golden("generation-2-of-11-workers") in page
    assert golden("has-the-plan") in test.button(key="worker-W0_0").label
    assert golden("in-its-groups") in test.button(key="worker-W0_1").label
    rows = page.split('<table class="or-table"><caption>Time after')[1].split("<tr>")[2:]
    assert [row.count("waits") for row in rows] == [3] * 8 + [2, 1, 0], "who is furthest behind comes first"
    job.resume(2)
    assert golden("generation-2-all-11-workers") in html(open_live(job.job_id))


def test_of_many_workers_the_last_ones_are_listed() -> None:
    workers = tuple(GenerationProgress(f"W{p}_0", 1.0, 2.0, 10.0 + p) for p in range(100))
    page = roll_out_html(RollOut(3, 0.0, "x", workers))
    assert golden("all-100-workers-train-by") in page
    assert page.index("W99_0") < page.index("W98_0") and "W2_0<" not in page
    assert golden("and-76-more-none-of-them") in page
    assert roll_out_html(None) == ""
