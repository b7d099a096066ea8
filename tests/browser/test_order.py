"""What is shown of a page while it is made: from the top down, and nothing that is moved afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.watching import NEEDS_CHROMIUM

ASSETS = Path(__file__).resolve().parents[2] / "app" / "ui" / "assets"
pytestmark = NEEDS_CHROMIUM

# As Streamlit draws them: nothing yet, something that is being loaded, words.
EMPTY, WAITS, WORDS = (
    f'<div data-testid="stElementContainer"><div data-testid="{kind}">{said}</div></div>'
    for kind, said in (("stEmpty", ""), ("stSkeleton", ""), ("stHtml", "words"))
)


@pytest.fixture
def page(tab: Page) -> Page:
    page = tab
    page.goto("about:blank")
    page.set_content('<div class="stMainBlockContainer"><div class="stVerticalBlock"></div></div>')
    page.add_style_tag(path=ASSETS / "console.css")
    page.add_script_tag(path=ASSETS / "order.js")
    return page


def draw(page: Page, *rows: str) -> list[bool]:
    """Puts these into the page's rows, and says of each row whether it is shown."""
    return page.evaluate(  # type: ignore[no-any-return]
        """async rows => {
            const block = document.querySelector(".stVerticalBlock");
            while (block.children.length < rows.length) block.append(document.createElement("div"));
            rows.forEach((row, i) => { block.children[i].innerHTML = row; });
            await new Promise(requestAnimationFrame);
            return [...block.children].map(row => getComputedStyle(row).visibility === "visible");
        }""",
        list(rows),
    )


def test_what_would_be_moved_waits(page: Page) -> None:
    assert draw(page, WORDS, WAITS, WORDS) == [True, False, False]
    assert draw(page, WORDS, WORDS, WORDS) == [True, True, True]
    assert draw(page, WORDS, WORDS, WORDS, WAITS) == [True, True, True, False]


def test_what_has_been_seen_stays(page: Page) -> None:
    assert draw(page, WORDS, WORDS) == [True, True]
    assert draw(page, WORDS + WAITS, WORDS) == [True, True]


@pytest.mark.parametrize("before", ["", EMPTY, EMPTY + EMPTY])
def test_a_row_that_came_before_what_is_in_it_has_not_been_seen(page: Page, before: str) -> None:
    assert draw(page, before) == [True]
    assert draw(page, before + WAITS) == [False]
    assert draw(page, WORDS, WAITS) == [True, False]


def test_a_chart_is_not_waited_for(page: Page) -> None:
    assert draw(page, WORDS, f'<div class="st-key-loss-chart">{WAITS}</div>', WORDS) == [True, True, True]
