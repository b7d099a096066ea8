"""Live, whatever state a worker and its job are in."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest
from ui_console import MAIN, JobHere, until

from agent.protocol import Registration
from app.console import Console


def open_live(job_id: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=60)
    test.query_params["job"] = job_id
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def html(test: AppTest) -> str:
    return "\n".join(element.proto.body for element in test.get("html"))


def looks(test: AppTest) -> dict[str, str]:
    """The second line of each worker's cell."""
    return {
        str(b.key).removeprefix("worker-"): b.label.split(":small[")[1].rstrip("]")
        for b in test.button
        if str(b.key).startswith("worker-W")
    }


def test_each_state_of_a_worker_has_its_look(console: Console) -> None:
    job = JobHere(console, "all looks").register().commit(0, 9, 1).die("W1_2")
    job.resume(2)
    console.job(job.job_id).slow = {"W0_0": 1.8}
    test = open_live(job.job_id)
    seen = looks(test)
    assert seen["W0_0"] == "slow, 1.8 ×" and seen["W1_2"] == "failed"
    assert seen["W0_2"] == "+3 re-routed" and seen["W0_1"] == "running"
    legend = next(body for body in html(test).split("\n") if "or-legend" in body)
    for look, count in (("running", 8), ("slow", 1), ("re-routed", 2), ("failed", 1)):
        assert f"<b>{count}</b>" in legend.split(f"or-look-{look}")[1].split("</span>")[0], look
    # Its new process is there, and waits for the iteration's boundary.
    console.register(job.job_id, Registration(worker="W1_2", incarnation="W1_2-b", host="node1", pid=200))
    console.operators.pause(job.job_id, "ada")
    paused = open_live(job.job_id)
    assert (
        looks(paused)["W1_2"] == "re-joining"
        and "Paused" in html(paused)
        and paused.button(key="pause").label == "Resume"
    )


def test_when_a_job_ends_its_page_offers_no_more_than_can_be_done(console: Console) -> None:
    job = JobHere(console, "ends", iterations=10).register().commit(0, 9, 1)
    running = open_live(job.job_id)
    assert "or-tone-good" in html(running) and not [b for b in running.button if b.key == "act-kill-job"]
    job.finish()
    until(lambda: console.view(job.job_id).state == "finished", "the job is over")
    running.run()
    page = html(running)
    assert "or-tone-done" in page and "all done" in page and "the job is over" in page
    assert set(looks(running).values()) == {"finished"}
    assert running.button(key="act-kill-job").disabled, "before its name is typed"


def test_2048_workers_are_one_map_with_a_way_to_each(console: Console) -> None:
    job = JobHere(console, "2048 workers", pipelines=64, stages=32, micro_batches=2)
    console.register(job.job_id, Registration(worker="W63_31", incarnation="a", host="node1", pid=7))
    test = open_live(job.job_id)
    assert "Waiting for 2,047 of 2,048 workers to register" in html(test)
    assert not looks(test), "no buttons: a browser would take seconds for so many"
    assert 'or-look-starting"></i>Starting <b>2,048</b>' in html(test) and test.get("vega_lite_chart")
    assert len(test.selectbox(key="worker-name").options) == 2048
    test.selectbox(key="worker-name").select("W63_31").run()
    test.button(key="worker-open").click().run()
    assert not test.exception
    assert test.query_params["worker"] == "W63_31" and "7 on node1" in html(test)
