"""Live's controls: event feed, a worker's history, drain, who decides, and the options."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ui_factory as factory
from flaky_database import FlakyDatabase
from streamlit.dataframe_util import convert_arrow_bytes_to_pandas_df
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, JobHere, errors, turn_to, until

from openrecycle.agent.coordination.membership import FailureTimeouts, Mode, Note
from openrecycle.agent.messages.protocol import JobFinished, LogLine, LogLines, Registration
from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.console.view import WorkerDetail
from openrecycle.app.jobs.states import Condition, RoleState
from openrecycle.app.jobs.throughput import Baseline
from openrecycle.app.plans.service import use_plan
from openrecycle.app.plans.sources import OfJob, Source
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import address, live, worker_dialog
from openrecycle.app.ui.live import SharedReads
from openrecycle.app.ui.worker_dialog import facts_html
from openrecycle.db.access import audit_row
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.solvers.portfolio import make_plan
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes


def open_live(job_id: str, **address: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=30)
    for key, value in {"job": job_id, **address}.items():
        test.query_params[key] = value
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def html(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    return "\n".join(parts + [m.value for kind in ("markdown", "caption") for m in test.get(kind)])


def feed(test: AppTest) -> str:
    return next(e.proto.body for e in test.get("html") if "or-feed" in e.proto.body)


def failed_job(console: ConsoleService, name: str) -> JobHere:
    job = JobHere(console, name).register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2)
    return job.commit(10, 15, 2).beat(15, 2)


def test_goodput_and_age_of_data_are_on_the_page(console: ConsoleService) -> None:
    job = JobHere(console, "figures").register().commit(0, 9, 1).beat(10, 1)
    page = html(open_live(job.job_id))
    for label in ("Iterations done", "Throughput", "Goodput so far", "Living workers", "Plan in force", "Age of data"):
        assert f'<div class="or-label">{label}' in page
    assert "ETTR" in page and "vs 1F1B" in page


def test_events_are_filtered_and_acknowledged(console: ConsoleService) -> None:
    job = failed_job(console, "events")
    until(lambda: console.queries.view(job.job_id).advice is not None, "the advice, which is an event too, is there")
    test = open_live(job.job_id)
    assert "or-open" in feed(test) and "generation 1" in feed(test).lower()
    test.get_by_key("events").set_value("open").run()  # type: ignore[attr-defined]
    assert feed(test).count("<li") == feed(test).count("or-open") > 0
    test.button(key="acknowledge").click().run()
    assert not test.exception
    assert golden("no-event-fits") in feed(test)
    assert test.button(key="acknowledge").disabled
    # On a busy machine the console may say that it stood still; nobody need look at that.
    notable = [e for e in console.queries.view(job.job_id).events if e.severity != "info" and e.kind != "console"]
    assert notable and all(e.seen_by for e in notable)
    test.get_by_key("events").set_value("all").run()  # type: ignore[attr-defined]
    assert "acknowledged by" in feed(test)
    test.text_input(key="find").input("W1_2").run()
    lines = feed(test).split("<li")[1:]
    assert lines and all("W1_2" in line for line in lines)


def test_a_worker_shows_its_history_op_times_and_log(console: ConsoleService) -> None:
    job = failed_job(console, "history")
    line = LogLine(at=time.time(), text="<b>hello</b>")
    console.reports.printed(job.job_id, LogLines(worker="W0_2", incarnation="W0_2-a", lines=(line,), skipped=0))
    until(
        lambda: bool(console.jobs.find(job.job_id).measurements.op_times.smoothed("W0_2")),
        "the heartbeats are taken in",
    )
    test = open_live(job.job_id, worker="W0_2")
    page = html(test)
    assert "&lt;b&gt;hello" in page, "the log, as text"
    assert "Op times, smoothed" in page and "40 ms" in page and "(+1.2 %)" in page
    assert 'class="or-in-running"' in page and "re-routed" in page.lower()
    dead = html(open_live(job.job_id, worker="W1_2"))
    assert 'class="or-in-failed"' in dead and "killed by signal 9" in dead
    assert golden("expected-one-of-the-jobs") in errors(open_live(job.job_id, worker="W9_9"))[0]


def test_a_workers_reports_over_time_are_drawn_and_in_a_table(console: ConsoleService) -> None:
    told = (2**20, 2**20, 24 * 2**20, 2**20)
    job = JobHere(console, "over time", stage_bytes=told).register().commit(0, 9, 1).beat(10, 1)
    until(
        lambda: bool(console.jobs.find(job.job_id).measurements.op_times.smoothed("W0_2")),
        "the heartbeats are taken in",
    )
    test = open_live(job.job_id, worker="W0_2")
    page = html(test)
    assert golden("1-heartbeat-in-this-time") in page
    table = page.split("1 heartbeat in this time")[1].split("</table>")[0]
    assert "Forward" in table and table.count("40 ms") == 4, "lowest, mean and highest measured (40.5), and the plan's"
    assert "300 MiB" in table
    assert page.count(golden("up-to-24-mib-where")) == 2, "among the facts, and below the chart of its memory"
    charts = test.get("vega_lite_chart")[-2:]
    ops, memory = (convert_arrow_bytes_to_pandas_df(c.proto.datasets[0].data.data) for c in charts)
    assert list(ops["op"]) == ["F"] and list(ops["planned"]) == [40.0]
    assert list(memory["mebibytes"]) == [300.0]
    test.get_by_key("worker-span").set_value("1 day").run()  # type: ignore[attr-defined]
    assert not test.exception and golden("1-heartbeat-in-this-time") in html(test)
    silent = JobHere(console, "silent").register().commit(0, 1, 1)
    page = html(open_live(silent.job_id, worker="W0_0"))
    assert golden("it-has-reported-nothing-in") in page and "May take" not in page


def test_a_worker_is_drained_after_confirmation(console: ConsoleService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "HEARD_SECONDS", 0.0)  # after a while
    job = JobHere(console, "drain", demo=False).register().commit(0, 9, 1).beat(10, 1)
    test = open_live(job.job_id)
    test.button(key="worker-W2_1").click().run()
    assert test.query_params["worker"] == "W2_1"
    test.button(key="ask-drain").click().run()
    assert "Drain W2_1?" in html(test) and golden("nothing-is-redone") in html(test)
    assert console.jobs.find(job.job_id).state.members["W2_1"].state == "running"
    test.button(key="worker-confirm").click().run()
    assert not test.exception
    said = [e.text for e in console.queries.view(job.job_id).events if e.worker == "W2_1"]
    assert any(golden("operator-in-the-browser") in text for text in said), said
    assert "worker" not in test.query_params, "the dialog is closed"
    test.query_params["worker"] = "W2_1"  # as a refresh has it that was sent before, and waited on a busy machine
    test.run()
    assert "worker" not in test.query_params, "and does not open again"
    assert not [b for b in test.button if (b.key or "").startswith("ask-")]


def test_of_one_that_has_left_is_said_what_was_last() -> None:
    """In no generation: not in generation 0, and neither training nor holding memory."""
    worker = factory.running().workers[0]
    for state, there in ((RoleState.RUNNING, True), (RoleState.DRAINED, False)):
        left = replace(worker, state=state, generation=int(there))
        shown = facts_html(WorkerDetail(left, (), (), (), (), None))
        assert ("training" in shown) is there
        assert ("in use" in shown) is there
        assert ("Last iteration" in shown) is not there and "generation 0" not in shown


@pytest.mark.parametrize("page", ["live", "schedule"])
def test_a_page_without_the_database_says_so_and_comes_back(tmp_path: Path, page: str) -> None:
    database = sqlite_in(tmp_path, FlakyDatabase)
    console = ConsoleService(Store(database), failure_timeouts=FailureTimeouts(1.0, 80_000.0, 86_000.0))
    console.start()
    set_console(console)
    try:
        job = JobHere(console, "no database").register().commit(0, 9, 1)
        database.away = True
        test = open_live(job.job_id)
        if page != "live":
            turn_to(test, page).run()
        assert golden("the-database-cant-take-this") in errors(test)[0]
        assert "by itself" in errors(test)[0] + html(test), "whoever waits need not do anything"
        database.heal()
        test.run()
        assert not test.exception and not test.error
        assert "no database" in html(test)
    finally:
        set_console(None)
        console.close()
        database.close()


def test_an_open_page_says_that_the_database_hangs_and_shows_what_it_last_knew(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobHere(console, "hung database").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    goes_on = threading.Event()
    view = console.queries.view
    monkeypatch.setattr(console.queries, "view", lambda *args: goes_on.wait(60) and view(*args))
    monkeypatch.setattr(live, "shared_reads", SharedReads(0.01))
    test.run()
    assert golden("the-database-has-not-answered") in test.warning[0].value
    assert "10 <span" in html(test), "iterations done"
    begun = [thread for thread in threading.enumerate() if thread.name == "page read"]
    test.run()
    assert test.warning and [t for t in threading.enumerate() if t.name == "page read"] == begun, "one waits for all"
    goes_on.set()
    begun[0].join()
    monkeypatch.setattr(live, "shared_reads", SharedReads(60))
    test.run()
    assert not test.warning and not test.exception


def test_shared_reads_hand_on_results_and_errors() -> None:
    reads = SharedReads(60)
    assert reads.read("sum", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        reads.read("sum", lambda: 1 // 0)
    assert reads.read("sum", lambda: 3) == 3, "each is read anew"


def test_who_decides_can_be_changed(console: ConsoleService) -> None:
    job = JobHere(console, "mode").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    assert test.button(key="mode-apply").disabled, "nothing has been changed yet"
    test.radio(key="mode-choice-automatic").set_value(Mode.MANUAL).run()
    test.button(key="mode-apply").click().run()
    assert not test.exception
    assert console.operators.choice(job.job_id).mode == Mode.MANUAL


def test_a_job_is_paused_and_goes_on(console: ConsoleService) -> None:
    job = JobHere(console, "pause").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    test.button(key="pause").click().run()
    assert not test.exception and console.jobs.find(job.job_id).paused
    assert test.button(key="pause").label == "Resume" and "Pausing: waiting for W0_0" in html(test)
    job.beat(10, 1, "paused")
    until(lambda: console.queries.view(job.job_id).condition is Condition.PAUSED, "they have stopped")
    assert golden("paused-all-workers-wait") in html(test.run()) and set(looks(test).values()) == {"paused"}
    test.button(key="resume").click().run()
    assert not test.exception and not console.jobs.find(job.job_id).paused


def test_what_a_button_says_is_asked_for_though_another_operator_was_quicker(console: ConsoleService) -> None:
    job = JobHere(console, "two operators").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    console.operators.pause(job.job_id, "ada")
    test.button(key="pause").click().run()
    assert console.jobs.find(job.job_id).paused, "Pause never lets it go on"
    assert golden("the-job-is-paused") in test.toast[0].value.lower()
    console.operators.resume(job.job_id, "ada")
    test.button(key="pause").click().run()
    assert not console.jobs.find(job.job_id).paused and golden("the-job-is-not-paused") in test.toast[0].value.lower()


def test_a_page_stands_still_without_the_database_though_the_job_had_come_further(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobHere(console, "paused before the outage").register().commit(0, 9, 1)
    test = open_live(job.job_id)
    console.operators.pause(job.job_id, "ada")
    reads: list[object] = []

    def view(*args: object) -> None:
        reads.append(args)
        if len(reads) > 1:  # does not end else
            raise AssertionError("it reads again at once")
        raise ConsoleError(503, "unavailable", "the database is away")

    monkeypatch.setattr(console.queries, "view", view)
    test.run()
    assert not test.exception and golden("the-database-is-away") in test.warning[0].value.lower()
    assert "10 <span" in html(test), "what was seen last"


def test_the_head_is_drawn_anew_once_it_would_say_something_else(console: ConsoleService) -> None:
    job = JobHere(console, "head").register().commit(0, 9, 1)
    live_job, choice = console.jobs.find(job.job_id), console.operators.choice(job.job_id)

    def said() -> tuple[object, ...]:
        return live.said_by_controls(console, job.job_id, choice)

    until(lambda: live_job.baseline is not None, "the fault-free throughput is predicted")
    first = said()
    assert said() == first
    live_job.pin(Baseline(60.0, "measured", 0, 19), Note("info", "plan", "measured"), audit_row("test", "measured"))
    measured = said()
    job.finish()
    assert first != measured != said()


def test_the_ways_on_stand_side_by_side_until_one_is_chosen(console: ConsoleService) -> None:
    job = JobHere(console, "manual").register().commit(0, 9, 1).beat(10, 1)
    console.operators.set_mode(job.job_id, Mode.MANUAL, 3600.0, "test")
    job.die("W1_2")
    until(lambda: bool(console.operators.choice(job.job_id).candidates), "the options are worked out")
    choice = console.operators.choice(job.job_id)
    assert choice.waiting
    test = open_live(job.job_id)
    page = html(test)
    assert "Which option?" in page and golden("is-taken-in") in page
    names = [way.name for way in choice.candidates]
    assert "re-route" in names
    for way in choice.candidates:
        assert test.button(key=f"choose-{way.name}").label == "Apply"
        assert f"plan=job:{job.job_id}:{way.plan}" in page
    test.button(key="choose-re-route").click().run()
    assert not test.exception
    until(lambda: console.queries.view(job.job_id).generation == 2, "the job goes on")


def test_an_option_that_is_refused_says_why(console: ConsoleService) -> None:
    """The one that is offered where the job re-routes by another plan than the option's own."""
    job = failed_job(console, "other plan")
    live_job = console.jobs.find(job.job_id)
    until(lambda: bool(console.operators.choice(job.job_id).candidates), "the options are worked out")
    in_force = console.sources.find(OfJob(job.job_id))
    assert isinstance(in_force, Source)
    for technique in (Technique.ADAPTIVE, Technique.DECOUPLED):
        plan = make_plan(replace(in_force.plan.problem(), technique=technique), solver="list")
        if plan.fingerprint != in_force.plan.fingerprint:
            break
    use_plan(live_job, plan, "ada")
    job.resume(3)
    job.commit(16, 18, 3).beat(18, 3)
    until(lambda: bool(console.operators.choice(job.job_id).candidates), "the options are worked out anew")
    test = open_live(job.job_id)
    test.button(key="choose-re-route").click().run()
    assert test.toast[0].value == golden("the-job-re-routes-already")
    assert console.queries.view(job.job_id).generation == 3


