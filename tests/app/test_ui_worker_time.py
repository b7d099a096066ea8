"""Charts of what a worker reported over time."""

from __future__ import annotations

from openrecycle.app.charts.progress import broken, memory, op_times
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.observing.recorder import MetricSeries, Series


def series(**metrics: MetricSeries) -> Series:
    return Series(1, (10, 11, 12, 60), (1, 2, 1, 1), (1, 2, 3, 4), ("training",) * 4, metrics)


SAME = MetricSeries((1.0, 2.0, 3.0, 4.0), (1.0, 2.5, 3.0, 4.0), (1.0, 3.0, 3.0, 4.0))


def test_a_line_is_broken_where_the_worker_was_silent() -> None:
    at, values = broken(series(F=SAME), SAME.mean)
    assert at == [10_000, 11_000, 12_000, 13_000, 60_000]
    assert values == [1.0, 2.5, 3.0, None, 4.0]


def test_each_kind_has_its_line_colour_and_plan() -> None:
    chart = op_times(series(F=SAME, W=SAME), {"F": 1.5}, LIGHT)
    assert chart.rows["op"] == ["F"] * 5 + ["W"] * 5
    assert chart.rows["planned"] == [1.5] * 5 + [None] * 5
    assert chart.spec["encoding"]["color"]["scale"] == {
        "domain": ["F", "W"],
        "range": [LIGHT.op_lines["F"], LIGHT.op_lines["W"]],
    }
    assert len(chart.spec["layer"]) == 2 and "dashed" in chart.spec["title"]
    without = op_times(series(F=SAME), {}, LIGHT)
    assert len(without.spec["layer"]) == 1 and "dashed" not in without.spec["title"]


def test_memory_is_the_highest_of_each_step_in_mebibytes() -> None:
    most = tuple(n * 2.0**20 for n in (5, 6, 7, 8))
    chart = memory(series(resident_bytes=MetricSeries(most, most, most)), LIGHT)
    assert chart.rows["mebibytes"] == [5.0, 6.0, 7.0, None, 8.0]
