"""The part of the time that is shown: what the slider, the link and a chart that is dragged make of each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ui_console import Address

from openrecycle.app.ui import address

CHART, END = "gantt", 840.0


class Page:
    """What Streamlit keeps between two runs of a page, and what a browser may send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: dict[str, Any] = {}
        self.address = Address()
        kept = SimpleNamespace(session_state=self.state, query_params=self.address)
        monkeypatch.setattr(address, "st", kept)

    def drag(self, sent: object) -> None:
        self.state[f"zoom-of-{CHART}"] = {"range": sent}
        address.dragged(CHART, address.TimeRange("time", END, None))

    def slide(self, low: float, high: float) -> None:
        address.choose_range("time", address.narrowed((low, high), END))

    def draw(self, what: str = "a plan") -> tuple[tuple[float, float] | None, int]:
        return address.drawn_with(CHART, what, address.parsed(self.address.get("time", ""), END))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    return Page(monkeypatch)


@pytest.mark.parametrize(
    ("sent", "link", "part"),
    [
        ([200.04, 400.06], "200-400.1", (200.0, 400.1)),
        ([-50, 400], "0-400", (0.0, 400.0)),
        ([700.5, 5000], "700.5-840", (700.5, 840.0)),
        ([12.34567, 12.45678], "12.3457-12.4568", (12.3457, 12.4568)),
        ([1e-5, 2e-5], "0.00001-0.00002", (1e-5, 2e-5)),
        ([0, 840], None, None),
        ([0, 1209.6], None, None),
        ([], None, None),
    ],
)
def test_a_dragged_chart_sets_the_link(
    page: Page, sent: list[float], link: str | None, part: tuple[float, float] | None
) -> None:
    page.slide(100, 300)
    assert page.address == {"time": "100-300"}
    page.drag(sent)
    assert page.address.get("time") == link
    if link is not None:
        assert address.parsed(link, END) == pytest.approx(part)


@pytest.mark.parametrize("sent", [None, "all", [None, 3], ["1", "2"], [float("nan"), 3.0], [400, 200], [900, 950], {}])
def test_what_else_a_browser_may_send_changes_nothing(page: Page, sent: object) -> None:
    page.slide(100, 300)
    page.drag(sent)
    assert page.address == {"time": "100-300"}


def test_a_chart_that_has_been_dragged_is_not_drawn_anew(page: Page) -> None:
    first = page.draw()
    assert first[0] is None
    page.drag([200, 400])
    assert page.draw() == first
    page.drag([250, 300])
    assert page.draw() == first


def test_it_is_drawn_anew_with_that_part_when_something_else_in_it_changes(page: Page) -> None:
    before = page.draw()
    page.drag([200, 400])
    shown, revision = page.draw("a plan, with a path")
    assert shown == (200, 400) and revision != before[1]
    assert page.draw("a plan, with a path") == (shown, revision)


def test_the_slider_and_a_double_click_have_it_drawn_anew(page: Page) -> None:
    revisions = [page.draw()[1]]

    def drawn() -> tuple[float, float] | None:
        shown, revision = page.draw()
        assert revision not in revisions, "the browser would keep its zoom"
        revisions.append(revision)
        return shown

    page.drag([200, 400])
    page.draw()
    page.slide(0, END)  # back to what it was drawn with
    assert drawn() is None
    page.slide(100, 300)
    assert drawn() == (100, 300)
    page.drag([150, 200])
    page.drag([])
    assert drawn() is None
    page.drag([])
    assert drawn() is None


@pytest.mark.parametrize(
    ("shown", "part"),
    [
        (None, None),
        ((150.0, 160.0), (150.0, 160.0)),
        ((50.0, 160.0), (100.0, 160.0)),
        ((150.0, 400.0), (150.0, 200.0)),
        ((50.0, 400.0), None),
        ((0.0, 100.0), None),
        ((300.0, 400.0), None),
    ],
)
def test_a_chart_of_a_part_shows_what_it_has_of_the_chosen_time(
    shown: tuple[float, float] | None, part: tuple[float, float] | None
) -> None:
    assert address.within(address.TimeRange("time", END, shown), 100, 200) == part


@pytest.mark.parametrize("word", ["400-200", "a-b", "200", "-5-10", "0-99999", "nan-3", "1-inf", "", "-"])
def test_a_time_that_cannot_be(word: str) -> None:
    assert address.parsed(word, END) is None


@pytest.mark.parametrize("end", [1 / 3, 100 / 7, 840.0, 27.0, 1e-3, 123456.789])
def test_the_end_can_be_sent(end: float) -> None:
    link = f"0-{address.spelled(end)}"
    parsed = address.parsed(link, end)
    assert parsed is not None and address.narrowed(parsed, end) is None
