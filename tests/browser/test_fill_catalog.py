"""A catalog filled in a real browser: progress, Cancel, going on, and from a point of the chart to its plan."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.console_server import Agents, ConsoleServer, ForkedConsole
from tests.browser.watching import NEEDS_CHROMIUM, settle, watched

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A console with a job, for which it has made the plans ahead."""
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('catalog') / 'console.db'}")
    job = Agents(server)
    end = time.monotonic() + 60
    while server.get(job.path("/catalog")).json()["covered"] != 2:
        assert time.monotonic() < end, "it is planned ahead"
        time.sleep(0.1)
    yield server
    server.close()


@pytest.fixture
def page(tab: Page, server: ConsoleServer) -> Iterator[Page]:
    """The console's first page."""
    with watched(tab, server.root, height=1100) as page:
        page.goto(server.root)
        yield page


@pytest.mark.chaos
def test_filled_cancelled_gone_on_with_and_opened(page: Page) -> None:
    page.get_by_role("link", name="Catalog").click()
    expect(page.get_by_text("all there")).to_be_visible()
    failures = page.get_by_role("spinbutton", name="Failures at once")
    failures.fill("3")
    failures.press("Enter")
    expect(page.get_by_text("44 missing")).to_be_visible()
    page.get_by_role("combobox", name="Solver").click()
    page.get_by_role("option", name="CP-SAT (may prove it optimal)").click()
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
    settle(page)
    points.nth(1).hover(force=True)
    expect(page.locator(".hoverlayer")).to_contain_text("click: open on Schedule")
    points.nth(1).click(force=True)
    page.wait_for_url(re.compile("/schedule"))
    assert re.search("plan=catalog(:|%3A)[0-9a-f]{32}(:|%3A)000001-", page.url), page.url
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(page.get_by_text("out – its micro-batches run on").first).to_be_visible()


@pytest.mark.chaos
def test_a_link_shows_what_its_sender_saw(browser: Browser, server: ConsoleServer, page: Page) -> None:
    """After a reload, and in somebody else's browser."""
    page.get_by_role("link", name="Catalog").click()
    field = page.get_by_role("spinbutton", name="Failures at once")
    field.fill("1")
    field.press("Enter")
    page.wait_for_url("**cat_tolerance-*=1**")

    def shows_the_same(shown: Page) -> None:
        expect(shown.get_by_role("spinbutton", name="Failures at once")).to_have_value("1")
        expect(shown.get_by_text("of 5, up to 1 failure")).to_be_visible()

    shows_the_same(page)
    link = page.url
    page.reload()
    shows_the_same(page)
    assert page.url == link
    with watched(browser, server.root) as other:
        other.goto(link)
        shows_the_same(other)
