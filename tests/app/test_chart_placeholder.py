"""A schedule's picture has what its chart has, at the same place."""

from __future__ import annotations

import base64
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
import ui_factory as factory
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from openrecycle.app.charts.gantt import ASIDE_OPACITY, BOTTOM, TOP, Strip, comparison, gantt
from openrecycle.app.charts.theme import DARK, LIGHT
from openrecycle.app.ui.components import WIDTH, chart_placeholder
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.drawing import Drawing, Rows
from openrecycle.planner.plans.schedule import Schedule
from tests.conftest import examples
from tests.golden import golden

pytestmark = pytest.mark.processes

SVG = "{http://www.w3.org/2000/svg}"
BAR = re.compile(r"M(-?\d+) ([\d.]+)h(\d+)V([\d.]+)h-?\d+z")


def pictures(html: str) -> dict[str, ElementTree.Element]:
    """By where they stand; each is read as strictly as browsers read them."""
    found = re.findall(r'<img class="or-first-(\w+)" alt="" src="data:image/svg\+xml;base64,([^"]+)">', html)
    return {where: ElementTree.fromstring(base64.b64decode(data)) for where, data in found}


def words(picture: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in picture.iter(f"{SVG}text")]


def bars(picture: ElementTree.Element) -> list[tuple[str, int, int, float]]:
    """(colour, left, right, middle) of each, from left 0 to WIDTH; the middle in pixels from the top."""
    return [
        (path.get("fill", ""), int(left), int(left) + int(width), (float(top) + float(bottom)) / 2)
        for path in picture.iter(f"{SVG}path")
        for left, top, width, bottom in BAR.findall(path.get("d", ""))
    ]


def rows_of(schedule: Schedule) -> dict[Worker, float]:
    """The middle of each worker's row, in pixels from the top."""
    rows = Rows.of(list(schedule.problem.job.workers()))
    height = gantt(Drawing.of(schedule), LIGHT).layout.height - TOP - BOTTOM
    first, last = -0.05, rows.extent + 0.05
    return {worker: TOP + (at - first) / (last - first) * height for worker, at in rows.at.items()}


@examples(15, suppress_health_check=[HealthCheck.too_slow])
@given(pipelines=st.integers(2, 4), stages=st.integers(1, 4), data=st.data())
def test_every_op_is_in_the_picture(pipelines: int, stages: int, data: st.DataObject) -> None:
    cells = [f"W{p}_{s}" for p in range(1, pipelines) for s in range(stages)]
    failed = tuple(sorted(data.draw(st.sets(st.sampled_from(cells), max_size=2))))
    schedule = factory.plan(failed, grid=(pipelines, stages, 4), memory="none").schedule()
    figure = gantt(Drawing.of(schedule), LIGHT, next_iteration=False)
    end = figure.layout.xaxis.range[1] * schedule.problem.job.ticks_per_unit
    found = pictures(chart_placeholder(figure))
    middles = rows_of(schedule)
    drawn: Counter[tuple[str, int, int, Worker]] = Counter()
    for colour, left, right, middle in bars(found["middle"]):
        worker = min(middles, key=lambda w: abs(middles[w] - middle))
        assert abs(middles[worker] - middle) < 0.2, "pixels"
        drawn[colour, left, right, worker] += 1
    wanted = Counter((LIGHT.track, 0, WIDTH, worker) for worker in schedule.ops)
    for worker, ops in schedule.ops.items():
        wanted.update(
            (LIGHT.ops[op.kind], round(WIDTH * op.start / end), round(WIDTH * op.end / end), worker) for op in ops
        )
    assert drawn == wanted
    assert words(found["left"]) == [str(worker) for worker in schedule.problem.job.workers()]
    assert words(found["right"])[0] == "idle" and len(words(found["right"])) == 1 + len(schedule.ops)
    said = words(found["middle"])
    assert sum(golden("out-its-micro-batches-run-on") in each for each in said) == len(failed)
    assert said[-1] == figure.layout.xaxis.title.text
    # Those that fit have their numbers: no bar of such a plan is narrower than a 60th of the chart.
    others = len(failed) + 2  # where fault-free 1F1B ends, and the axis
    assert len(said) - others == sum(op.kind != "O" for ops in schedule.ops.values() for op in ops)


def test_what_is_not_shown_is_not_in_it() -> None:
    schedule = factory.plan(("W1_2",)).schedule()
    whole = bars(pictures(chart_placeholder(gantt(Drawing.of(schedule), DARK)))["middle"])
    part = bars(pictures(chart_placeholder(gantt(Drawing.of(schedule), DARK, shown=(10, 15))))["middle"])
    assert len(part) < 0.5 * len(whole)
    assert all(left <= WIDTH and right >= 0 for _, left, right, _ in part)


def test_what_else_a_chart_has() -> None:
    """Memory and its limits, a path, the critical path, waits and the fault-free end; no mark twice."""
    schedule = factory.plan(("W1_2",)).schedule()
    plain = gantt(Drawing.of(schedule), LIGHT)
    full = gantt(Drawing.of(schedule), LIGHT, held=True, path=(1, 2), critical=True)
    marks = [
        [path.attrib for path in pictures(chart_placeholder(figure))["middle"].iter(f"{SVG}path")]
        for figure in (plain, full)
    ]
    assert len(marks[1]) > len(marks[0])
    assert sum("stroke-dasharray" in mark for mark in marks[0]) == 1, "where fault-free 1F1B ends"
    assert sum("stroke-dasharray" in mark for mark in marks[1]) == 3, "and the limit, and the critical path"
    held = pictures(chart_placeholder(full))
    aside = {element.get("opacity") for element in held["middle"].iter(f"{SVG}text") if element.text == "0"}
    assert aside == {str(ASIDE_OPACITY)}, "the numbers of what is not on the path are as faint as their bars"
    assert "peak" in words(held["right"]) and any("Activations held" in each for each in words(held["middle"]))
    assert len(words(held["left"])) == 24


def test_names_of_people_leave_it_a_picture() -> None:
    plan = factory.plan(("W1_2",))
    names = ["a & b <i>c</i> \x01 &amp; \ud800", "<b>x", ""]
    strips = [Strip(name, plan, Drawing.of(plan.schedule())) for name in names]
    found = pictures(chart_placeholder(comparison(strips, LIGHT)))
    said = words(found["middle"])
    assert any(each.startswith("a & b <i>c</i> ? &amp; ?") for each in said)
    assert any(each.startswith("<b>x") for each in said)
    assert words(found["left"]) == 3 * [str(worker) for worker in plan.schedule().problem.job.workers()]


def test_a_figure_without_bars_has_none() -> None:
    plan = factory.plan(())
    strips = [Strip("a", plan, Drawing.of(plan.schedule()))] * 2
    figure = comparison(strips, LIGHT)
    assert chart_placeholder(figure)
    figure.data = [trace for trace in figure.data if trace.type != "bar"]
    assert chart_placeholder(figure) == ""
