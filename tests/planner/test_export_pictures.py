"""SVG and PNG: the same drawing twice, true to the schedule, and readable or refused."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from PIL import Image

from openrecycle.planner.export import EXPORTERS
from openrecycle.planner.export.picture import SCALE, Rect, Text, blend, draw_png, draw_svg, gantt, hatch_lines, small
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.drawing import DARK, LIGHT, Colours, Drawing, raster, raster_fills, rows_words
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden
from tests.planner.plans import listed, worked_example
from tests.planner.problems import problems

NS = "{http://www.w3.org/2000/svg}"


def elements(text: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter())


def words(text: str) -> list[str]:
    return [e.text or "" for e in elements(text) if e.tag == f"{NS}text"]


def tooltips(text: str) -> list[str]:
    return [t.text or "" for e in elements(text) if e.tag == f"{NS}rect" for t in e if t.tag == f"{NS}title"]


def pixels(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@examples(40)
@given(problem=problems())
def test_svg_has_a_bar_per_op_and_a_row_per_worker(problem: Problem) -> None:
    plan = listed(problem)
    text = EXPORTERS["svg"].render(plan).decode()
    ops = [op for ops in plan.schedule().ops.values() for op in ops]
    assert len(tooltips(text)) == sum(op.duration > 0 for op in ops)
    rows = [w for w in words(text) if w[:1] == "W" and "_" in w]
    assert rows == [str(w) for w in problem.job.workers()]
    assert sum(w.startswith("out – ") for w in words(text)) == len(problem.failed)


def test_bars_lie_where_the_ops_are() -> None:
    plan = worked_example(Technique.STAGGERED, "W1_2")
    drawing = gantt(plan)
    bars = [s for s in drawing.shapes if isinstance(s, Rect) and s.tooltip]
    ops = [op for ops in plan.schedule().ops.values() for op in ops if op.duration]
    slot = (bars[1].x - bars[0].x) / (ops[1].start - ops[0].start)
    left = bars[0].x - ops[0].start * slot
    for bar, op in zip(bars, ops, strict=True):
        assert bar.x == pytest.approx(left + op.start * slot)
        assert bar.width == pytest.approx(op.duration * slot, abs=1.01)  # a thin gap to the next
        assert bar.fill == LIGHT.ops[op.kind]
        assert (bar.hatch is not None) == op.rerouted
        assert (bar.stroke == LIGHT.failed) == op.rerouted
        assert bar.tooltip.startswith(f"{op.worker}: ")
        assert (f"re-routed from W{op.pipeline}_{op.stage}" in bar.tooltip) == op.rerouted
        assert bar.x + bar.width <= drawing.width


def test_numbers_are_in_bars_that_hold_them_and_in_no_others() -> None:
    plan = worked_example(Technique.STAGGERED, "W1_2")
    shown = Counter(w for w in words(EXPORTERS["svg"].render(plan).decode()) if w.replace("·", "").isdigit())
    expected = Counter(
        f"1·{op.micro_batch}" if op.rerouted else str(op.micro_batch) for op in plan.schedule().compute_ops()
    )
    axis = Counter(["0", "5", "10", "15", "20", "25"])
    assert shown == expected + axis
    narrow = make_plan(Problem(Job.uniform(1, 2, 400)), solver="list", look_ahead=False)
    drawing = gantt(narrow)
    bars = [s for s in drawing.shapes if isinstance(s, Rect) and s.tooltip]
    numbers = [s for s in drawing.shapes if isinstance(s, Text) and s.anchor == "middle" and s.colour != LIGHT.muted]
    assert max(bar.width for bar in bars) < 8
    assert not numbers


def test_png_shows_the_drawing() -> None:
    plan = worked_example(Technique.STAGGERED, "W1_2")
    drawing = gantt(plan)
    image = pixels(EXPORTERS["png"].render(plan))
    assert image.size == (round(drawing.width * SCALE), round(drawing.height * SCALE))
    bars = [s for s in drawing.shapes if isinstance(s, Rect) and s.tooltip]
    for bar in bars:
        corner = round((bar.x + 4) * SCALE), round((bar.y + 2.5) * SCALE)
        assert image.getpixel(corner) in (rgb(bar.fill), rgb(bar.hatch or bar.fill))
        edge = round((bar.x + bar.width / 2) * SCALE), round(bar.y * SCALE) + 1
        assert image.getpixel(edge) == rgb(bar.stroke or bar.fill)


def test_a_plan_says_of_no_worker_that_it_failed() -> None:
    """It does not know: one may have moved, been drained, or never been there. Red is only the edge of what is
    re-routed."""
    large = make_plan(
        Problem(Job.uniform(64, 8, 4), frozenset({Worker(3, 2), Worker(9, 2)})), solver="list", look_ahead=False
    )
    for plan in (worked_example(Technique.STAGGERED, "W1_2"), large):
        assert plan.failed
        for shape in gantt(plan).shapes:
            if isinstance(shape, Text):
                assert "failed" not in shape.text.lower() and shape.colour != LIGHT.failed
            elif isinstance(shape, Rect):
                assert shape.fill != LIGHT.failed and (shape.stroke != LIGHT.failed or shape.hatch)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_row_of_a_failed_worker_has_the_tint_of_the_pages(colours: Colours) -> None:
    drawing = Drawing.of(worked_example(Technique.STAGGERED, "W1_2").schedule(), out={"W1_2": "failed"})
    opacity = float(colours.failed_tint.removesuffix(")").split(",")[-1])
    tint = blend(colours.failed, colours.background, opacity)
    shapes = small(drawing, colours, drawing.schedule.period, "").shapes
    assert sum(isinstance(shape, Rect) and shape.fill == tint for shape in shapes) == 1


def test_png_has_letters() -> None:
    """The title's strip holds its ink: text is really drawn, with the font that Pillow carries."""
    drawing = gantt(worked_example())
    title = next(s for s in drawing.shapes if isinstance(s, Text) and s.bold)
    image = pixels(draw_png(drawing))
    box = tuple(round(v * SCALE) for v in (title.x, title.y - 9, title.x + 300, title.y + 9))
    strip = image.crop(box)  # type: ignore[arg-type]
    ink = sum(count for count, colour in strip.getcolors(1 << 20) or [] if sum(colour) < 300)  # type: ignore[arg-type]
    assert 0.05 < ink / (strip.width * strip.height) < 0.6


