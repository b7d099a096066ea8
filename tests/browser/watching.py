"""What every test in a real browser needs: a page that is watched, one that has come to rest, and one that fits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, TimeoutError, expect

from tests.conftest import at_length

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
# Loaded machines are slow.
WAIT_MS = 60_000
FADE_MS = 30_000
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


# By what WCAG 2.2 asks of text at level AA. What is disabled, not seen at all, or drawn as a picture is not of it. The
# value of a slider stands above the knob that it is in. Icons are letters of a font.
_TOO_FAINT = """() => {
    const pixel = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const read = colour => {
        pixel.clearRect(0, 0, 1, 1);
        pixel.fillStyle = colour;
        pixel.fillRect(0, 0, 1, 1);
        return [...pixel.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, below, share) => below.map((value, i) => top[i] * share + value * (1 - share));
    const light = colour => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
        const value = colour[i] / 255;
        return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    }, 0);
    const faint = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const words = walker.currentNode.textContent.trim(), place = walker.currentNode.parentElement;
        const look = getComputedStyle(place), box = place.getBoundingClientRect();
        if (!words || !box.width || !box.height || look.visibility !== "visible") continue;
        if (place.closest("svg, style, script, [disabled], [aria-disabled=true], [data-testid=stSliderThumbValue]"))
            continue;
        let share = 1;
        const layers = [];
        for (let each = place; each; each = each.parentElement) {
            share *= getComputedStyle(each).opacity;
            layers.unshift(read(getComputedStyle(each).backgroundColor));
        }
        const ground = layers.reduce((below, layer) => over(layer, below, layer[3] / 255), [255, 255, 255]);
        const colour = read(look.color);
        if (!(share * colour[3])) continue;
        const both = [light(over(colour, ground, share * colour[3] / 255)), light(ground)].sort((a, b) => b - a);
        const size = parseFloat(look.fontSize), icon = place.matches("[data-testid=stIconMaterial]");
        const large = icon || size >= 24 || (size >= 18.66 && look.fontWeight >= 700);
        const contrast = (both[0] + 0.05) / (both[1] + 0.05);
        if (contrast < (large ? 3 : 4.5)) faint.push(`${words.slice(0, 40)}: ${contrast.toFixed(2)}`);
    }
    return faint;
}"""


def assert_it_can_be_read(page: Page) -> None:
    """No words on it are too faint, once nothing fades any more."""
    with suppress(TimeoutError):
        page.wait_for_function(f"() => !({_TOO_FAINT})().length", timeout=FADE_MS)
    faint = page.evaluate(_TOO_FAINT)
    assert not faint, f"{page.url}: too faint: {faint}"


def assert_it_fits(page: Page, *texts: str) -> None:
    """Nothing scrolls sideways, no text in the elements `texts` (CSS) is cut, all of it can be read, and every chart is
    described."""
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
    assert cut == [], f"{where}: text is cut: {cut}"
    charts = page.locator("[data-testid='stPlotlyChart'], [data-testid='stVegaLiteChart']")
    for i in range(charts.count()):
        described = charts.nth(i).evaluate("e => !!e.closest('[aria-label]') || !!e.querySelector('[aria-label]')")
        assert described, f"{where}: chart {i} has no description"
    assert_it_can_be_read(page)
