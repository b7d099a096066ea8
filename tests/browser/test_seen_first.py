"""A schedule is seen before the browser has Plotly, and Plotly's chart takes the place of its picture unnoticed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Route, expect

from tests.app.console_server import ForkedConsole
from tests.app.ui_console import ConsoleHere, JobHere
from tests.browser.watching import NEEDS_CHROMIUM, watched
from tests.conftest import at_length

pytestmark = NEEDS_CHROMIUM

CHART = ".js-plotly-plot:not([style*='visibility']) .barlayer .point"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a console with a job that has lost a worker."""
    folder: Path = tmp_path_factory.mktemp("console")
    here = ConsoleHere(folder)
    job = JobHere(here.console, "job").register().commit(0, 3, 1).beat(4, 1).die("W1_2").heal("W1_2", 2)
    job.commit(4, 6, 2).beat(7, 2).finish()
    here.close()
    server = ForkedConsole(f"sqlite:///{folder}/console.db")
    yield f"{server.root}{{}}?job={job.job_id}"
    server.close()


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("path", "width", "scheme"),
    [
        ("/schedule", 1440, "light"),
        *itertools.starmap(
            at_length,
            [
                ("/compare", 390, "dark"),
                ("/schedule", 1440, "dark"),
                ("/schedule", 390, "light"),
                ("/schedule", 390, "dark"),
                ("/compare", 1440, "light"),
                ("/compare", 1440, "dark"),
                ("/compare", 390, "light"),
            ],
        ),
    ],
)
def test_the_picture_stands_where_the_chart_will(
    browser: Browser, address: str, path: str, scheme: str, width: int
) -> None:
    held: list[Route] = []
    with watched(browser, address.split("{")[0], width=width, height=1600, scheme=scheme) as page:
        page.route("**/PlotlyChart.*.js", lambda route: held.append(route))
        page.goto(address.format(path), wait_until="commit")
        picture = page.locator(".or-first")
        expect(picture).to_be_visible()
        expect(page.locator(".or-card").first).to_be_visible()
        expect(page.locator(".stApp")).to_have_attribute("data-test-script-state", "notRunning")
        assert held and not page.locator(".js-plotly-plot").count()
        frame = page.locator("[class*='st-key-wide-chart']")
        before = seen(frame, "img.or-first-middle")
        while held:
            held.pop().continue_()
        page.locator(CHART).first.wait_for(state="attached")
        expect(picture).to_be_hidden()
        after = seen(frame, ".js-plotly-plot")
    assert before.shape == after.shape, "nothing is moved"
    # Hatches, lines of the grid and other letters: fewer than one in eight.
    assert np.mean(np.abs(before - after).max(axis=2) > 64) < 0.12
    shifted = np.mean(np.abs(before[:, 12:] - after[:, :-12]).max(axis=2) > 64)
    assert shifted > 2 * np.mean(np.abs(before - after).max(axis=2) > 64), "it would be seen if it were elsewhere"


def seen(frame: Locator, first: str) -> np.ndarray:
    """The chart's area, (rows, columns, 3)."""
    frame.locator(first).first.wait_for()
    return np.asarray(Image.open(io.BytesIO(frame.screenshot())).convert("RGB")).astype(int)
