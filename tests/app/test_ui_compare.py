"""Compare: every state of the page over a real console, and that its chart tells the truth."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ui_factory as factory
from streamlit.testing.v1 import AppTest
from ui_console import DEADLINE, MAIN, ConsoleHere, JobHere, errors, turn_to, until

from openrecycle.app.charts import gantt as charts
from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import RELATIVE, Strip, comparison
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.plans.sources import MOST
from openrecycle.app.ui.tables import stage_table
from openrecycle.planner.export.compare import by_stage
from openrecycle.planner.plans.drawing import OP_WORDS, Drawing
from openrecycle.planner.plans.plan import Plan
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> JobHere:
    return JobHere(here.console, "compared job").register().die("W1_2").heal("W1_2", 2)


def open_page(**query: Any) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=60)
    for name, value in query.items():
        test.query_params[name] = value
    turn_to(test, "compare")
    return settled(test)


def settled(test: AppTest) -> AppTest:
    """Runs the page until nothing on it is still being planned."""
    deadline = time.monotonic() + DEADLINE
    while True:
        test.run()
        assert not test.exception, test.exception[0].message
        if not any(c.value.startswith("Planning") for c in test.caption):
            return test
        assert time.monotonic() < deadline, "a plan is never made"
        time.sleep(0.05)


def words(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    return "\n".join([*parts, *(e.value for kind in ("markdown", "caption") for e in test.get(kind)), *errors(test)])


def chart(test: AppTest) -> dict[str, Any]:
    return json.loads(test.get("plotly_chart")[0].proto.spec)  # type: ignore[no-any-return]


def titles(test: AppTest) -> list[str]:
    texts = [a["text"] for a in chart(test)["layout"]["annotations"]]
    return [t.removeprefix("<b>").rpartition("</b> · period")[0] for t in texts if "</b> · period" in t]


def test_without_a_job_the_page_says_what_to_do(tmp_path: Path) -> None:
    empty = ConsoleHere(tmp_path)
    set_console(empty.console)
    try:
        test = open_page()
        assert golden("choose-two-to-four-plans") in words(test)
        assert not test.get("plotly_chart")
    finally:
        set_console(None)
        empty.close()


def test_a_job_begins_with_fault_free_1f1b_and_the_plan_in_force(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id)
    assert titles(test) == ["Fault-free 1F1B", "compared job in force: without W1_2"]
    table = next(e.proto.body for e in test.get("html") if "or-beside" in e.proto.body)
    assert all(f'<th scope="col">{name}</th>' in table for name in titles(test))
    assert '<th scope="row">workers out</th><td>none</td><td>W1_2</td>' in table
    plan = console.queries.view(job.job_id).plan
    assert plan is not None
    shown = f"{plan.metrics.period / 1000:.5g} s ({text.percent(plan.metrics.period / 1080 - 1, sign=True)})"
    assert f"<td>1.08 s</td><td>{shown}</td>" in table.replace("&nbsp;", " ")
    assert len(test.dataframe[0].value) == 2 * 4, "a row per stage and plan"


def test_the_baseline_can_be_pinned(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id)
    second = test.selectbox(key="baseline").options[1]
    test.selectbox(key="baseline").select(second)
    settled(test)
    assert titles(test)[0] == "compared job in force: without W1_2"
    link = {name: test.query_params[name] for name in ("job", "baseline")}
    assert titles(open_page(**link)) == titles(test), "the link says which"


def test_a_link_compares_what_its_sender_saw_when_the_job_runs_another_plan(console: ConsoleService) -> None:
    job = JobHere(console, "changed job").register()
    test = open_page(job=job.job_id, baseline=f"job:{job.job_id}:in-force")
    link = {name: test.query_params[name] for name in ("job", "plans", "baseline")}
    assert link["baseline"] in link["plans"], "the baseline is the plan of now, too"
    before = chart(test)["data"]
    job.die("W1_2").heal("W1_2", 2)
    for shown in (settled(test), open_page(**link)):
        assert chart(shown)["data"] == before
    other = JobHere(console, "other job").register()
    settled(test).selectbox(key="job-picker").select(other.job_id)
    assert "other job in force: fault-free" in titles(settled(test)), "what nobody has chosen changes with the job"


def test_plans_of_any_kind_and_unit_stand_on_one_axis(console: ConsoleService, job: JobHere) -> None:
    saved = console.plans.library.save(factory.plan(("W0_1",), unit="slot", memory="none"), "in <b>slots</b>")
    test = open_page(job=job.job_id, plans=[f"job:{job.job_id}:in-force", f"saved:{saved}"])
    assert RELATIVE in chart(test)["layout"]["xaxis"]["title"]["text"]
    assert titles(test)[1] == "in &lt;b&gt;slots&lt;/b&gt;", "names are not read as HTML"
    assert golden("their-units-differ") in words(test)


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        (["nonsense", "made:fault-free:1f1b:JOB"], "plans: got 'nonsense'"),
        (["saved:0123", "made:fault-free:1f1b:JOB"], "plan: got '0123'"),
        (["made:staggered:none:JOB:W0_0+W1_0+W2_0", "made:fault-free:1f1b:JOB"], golden("stage-0-has-no-living")),
        ([f"made:staggered:{n}:JOB" for n in range(4, 9)], golden("plans-got-5-expected-at", MOST)),
    ],
)
def test_what_a_link_has_wrong_is_said_and_the_rest_is_shown(
    console: ConsoleService, job: JobHere, plans: list[str], said: str
) -> None:
    test = open_page(plans=[each.replace("JOB", job.job_id) for each in plans])
    assert any(said in error for error in errors(test))
    assert len(test.multiselect(key="compare-picker").value) == min(len(plans) - 1, MOST)


def test_choosing_goes_into_the_link(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id)
    picker = test.multiselect(key="compare-picker")
    picker.select(next(option for option in picker.options if option == "fault-free"))
    settled(test)
    assert len(titles(test)) == 3 and len(list(test.query_params["plans"])) == 3
    test.multiselect(key="compare-picker").set_value([])
    test.run()
    assert golden("choose-two-to-four-plans") in words(test), "an empty choice stays empty"


def test_filters_hold_for_all(console: ConsoleService, job: JobHere) -> None:
    test = open_page(job=job.job_id)
    test.get_by_key("show").set_value("failure")  # type: ignore[attr-defined]
    settled(test)
    layout = chart(test)["layout"]
    for axis in ("yaxis", "yaxis2"):
        assert layout[axis]["ticktext"] == ["W0_2", "W1_2", "W2_2"]


# -- the chart ---------------------------------------------------------------------------------


def strip(plan: Plan, name: str = "a plan") -> Strip:
    return Strip(name, plan, Drawing.of(plan.schedule()))


def test_every_op_of_each_plan_is_drawn_in_its_own_rows() -> None:
    plans = [factory.plan(unit="slot"), factory.plan(("W1_2",), unit="slot"), factory.plan(("W0_0",), unit="slot")]
    figure = comparison([strip(p, str(i)) for i, p in enumerate(plans)], LIGHT)
    for i, plan in enumerate(plans):
        own = [
            t for t in figure.data if (t.yaxis or "y") == (f"y{i + 1}" if i else "y") and t.meta.get("kind") in OP_WORDS
        ]
        drawn = sorted((t.meta["kind"], float(b), float(x)) for t in own for b, x in zip(t.base, t.x, strict=True))
        assert drawn == sorted(
            (op.kind, float(op.start), float(op.duration)) for ops in plan.workers.values() for op in ops
        )
    lines = [s for s in figure.layout.shapes if s.type == "line"]
    assert [s.x0 for s in lines if s.name != "baseline"] == [p.metrics.period for p in plans]
    assert [s.x0 for s in lines if s.name == "baseline"] == [plans[0].metrics.period]
    titles = [(note.y, note.text) for note in figure.layout.annotations if note.yref == "paper"]
    assert len(titles) == len({y for y, _ in titles}) == len(plans), (
        "one line of words above each, which none overprint"
    )
    for (_, words), plan in zip(titles, plans, strict=True):
        assert f"period {text.planned(plan.metrics.period, plan.job.time_unit)}" in words
    domains = [figure.layout[f"yaxis{i + 1}" if i else "yaxis"].domain for i in range(3)]
    assert all(upper[0] > lower[1] for upper, lower in pairwise(domains)), "nothing overlaps"


def test_different_units_are_measured_by_the_fault_free_iteration() -> None:
    slots, ms = factory.plan(("W1_2",), unit="slot", memory="none"), factory.plan(("W1_2",), memory="none")
    figure = comparison([strip(slots), strip(ms)], LIGHT)
    ends = [s.x0 for s in figure.layout.shapes if s.type == "line" and s.name != "baseline"]
    assert ends == pytest.approx([1 + slots.metrics.slowdown_vs_1f1b, 1 + ms.metrics.slowdown_vs_1f1b])


def test_large_plans_are_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "MAX_BARS", 100)
    figure = comparison([strip(factory.plan()), strip(factory.plan(("W1_2",)))], LIGHT)
    assert [image.yref for image in figure.layout.images] == ["y", "y2"]
    assert not [t for t in figure.data if t.meta.get("kind") in OP_WORDS]


def test_stages_add_up() -> None:
    plan = factory.plan(("W1_2",), unit="slot", memory="uniform")
    schedule = plan.schedule()
    figures = by_stage(schedule)
    assert [f.living for f in figures] == [3, 3, 2, 3]
    assert [f.rerouted for f in figures] == [0, 0, 6, 0]
    assert max(f.end - f.start for f in figures) == plan.metrics.period
    assert max(f.peak for f in figures) == max(plan.metrics.peak_activations.values())
    idle = sum(f.bubble_fraction * f.living for f in figures) / sum(f.living for f in figures)
    assert idle == pytest.approx(schedule.bubble_fraction)
    table = stage_table(["a", "b"], [schedule, factory.plan().schedule()])
    assert [(table["stage"][i], table["plan"][i]) for i in range(3)] == [(0, "a"), (0, "b"), (1, "a")]


def test_a_file_with_a_plan_is_compared_and_what_is_of_another_grid_is_said_to_be(
    console: ConsoleService, job: JobHere
) -> None:
    plan = factory.plan(grid=(2, 3, 4))
    test = open_page(job=job.job_id)
    test.file_uploader[0].set_value(("mine.json", plan.to_json().encode(), "application/json")).run()
    name = f"saved:{plan.fingerprint}"
    until(lambda: name in test.run().query_params.get("plans", []), "the plan is among those compared")
    page = words(settled(test))
    assert golden("of-2-3-4-the") in page, "its period says nothing about the baseline's"
    assert '<h1 class="or-title">compared job</h1>' in page
    test = open_page(job=job.job_id, plans=[name])
    assert '<h1 class="or-title">Compare</h1>' in words(test), "none of the plans is the job's"
