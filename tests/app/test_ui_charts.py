"""Charts tell the truth about the plans and views that they draw."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import ui_factory as factory
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from PIL import Image

from openrecycle.app.charts import gantt as charts
from openrecycle.app.charts.gantt import ASIDE_OPACITY
from openrecycle.app.charts.theme import DARK, LIGHT, Palette
from openrecycle.app.ui.components import chart_placeholder
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans import drawing as model
from openrecycle.planner.plans.drawing import BAR_HEIGHT, OP_WORDS, Drawing, Rows
from openrecycle.planner.plans.schedule import Op, Schedule, critical_path, micro_batch_path
from tests.conftest import examples
from tests.golden import golden


def schedule_of(failed: tuple[str, ...] = (), **options: Any) -> Schedule:
    return factory.plan(failed, **options).schedule()


def gantt(
    schedule: Schedule,
    colours: Palette,
    *,
    workers: Sequence[Worker] | None = None,
    out: dict[str, str] | None = None,
    window: tuple[float, float] | None = None,
    **options: Any,
) -> go.Figure:
    return charts.gantt(Drawing.of(schedule, workers, out, window), colours, **options)


def op_traces(figure: go.Figure) -> list[Any]:
    return [t for t in figure.data if t.meta and t.meta.get("kind") in OP_WORDS]


def drawn(figure: go.Figure) -> list[tuple[str, bool, float, float, float]]:
    """(kind, re-routed, row, start, end) of every bar."""
    return [
        (t.meta["kind"], t.meta["rerouted"], float(y), float(base), float(base) + float(x))
        for t in op_traces(figure)
        for y, base, x in zip(t.y, t.base, t.x, strict=True)
    ]


def expected(schedule: Schedule, shown: Rows) -> list[tuple[str, bool, float, float, float]]:
    job = schedule.problem.job
    ops: list[Op] = [op for w in shown.workers for op in schedule.ops.get(w, ())]
    return [
        (op.kind, op.rerouted, shown.at[op.worker], float(job.units(op.start)), float(job.units(op.end))) for op in ops
    ]


@examples(25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_op_is_one_bar_at_its_place(data: st.DataObject) -> None:
    pipelines, stages = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    grid = (pipelines, stages, data.draw(st.integers(1, 5)))
    # Pipeline 0 lives, so that every stage has a living peer.
    cells = [f"W{p}_{s}" for p in range(1, pipelines) for s in range(stages)]
    failed = tuple(sorted(data.draw(st.sets(st.sampled_from(cells), max_size=3))))
    technique = data.draw(st.sampled_from(["adaptive", "decoupled", "staggered"]))
    optimizer = data.draw(st.integers(0, 2))
    schedule = schedule_of(failed, grid=grid, technique=technique, memory="none", optimizer=optimizer)
    figure = gantt(schedule, LIGHT)
    shown = Rows.of(list(schedule.problem.job.workers()))
    assert sorted(drawn(figure)) == sorted(expected(schedule, shown)), "times are whole, so they agree exactly"


def test_rerouted_bars_are_hatched_outlined_and_name_their_home() -> None:
    figure = gantt(schedule_of(("W1_2",)), LIGHT)
    moved = [t for t in op_traces(figure) if t.meta["rerouted"]]
    assert {t.meta["kind"] for t in moved} == {"F", "I", "W"}
    for trace in moved:
        assert trace.marker.pattern.shape == "/"
        assert trace.marker.line.color == LIGHT.failed
        assert set(trace.text) == {f"<b>1·{m}</b>" for m in range(6)}
        assert all("of pipeline 1" in h and "re-routed" in h for h in trace.hovertext)
    for trace in op_traces(figure):
        if not trace.meta["rerouted"]:
            assert trace.marker.pattern.shape is None


def test_failed_row_is_tinted_and_says_so() -> None:
    schedule = schedule_of(("W1_2", "W0_0"))
    figure = gantt(schedule, LIGHT, out={"W1_2": "failed", "W0_0": "failed"})
    shown = Rows.of(list(schedule.problem.job.workers()))
    tinted = [s for s in figure.layout.shapes if s.fillcolor == LIGHT.failed_tint]
    assert {s.name for s in tinted} == {"W0_0", "W1_2"}
    assert all((s.y0 + s.y1) / 2 == pytest.approx(shown.at[Worker.parse(s.name)]) for s in tinted)
    texts = [a.text for a in figure.layout.annotations]
    assert any("✕ failed" in t and "W0_2 and W2_2" in t for t in texts)
    tracks = next(t for t in figure.data if t.meta.get("kind") == "track")
    assert len(tracks.y) == 10, "a failed worker has no bubbles"


def test_who_moved_or_nobody_knows_of_does_not_look_failed() -> None:
    schedule = schedule_of(("W1_2", "W0_0"))
    for out in ({"W0_0": "moved to W2_1"}, {}):
        figure = gantt(schedule, LIGHT, out={"W1_2": "failed", **out})
        assert {s.name for s in figure.layout.shapes if s.fillcolor == LIGHT.failed_tint} == {"W1_2"}
        texts = [a.text for a in figure.layout.annotations if "run on" in a.text]
        assert sum("failed" in text for text in texts) == 1
        assert any(out.get("W0_0", "out") in text and "✕" not in text for text in texts)
    # Why a micro-batch is re-routed, a plan does not know: its own worker may be there, and slow.
    said = [words for trace in figure.data for words in trace.hovertext or () if "re-routed" in words]
    assert said and all("re-routed from W1_2" in words or "re-routed from W0_0" in words for words in said)
    assert not any("failed" in words for words in said)


def test_fault_free_end_and_ghost_stand_where_they_belong() -> None:
    schedule = schedule_of(("W1_2",), unit="slot", memory="none")
    figure = gantt(schedule, LIGHT)
    line = next(s for s in figure.layout.shapes if s.line.dash == "dot")
    assert line.x0 == line.x1 == 27
    assert any("ends at 27 slots" in a.text for a in figure.layout.annotations)
    ghost = next(t for t in figure.data if t.meta.get("kind") == "ghost")
    first = min(ops[0].start for ops in schedule.ops.values())
    assert min(ghost.base) == first + schedule.period
    assert figure.layout.xaxis.range[1] >= min(ghost.base)


def test_instant_optimizer_step_is_drawn_as_a_line() -> None:
    without = next(t for t in op_traces(gantt(schedule_of(), LIGHT)) if t.meta["kind"] == "O")
    assert set(without.x) == {0} and without.marker.line.width == 3
    with_time = next(t for t in op_traces(gantt(schedule_of(optimizer=20), LIGHT)) if t.meta["kind"] == "O")
    assert set(with_time.x) == {20} and with_time.marker.line.width == 1


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_figures_are_json_and_use_their_theme(colours: Any) -> None:
    text = gantt(schedule_of(("W1_2",)), colours).to_json()
    other = DARK if colours is LIGHT else LIGHT
    assert colours.text in text
    assert other.text not in text


def test_rows_do_not_overlap_and_pipelines_stand_apart() -> None:
    shown = Rows.of(list(schedule_of().problem.job.workers()))
    middles = [shown.at[w] for w in shown.workers]
    steps = np.diff(middles)
    assert steps.min() >= 1
    apart = [
        b - a for (v, a), (w, b) in zip(shown.at.items(), list(shown.at.items())[1:], strict=False) if v[0] != w[0]
    ]
    assert min(apart) == pytest.approx(1 + model.PIPELINE_GAP)
    assert shown.extent == pytest.approx(middles[-1] + 0.5)


# -- large schedules ------------------------------------------------------------------------


def test_raster_has_the_op_that_runs_at_each_moment() -> None:
    schedule = schedule_of(("W1_2", "W0_1", "W2_0"), unit="slot")
    workers = list(schedule.problem.job.workers())
    end = max(ops[-1].end for ops in schedule.ops.values())
    image = model.raster(Drawing.of(schedule, out={"W1_2": "failed", "W0_1": "drained"}), columns=end * 4)
    for row, worker in enumerate(workers):
        if worker in schedule.problem.failed:
            assert set(image[row]) == {model.CODE_FAILED if str(worker) == "W1_2" else model.CODE_OUT}
            continue
        for column in range(end * 4):
            at = (column + 0.5) / 4
            running = [op for op in schedule.ops[worker] if op.start <= at < op.end]
            assert image[row, column] == (model.CODES[running[0].kind] if running else 0)


def test_a_raster_of_fewer_rows_than_workers_shows_those_that_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_ROWS", 5)
    image = model.raster(Drawing.of(schedule_of(("W1_2", "W0_1"), unit="slot"), out={"W1_2": "failed"}))
    assert [row.min() for row in image] == [model.CODE_OUT, 0, model.CODE_FAILED, 0]  # three workers a row


def test_box_selects_the_workers_and_the_time_it_covers() -> None:
    schedule = schedule_of(("W1_2",), unit="slot")
    workers = list(schedule.problem.job.workers())
    detail = charts.detail_of_box(Drawing.of(schedule), (4.0, 9.0), (1.2, 3.4))
    assert detail.workers == tuple(workers[1:4]) and detail.window == (4.0, 9.0) and not detail.cut
    figure = gantt(schedule, LIGHT, workers=detail.workers, window=detail.window)
    assert len(drawn(figure)) == detail.ops
    assert list(figure.layout.xaxis.range) == [4, 9]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_overview_is_the_schedule_in_the_themes_colours_between_its_axes(colours: Palette) -> None:
    schedule = schedule_of(("W1_2", "W0_1", "W3_0"), grid=(4, 3, 6), unit="a<b")
    workers = list(schedule.problem.job.workers())
    out = {"W1_2": "failed", "W0_1": "moved to W2_2"}
    whole = Drawing.of(schedule, out=out)
    html = charts.overview(whole, charts.picture(whole, colours), 'say "all"')
    assert model.rows_words(whole) == golden("one-row-per-worker-red-rows")
    assert 'alt="say &quot;all&quot;"' in html and "(a&lt;b)" in html
    found = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert found
    image = Image.open(io.BytesIO(base64.b64decode(found[1]))).convert("RGB")
    assert image.size == (model.COLUMNS, len(workers))

    def at(x: int, y: int) -> str:
        pixel: Any = image.getpixel((x, y))
        return "#{:02X}{:02X}{:02X}".format(*pixel)

    for row, worker in enumerate(workers):
        for op in schedule.ops.get(worker, ()):
            middle = round((op.start + op.end) / 2 / schedule.end * model.COLUMNS)
            if op.duration:
                assert at(middle, row) == colours.ops[op.kind]
    dead = workers.index(Worker(1, 2))
    assert at(5, dead) == colours.failed
    for other in (Worker(0, 1), Worker(3, 0)):
        assert at(5, workers.index(other)) == colours.muted
    rows = dict(re.findall(r'<span style="top:([\d.]+)%">(\w+)</span>', html))
    assert set(rows.values()) <= set(map(str, workers)) and {"W0_0", "W3_2"} <= set(rows.values())
    for top, name in rows.items():
        assert float(top) == pytest.approx(100 * (workers.index(Worker.parse(name)) + 0.5) / len(workers), abs=0.01)
    times = re.findall(r'<span style="left:([\d.]+)%">([\d.,]+)</span>', html)
    assert 4 <= len(times) <= 11
    end = schedule.problem.job.units(schedule.end)
    for left, words in times:
        assert float(left) == pytest.approx(100 * float(words.replace(",", "")) / end, abs=0.01)


def test_a_picture_that_has_not_all_workers_says_so() -> None:
    """A worker that is out has a row, whatever is left out beside it."""
    schedule = schedule_of(("W301_1",), grid=(602, 2, 2), unit="slot")
    whole = Drawing.of(schedule, out={"W301_1": "failed"})
    image = model.raster(whole)
    assert len(image) == 402 and (image == model.CODE_FAILED).any()
    assert model.rows_words(whole) == golden("of-1204-workers-402-are")
    assert model.thinned_words(Drawing.of(schedule, whole.rows.workers[:600])) == ""


def test_a_detail_is_where_the_box_was() -> None:
    schedule = schedule_of(("W1_2",), grid=(4, 3, 6))
    detail = charts.detail_of_box(Drawing.of(schedule), (4.0, 9.0), (1.2, 3.4))
    assert charts.box_of(Drawing.of(schedule), detail) == (4.0, 9.0, 0.5, 3.5)
    assert charts.detail_of_box(Drawing.of(schedule), (4.0, 9.0), (0.5, 3.5)).window == detail.window


@pytest.mark.parametrize("start", [0.0, 40.0, 40.5])
def test_a_detail_has_the_ops_that_it_says_also_where_more_run_at_once_than_it_may_have(start: float) -> None:
    schedule = schedule_of((), grid=(16, 16, 64), unit="slot")
    detail = charts.detail_of(Drawing.of(schedule), 0, 256, start, 200)
    assert detail.cut and detail.window[0] == start < detail.window[1]
    shown = Drawing.of(schedule, detail.workers, window=detail.window).ops
    assert 0 < len(shown) == detail.ops <= 200
    box = charts.detail_of_box(Drawing.of(schedule), (start, start + 0.25), (0, 255))
    assert not box.cut and len(box.workers) == 256 and box.window == (start, start + 0.25)


@pytest.mark.parametrize(("most", "rows"), [(300, 256), (100, 25)])
def test_a_box_has_all_of_its_rows_unless_their_ops_are_too_many(
    monkeypatch: pytest.MonkeyPatch, most: int, rows: int
) -> None:
    monkeypatch.setattr("openrecycle.app.charts.gantt.MAX_DETAIL", most)
    schedule = schedule_of((), grid=(16, 16, 64), unit="slot")
    box = charts.detail_of_box(Drawing.of(schedule), (40.0, 40.25), (0, 255))
    assert (len(box.workers), box.window, box.cut) == (rows, (40.0, 40.25), rows < 256)
    assert 0 < len(Drawing.of(schedule, box.workers, window=box.window).ops) == box.ops <= most


def test_large_schedule_is_drawn_small_enough() -> None:
    schedule = schedule_of(("W1_2", "W5_7"), grid=(16, 16, 64))
    whole = Drawing.of(schedule)
    assert sum(map(len, schedule.ops.values())) > charts.MAX_BARS
    detail = charts.detail_of(whole, 100, 24, 0.0)
    html = charts.overview(whole, charts.picture(whole, LIGHT), "all of it")
    assert detail.ops <= charts.MAX_DETAIL
    assert len(html) < 200_000


def test_many_ops_are_one_shape_a_kind_and_each_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of(("W1_2",), unit="slot")
    monkeypatch.setattr(charts, "MAX_NODES", 100)
    figure = gantt(schedule, LIGHT, path=(1, 2))
    workers = Rows.of(list(schedule.problem.job.workers())).at
    found: dict[str, list[Any]] = {}
    for trace in figure.data:
        if trace.type == "scatter" and trace.meta["kind"] in OP_WORDS:
            assert None not in trace.x, "a gap would make another element"
            corners = list(zip(trace.x, trace.y, strict=True))
            tops = [
                (left, (upper + lower) / 2)
                for (left, lower), (same, upper) in pairwise(corners)
                if left == same and lower - upper == pytest.approx(BAR_HEIGHT)
            ]
            found.setdefault(trace.meta["kind"], []).extend(tops)
    on_path = set(micro_batch_path(schedule, 1, 2))
    others = [op for op in schedule.compute_ops() if op not in on_path]
    for kind in ("F", "I", "W"):
        begun = sorted((op.start, workers[op.worker]) for op in others if op.kind == kind)
        assert sorted(found[kind]) == [(start, pytest.approx(row)) for start, row in begun]
    under = next(t for t in figure.data if t.meta["kind"] == "under")
    assert len([words for words in under.hovertext if words]) == sum(map(len, found.values()))
    elements = sum(len(t.x) for t in figure.data if t.type == "bar")
    assert elements < 100, "only the path's own ops, which can be clicked, and the rows' tracks"
    assert chart_placeholder(figure).count("or-first-middle") == 1


# -- paths and memory ------------------------------------------------------------------------


def kinds(figure: go.Figure) -> list[str]:
    return [t.meta["kind"] for t in figure.data]


def test_the_path_of_a_micro_batch_stands_out_and_the_rest_steps_back() -> None:
    schedule = schedule_of(("W1_2",), unit="slot")
    figure = gantt(schedule, LIGHT, path=(1, 2))
    assert sorted(drawn(figure)) == sorted(drawn(gantt(schedule, LIGHT))), "nothing is lost or doubled"
    ahead = [t for t in op_traces(figure) if not t.meta["aside"]]
    assert {c for t in ahead for c in t.customdata} == {"1.2"}
    assert all(t.opacity == ASIDE_OPACITY for t in op_traces(figure) if t.meta["aside"])
    outline = next(t for t in figure.data if t.meta["kind"] == "path")
    whole = micro_batch_path(schedule, 1, 2)
    assert len(outline.x) == sum(op.kind != "W" for op in whole)
    assert set(outline.y) == {Rows.of(list(schedule.problem.job.workers())).at[op.worker] for op in whole}


def test_the_critical_path_is_threaded_and_its_waits_are_shown() -> None:
    schedule = schedule_of(("W1_2", "W0_2"), memory="1f1b", technique="decoupled", unit="slot")
    figure = gantt(schedule, LIGHT, critical=True)
    outline = next(t for t in figure.data if t.meta["kind"] == "critical")
    path = critical_path(schedule)
    assert list(outline.base) == [link.op.start for link in path]
    waiting = [link for link in path if link.waited]
    bars = [t for t in figure.data if t.meta["kind"] == "wait"]
    assert [list(t.x) for t in bars] == ([[link.waited for link in waiting]] if waiting else [])
    assert "critical" not in kinds(gantt(schedule, LIGHT))


@pytest.mark.parametrize("limit", ["none", "uniform", "1f1b"])
def test_what_is_held_is_drawn_on_the_same_time_axis_below_its_limit(limit: str) -> None:
    schedule = schedule_of(("W1_2",), memory=limit, technique="staggered" if limit != "1f1b" else "decoupled")
    figure = gantt(schedule, LIGHT, held=True)
    assert figure.layout.xaxis.anchor == "y2"
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]
    shown = Rows.of(list(schedule.problem.job.workers()))
    area = next(t for t in figure.data if t.meta["kind"] == "memory")
    peaks = dict.fromkeys(schedule.ops, 0.0)
    for y, words in zip(area.y, area.hovertext, strict=True):
        if y is not None:
            worker = Worker.parse(words[3 : words.index("</b>")])
            peaks[worker] = max(peaks[worker], shown.at[worker] + BAR_HEIGHT / 2 - y)
    limits = schedule.problem.limits
    top = max(max(limits[w.stage] or 0, n) for w, n in schedule.peak_activations.items())
    assert peaks == pytest.approx({w: BAR_HEIGHT * n / top for w, n in schedule.peak_activations.items()})
    assert ("memory limit" in kinds(figure)) == (limit != "none")
    figures = [a.text for a in figure.layout.annotations]
    worker = Worker(0, 2)
    own = limits[worker.stage]
    assert str(schedule.peak_activations[worker]) + (f" of {own}" if own else "") in figures
    assert f"{100 * schedule.worker_bubble_fraction(worker):.0f} %" in figures


def test_a_window_keeps_what_lies_in_it_only() -> None:
    schedule = schedule_of(("W1_2",), unit="slot", memory="none")
    figure = gantt(schedule, LIGHT, window=(5, 12))
    assert list(figure.layout.xaxis.range) == [5, 12]
    assert "ghost" not in kinds(figure) and not any(s.line.dash == "dot" for s in figure.layout.shapes)
    assert all(end > 5 and start < 12 for *_, start, end in drawn(figure))
    area = next(t for t in gantt(schedule, LIGHT, window=(5, 12), held=True).data if t.meta["kind"] == "memory")
    assert {5, 12} <= {x for x in area.x if x is not None} <= set(range(5, 13))
    for worker in (Worker(0, 0), Worker(2, 1)):
        come = [held for tick, held in schedule.held_activations(worker) if tick <= 5][-1]
        said = [words for x, words in zip(area.x, area.hovertext, strict=True) if x == 5]
        assert f"<b>{worker}</b> holds {come} activations" in said
    late = gantt(schedule, LIGHT, window=(20, 30))
    assert "ghost" in kinds(late) and any(s.line.dash == "dot" for s in late.layout.shapes)
