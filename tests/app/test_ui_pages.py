"""Every page in every state, run as Streamlit runs it, over a real console."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pandas as pd
import pytest
from streamlit.dataframe_util import convert_arrow_bytes_to_pandas_df
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, errors, turn_to, until

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.messages.protocol import JobFinished, Registration
from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.plans.sources import OfJob, parse_reference
from tests.golden import golden

pytestmark = pytest.mark.processes

TIMEOUT = 30


@pytest.fixture(scope="module")
def jobs(here: ConsoleHere) -> dict[str, JobHere]:
    """One job for each state."""
    made = {
        "starting": JobHere(here.console, "starting job"),
        "running": JobHere(here.console, "running job").register().commit(0, 9, 1).beat(10, 1),
        "failed": JobHere(here.console, "failed job").register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2),
        "halted": JobHere(here.console, "halted job").register().commit(0, 4, 1),
        "finished": JobHere(here.console, "finished job", iterations=10).register().commit(0, 9, 1).finish(),
        "strict": JobHere(here.console, "no demo", demo=False, paced=False).register().commit(0, 9, 1),
    }
    made["failed"].commit(10, 15, 2).beat(15, 2)
    for name in ("W0_3", "W1_3", "W2_3"):
        made["halted"].die(name)
    return made


def open_page(job_id: str | None, page: str = "live") -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    if job_id is not None:
        test.query_params["job"] = job_id
    if page != "live":
        turn_to(test, page)
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def words(test: AppTest) -> str:
    """All text of the page: HTML, Markdown, captions, alerts."""
    parts = [element.proto.body for element in test.get("html")]
    parts += [m.value for kind in ("markdown", "caption", "warning", "title") for m in test.get(kind)]
    return "\n".join([*parts, *errors(test)])


def cell(test: AppTest, worker: str) -> str:
    return str(test.button(key=f"worker-{worker}").label)


def figure(test: AppTest, index: int = 0) -> dict[str, object]:
    return json.loads(test.get("plotly_chart")[index].proto.spec)  # type: ignore[no-any-return]


def rows(test: AppTest, chart: str) -> pd.DataFrame:
    """The rows of a Vega-Lite chart, by its order on the page."""
    element = test.get("vega_lite_chart")[["throughput", "loss"].index(chart)]
    return convert_arrow_bytes_to_pandas_df(element.proto.datasets[0].data.data)


def test_without_a_job_both_pages_say_what_to_do(tmp_path: Path) -> None:
    empty = ConsoleHere(tmp_path)
    set_console(empty.console)
    try:
        for page in ("live", "schedule"):
            test = open_page(None, page)
            assert golden("no-training-job-yet") in words(test)
            assert "openrecycle train --console http" in test.code[0].value
            assert golden("no-job-is-needed-to") in words(test)
            assert not errors(test)
            # A link to a job of another database: what it names is not there, nor is any other.
            test = open_page("gone", page)
            assert golden("no-training-job-yet") in words(test)
            (said,) = errors(test)
            assert "'gone'" in said
    finally:
        set_console(None)
        empty.close()


def test_starting(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["starting"].job_id)
    assert golden("waiting-for-12-of-12") in words(test)
    assert "empty" in cell(test, "W2_3")
    assert not test.get("vega_lite_chart"), "there is nothing to plot before the first iteration"
    assert golden("no-plan-is-in-force") in words(open_page(jobs["starting"].job_id, "schedule"))


def test_running(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["running"].job_id)
    page = words(test)
    assert golden("training-in-generation-1-with-all") in page
    assert "none lost" in page
    assert golden("the-computation-inside-is-real") in page
    assert all("running" in cell(test, name) for name in jobs["running"].names)
    assert "iteration 10 · generation 1" in test.button(key="worker-W0_0").help
    assert len(rows(test, "throughput")) == 10


def test_failed_worker(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["failed"].job_id)
    page = words(test)
    assert "failed: W1_2" in page
    assert "failed" in cell(test, "W1_2")
    assert "re-routed" in cell(test, "W0_2") and "re-routed" in cell(test, "W2_2")
    assert "running" in cell(test, "W0_1")
    assert "283 ms" in page and "12.0 ms" not in page
    marks = rows(test, "throughput")["mark"]
    assert list(marks[marks != ""].items()) == [(10, "✕ W1_2")]


def test_while_workers_are_out_the_best_way_on_is_said(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["failed"].job_id
    until(lambda: console.queries.view(job).advice is not None, "the advice comes")
    test = open_page(job)
    page, said = words(test), f'<div class="or-quiet">{escape(console.queries.view(job).advice or "")}</div>'
    assert page.index("class='or-says'") < page.index(said) < page.index('<div class="or-cards">')
    assert [folded.label for folded in test.expander][:1] == ["Options with W1_2 empty"]


def test_while_all_live_the_same_place_says_what_is_ready(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["running"].job_id
    until(
        lambda: 0 < console.queries.view(job).plans_to_make == console.queries.view(job).planned_ahead,
        "plans are made ahead",
    )
    test = open_page(job)
    page, plans = words(test), console.queries.view(job).plans_to_make
    said = f"Plans made ahead: {plans}. When a worker is lost, the options are shown here."
    assert page.index("class='or-says'") < page.index(said) < page.index('<div class="or-cards">')
    assert not [folded for folded in test.expander if folded.label.startswith("Options with")]
    assert golden("the-options-are-shown-here") not in words(open_page(jobs["finished"].job_id))


def test_halted_says_why(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["halted"].job_id)
    page = words(test)
    assert "or-tone-bad" in page and ">halted<" in page
    assert golden("stage-3-has-no-living") in page
    test.button(key="worker-W1_3").click().run()
    assert golden("nobody-to-take-the-weights") in words(test)
    assert not [b for b in test.button if b.key == "worker-confirm"], "a restart that can't help is not offered"


def test_finished(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["finished"].job_id)
    assert "all done" in words(test)
    test.button(key="worker-W0_0").click().run()
    assert not test.exception


def test_unknown_job_in_the_address(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    for page in ("live", "schedule"):
        test = open_page("no-such-job", page)
        assert "job: got 'no-such-job'" in errors(test)[0]
        picker = test.selectbox(key="job-picker")
        assert picker.value is None
        picker.select(jobs["running"].job_id).run()
        assert test.query_params["job"] == jobs["running"].job_id
        assert not test.error


def test_the_job_is_that_of_the_address(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    """Also on the next page, which a link leads to without any; and after the browser's Back."""
    running, failed, halted = (jobs[name].job_id for name in ("running", "failed", "halted"))
    test = open_page(running)
    for page in ("schedule", "live"):
        test.query_params.clear()
        turn_to(test, page).run()
        assert test.query_params["job"] == running and test.selectbox(key="job-picker").value == running
    test.selectbox(key="job-picker").select(failed).run()
    assert test.query_params["job"] == failed and jobs["failed"].spec.name in words(test)
    test.query_params["job"] = halted
    test.run()
    (picker,) = (box for box in test.selectbox if box.label == "Job")
    assert picker.value == test.query_params["job"] == halted and jobs["halted"].spec.name in words(test)
    labels = {option.rsplit(" · ", 1)[1]: option for option in picker.options}
    assert " · finished · " in labels[jobs["finished"].job_id] and labels[halted].count(" · ") == 1, "it may run again"