def test_one_pipeline_of_a_plan() -> None:
    plan = worked_example(Technique.STAGGERED, "W1_2")
    text = EXPORTERS["svg"].render(plan, pipeline=1).decode()
    assert [w for w in words(text) if w[:1] == "W" and "_" in w] == ["W1_0", "W1_1", "W1_2", "W1_3"]
    assert "Pipeline 1 of 3 pipelines x 4 stages x 6 micro-batches, without W1_2" in words(text)
    assert pixels(EXPORTERS["png"].render(plan, pipeline=1)).height < pixels(EXPORTERS["png"].render(plan)).height


@pytest.mark.parametrize(("pipelines", "stages"), [(64, 8), (1, 300)])
def test_a_large_plan_is_the_raster_between_its_axes(pipelines: int, stages: int) -> None:
    failed = frozenset({Worker(3, 2), Worker(9, 2)}) if pipelines > 1 else frozenset()
    plan = make_plan(Problem(Job.uniform(pipelines, stages, 4), failed), solver="list", look_ahead=False)
    codes = raster(Drawing.of(plan.schedule(), plan.job.job().workers()))
    fills = [rgb(fill) for fill in raster_fills(LIGHT)]
    text = EXPORTERS["svg"].render(plan).decode()
    (image,) = (e for e in elements(text) if e.tag == f"{NS}image")
    shown = pixels(base64.b64decode(image.attrib["href"].partition(",")[2]))
    assert shown.size == (codes.shape[1], codes.shape[0]) == (codes.shape[1], pipelines * stages)
    assert [fills[code] for code in codes.ravel().tolist()] == list(
        map(tuple, np.asarray(shown).reshape(-1, 3).tolist())
    )
    rows = [w for w in words(text) if w[:1] == "W" and "_" in w]
    assert (rows[0], rows[-1]) == ("W0_0", str(Worker(pipelines - 1, stages - 1)))
    assert rows_words(Drawing.of(plan.schedule())) in words(text)
    colours = {colour for _, colour in pixels(EXPORTERS["png"].render(plan)).getcolors(1 << 20) or []}
    assert {fills[code] for code in set(codes.ravel().tolist())} <= colours


def test_a_picture_says_that_it_shows_fewer_workers_than_there_are() -> None:
    plan = make_plan(Problem(Job.uniform(64, 16, 2)), solver="list", look_ahead=False)
    (note,) = [w for w in words(EXPORTERS["svg"].render(plan).decode()) if w == rows_words(Drawing.of(plan.schedule()))]
    assert re.findall(r"[\d,]+\d", note) == ["1,024", "512"]


def test_a_picture_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrecycle.planner.export.picture.MAX_PIXELS", 1000)
    with pytest.raises(PlannerError, match=golden("use-svg-which-has-no")):
        EXPORTERS["png"].render(worked_example())


@pytest.mark.parametrize("unit", ["<b>&\"'", "µs", "]]>"])
def test_any_unit_makes_well_formed_pictures(unit: str) -> None:
    job = Job(1, 1, 1, profiles=(StageProfile(0.000001, 1e9, 0.5, 3),), time_unit=unit)
    plan = make_plan(Problem(job), solver="list", look_ahead=False)
    assert any(golden("time-in-the-iteration") in w for w in words(EXPORTERS["svg"].render(plan).decode()))
    assert pixels(EXPORTERS["png"].render(plan)).width > 0


def test_hatching_stays_inside() -> None:
    for rect in (Rect(3, 5, 20, 10, "#FFFFFF"), Rect(0, 0, 2, 40, "#FFFFFF"), Rect(1, 1, 50, 3, "#FFFFFF")):
        found = list(hatch_lines(rect))
        assert found
        for (x0, y0), (x1, y1) in found:
            assert rect.x <= x0 < x1 <= rect.x + rect.width
            assert rect.y <= y1 < y0 <= rect.y + rect.height
            assert x1 - x0 == pytest.approx(y0 - y1)


def test_the_same_plan_is_the_same_picture() -> None:
    plan = worked_example(Technique.DECOUPLED, "W1_2")
    drawing = gantt(plan)
    assert draw_svg(drawing) == draw_svg(gantt(plan))
    assert draw_png(drawing) == draw_png(gantt(plan))
