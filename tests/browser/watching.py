"""What every test in a real browser needs: a page that is watched, one that has come to rest, and one that fits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, expect

from tests.conftest import at_length

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
# Loaded machines are slow.
WAIT_MS = 60_000
# Both widths, both colour schemes.
SCREENS = [("light", 1440, 900), ("dark", 390, 844), at_length("dark", 1440, 900), at_length("light", 390, 844)]

NEEDS_CHROMIUM = [
    pytest.mark.browser,
    # In one test process, which has one Chromium.
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install the package chromium to run browser tests"),
]


@contextmanager
def watched(
    where: Browser | Page, root: str, *, width: int = 1440, height: int = 900, scheme: Any = "light"
) -> Iterator[Page]:
    """An empty page. At the end its console may have had no error, and nothing but `root` been asked.

    where: a browser, in which it is a new reader's first page; or a page that is used again: that has the code of
    the console's pages compiled already (a schedule takes 1.7 CPU seconds there, in a new one 4). How parts are moved
    as a page comes is seen in a new one.
    """
    complaints: list[str] = []
    page = where.new_page() if isinstance(where, Browser) else where
    page.set_default_timeout(WAIT_MS)
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    ours = (root, root.replace("http", "ws", 1), "data:", "blob:", "about:blank")

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(f"console: {message.text}")

    def failed(error: Error) -> None:
        complaints.append(f"page error: {error}")

    def asked(request: Request) -> None:
        if not request.url.startswith(ours):
            complaints.append(f"outside: {request.url}")

    page.on("console", said)
    page.on("pageerror", failed)
    page.on("request", asked)
    yield page
    if page is where:
        page.goto("about:blank")
        page.remove_listener("console", said)
        page.remove_listener("pageerror", failed)
        page.remove_listener("request", asked)
    else:
        page.close()
    assert not complaints, "\n".join(complaints)


# Plotly draws a chart first; who listens to its clicks is attached afterwards.
_LISTENED_TO = """() => [...document.querySelectorAll(".js-plotly-plot")]
    .every(chart => chart._ev?.listenerCount("plotly_selected"))"""


def settle(page: Page) -> None:
    """Waits until no script runs, and charts take clicks. A chart is replaced when a script ends, and a click on the
    one before is lost, as is one that comes before anybody listens."""
    expect(page.locator(".stApp")).to_have_attribute("data-test-script-state", "notRunning")
    page.wait_for_function(_LISTENED_TO)


def assert_it_fits(page: Page, *texts: str) -> None:
    """Nothing scrolls sideways, no text in the elements `texts` (CSS) is cut, and every chart is described."""
    where = f"{page.url} at {(page.viewport_size or {}).get('width')}"
    sizes = page.evaluate(
        """() => [document.documentElement, document.querySelector('.stMain')]
            .map(e => e.scrollWidth - e.clientWidth)"""
    )
    assert max(sizes) <= 0, f"{where}: it scrolls sideways"
    cut = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)]
            .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline'
                && e.clientWidth > 0).map(e => e.textContent)""",
        ", ".join(texts),
    )
    assert cut == [], f"{where}: text is cut"
    charts = page.locator("[data-testid='stPlotlyChart'], [data-testid='stVegaLiteChart']")
    for i in range(charts.count()):
        described = charts.nth(i).evaluate("e => !!e.closest('[aria-label]') || !!e.querySelector('[aria-label]')")
        assert described, f"{where}: chart {i} has no description"