def test_the_filter_of_the_address_is_the_filter_of_the_page(console: ConsoleService) -> None:
    job = failed_job(console, "link")
    test = open_live(job.job_id, events="failure", find="W1_2")
    lines = feed(test).split("<li")[1:]
    assert lines and all("W1_2" in line for line in lines)
    assert test.get_by_key("events").value == "failure"  # type: ignore[attr-defined]
    test.get_by_key("events").set_value("all").run()  # type: ignore[attr-defined]
    assert "events" not in test.query_params and test.query_params["find"] == "W1_2"
    assert "or-feed" in feed(open_live(job.job_id, events="no-such-filter"))


def looks(test: AppTest) -> dict[str, str]:
    """The second line of each worker's cell."""
    return {
        str(b.key).removeprefix("worker-"): b.label.split(":small[")[1].rstrip("]")
        for b in test.button
        if str(b.key).startswith("worker-W")
    }


def test_each_state_of_a_worker_has_its_look(console: ConsoleService) -> None:
    job = JobHere(console, "all looks").register().commit(0, 9, 1).die("W1_2")
    job.resume(2)
    console.jobs.find(job.job_id).measurements.found_slow({"W0_0": 1.8})
    test = open_live(job.job_id)
    seen = looks(test)
    assert seen["W0_0"] == "slow, 1.8 ×" and seen["W1_2"] == "failed"
    assert seen["W0_2"] == "+3 re-routed" and seen["W0_1"] == "running"
    legend = next(body for body in html(test).split("\n") if "or-legend" in body)
    for look, count in (("running", 8), ("slow", 1), ("re-routed", 2), ("failed", 1)):
        assert f"<b>{count}</b>" in legend.split(f"or-look-{look}")[1].split("</span>")[0], look
    # Its new process is there, and waits for the iteration's end.
    console.reports.register(job.job_id, [Registration(worker="W1_2", incarnation="W1_2-b", host="node1", pid=200)])
    console.operators.pause(job.job_id, "ada")
    assert not test.dataframe, "what is not opened is not sent"
    test.query_params["progress-figures"] = "true"
    paused = test.run()
    assert list(paused.dataframe[0].value["iteration"]) == list(range(9, -1, -1))
    assert (
        looks(paused)["W1_2"] == "joining"
        and "Pausing" in html(paused)
        and paused.button(key="pause").label == "Resume"
    )