def test_a_job_that_is_gone_is_asked_about_only_where_a_link_names_it(console: ConsoleService) -> None:
    gone = JobHere(console, "gone", iterations=10).register().commit(0, 9, 1).finish()
    JobHere(console, "stays", iterations=10).register()
    test = open_page(gone.job_id)
    until(lambda: not console.histories.kept_for(gone.job_id), "it can be deleted")
    console.histories.delete(gone.job_id, "ada")
    assert test.run().error, "its page says that it is gone"
    test.query_params.clear()
    turn_to(test, "schedule").run()
    assert not test.error and test.query_params["job"] != gone.job_id


def test_the_dialog_is_that_of_the_address(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["running"].job_id)
    test.button(key="worker-W2_1").click().run()
    test.button(key="ask-kill").click().run()
    assert "Kill W2_1?" in words(test)
    test.query_params["worker"] = "W0_3"  # Back
    assert "Kill W" not in words(test.run()) and "<h2>" not in words(test)
    assert [d.proto.dialog.title for d in test.get("dialog")] == ["Worker W0_3"]
    test.query_params["worker"] = "W2_1"
    assert "Kill W2_1?" in words(test.run())
    del test.query_params["worker"]
    assert not test.run().get("dialog")
    test.query_params["worker"] = "W2_1"
    assert "Kill W2_1?" not in words(test.run()), "nothing stays armed behind a closed dialog"


