"""The Planner page in every state, run as Streamlit runs it, with real planning processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

import pytest
from planner_page import click, compared, figure, open_page, page_console, params, planned, run, settled, words
from ui_console import ConsoleHere, JobHere, turn_to, until
from ui_factory import plan

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.solving import Solves
from openrecycle.app.plans.whatif import WhatIf, parse
from openrecycle.app.security.access import Access
from openrecycle.app.ui import address
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from tests.golden import golden

pytestmark = pytest.mark.processes

# What the address says of the question that the page begins with.
USUAL = {"grid": "3x4x6"}


@pytest.fixture
def console(here: ConsoleHere) -> Iterator[ConsoleService]:
    yield from page_console(here)


# -- asking -------------------------------------------------------------------------------------


def test_without_a_job_the_page_asks_and_starts_nothing(console: ConsoleService) -> None:
    test = open_page()
    assert golden("no-plan-can-be-shorter-than-21") in words(test)
    assert console.plans.solves.all() == [] and params(test) == USUAL
    assert not test.button(key="planner-plan").disabled
    assert all("alive" in test.button(key=f"worker-W{p}_{s}").label for p in range(3) for s in range(4))


def test_a_click_kills_and_another_revives(console: ConsoleService) -> None:
    test = click(open_page(), "worker-W1_2")
    assert "dead" in test.button(key="worker-W1_2").label and params(test) == {"fail": "W1_2"}
    assert golden("no-plan-can-be-shorter-than") in words(test)
    assert "stage 2: <b>2 of 3</b> live" in words(test)
    click(test, "worker-W0_0")
    assert params(test) == {"fail": "W0_0.W1_2"}
    click(test, "worker-W1_2")
    assert params(test) == {"fail": "W0_0"}
    assert params(click(test, "planner-revive")) == USUAL
    assert console.plans.solves.all() == []


def test_each_technique_includes_the_ones_before(console: ConsoleService) -> None:
    test = open_page()

    def switches() -> list[bool]:
        return [switch(t).value for t in ("Adaptive pipelining", "Decoupled backward", "Staggered optimizer")]

    def switch(label: str) -> Any:
        return next(toggle for toggle in test.toggle if toggle.label == label)

    assert switches() == [True, True, True]
    switch("Decoupled backward").set_value(False)
    run(test)
    assert switches() == [True, False, False] and params(test) == {"technique": "adaptive"}
    switch("Adaptive pipelining").set_value(False)
    run(test)
    assert switches() == [False, False, False] and params(test) == {"technique": "fault-free"}
    switch("Staggered optimizer").set_value(True)
    run(test)
    assert switches() == [True, True, True] and params(test) == USUAL


def test_every_control_is_in_the_link_and_a_link_sets_every_control(console: ConsoleService) -> None:
    test = open_page()
    test.number_input(key="planner-pipelines").set_value(4)
    run(test)
    test.number_input(key="planner-micro_batches").set_value(5)
    run(test)
    test.selectbox(key="planner-memory").select("number")
    run(test)
    test.number_input(key="planner-memory-count").set_value(7)
    run(test)
    test.selectbox(key="planner-solver").select("cp-sat")
    run(test)
    test.number_input(key="planner-seconds").set_value(3.5)
    run(test)
    test.selectbox(key="planner-profile").select("uneven")
    run(test)
    link = params(test)
    assert link == {"grid": "4x4x5", "memory": "7", "solver": "cp-sat", "time": "3.5", "profile": "uneven"}
    again = open_page(**link)
    assert again.number_input(key="planner-pipelines").value == 4
    assert again.number_input(key="planner-memory-count").value == 7
    assert again.selectbox(key="planner-solver").value == "cp-sat"
    assert again.selectbox(key="planner-profile").value == "uneven"
    assert params(again) == link
    # Links between pages drop the words; the session remembers the question.
    turn_to(again, "schedule").run()
    again.query_params.clear()
    turn_to(again, "planner")
    assert params(run(again)) == link
    assert params(click(again, "planner-reset")) == USUAL
    assert console.plans.solves.all() == []


def test_back_comes_to_the_usual_question_too(console: ConsoleService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "HEARD_SECONDS", 0.0)  # after a while
    test = open_page()
    assert params(test) == USUAL
    assert params(click(test, "worker-W1_2")) == {"fail": "W1_2"}
    test.query_params.clear()
    for name, word in USUAL.items():
        test.query_params[name] = word
    assert "alive" in run(test).button(key="worker-W1_2").label
    assert params(test) == USUAL


def test_some_at_random(console: ConsoleService) -> None:
    test = open_page(grid="8x4x4")
    test.number_input(key="planner-random-count").set_value(5)
    test.number_input(key="planner-random-seed").set_value(3)
    run(test)
    click(test, "planner-random-go")
    dead = parse(params(test))[0].failed
    assert len(dead) == 5
    assert all(sum(name.endswith(f"_{s}") for name in dead) < 8 for s in range(4))


# -- what is wrong ------------------------------------------------------------------------------


def test_what_a_link_says_wrongly_is_said_and_the_usual_taken(console: ConsoleService) -> None:
    test = open_page(grid="3x4", fail="W1_2")
    assert "grid: got '3x4'" in words(test)
    assert "dead" in test.button(key="worker-W1_2").label


def test_an_absurd_size_is_refused_beside_the_grid(console: ConsoleService) -> None:
    test = open_page(grid="99999x99999x9")
    assert golden("expected-at-most-400-000") in words(test)
    assert test.button(key="planner-plan").disabled
    assert not [b for b in test.button if str(b.key).startswith("worker-W")]
    test.number_input(key="planner-pipelines").set_value(3)
    run(test)
    test.number_input(key="planner-stages").set_value(4)
    run(test)
    assert not test.button(key="planner-plan").disabled


def test_a_failure_without_a_technique_is_said_beside_the_switches(console: ConsoleService) -> None:
    test = open_page(fail="W1_2", technique="fault-free")
    assert escape("technique: got 'fault-free',") in words(test)
    assert test.button(key="planner-plan").disabled


def test_bytes_without_a_profile_that_has_them_is_said_beside_the_limit(console: ConsoleService) -> None:
    test = open_page()
    test.selectbox(key="planner-memory").select("bytes")
    run(test)
    assert "memory: got None," in words(test)
    assert test.button(key="planner-plan").disabled


def test_a_dead_stage_has_no_plan_but_a_migration_gives_it_one(console: ConsoleService) -> None:
    test = open_page(fail="W0_2.W1_2.W2_2", memory="none")
    assert golden("stage-2-has-no-living") in words(test) and test.button(key="planner-plan").disabled
    settled(click(test, "planner-look"), console)
    assert golden("no-peer-lives-on-stage") in words(test)
    click(test, "planner-migrate")
    assert not test.button(key="planner-plan").disabled
    assert len(parse(params(test))[0].failed) == 3


def test_what_a_link_may_say_of_costs_the_fields_can_have(console: ConsoleService) -> None:
    for name, value in (("heals", "1e9"), ("copy", "1e-6"), ("state", "1e6")):
        test = open_page(fail="W0_2.W1_2.W2_2", memory="none", **{name: value})
        shown = {str(n.key).strip().removeprefix("planner-"): n.value for n in test.number_input}
        assert float(value) in [shown[field] for field in ("state_gb", "copy_gbs", "heals_in")]
        assert (shown["state_gb"] is None) == (name != "state")
    test = open_page(memory="999999999")
    assert next(n for n in test.number_input if n.label == "Activations").value == 999_999_999


def test_nothing_is_planned_that_the_link_did_not_ask(console: ConsoleService) -> None:
    test = open_page(grid="0x4x6", fail="W0_3")
    assert test.button(key="planner-plan").disabled and golden("what-is-wrong-in-the-link") in words(test)
    test.number_input(key="planner-stages").set_value(5)
    assert not run(test).button(key="planner-plan").disabled and golden("stands-in-the-way") not in words(test)


def test_a_plan_of_another_grid_is_not_set_beside_it(console: ConsoleService) -> None:
    planned(open_page(solver="list"), console)
    test = open_page(solver="list")
    test.number_input(key="planner-stages").set_value(5)
    run(test)
    table = compared(planned(test, console))
    assert table["figure"] == ["This plan", "Fault-free 1F1B"], "periods of other grids say nothing about each other"
    test.number_input(key=next(n.key for n in test.number_input if n.label == "Micro-batches")).set_value(5)
    run(test)
    assert compared(planned(test, console))["figure"] == ["This plan", "Fault-free 1F1B"]
    test.selectbox(key="planner-memory").select("none")
    run(test)
    assert len(compared(planned(test, console))["figure"]) == 3, "of one grid they stand beside each other"


# -- planning -----------------------------------------------------------------------------------


def test_a_plan_with_its_figures_chart_and_comparison(console: ConsoleService) -> None:
    test = planned(open_page(fail="W1_2", memory="none"), console)
    page = words(test)
    assert "27 slots" in page and "proven optimal: 27 slots" in page
    assert "+3 re-routed" in test.button(key="worker-W0_2").label
    assert figure(test)["layout"]["yaxis"]["ticktext"][0] == "W0_0"
    table = compared(test)
    assert table["figure"] == ["This plan", "Fault-free 1F1B"] and table["period"] == ["27 slots", "27 slots (±0 %)"]
    assert table["gap"][0] == "0 %" and table[golden("slowdown-vs-best-fault-free")] == ["+42.1 %", "+42.1 %"]
    assert test.button(key="planner-plan").disabled, "it is planned already"
    assert golden("no-other-distribution") in page, "leaving the failure where it is, is best"
    # Another question: its result stands beside the one before.
    test.selectbox(key="planner-memory").select("uniform")
    run(test)
    assert golden("no-plan-can-be-shorter-than") in words(test)
    planned(test, console)
    table = compared(test)
    assert table["period"] == ["29 slots", "27 slots (−6.9 %)", "27 slots (−6.9 %)"]
    assert table["figure"][2].startswith("Before: 3 × 4 × 6")
    test.segmented_control(key="show").set_value("1f1b")
    run(test)
    assert "W1_2" not in json.dumps(figure(test)["layout"].get("annotations", []))
    (slider,) = (s for s in test.slider if s.label == "Time (slots)")
    slider.set_range(5.0, 12.0)
    run(test)
    # A link shows all of it: which of them is drawn, and which part, too.
    names = ("fail", "before", "show", "window")
    link = {name: test.query_params[name] for name in names if name in test.query_params}
    assert set(link) == set(names)
    other = run(open_page(**{name: value[0] if isinstance(value, list) else value for name, value in link.items()}))
    # What needs no search is worked out anew, in a time of its own.
    again = compared(other)
    del again["solver"], table["solver"]
    assert again == table
    drawn, again = figure(test), figure(other)
    assert drawn["layout"]["xaxis"]["range"] == again["layout"]["xaxis"]["range"] == [5.0, 12.0]
    assert drawn["data"] == again["data"]
    unknown = open_page(fail="W1_2", before="fail=W0_3")
    assert "plan 3 × 4 × 6" in words(unknown) and "This plan" in words(unknown)


def test_the_papers_example_is_one_click(console: ConsoleService) -> None:
    test = settled(click(open_page(), "planner-example"), console)
    strip = next(e.proto.body for e in test.get("html") if "or-steps" in e.proto.body)
    assert [strip.index(f">{n} slots<") for n in (27, 36, 29)] == sorted(
        strip.index(f">{n} slots<") for n in (27, 36, 29)
    )
    assert strip.count("proven optimal") == 4 and strip.count("27 slots</div>") == 2
    assert params(test) == {"fail": "W1_2", "memory": "none", "example": "paper"}
    test.segmented_control(key="planner-step").set_value("Adaptive pipelining")
    run(test)
    assert params(test)["technique"] == "adaptive" and "36 slots" in words(test)
    # Another question leaves the example.
    click(test, "worker-W0_0")
    assert "example" not in params(test)


def test_a_search_under_way_is_shown_and_cancelled(console: ConsoleService) -> None:
    hard = job_doc(Job.uniform(6, 6, 12, durations={"F": 1, "I": 1.3, "W": 0.7, "transfer": 0.4}))
    question = WhatIf.of(hard.job(), ("W0_1", "W1_4", "W2_4"), WhatIf().technique, "7")
    test = click(open_page(**question.params(), solver="cp-sat", time="300"), "planner-plan")
    solve = next(s for s in console.plans.solves.all() if s.request.kind == "plan")
    until(lambda: bool(solve.points), "there is a plan")
    run(test)
    page = words(test)
    assert golden("best-so-far") in page and "Proven bound" in page and golden("of-at-most-5-min") in page
    assert test.get("vega_lite_chart"), "the curve of best period and bound"
    assert test.button(key="planner-plan").disabled
    click(test, "planner-cancel")
    settled(test, console)
    assert "stopped" in words(test).lower() and golden("gap-to-the-bound") in words(test)
    assert test.button(key="planner-plan").label == "Plan again"


def test_a_planning_process_that_dies_is_an_error_on_the_page(console: ConsoleService) -> None:
    test = open_page(fail="W1_2")
    # Whatever the process may say or not: it is gone.
    click(test, "planner-plan")
    for solve in console.plans.solves.all():
        assert solve.child is not None
        solve.child.process.kill()
    settled(test, console)
    plan_made = [s for s in console.plans.solves.all() if s.request.kind == "plan" and s.plan is not None]
    assert plan_made or golden("ended-before-it-was-done") in words(test)
    if not plan_made:
        assert not test.button(key="planner-plan").disabled, "one may try again"


# -- keeping and applying -----------------------------------------------------------------------


def test_a_plan_is_kept_and_its_link_shows_it(console: ConsoleService) -> None:
    test = planned(open_page(fail="W1_2", memory="none"), console)
    next(field for field in test.text_input if field.label == "Name").set_value("the paper's")
    run(test)
    click(test, "planner-keep")
    link = params(test)
    assert "Saved as “the paper's”" in words(test)
    (row,) = console.plans.library.saved()
    assert (row["name"], link["saved"]) == ("the paper's", row["fingerprint"])
    # The link of a colleague, in a console that has not planned it.
    console.plans.solves.close()
    console.plans.solves = Solves()
    again = open_page(saved=link["saved"])
    assert params(again) == link and "27 slots" in words(again) and golden("a-saved-plan") in words(again)
    assert console.plans.solves.all() == []
    again.button(key="planner-to-plan").click()
    run(again)
    assert again.query_params["plan"] == f"saved:{link['saved']}" and "27 slots" in words(again)
    again = open_page(saved=link["saved"])
    click(again, "planner-forget")
    assert console.plans.library.saved() == [] and "saved" not in params(again)
    assert golden("expected-the-fingerprint-of-a") in words(open_page(saved=link["saved"]))


def test_a_saved_plan_that_may_not_be_forgotten_stays_on_the_page(console: ConsoleService) -> None:
    console.plans.library.save(plan(("W2_1",), unit="slot"), "two one")
    test = open_page(saved=plan(("W2_1",), unit="slot").fingerprint)
    link, everybodys = params(test), console.security.access
    console.security.access = Access("a token, which nobody has given here")
    try:
        click(test, "planner-forget")
    finally:
        console.security.access = everybodys
    assert golden("the-session-has-ended-load") in words(test)
    assert params(test) == link and golden("a-saved-plan") in words(test)
    assert len(console.plans.library.saved()) == 1


def test_a_jobs_question_is_taken_over_and_the_answer_applied(console: ConsoleService) -> None:
    job = JobHere(console, "to be helped").register().commit(0, 3, 1).die("W1_2").heal("W1_2", 2)
    over = JobHere(console, "over").register().finish()
    test = open_page()
    jobs = (job.job_id, over.job_id)
    offered = [words for words in test.selectbox(key="planner-take").options if words.endswith(jobs)]
    assert offered == [f"to be helped · {job.job_id}", f"over · finished · {over.job_id}"], "as in every list of jobs"
    test.selectbox(key="planner-take").select(f"job {job.job_id}")
    run(test)
    assert "dead" in test.button(key="worker-W1_2").label
    assert golden("no-plan-can-be-shorter") in words(test)
    # A plan for fewer activations than the job allows fits it, and is not the one in force.
    test.selectbox(key="planner-memory").select("1f1b")
    run(test)
    planned(test, console)
    assert not test.button(key="planner-apply-go").disabled
    click(test, "planner-apply-go")
    assert golden("applied-operator-in-the-browser") in words(test)
    view = console.queries.view(job.job_id)
    assert view.generation == 3 and view.plan is not None and view.plan.memory == "1f1b"
    assert golden("it-is-in-force-already") in words(run(test))


def test_a_plan_that_does_not_fit_says_why(console: ConsoleService) -> None:
    JobHere(console, "another grid", pipelines=2, stages=2).register()
    test = planned(open_page(fail="W1_2"), console)
    options = test.selectbox(key="planner-apply-job").options
    test.selectbox(key="planner-apply-job").select_index(next(i for i, o in enumerate(options) if "another grid" in o))
    run(test)
    assert golden("the-plan-is-for-a-grid") in words(test)
    assert test.button(key="planner-apply-go").disabled


def test_a_saved_plan_is_taken_over(console: ConsoleService) -> None:
    console.plans.library.save(plan(("W2_1",), unit="slot"), "two one")
    test = open_page()
    test.selectbox(key="planner-take").select(f"saved {plan(('W2_1',), unit='slot').fingerprint}")
    run(test)
    assert params(test)["fail"] == "W2_1" and golden("a-saved-plan") in words(test)
    assert console.plans.solves.all() == []


# -- size ---------------------------------------------------------------------------------------


def test_a_grid_too_large_for_buttons_is_a_heat_map_with_names(console: ConsoleService) -> None:
    test = open_page(grid="20x8x4")

    def names() -> Any:
        return next(field for field in test.text_input if field.label == "Dead workers")

    assert not [b for b in test.button if str(b.key).startswith("worker-W")]
    assert test.get("vega_lite_chart")
    names().set_value("W19_7, W0_0")
    run(test)
    assert params(test) == {"grid": "20x8x4", "fail": "W0_0.W19_7"}
    names().set_value("W20_0")
    run(test)
    assert escape("dead workers: got 'W20_0',") in words(test)
    assert params(test)["fail"] == "W0_0.W19_7"


@pytest.mark.chaos
def test_a_plan_too_large_for_bars_is_a_picture(console: ConsoleService) -> None:
    test = planned(open_page(grid="16x8x24", fail="W3_2", solver="list"), console)
    assert golden("alt-overview-of-128-workers") in words(test)
    assert compared(test)["figure"] == ["This plan"]
