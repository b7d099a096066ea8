"""A catalog filled in a real browser: progress, Cancel, going on, and from a point of the chart to its plan."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
WAIT_MS = 60_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install the package chromium to run browser tests"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A console without a job."""
    folder = tmp_path_factory.mktemp("catalog")
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--database-url", f"sqlite:///{folder / 'c.db'}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "OPENRECYCLE_TOKEN")}
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert found, (folder / "errors").read_text()
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The console's first page; at the end nothing may have been complained about."""
    page = browser.new_page(viewport={"width": 1440, "height": 1100})
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert complaints == []


def test_filled_cancelled_gone_on_with_and_opened(page: Page) -> None:
    page.get_by_role("link", name="Catalog").click()
    expect(page.get_by_text("Nothing is planned ahead for this question yet: 21 plans")).to_be_visible()
    failures = page.get_by_role("spinbutton", name="Failures at once")
    failures.fill("3")
    failures.press("Enter")
    expect(page.get_by_text("yet: 65 plans are to be made")).to_be_visible()
    page.get_by_role("combobox", name="Solver").click()
    page.get_by_role("option", name="CP-SAT (optimal)").click()
    seconds = page.get_by_role("spinbutton", name="Seconds per plan")
    seconds.fill("30")
    seconds.press("Enter")
    page.wait_for_url("**cat_seconds=30**")
    page.get_by_role("button", name="Fill", exact=True).click()
    expect(page.get_by_text(re.compile(r"[1-9]\d* of 65 plans are there, after"))).to_be_visible()
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_text("What was made is kept; Fill goes on from there.")).to_be_visible()

    page.get_by_role("combobox", name="Solver").click()
    page.get_by_role("option", name="List scheduler (fast)").click()
    expect(page.get_by_role("spinbutton", name="Seconds per plan")).to_have_count(0)
    page.get_by_role("button", name="Fill", exact=True).click()
    expect(page.get_by_text(re.compile(r"\d+ plans? made in "))).to_be_visible()
    expect(page.get_by_text("all there")).to_be_visible()

    chart = page.get_by_label(re.compile("^Period by number of failures"))
    expect(chart.or_(page.locator(".js-plotly-plot")).first).to_be_visible()
    points = page.locator(".js-plotly-plot .scatterlayer .points path")
    expect(points).to_have_count(4)
    points.nth(1).hover(force=True)
    expect(page.locator(".hoverlayer")).to_contain_text("click: open on Schedule")
    points.nth(1).click(force=True)
    page.wait_for_url(re.compile("/schedule"))
    assert re.search("plan=catalog(:|%3A)[0-9a-f]{32}(:|%3A)000001-", page.url), page.url
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(page.get_by_text("failed – its micro-batches run on").first).to_be_visible()


def test_help_draws_five_pictures_and_says_how_to_connect(page: Page, address: str) -> None:
    page.get_by_role("link", name="Help").click()
    pictures = page.locator(".or-idea img")
    expect(pictures).to_have_count(5)
    for i in range(5):
        assert pictures.nth(i).evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
        assert (pictures.nth(i).get_attribute("alt") or "").startswith("Schedule of ")
    page.get_by_text("Your own job", exact=True).click()
    expect(page.get_by_text(f'console="{address}"').first).to_be_visible()
    expect(page.get_by_text("OPENRECYCLE_TOKEN")).to_have_count(0)