def test_what_was_confirmed_is_done_to_the_process_that_was_seen(console: ConsoleService) -> None:
    job = JobHere(console, "replaced").register().commit(0, 9, 1).beat(10, 1)
    for kind in ("kill", "drain"):
        test = open_page(job.job_id)
        test.button(key="worker-W1_2").click().run()
        test.button(key=f"ask-{kind}").click().run()
        generation = console.queries.view(job.job_id).generation
        job.die("W1_2").heal("W1_2", generation + 1).commit(10, 12, generation + 1)
        job.back("W1_2").resume(generation + 2)
        job.beat(13, generation + 2)
        test.button(key="worker-confirm").click().run()
        assert not console.jobs.find(job.job_id).commands.after(0) and golden("is-not-as-it-was") in words(test)
        assert console.jobs.find(job.job_id).state.members["W1_2"].state == "running"
        assert test.button(key=f"ask-{kind}"), "it can be asked for anew"


def test_only_a_worker_that_can_be_started_is_offered_to_be(console: ConsoleService) -> None:
    job = JobHere(console, "waits for its workers", checkpoints=True)

    def offered() -> str:
        test = open_page(job.job_id)
        test.button(key="worker-W1_2").click().run()
        return words(test) + " ".join(b.label for b in test.button if str(b.key).startswith("ask-"))

    assert golden("it-has-not-registered-yet") in offered() and "Start" not in offered().split(" ")
    job.register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2)
    assert "Restart" in offered()
    console.reports.finish(job.job_id, JobFinished(state="stopped", reason="interrupted"))
    assert "Restart" not in offered()


def test_suspect_workers_show(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path, FailureTimeouts(heartbeat=0.1, suspect=0.3, dead=3600.0))
    set_console(here.console)
    try:
        job = JobHere(here.console, "silent job").register()
        until(lambda: here.console.queries.view(job.job_id).workers[0].state == "suspect", "silence makes suspect")
        test = open_page(job.job_id)
        assert "suspect" in cell(test, "W0_0")
        assert golden("waiting-for-all-workers") in words(test)
    finally:
        set_console(None)
        here.close()