def test_a_job_that_was_stopped_has_ended_workers_and_what_they_last_reported(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = failed_job(console, "interrupted")
    until(
        lambda: bool(console.jobs.find(job.job_id).measurements.op_times.smoothed("W0_2")),
        "the heartbeats are taken in",
    )
    console.reports.finish(job.job_id, JobFinished(state="stopped", reason="interrupted"))
    later = time.time() + 2 * 86_400
    monkeypatch.setattr(worker_dialog, "time", SimpleNamespace(time=lambda: later))
    test = open_live(job.job_id, worker="W0_2")
    assert looks(test) == {name: "failed" if name == "W1_2" else "ended" for name in job.names}
    page = html(test)
    assert golden("ended-with-the-job-b") in page and "Finished <b>" not in page
    assert golden("1-heartbeat-in-this-time") in page


def test_a_job_that_has_ended_can_be_deleted(console: ConsoleService) -> None:
    JobHere(console, "goes on").register()
    job = JobHere(console, "ends", iterations=10).register().commit(0, 9, 1)
    test = open_live(job.job_id)
    assert "or-tone-good" in html(test) and golden("it-can-be-deleted-when") in html(test)
    assert f'href="/api/v1/jobs/{job.job_id}/history.zip"' in html(test)
    assert not [b for b in test.button if b.key == "act-kill-job"]
    job.finish()
    until(lambda: console.queries.view(job.job_id).state == "finished", "the job is over")
    page = html(test.run())
    assert "or-tone-done" in page and "all done" in page and golden("the-job-is-over") in page
    assert set(looks(test).values()) == {"finished"}
    name = f"delete-name-{job.job_id}"
    assert test.button(key="act-kill-job").disabled
    assert test.text_input(key=name).input("end").run().button(key="act-kill-job").disabled
    test.text_input(key=name).input("ends").run().button(key="act-kill-job").click().run()
    assert not test.exception and not test.error
    assert job.job_id not in [known.job_id for known in console.queries.list_jobs()]
    assert test.toast[0].value == "ends is deleted"
    assert test.query_params["job"] != job.job_id and "or-sentence" in html(test)
    audit = console.security.audit.read(job_id=job.job_id)
    assert [line["actor"] for line in audit if line["action"] == "delete"] == [golden("operator-in-the-browser")]


def test_2048_workers_are_one_map_with_a_way_to_each(console: ConsoleService) -> None:
    job = JobHere(console, "2048 workers", pipelines=64, stages=32, micro_batches=2)
    console.reports.register(job.job_id, [Registration(worker="W63_31", incarnation="a", host="node1", pid=7)])
    test = open_live(job.job_id)
    assert golden("waiting-for-2-047-of") in html(test)
    assert not looks(test), "no buttons: a browser would take seconds for so many"
    assert 'or-look-empty"></i>Empty <b>2,047</b>' in html(test) and test.get("vega_lite_chart")
    assert len(test.selectbox(key="worker-name").options) == 2048
    test.query_params["worker-figures"] = "true"
    test.selectbox(key="worker-name").select("W63_31").run()
    assert len(test.dataframe[0].value) == 2048
    test.button(key="worker-open").click().run()
    assert not test.exception
    assert test.query_params["worker"] == "W63_31" and "7 on node1" in html(test)
