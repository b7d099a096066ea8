"""The Planner's charts: what is drawn of a search, of migrations, and of a large grid."""

from __future__ import annotations

import pytest

from openrecycle.app.charts.progress import dead_grid
from openrecycle.app.charts.theme import DARK, LIGHT, Palette
from openrecycle.app.plans.solving import PlanAsked, Point, Solve
from openrecycle.app.plans.whatif import WhatIf
from openrecycle.app.ui.planner import log_lines, migrations_chart, search_cards, search_chart, search_words
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.layers.migration import MigrationAnswer, Migrations
from openrecycle.planner.plans.plan import job_doc
from tests.golden import golden

ASKED = PlanAsked(job=job_doc(Job.uniform(3, 4, 6)), failed=("W1_2",))
FOUND = Migrations(
    migrations=[MigrationAnswer(worker="W1_3", takes="W0_2", source="W2_2")],
    failed=["W1_2", "W1_3"],
    present=[0, 0, 2, 0],
    counts=[0, 0, 1, 1],
    period_now=54,
    period=27,
    pause=0,
    gained=None,
    partition=[],
    reason="1 migration shortens the period",
)


def searched(*points: Point, seconds: float = 9.0) -> Solve:
    return Solve(ASKED.id, ASKED, state="done", points=list(points), seconds=seconds)


def test_a_search_is_drawn_up_to_now_and_said_in_words() -> None:
    solve = searched(Point(0.1, None, 20, "list"), Point(0.2, 31, 27, "list"), Point(2.0, 29, 28, "cp-sat"))
    chart = search_chart(solve, "slot", LIGHT)
    assert list(chart.rows["seconds"]) == pytest.approx([0.2, 2.0, 9.0])
    assert list(chart.rows["incumbent"]) == [31, 29, 29] and list(chart.rows["bound"]) == [27, 28, 28]
    assert chart.spec == search_chart(searched(Point(1.0, 40, 1, "x")), "slot", LIGHT).spec, "it stands still"
    assert search_words(solve, "slot") == (golden("best-period-and-proven-bound"))
    assert search_words(searched(), "slot").endswith(golden("there-is-no-plan-yet"))


def test_the_log_and_the_cards_say_the_gap() -> None:
    solve = searched(Point(0.1, None, 20, "list"), Point(0.2, 30, 25, "list"))
    assert log_lines(solve, "slot") == [
        golden("0-10-s-list-no"),
        "    0.20 s  list: period 30 slots, bound 25 slots, gap 20 %",
    ]
    assert [card.value for card in search_cards(solve, "slot")] == ["30 slots", "25 slots", "20 %", "9.0 s"]
    assert [card.value for card in search_cards(searched(), "slot")][:3] == ["–"] * 3


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_migrations_are_arrows_from_the_worker_and_from_the_weights(colours: Palette) -> None:
    figure = migrations_chart(Job.uniform(3, 4, 6), ["W0_2", "W1_2"], FOUND, colours)
    (arrow,) = figure.layout.annotations
    assert (arrow.ax, arrow.ay, arrow.x, arrow.y) == (3, 1, 2, 0), "W1_3 goes to the place of W0_2"
    (copy,) = figure.layout.shapes
    assert (copy.x0, copy.y0, copy.x1, copy.y1) == (2, 2, 2, 0), "with the weights of W2_2"
    shown = {trace.meta: list(trace.text) for trace in figure.data}
    assert shown["dead"] == ["W0_2", "W1_2"] and shown["moves"] == ["W1_3"] and len(shown["alive"]) == 9


def test_migrations_in_a_large_grid_show_the_rows_that_matter() -> None:
    figure = migrations_chart(Job.uniform(100, 4, 6), ["W0_2", "W1_2"], FOUND, LIGHT)
    assert list(figure.layout.yaxis.ticktext) == ["pipeline 0", "pipeline 1", "pipeline 2"]


def test_a_large_grid_has_a_look_for_every_worker() -> None:
    question = WhatIf(20, 8, 4).with_failed({"W3_1", "W19_7"})
    chart = dead_grid(question, {"W4_1": 2, "W5_1": 0}, LIGHT)
    looks = dict(zip(chart.rows["worker"], chart.rows["look"], strict=True))
    assert looks["W3_1"] == looks["W19_7"] == "dead" and looks["W4_1"] == "takes re-routed work"
    assert looks["W5_1"] == "alive" and len(looks) == 160
    place = chart.rows["worker"].index("W19_7")
    assert (chart.rows["pipeline"][place], chart.rows["stage"][place]) == (19, 7)