def test_kill_needs_confirmation_and_says_what_happens(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["running"]
    # What is left without it is known once its plan is there.
    until(lambda: console.operators.loss_of(job.job_id, "W2_1").share is not None, "a plan without W2_1")
    test = open_page(job.job_id)
    test.button(key="worker-W2_1").click().run()
    assert console.jobs.find(job.job_id).commands.after(0) == [], "opening a worker does nothing to it"
    assert not [b for b in test.button if b.key == "worker-confirm"], "nothing is armed yet"
    for tab in ("History", "Log", "Now"):
        test.session_state["worker-tabs"] = tab
        test.run()
        assert not [b for b in test.button if b.key == "worker-confirm"], tab
    test.button(key="ask-kill").click().run()
    page = words(test)
    assert "Kill W2_1?" in page and "Process 109 on node1" in page
    assert golden("its-6-micro-batches-go-to") in page and golden("of-fault-free-throughput-is-left") in page
    assert console.jobs.find(job.job_id).commands.after(0) == [], "asked, and not confirmed"
    assert test.button(key="worker-confirm").label == "Kill W2_1"
    test.button(key="worker-confirm").click().run()
    assert not test.exception
    assert [(c.kind, c.worker) for c in console.jobs.find(job.job_id).commands.after(0)] == [("kill", "W2_1")]


def test_restart_is_offered_for_a_failed_worker(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["failed"]
    test = open_page(job.job_id)
    test.button(key="worker-W1_2").click().run()
    test.button(key="ask-restart").click().run()
    assert test.button(key="worker-confirm").label == "Restart W1_2"
    test.button(key="worker-confirm").click().run()
    assert [(c.kind, c.worker) for c in console.jobs.find(job.job_id).commands.after(0)] == [("restart", "W1_2")]


def test_cancel_does_nothing(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["failed"]
    before = console.jobs.find(job.job_id).commands.after(0)
    test = open_page(job.job_id)
    test.button(key="worker-W0_0").click().run()
    test.button(key="ask-kill").click().run()
    test.button(key="worker-cancel").click().run()
    assert not test.exception and not [b for b in test.button if b.key == "worker-confirm"]
    test.button(key="ask-kill").click().run()
    test.button(key="worker-W0_1").click().run()
    assert not [b for b in test.button if b.key == "worker-confirm"], "another one's dialog is not armed"
    assert console.jobs.find(job.job_id).commands.after(0) == before


def test_last_peer_warns_of_the_halt(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = JobHere(console, "thin job").register().commit(0, 3, 1)
    job.die("W0_1").resume(2)
    job.die("W1_1").resume(3)
    test = open_page(job.job_id)
    test.button(key="worker-W2_1").click().run()
    test.button(key="ask-kill").click().run()
    assert golden("nobody-can-take-over") in words(test)
    assert golden("stops-the-job") in test.warning[0].value


def test_no_kill_outside_a_demo(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["strict"].job_id)
    assert golden("the-computation-inside-is-real") not in words(test), "not paced: nothing to say"
    test.button(key="worker-W0_0").click().run()
    assert golden("only-the-processes-of-a") in words(test)
    assert not [b for b in test.button if b.key == "ask-kill"]


def test_schedule_of_the_plan_in_force(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = jobs["failed"]
    plan = console.queries.view(job.job_id).plan
    assert plan is not None
    test = open_page(job.job_id, "schedule")
    assert test.selectbox(key="plan-picker").value == f"job:{job.job_id}:in-force"
    drawn = figure(test)["data"]
    bars = sum(len(t["hovertext"]) for t in drawn if t["meta"]["kind"] in "FIWBO")  # type: ignore[attr-defined]
    assert bars == sum(len(ops) for ops in plan.workers.values())
    assert len(test.dataframe[0].value) == 12
    assert len(test.dataframe[1].value) == bars


def test_schedule_of_another_plan(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = open_page(jobs["failed"].job_id, "schedule")
    picker = test.selectbox(key="plan-picker")
    fault_free = next(v for v in picker.options if v == "fault-free")
    picker.select(fault_free).run()
    assert not test.exception
    chosen = parse_reference(str(test.query_params["plan"]))
    assert isinstance(chosen, OfJob) and console.plans.cache.plan(chosen.fingerprint).failed == ()
    assert not any(t["meta"].get("rerouted") for t in figure(test)["data"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("show", "rows"), [("failure", 3), ("pipeline", 4), ("stage", 3), ("all", 12)])
def test_schedule_filters(console: ConsoleService, jobs: dict[str, JobHere], show: str, rows: int) -> None:
    test = open_page(jobs["failed"].job_id, "schedule")
    test.get_by_key("show").set_value(show).run()  # type: ignore[attr-defined]
    assert not test.exception
    assert len(figure(test)["layout"]["yaxis"]["ticktext"]) == rows  # type: ignore[index]


def test_unknown_plan_in_the_address(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    test.query_params["job"] = jobs["failed"].job_id
    test.run()
    test.query_params["plan"] = "0123abcd"
    turn_to(test, "schedule").run()
    assert "plan: got '0123abcd'" in errors(test)[0]
    assert test.get("plotly_chart")


def test_a_large_schedule_opens_as_overview_and_detail(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = JobHere(console, "large job", pipelines=8, stages=8, micro_batches=48).register()
    test = open_page(job.job_id, "schedule")
    assert 'src="data:image/png;base64,' in words(test) and 'alt="Overview of 64 workers' in words(test)
    assert test.get("bidi_component") and len(test.get("plotly_chart")) == 1, "a pad for boxes, and a detail"
    bars = sum(len(t["hovertext"]) for t in figure(test, 0)["data"] if t["meta"]["kind"] in "FIWBO")  # type: ignore[attr-defined]
    assert 100 < bars < 1000
    test.selectbox(key="first-row").select("W4_0").run()
    assert not test.exception
    assert figure(test, 0)["layout"]["yaxis"]["ticktext"][0] == "W4_0"  # type: ignore[index]
    live = open_page(job.job_id)
    assert live.button(key="worker-W7_7"), "64 workers are still one button each"


def test_a_grid_too_large_for_buttons_is_a_heat_map(console: ConsoleService, jobs: dict[str, JobHere]) -> None:
    job = JobHere(console, "wide job", pipelines=20, stages=4, micro_batches=4).register()
    test = open_page(job.job_id)
    assert not [b for b in test.button if str(b.key).startswith("worker-W")]
    test.selectbox(key="worker-name").select("W19_3").run()
    test.button(key="worker-open").click().run()
    assert not test.exception
    assert "179 on node1" in words(test)
    assert test.button(key="ask-kill")


def test_a_page_that_fails_says_so_in_a_sentence_and_the_log_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        from openrecycle.app.runtime.errors import ConsoleError
        from openrecycle.app.server import page_failed

        for error in (KeyError("secret"), ConsoleError(404, "unknown", "job: got 'x', expected one that is there")):
            assert page_failed(error)

    test = AppTest.from_function(script).run()
    broken, refused = errors(test)
    mark = re.search(r"in its log under ([0-9a-f]{8})\.", broken)
    assert mark and "secret" not in broken and golden("no-job-is-touched") in broken
    assert refused.startswith("job: got 'x',")
    said = capsys.readouterr()
    assert mark.group(1) in said.out + said.err and "KeyError: 'secret'" in said.out + said.err


def test_large_numbers_are_drawn(console: ConsoleService) -> None:
    """Of iterations and generations there may be as many as the protocol takes."""
    job, first = JobHere(console, "for ever", iterations=2**53).register(), 2**40
    job.commit(first, first + 2, 1).beat(first + 3, 1)
    assert list(rows(open_page(job.job_id), "throughput")["iteration"]) == [first, first + 1, first + 2]


LINK = "![](https://elsewhere.example/picture.png) [Sign in again](https://elsewhere.example)"


@pytest.mark.parametrize(
    ("page", "named"),
    [
        ("live", "job"),
        ("schedule", "plan"),
        ("compare", "plans"),
        ("catalog", "job"),
        ("catalog", "catalog"),
        ("planner", "saved"),
    ],
)
def test_what_an_address_says_is_no_markdown(console: ConsoleService, page: str, named: str) -> None:
    """Whoever follows a link is shown none of somebody else's, and asks no other server for a picture."""
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    test.query_params[named] = LINK
    if page != "live":
        turn_to(test, page)
    test.run()
    assert not test.exception
    assert any("[Sign in again](https" in error for error in errors(test)), "it is said as it is"
    assert not any("![" in element.value or "](" in element.value for element in test.error)


def test_what_an_agent_calls_its_host_is_no_markdown(console: ConsoleService) -> None:
    job = JobHere(console, "odd hosts")
    console.reports.register(
        job.job_id, [Registration(worker=n, incarnation=f"{n}-a", host=f"h {LINK}", pid=7) for n in job.names]
    )
    job.resume(1)
    job.commit(0, 3, 1).beat(4, 1)
    test = AppTest.from_file(MAIN, default_timeout=TIMEOUT)
    test.query_params.update(job=job.job_id, worker="W0_0")
    test.run()
    test.button(key="ask-kill").click().run()
    assert not test.exception
    (asked,) = [element.value for element in test.markdown if "SIGKILL" in element.value]
    for markdown in (asked, test.button(key="worker-W0_0").help):
        assert "Sign in again" in markdown and "![" not in markdown and "](" not in markdown


def test_home_opens_a_job_that_runs_before_one_that_has_ended(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path)
    set_console(here.console)
    try:
        runs = JobHere(here.console, "runs").register()
        JobHere(here.console, "ended later").register().finish()
        test = AppTest.from_file(MAIN, default_timeout=30).run()
        assert not test.exception and test.query_params["job"] == runs.job_id
    finally:
        set_console(None)
        here.close()
