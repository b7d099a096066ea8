"""Charts that follow a job: they tell the truth about its view, and stand still while it runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jsonschema
import numpy as np
import pyarrow.ipc
import pytest
import ui_factory as factory

from openrecycle.agent.coordination.membership import (
    Candidate,
    Chosen,
    LetGo,
    Mode,
    ModeSet,
    Offer,
    Offered,
    StateLost,
    UsePlan,
)
from openrecycle.app.charts.progress import (
    LATE,
    LOOKS,
    WORDS,
    Mark,
    generation_marks,
    losses,
    progress_rows,
    throughput,
    worker_grid,
)
from openrecycle.app.charts.theme import DARK, LIGHT, Palette
from openrecycle.app.charts.vega import LiveChart
from openrecycle.app.console.view import GenerationView, JobView, generation_views
from openrecycle.app.jobs.live_job import generation_row
from openrecycle.app.jobs.states import RoleState
from openrecycle.planner.jobs.words import STAND_BY
from tests.agent.coordinator_run import FAILURE_TIMEOUTS, Run


@pytest.fixture(scope="module")
def vega_lite_schema() -> dict[str, Any]:
    return json.loads((files("altair.vegalite.v6.schema") / "vega-lite-schema.json").read_text())  # type: ignore[no-any-return]


def live_charts(view: JobView, colours: Palette) -> list[LiveChart]:
    rows = progress_rows(view.iterations, generation_marks(view.iterations, view.recoveries, view.generations), 36.7)
    return [worker_grid(view, colours), throughput(rows, colours), losses(rows, colours)]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_live_charts_are_valid_vega_lite(vega_lite_schema: dict[str, Any], colours: Palette) -> None:
    validator = jsonschema.Draft7Validator(vega_lite_schema)
    for chart in live_charts(factory.failed(), colours):
        spec = {name: part for name, part in chart.whole().items() if name != "datasets"}
        assert [e.message[:300] for e in validator.iter_errors(spec)] == []
        assert len({len(column) for column in chart.rows.values()}) == 1, "columns of one length"
        fields = set(re.findall(r'"field": "([^"]+)"', json.dumps(spec)))
        made = set(re.findall(r'"as": "([^"]+)"', json.dumps(spec)))
        assert fields <= set(chart.rows) | made | {"row"}, "every field drawn is a column"


def test_vega_knows_each_row_again_when_new_ones_come() -> None:
    """Else it keeps what it drew for thousands of earlier ones (app.charts.vega)."""
    for chart in live_charts(factory.failed(), LIGHT):
        whole = chart.whole()
        with pyarrow.ipc.open_stream(whole["datasets"]["rows"]) as stream:
            numbers = stream.read_all()["row"].to_pylist()
        assert numbers == list(range(len(next(iter(chart.rows.values())))))
        keys = {layer["mark"]["type"]: layer["encoding"].get("key") for layer in whole["layer"]}
        assert keys.pop("line", None) is None, "a key would make a line of each row"
        assert keys and all(key == {"field": "row"} for key in keys.values())
        derived = [step for part in (whole, *whole["layer"]) for step in part.get("transform", ())]
        assert all(step.keys() == {"filter"} for step in derived), "a copy of each row that ever came would be kept"
        assert whole["data"]["format"]["parse"] == dict.fromkeys([*chart.rows, "row"]), "and so would Vega-Lite's own"


def test_words_of_a_late_change_stand_on_its_left_and_dots_only_where_there_is_room() -> None:
    few, many = progress_rows(factory.iteration_views(60), [], 36.7), progress_rows(factory.iteration_views(200), [], 0)
    assert few["dotted"].all() and not many["dotted"].any()
    late = [
        int(n - many["iteration"][0]) for n, is_late in zip(many["iteration"], many["late"], strict=True) if is_late
    ]
    assert late == list(range(170, 200))
    assert np.isnan(few["reference"][:-1]).all() and few["reference"][-1] == pytest.approx(36.7)
    assert few["headroom"][-1] == pytest.approx(1.15 * max(36.7, few["samples_per_second"].max()))
    assert all(len(column) == 0 for column in progress_rows((), [], None).values())


def test_words_of_changes_that_come_soon_after_each_other_do_not_overprint() -> None:
    marks = [Mark(i, f"✕ W0_{i}", True, "") for i in (10, 12, 14, 16, 18, 20, 90, 97, 99)]
    rows = progress_rows(factory.iteration_views(101), marks, 36.7)
    shown = [(i, words, rows["height"][i]) for i, words in enumerate(rows["mark"]) if words]
    boxes = [
        (at - 100 * WORDS, at, height) if at > 100 * LATE else (at, at + 100 * WORDS, height) for at, _, height in shown
    ]
    for n, (begin, end, height) in enumerate(boxes):
        for other_begin, other_end, other_height in boxes[:n]:
            assert end <= other_begin or begin >= other_end or abs(height - other_height) >= 13
    assert "✕ W0_16 +2" in rows["mark"], "what has no room is counted"
    assert [i for i, change in enumerate(rows["change"]) if change] == [10, 12, 14, 16, 18, 20, 90, 97, 99]
    assert rows["height"].min() > 40, "below the curve's top"


def test_live_specs_stand_still_while_the_job_runs() -> None:
    """A changed spec would have the browser build the chart anew, which flickers and forgets the zoom."""
    before = factory.running()
    after = replace(
        before,
        iterations=factory.iteration_views(31),
        workers=factory.worker_views(before.spec, before.plan, {"W0_0": RoleState.SUSPECT}, 31),
    )
    for old, new in zip(live_charts(before, LIGHT), live_charts(after, LIGHT), strict=True):
        assert old.spec == new.spec
        assert any(
            not np.array_equal(old.rows[name], new.rows[name]) for name in ("iteration", "look") if name in old.rows
        )


def test_large_grid_has_every_worker_and_marks_those_that_need_a_look() -> None:
    view = factory.large()
    chart = worker_grid(view, LIGHT)
    rows = chart.rows
    looks = dict(zip(rows["worker"], rows["look"], strict=True))
    assert len(looks) == 2048
    assert {w: state for w, state in looks.items() if state != "running"} == {
        "W3_5": "failed",
        "W20_9": "failed",
        "W40_1": "suspect",
    }
    at = rows["worker"].index("W20_9")
    assert (int(rows["pipeline"][at]), int(rows["stage"][at])) == (20, 9)
    shapes, marks = chart.spec["layer"]
    assert marks["transform"] == [{"filter": {"not": {"field": "look", "oneOf": ["running", "re-routed"]}}}]
    shape = marks["encoding"]["shape"]["scale"]
    by_look = dict(zip(shape["domain"], shape["range"], strict=True))
    assert (
        len(
            {
                by_look[name]
                for name in ("failed", "suspect", "joining", "moved", "drained", "empty", "paused", "finished")
            }
        )
        == 8
    )
    colour = shapes["encoding"]["color"]["scale"]
    assert dict(zip(colour["domain"], colour["range"], strict=True))["running"] == LIGHT.healthy


def test_each_state_has_a_look_and_no_two_share_shape_and_colour() -> None:
    assert set(LOOKS) == set(RoleState)
    looks = [(symbol, attribute) for _, symbol, attribute in LOOKS.values()]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("state", RoleState)
def test_each_state_has_its_mark_in_legends_and_cells(state: RoleState) -> None:
    style = (files("openrecycle.app.ui") / "assets" / "console.css").read_text()
    assert f'[class*="st-key-cell-{state.value}"] button::before, .or-look-{state.value} {{' in style


def test_failures_are_marked_where_the_generation_changes() -> None:
    view = factory.failed()
    marks = generation_marks(view.iterations, view.recoveries, view.generations)
    assert [(m.iteration, m.text, m.lost) for m in marks] == [(18, "✕ W1_2", True)]
    rows = progress_rows(view.iterations, marks, 36.7)
    marked = [
        (int(at), words, change)
        for at, words, change in zip(rows["iteration"], rows["mark"], rows["change"], strict=True)
        if change
    ]
    assert marked == [(18, "✕ W1_2", "lost")]
    assert list(rows["samples_per_second"]) == pytest.approx([i.samples_per_second for i in view.iterations])
    assert list(rows["loss"]) == pytest.approx([i.loss for i in view.iterations])
    assert np.nanmax(rows["reference"]) == pytest.approx(36.7)


def test_an_iteration_without_a_loss_is_a_gap_in_the_curve_of_losses() -> None:
    *others, last = factory.iteration_views(6)
    rows = progress_rows((*others, replace(last, loss=None)), [], None)
    assert np.isnan(rows["loss"]).tolist() == [False] * 5 + [True]
    assert np.isfinite(rows["samples_per_second"]).all()


def test_a_rejoin_and_a_reform_are_told_from_a_failure() -> None:
    base = factory.iteration_views(6)
    steps = [(1, 12), (1, 12), (2, 11), (3, 12), (4, 12), (4, 12)]
    iterations = tuple(replace(i, generation=e, living=n) for i, (e, n) in zip(base, steps, strict=True))
    marks = generation_marks(iterations, (), ())
    assert [(m.iteration, m.lost) for m in marks] == [(2, True), (3, False), (4, False)]
    assert marks[0].text == "✕ failure" and marks[1].text == "↺ re-join" and marks[2].text == "re-formed"


def test_a_change_of_plan_and_a_worker_that_was_asked_to_leave_are_told_from_a_failure() -> None:
    base = factory.iteration_views(4)
    steps = [(1, 12), (2, 11), (3, 11), (3, 11)]
    iterations = tuple(replace(i, generation=e, living=n) for i, (e, n) in zip(base, steps, strict=True))
    left = GenerationView(2, "Ann asked W1_2 to leave", let_go=(LetGo("W1_2", False),))
    planned = GenerationView(3, "Ann put plan 89abcdef in force", replanned=True)
    marks = generation_marks(iterations, (), (left, planned))
    assert [(m.text, m.lost) for m in marks] == [("↓ drained", False), ("⇄ new plan", False)]
    assert marks[1].detail == "Ann put plan 89abcdef in force"
    moved = replace(planned, reason="re-partition: layers per stage become 11, 14, 7, 12", relayout=True)
    assert generation_marks(iterations, (), (left, moved))[1].text == "⇄ layers"


def test_what_happens_between_two_commits_is_not_hidden_by_the_generation_that_comes_last() -> None:
    base = factory.iteration_views(4)
    steps = [(1, 12), (3, 11), (5, 11), (7, 11)]
    iterations = tuple(replace(i, generation=e, living=n) for i, (e, n) in zip(base, steps, strict=True))
    came = (
        GenerationView(2, "Ann asked W1_2 to leave", let_go=(LetGo("W1_2", False),)),
        GenerationView(3, "W2_0, W2_1 are to stand by", let_go=(LetGo("W2_0", True), LetGo("W2_1", True))),
        GenerationView(4, "re-partition", relayout=True),
        GenerationView(5, "iteration 7 raised in W0_0"),
        GenerationView(6, "Ann put plan 89abcdef in force", replanned=True),
        GenerationView(7, "iteration 8 raised in W0_0"),
    )
    marks = generation_marks(iterations, (), came)
    assert [(m.text, m.lost) for m in marks] == [("↓ drained", False), ("⇄ layers", False), ("⇄ new plan", False)]
    assert marks[0].detail == f"{came[0].reason}; {came[1].reason}"


def test_another_plan_and_other_layers_are_told_apart() -> None:
    run = Run(2, 2, partition=(3, 3)).start()
    run.send(UsePlan("mine", (), "ada"))
    run.resume()
    run.send(UsePlan("other layers", (), "ada", partition=(4, 2)))
    run.exit("W1_1")
    told = generation_views([generation_row(g) for g in run.opened])
    assert [(g.relayout, g.replanned) for g in told] == [(False, True), (True, True), (False, False)]
    steps = zip(factory.iteration_views(3), (1, 2, 3), strict=True)
    iterations = tuple(replace(i, generation=number, living=4) for i, number in steps)
    assert [m.text for m in generation_marks(iterations, (), told)] == ["⇄ new plan", "⇄ layers"]


def test_a_loss_that_no_launcher_reported_is_marked_also_where_a_worker_is_back_before_the_next_commit() -> None:
    rows: list[dict[str, Any]] = [
        {"reason": "all have registered"},
        {"reason": "W1_2: silent", "failed": ["W1_2"], "lost": ["W1_2"]},
        {"reason": "W1_2 re-joins"},
        {"reason": "W0_0: silent; W0_0 re-joins", "lost": ["W0_0"]},
        {"reason": "Ann asked W0_1 to leave", "failed": ["W0_1"], "let_go": [("W0_1", False)]},
        {"reason": "W1_2: silent; W2_2 takes the place of W1_2", "failed": ["W0_1", "W2_2"], "lost": ["W1_2"]},
    ]
    usual = {"failed": [], "lost": [], "let_go": [], "partition": [], "plan_fingerprint": "plan"}
    generations = generation_views([usual | {"generation": n} | row for n, row in enumerate(rows, 1)])
    steps = [(1, 12), (3, 12), (4, 12), (5, 11), (6, 10)]
    base = factory.iteration_views(len(steps))
    iterations = tuple(replace(i, generation=e, living=n) for i, (e, n) in zip(base, steps, strict=True))
    marks = generation_marks(iterations, (), generations)
    assert [m.text for m in marks] == ["✕ W1_2", "✕ W0_0", "↓ drained", "✕ W1_2"]


def test_nobody_has_died_where_the_state_of_a_stage_is_gone() -> None:
    run = Run(3, 2, checkpoints=True).start()
    run.exit("W0_0")
    run.resume()
    run.send(StateLost("W1_0", "W1_0-1", run.opened[-1].number, "stage 0: parts are gone"))
    assert run.opened[-1].restore and run.opened[-1].joining == ("W1_0", "W2_0")
    assert [g.lost for g in generation_views([generation_row(g) for g in run.opened])] == [("W0_0",), ()]


def test_who_stands_by_is_not_lost() -> None:
    run = Run(3, 2).start()
    run.exit("W2_0")
    run.resume()
    after = ("W2_0", "W2_1")
    run.send(Offered(("W2_0",), Offer(("W2_0",), (Candidate(STAND_BY, after),), STAND_BY)))
    chosen = Run(3, 2).start()
    chosen.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    chosen.exit("W2_0")
    chosen.send(Offered(("W2_0",), Offer(("W2_0",), (Candidate(STAND_BY, after),), STAND_BY)))
    chosen.send(Chosen(STAND_BY, "ada"))
    told = [generation_views([generation_row(g) for g in each.opened]) for each in (run, chosen)]
    assert [[g.lost for g in views] for views in told] == [[("W2_0",), ()], [("W2_0",)]]
    base = factory.iteration_views(3)
    steps = [(1, 6), (2, 5), (3, 4)]
    iterations = tuple(replace(i, generation=e, living=n) for i, (e, n) in zip(base, steps, strict=True))
    marks = generation_marks(iterations, (), told[0])
    assert [(m.text, m.lost) for m in marks] == [("✕ W2_0", True), ("↓ stands by", False)]


@pytest.mark.parametrize("at_once", [True, False])
def test_however_many_are_lost_beside_those_that_stand_by_all_are_named(at_once: bool) -> None:
    """Together, as when a node is lost, or one after the other while the job waits for a choice."""
    run = Run(8, 2).start()
    run.send(ModeSet(Mode.MANUAL, 300.0, "ada"))
    lost = tuple(f"W{pipeline}_0" for pipeline in range(5))
    if at_once:
        living = [name for name in run.names if name not in lost]
        run.beat()
        run.wait(FAILURE_TIMEOUTS.dead + 2, *living)
    else:
        for name in lost:
            run.exit(name)
    after = tuple(f"W{pipeline}_{stage}" for pipeline in range(5) for stage in range(2))
    run.send(Offered(lost, Offer(lost, (Candidate(STAND_BY, after),), STAND_BY)))
    run.send(Chosen(STAND_BY, "ada"))
    assert [g.lost for g in generation_views([generation_row(g) for g in run.opened])] == [lost]


def test_a_death_before_the_plan_is_there_hides_no_other_beside_those_that_stand_by() -> None:
    run = Run(4, 2).start()
    run.exit("W3_0")
    run.resume()
    run.plans = False
    run.send(Offered(("W3_0",), Offer(("W3_0",), (Candidate(STAND_BY, ("W3_0", "W3_1")),), STAND_BY)))
    run.exit("W0_1")
    run.plans = True
    run.exit("W1_1")
    told = generation_views([generation_row(g) for g in run.opened])
    assert [g.lost for g in told] == [("W3_0",), ("W0_1", "W1_1")]


def test_without_a_fault_free_rate_nothing_is_drawn_dotted() -> None:
    drawn = []
    for rate in (None, 36.7):
        rows = progress_rows(factory.iteration_views(3), [], rate)
        drawn.append('"field": "reference"' in json.dumps(throughput(rows, LIGHT).spec))
    assert drawn == [False, True]
    marks = [layer["mark"]["type"] for layer in throughput(rows, LIGHT).spec["layer"]]
    assert marks.index("line") < marks.index("text"), "its words are over the curve, which would run through them"
