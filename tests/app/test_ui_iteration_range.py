"""The part of a job's progress that Live shows: what a link and a curve that is moved make of each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ui_console import Address

from openrecycle.app.charts.progress import losses, progress_rows, throughput
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.charts.vega import ZOOM
from openrecycle.app.ui import address
from tests.golden import golden


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Streamlit keeps between two runs of a page."""
    kept = SimpleNamespace(session_state={}, query_params=Address())
    monkeypatch.setattr(address, "st", kept)
    return kept


def move(page: SimpleNamespace, chart: str, sent: Any) -> None:
    page.session_state["a-key"] = {"selection": {ZOOM: sent}}
    address.zoomed(chart, "a-key")


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("120-180", (120, 180)),
        ("0-101", (0, 101)),
        ("499-9000", (499, 9000)),
        ("0-99", None),
        ("500-600", None),
        ("180-120", None),
        ("150-150", None),
        ("-5-150", None),
        ("1.5-150", None),
        ("150", None),
        ("", None),
    ],
)
def test_a_link_names_iterations_that_there_are(
    page: SimpleNamespace, word: str, found: tuple[int, int] | None
) -> None:
    page.query_params["iterations"] = word
    assert address.iterations_shown(100, 499) == found
    assert page.query_params.get("iterations") == (word if found else None)
    words = page.session_state[address.NOTES]["iterations"].words
    assert words == (golden("iterations-got-expected-two-iterations", f"{word!r}") if found is None else "")


def test_what_the_job_leaves_behind_is_shown_no_more_without_a_word(page: SimpleNamespace) -> None:
    page.query_params["iterations"] = "100-150"
    assert address.iterations_shown(100, 499) == (100, 150)
    assert address.iterations_shown(151, 550) is None and page.query_params == {}
    assert page.session_state[address.NOTES]["iterations"].words == ""


def test_both_curves_show_what_one_is_moved_to_and_that_one_is_not_drawn_anew(page: SimpleNamespace) -> None:
    def drawn() -> list[tuple[Any, int]]:
        shown = address.iterations_shown(0, 399)
        return [address.drawn_with(chart, "job", shown) for chart in ("throughput", "loss")]

    assert drawn() == [(None, 0), (None, 0)]
    move(page, "throughput", {"before": [120.4, 180.2]})
    assert page.query_params == {"iterations": "120-180"}
    assert drawn() == [(None, 0), ((120, 180), 1)] and drawn() == drawn()
    move(page, "loss", {"before": [-3.0, 90.0]})
    assert page.query_params == {"iterations": "0-90"}
    assert drawn() == [((0, 90), 1), ((120, 180), 1)]
    move(page, "loss", {})
    assert page.query_params == {} and drawn() == [(None, 2), ((120, 180), 1)]


def test_what_a_browser_sends_before_it_hears_of_the_new_address_changes_nothing(page: SimpleNamespace) -> None:
    address.enter("live")
    move(page, "loss", {"before": [120.4, 180.2]})
    for late in ({}, {"iterations": "5-9"}):
        page.query_params = Address(late)
        assert address.iterations_shown(0, 399) == (120, 180) and page.query_params == {"iterations": "120-180"}
    move(page, "loss", {})
    page.query_params = Address({"iterations": "120-180"})
    assert address.iterations_shown(0, 399) is None and page.query_params == {}


def test_when_the_page_runs_as_a_whole_its_address_counts(page: SimpleNamespace) -> None:
    address.enter("live")
    move(page, "loss", {"before": [120.4, 180.2]})
    address.enter("live")  # at once, where a callback comes before a whole run
    page.query_params = Address()
    assert address.iterations_shown(0, 399) == (120, 180)
    page.query_params = Address()  # asked for before the browser heard of it, by the next click
    address.enter("live")
    assert address.iterations_shown(0, 399) == (120, 180)
    page.query_params = Address({"iterations": "5-9"})  # the browser's Back
    address.enter("live")
    assert address.iterations_shown(0, 399) == (5, 9)
    page.query_params = Address()
    assert address.iterations_shown(0, 399) is None


def test_what_the_job_leaves_behind_does_not_come_back(page: SimpleNamespace) -> None:
    address.enter("live")
    move(page, "loss", {"before": [120.4, 180.2]})
    assert address.iterations_shown(200, 399) is None and page.query_params == {}
    assert address.iterations_shown(200, 399) is None and page.query_params == {}


@pytest.mark.parametrize(
    "sent", [{"before": [10.2, 10.4]}, {"before": [9.0, 3.0]}, {"before": ["1", None]}, {"before": [3.0, float("inf")]}]
)
def test_what_is_no_part_changes_nothing(page: SimpleNamespace, sent: Any) -> None:
    page.query_params["iterations"] = "20-30"
    move(page, "loss", sent)
    assert page.query_params == {"iterations": "20-30"}


def test_the_curves_begin_with_the_part(page: SimpleNamespace) -> None:
    rows = progress_rows((), [], None)
    for make in (throughput, losses):
        params = [p for layer in make(rows, LIGHT, (120, 180)).spec["layer"] for p in layer.get("params", ())]
        assert [(p["name"], p["bind"], p["value"]) for p in params] == [(ZOOM, "scales", {"x": [120, 180]})]
        assert "value" not in next(p for layer in make(rows, LIGHT).spec["layer"] for p in layer.get("params", ()))
