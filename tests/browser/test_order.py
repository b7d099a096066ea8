"""What a page's own scripts do: it is shown from the top down, and nothing of it is moved afterwards; and Back goes
back by what somebody did."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from playwright.sync_api import Browser, Page

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


def test_back_goes_back_by_what_somebody_did(browser: Browser) -> None:
    """As Streamlit does it on a busy machine: the address has the next page's names before its path."""
    page = browser.new_page()  # whose history is empty: Chromium keeps no more than 50 entries
    try:
        page.clock.install(time=0)
        page.clock.pause_at(1_000)  # time goes on when the test says so, however busy the machine
        page.route(
            "http://console.test/**", lambda route: route.fulfill(body="<button>x</button>", content_type="text/html")
        )
        page.goto("http://console.test/")
        page.add_script_tag(path=ASSETS / "history.js")

        def puts(*addresses: str) -> int:
            """How many entries they make. By the place in the history, which is as long as before where an entry takes
            the place of those that were gone back from."""
            before = page.evaluate("navigation.currentEntry.index")
            page.evaluate("all => all.forEach(one => history.pushState({}, '', one))", list(addresses))
            return page.evaluate("navigation.currentEntry.index") - before  # type: ignore[no-any-return]

        assert puts("/?job=1") == 0
        page.get_by_role("button").click()
        assert puts("/?job=1&plan=2", "/?job=1&plan=2&follow=1", "/schedule?job=1&plan=2&follow=1") == 1
        page.keyboard.press("Space")
        assert puts("/schedule?job=1&plan=2") == 1
        page.keyboard.press("Space")
        page.go_back()
        assert puts("/schedule?job=1&plan=3") == 0
        page.get_by_role("button").click()
        page.clock.fast_forward(10_100)
        assert puts("/schedule?job=1&plan=4") == 0, "what comes long after comes of something else"
        page.go_back()
        assert page.url == "http://console.test/?job=1"
        for act in (page.mouse.down, page.mouse.up, lambda: page.keyboard.down("Tab")):
            act()
            page.clock.fast_forward(9_900)
            assert puts(f"/schedule?job=1&plan={uuid4()}") == 1
        page.dispatch_event("button", "keydown")
        assert puts("/schedule?job=1&plan=5") == 0, "which a script pressed, as colours.js does"

        def runs(state: str) -> None:
            page.evaluate("async state => document.body.setAttribute('data-test-script-state', state)", state)

        page.get_by_role("button").click()
        page.clock.fast_forward(9_000)
        runs("running")
        page.clock.fast_forward(60_000)
        assert puts("/schedule?job=1&plan=6") == 1, "a slow machine takes its time"
        runs("notRunning")
        page.get_by_role("button").click()
        page.clock.fast_forward(11_000)
        runs("running")
        assert puts("/schedule?job=1&plan=7") == 0, "a page that runs by itself, later"
    finally:
        page.close()
