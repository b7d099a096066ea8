"""Schedule: what is drawn and what the link keeps, in every state of the page."""

from __future__ import annotations

import json
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ui_factory as factory
from streamlit.proto.WidgetStates_pb2 import WidgetState
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Selectbox
from ui_console import DEADLINE, MAIN, Address, ConsoleHere, JobHere, errors, turn_to, until

from openrecycle.agent.messages.protocol import MeasuredOps
from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.ui import address, schedule
from openrecycle.app.ui.facts import critical_words
from openrecycle.planner.plans.drawing import OP_WORDS
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> JobHere:
    return JobHere(here.console, "drawn job").register().die("W1_2").heal("W1_2", 2)


def open_page(**query: Any) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=60)
    for name, value in query.items():
        test.query_params[name] = value
    turn_to(test, "schedule").run()
    assert not test.exception, test.exception[0].message
    return test


def drawn(test: AppTest, index: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    figure = json.loads(test.get("plotly_chart")[index].proto.spec)
    return figure["data"], figure["layout"]


def kinds(test: AppTest) -> set[str]:
    return {t["meta"]["kind"] for t in drawn(test)[0] if t.get("meta")}


def link(test: AppTest) -> str:
    """The plan that the address names."""
    said = test.query_params["plan"]
    return said if isinstance(said, str) else said[0]


def words(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    return "\n".join([*parts, *(e.value for kind in ("markdown", "caption") for e in test.get(kind)), *errors(test)])


def test_memory_and_the_next_iteration_are_drawn_and_the_critical_path_on_request(
    console: ConsoleService, job: JobHere
) -> None:
    test = open_page(job=job.job_id)
    assert {"memory", "memory limit", "ghost"} <= kinds(test) and "critical" not in kinds(test)
    test.get_by_key("draw").set_value(["critical"]).run()  # type: ignore[attr-defined]
    assert "critical" in kinds(test) and not {"memory", "ghost"} & kinds(test)
    plan = console.queries.view(job.job_id).plan
    assert plan is not None and critical_words(plan.schedule()) in words(test)


def test_a_plan_is_drawn_without_reading_what_its_job_does(
    console: ConsoleService, job: JobHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a busy job of thousands of workers that takes seconds, and none of it is on the page."""

    def read(*_: object) -> None:
        raise AssertionError("the whole view of a job was read")

    run = console.jobs.find(job.job_id).plan_run
    assert run is not None
    monkeypatch.setattr(console.queries, "view", read)
    monkeypatch.setattr(console.accounts, "of", read)
    test = open_page(job=job.job_id, plan=f"job:{job.job_id}:{run.fingerprint}")  # by way of Live, which fails
    assert {"memory", "ghost"} <= kinds(test) and "drawn job" in words(test)


def test_a_path_is_chosen_kept_in_the_link_and_dropped_where_there_is_no_such_micro_batch(
    console: ConsoleService, job: JobHere
) -> None:
    test = open_page(job=job.job_id, path="1.2")
    ahead = [t for t in drawn(test)[0] if t["meta"]["kind"] in OP_WORDS and not t["meta"]["aside"]]
    assert {c for t in ahead for c in t.get("customdata", [])} == {"1.2"}
    test.selectbox(key="path").select("0 of pipeline 0").run()
    assert str(test.query_params["path"]) in ("0.0", "['0.0']")
    for nonsense in ("9.9", "1", "a.b", "1.2.3"):
        assert "path" not in kinds(open_page(job=job.job_id, path=nonsense))


def test_a_click_toggles_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Streamlit reports of a click, in each form that it has been seen to take."""
    state: dict[str, Any] = {}
    query = Address()
    for module in (schedule, address):
        monkeypatch.setattr(module, "st", SimpleNamespace(session_state=state, query_params=query))
    for given in ("1.2", ["1.2"], {"0": "1.2"}):
        state["gantt"] = {"selection": {"points": [{"customdata": given}]}}
        schedule.clicked("gantt")
        assert query == {"path": "1.2"}
        schedule.clicked("gantt")
        assert query == {}
    state["gantt"] = {"selection": {"points": []}}
    schedule.clicked("gantt")
    assert query == {}


def test_time_range_in_the_link(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id, time="200-400")
    assert drawn(test)[1]["xaxis"]["range"] == [200, 400]
    for nonsense in ("400-200", "a-b", "200", "-5-10", "0-99999"):
        assert drawn(open_page(job=job.job_id, time=nonsense))[1]["xaxis"]["range"][0] == 0


class Late(Selectbox[Any]):
    """As a browser has it that has not yet been told how the chosen one is called now."""

    @property
    def _widget_state(self) -> WidgetState:
        return WidgetState(id=self.id, string_value="In force, generation 1: fault-free")


def test_the_plan_in_force_is_called_otherwise_once_another_one_is(console: ConsoleService) -> None:
    """The browser still sends what it was called before, which is no plan that anybody asks for."""
    job = JobHere(console, "renamed").register()
    test = open_page(job=job.job_id)
    picker = test.selectbox(key="plan-picker")
    assert picker.options[0] == "In force, generation 1: fault-free"
    job.die("W1_2").heal("W1_2", 2)
    test.run()
    test.selectbox(key="plan-picker").__class__ = Late
    test.run()
    assert not test.error and link(test).startswith(f"job:{job.job_id}:")
    assert test.selectbox(key="plan-picker").options[0] == "In force, generation 2: without W1_2"
    assert test.toggle[0].value and console.queries.view(job.job_id).plan.fingerprint in link(test)  # type: ignore[union-attr]


def test_a_saved_plan_is_shown_without_any_job(tmp_path: Path) -> None:
    empty = ConsoleHere(tmp_path)
    set_console(empty.console)
    try:
        nothing_else = errors(open_page(plan="saved:"))[0]
        saved = empty.console.plans.library.save(factory.plan(("W0_1",), unit="slot"), "kept")
        test = open_page()
        assert test.selectbox(key="plan-picker").options == ["Saved: kept"]
        assert "<b>out</b>" in json.dumps(drawn(test)[1]), "nobody knows why"
        assert drawn(open_page(plan=f"saved:{saved}"))[1] == drawn(test)[1]
        assert "plan: got 'saved:'" in errors(open_page(plan="saved:"))[0]
        assert errors(open_page(plan="saved:"))[0].removeprefix(nothing_else), "there is a plan to choose instead"
        assert nothing_else in errors(open_page(plan="saved:"))[0]
    finally:
        set_console(None)
        empty.close()


def test_a_kept_plan_outlives_the_job_that_its_link_names(console: ConsoleService, job: JobHere) -> None:
    plan = factory.running().plan
    assert plan is not None
    console.plans.library.save(plan, "the night shift's")
    test = open_page(job="deleted", plan=f"saved:{plan.fingerprint}")
    assert not test.error and "the night shift&#x27;s" in words(test) and drawn(test)[0]
    assert test.query_params["plan"] == f"saved:{plan.fingerprint}" and test.query_params["job"] != "deleted"
    for gone in ("saved:0123", f"job:deleted:{plan.fingerprint}"):
        assert "got 'deleted'" in open_page(job="deleted", plan=gone).error[0].value


def test_a_plan_by_technique_is_made_while_the_page_waits(console: ConsoleService, job: JobHere) -> None:
    small = JobHere(console, "2 x 3", pipelines=2, stages=3, micro_batches=5)
    test = open_page(job=small.job_id, plan=f"made:staggered:none:{small.job_id}")
    deadline = time.monotonic() + DEADLINE
    while not test.get("plotly_chart"):
        assert any(c.value.startswith("Planning: Adaptive + decoupled") for c in test.caption)
        assert time.monotonic() < deadline
        time.sleep(0.05)
        test.run()
    assert drawn(test)[1]["yaxis"]["ticktext"] == [f"W{p}_{s}" for p in range(2) for s in range(3)]


def test_every_format_is_offered_and_what_is_refused_says_why(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id)
    buttons = {b.proto.label: b for b in test.get("download_button")}
    assert set(buttons) == {
        "Chrome trace (Perfetto)",
        golden("pytorch-pipelining-csv-pipeline-0"),
        golden("csv-one-line-per-op"),
        golden("json-plan-document"),
        golden("yaml-plan-document"),
        "SVG picture",
        "PNG picture",
        "Job bundle (zip)",
    }
    assert [label for label, b in buttons.items() if b.proto.disabled] == [golden("pytorch-pipelining-csv-pipeline-0")]
    assert "one rank" in words(test)


def test_a_box_in_the_link_chooses_the_detail(
    console: ConsoleService, job: JobHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MAX_BARS", 100)
    test = open_page(job=job.job_id, box="400,800,8,11")
    _, layout = drawn(test)
    assert layout["xaxis"]["range"] == [400, 800]
    assert layout["yaxis"]["ticktext"] == [f"W2_{s}" for s in range(4)]
    zoomed = open_page(job=job.job_id, box="400,800,8,11", time="450-500")
    assert drawn(zoomed)[1]["xaxis"]["range"] == [450, 500], "what of the chosen time is in the box"
    zoomed = open_page(job=job.job_id, box="400,800,8,11", time="100-300")
    assert drawn(zoomed)[1]["xaxis"]["range"] == [400, 800]
    test.button(key="forget-box").click().run()
    assert drawn(test)[1]["yaxis"]["ticktext"][0] == "W0_0"
    for nonsense in ("1,2,3", "800,400,0,3", "a,b,c,d", "0,1,5,9999"):
        test = open_page(job=job.job_id, box=nonsense)
        assert drawn(test)[1]["yaxis"]["ticktext"][0] == "W0_0"
        assert golden("box-got-expected-two-times", f"{nonsense!r}") in unescape(words(test))


def test_a_box_that_is_drawn_goes_into_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Address(time="40-50")
    state: dict[str, Any] = {schedule.PAD: {"box": [10, 30.5, 3, 7]}}
    for module in (schedule, address):
        monkeypatch.setattr(module, "st", SimpleNamespace(session_state=state, query_params=query))
    time = address.TimeRange("time", 60.0, (40.0, 50.0))
    schedule.remember_box(time)
    assert query == {"box": "10,30.5,3,7"}, "all of the box is shown"
    for nothing in ({}, {"box": None}, {"box": [1, 2]}, {"box": ["1", 2, 3, 4]}, {"box": "1,2,3,4"}):
        state[schedule.PAD] = nothing
        schedule.remember_box(time)
        assert query == {"box": "10,30.5,3,7"}


def measure(console: ConsoleService, job: JobHere) -> int:
    """The job's workers record the iteration that the console asks for, exactly as planned; returns which."""
    live = console.jobs.find(job.job_id)
    console.measuring.newest(live, watch=True)

    def asked() -> bool:
        job.commit(live.state.committed, live.state.committed, live.state.generation)
        return console.measuring.wanted(live) is not None

    until(asked, "an iteration is asked for")
    iteration, plan = console.measuring.wanted(live), console.queries.view(job.job_id).plan
    assert iteration is not None and plan is not None
    for name in job.living:
        ops = plan.workers[name]
        part = MeasuredOps(
            worker=name,
            incarnation=name + "-a",
            generation=live.state.generation,
            iteration=iteration,
            clock="one",
            started_us=0,
            offset_us=0,
            uncertainty_us=0,
            kinds="".join(op.kind for op in ops),
            pipelines=tuple(op.pipeline for op in ops),
            micro_batches=tuple(-1 if op.micro_batch is None else op.micro_batch for op in ops),
            starts_us=tuple(round(1000 * op.start) for op in ops),
            durations_us=tuple(round(1000 * op.duration) for op in ops),
        )
        console.measuring.take(live, part)
    return iteration


def test_an_iteration_as_it_ran_stands_still_until_a_newer_one_is_asked_for(console: ConsoleService) -> None:
    job = JobHere(console, "measured job", iterations=20_000).register().die("W0_1").heal("W0_1", 2)
    waiting = open_page(job=job.job_id, plan=f"measured:{job.job_id}")
    assert any(golden("waiting-for-all-workers") in c.value for c in waiting.caption)
    iteration = measure(console, job)
    test = open_page(job=job.job_id, plan=f"measured:{job.job_id}")
    page = words(test)
    assert golden("iteration-as-it-ran-in", iteration) in page
    plan = console.queries.view(job.job_id).plan
    assert plan is not None
    bars = sum(len(t["hovertext"]) for t in drawn(test)[0] if t["meta"]["kind"] in OP_WORDS)
    assert bars == sum(map(len, plan.workers.values()))
    assert "memory" in kinds(test)

    link = str(test.query_params["plan"])
    assert link == f"measured:{job.job_id}:{iteration}"
    newer = measure(console, job)
    test.run()
    assert golden("iteration-as-it-ran", iteration) in words(test), "what is looked at does not change by itself"
    later = open_page(job=job.job_id, plan=link)
    assert golden("iteration-as-it-ran", iteration) in words(later), "and a link shows what its sender saw"
    test.button(key=f"newest-{job.job_id}").click().run()
    assert golden("iteration-as-it-ran", newer) in words(test)
    assert test.query_params["plan"] == f"measured:{job.job_id}:{newer}"

    unknown = open_page(job=job.job_id, plan=f"measured:{job.job_id}:{newer + 1}")
    assert golden("iteration-of-job-measured-job", newer + 1) in errors(unknown)[0]
    unknown.run()
    assert unknown.error, "it is said for as long as the address asks for it"
    unknown.button(key="show-newest").click().run()
    assert golden("iteration-as-it-ran", newer) in words(unknown) and not unknown.error


def test_a_link_shows_the_plan_that_was_in_force_and_the_page_itself_goes_on_with_the_job(
    console: ConsoleService,
) -> None:
    job = JobHere(console, "followed job").register()
    test = open_page(job=job.job_id)
    before, _ = drawn(test)
    link = {name: test.query_params[name] for name in ("job", "plan", "follow")}
    assert drawn(open_page(**link))[0] == before and not open_page(**link).info
    job.die("W1_2").heal("W1_2", 2)
    test.run()
    assert drawn(test)[0] != before and test.query_params["plan"] != link["plan"]
    assert test.selectbox(key="plan-picker").value == f"job:{job.job_id}:in-force"

    later = open_page(**link)
    assert drawn(later)[0] == before
    assert golden("runs-another-plan-by-now") in later.info[0].value
    later.button(key="show-in-force").click().run()
    assert drawn(later) == drawn(test) and not later.info
    assert [later.query_params[name] for name in ("plan", "follow")] == [
        test.query_params[name] for name in ("plan", "follow")
    ]
    picker = later.selectbox(key="plan-picker")
    picker.select(next(name for name in picker.options if name == "fault-free")).run()
    assert drawn(later)[0] == before and "follow" not in later.query_params


def test_a_job_that_ended_unmeasured_says_so(console: ConsoleService) -> None:
    job = JobHere(console, "over").register().finish()
    test = open_page(job=job.job_id, plan=f"measured:{job.job_id}")
    assert golden("no-iteration-of-job-over") in errors(test)[0]
    assert test.get("plotly_chart"), "the plan in force is shown instead"


def test_the_head_names_the_plan_that_is_shown(console: ConsoleService, job: JobHere) -> None:
    def head(test: AppTest) -> str:
        return next(e.proto.body for e in test.get("html") if '<h1 class="or-title">' in e.proto.body)

    kept = console.plans.library.save(factory.plan(grid=(2, 3, 5)), "two by three")
    other = head(open_page(job=job.job_id, plan=f"saved:{kept}"))
    assert "two by three" in other and "2 pipelines × 3 stages, 5 micro-batches each" in other
    assert golden("not-a-plan-of", job.spec.name) in other
    assert f'<h1 class="or-title">{job.spec.name}</h1>' in head(open_page(job=job.job_id))


def test_a_file_with_a_plan_is_read_and_shown(console: ConsoleService, job: JobHere) -> None:
    plan = factory.plan(("W0_1",), grid=(2, 3, 4))
    test = open_page(job=job.job_id)
    test.file_uploader[0].set_value(("mine.json", plan.to_json().encode(), "application/json")).run()
    until(
        lambda: any(row["fingerprint"] == plan.fingerprint for row in console.plans.library.saved()), "the plan is kept"
    )
    until(lambda: test.run().query_params.get("plan") == f"saved:{plan.fingerprint}", "the plan is shown")
    assert "mine" in words(test) and "2 pipelines × 3 stages" in words(test)
    test.file_uploader[0].set_value(("other.json", b'{"no": "plan"}', "application/json")).run()
    until(lambda: "other.json: " in words(test.run()), "what is wrong with the file is said")
    assert test.query_params["plan"] == f"saved:{plan.fingerprint}"
