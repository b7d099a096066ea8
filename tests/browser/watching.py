"""What every test in a real browser needs: a page that is watched, one that has come to rest, and one that fits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import at_length

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
# Loaded machines are slow.
WAIT_MS = 60_000
# Both widths, both colour schemes.
SCREENS = [("light", 1440, 900), ("dark", 390, 844), at_length("dark", 1440, 900), at_length("light", 390, 844)]

NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install the package chromium to run browser tests"),
]


@contextmanager
def watched(browser: Browser, root: str, **options: Any) -> Iterator[Page]:
    """An empty page of 1440 × 900. At the end its console may have had no error, and nothing but `root` been asked."""
    complaints: list[str] = []
    page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **options})
    page.set_default_timeout(WAIT_MS)
    ours = (root, root.replace("http", "ws", 1), "data:", "blob:")
    page.on("console", lambda m: complaints.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
    page.on("request", lambda r: None if r.url.startswith(ours) else complaints.append(f"outside: {r.url}"))
    yield page
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
