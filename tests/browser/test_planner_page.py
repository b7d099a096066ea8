"""The Planner in a real browser: kill by a click, plan, keep, and the link that shows the same to somebody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.console_server import ConsoleServer, ForkedConsole
from tests.browser.watching import NEEDS_CHROMIUM, SCREENS, assert_it_fits, settle, watched

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A console without a job."""
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('planner') / 'console.db'}")
    yield server
    server.close()


@pytest.fixture
def page(tab: Page, server: ConsoleServer) -> Iterator[Page]:
    with watched(tab, server.root, height=1200) as page:
        yield page


def dead(page: Page, worker: str) -> Any:
    return page.locator(f".st-key-cell-failed-{worker}")


def period(page: Page) -> Any:
    card = page.locator(".or-card", has=page.locator(".or-label", has_text=re.compile(r"^Period$")))
    return card.locator(".or-value")


def plan(page: Page) -> None:
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(period(page)).to_be_visible()


def test_what_if_to_a_link_that_shows_the_same(page: Page, server: ConsoleServer) -> None:
    page.goto(f"{server.root}/planner")

    # Two are killed by clicks, and one is brought back by the keyboard.
    page.get_by_role("button", name="W1_2").click()
    expect(dead(page, "W1_2")).to_be_visible()
    page.get_by_role("button", name="W0_0").click()
    expect(dead(page, "W0_0")).to_be_visible()
    page.get_by_role("button", name="W0_0").focus()
    page.keyboard.press("Enter")
    expect(dead(page, "W0_0")).to_be_hidden()
    expect(page).to_have_url(re.compile(r"\?fail=W1_2$"))
    expect(page.get_by_text("No plan can be shorter than 29 slots")).to_be_visible()

    # Planned: its figures, who takes the work, its chart.
    plan(page)
    expect(period(page)).to_have_text("29 slots")
    for peer in ("W0_2", "W2_2"):
        expect(page.locator(f".st-key-cell-re-routed-{peer}")).to_contain_text("+3 re-routed")
    expect(page.locator(".js-plotly-plot .annotation-text").filter(has_text="failed")).to_contain_text("W0_2 and W2_2")

    # Kept, and shown to somebody else by the link alone.
    page.locator(".st-key-planner-save button").first.click()
    name = page.get_by_role("textbox", name="Name", exact=True)
    name.fill("without-W1_2")
    name.press("Enter")
    page.get_by_test_id("stPopoverBody").get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved as “without-W1_2”")).to_be_visible()
    expect(page).to_have_url(re.compile("saved="))
    link = page.url
    page.goto("about:blank")  # with which this session ends
    # Whose screen is a telephone's: all of it fits that, too.
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.goto(link)
    expect(period(page)).to_have_text("29 slots")
    expect(dead(page, "W1_2")).to_be_visible()
    assert [row["name"] for row in server.get("/plans").json()["plans"]] == ["without-W1_2"]
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    settle(page)
    assert_it_fits(page, ".or-card *", ".or-step *", ".st-key-worker-grid-planner button")


@pytest.mark.chaos
def test_more_memory_gives_another_answer_beside_the_one_before(page: Page, server: ConsoleServer) -> None:
    page.goto(f"{server.root}/planner?fail=W1_2")
    button = page.get_by_role("button", name="Plan", exact=True)
    button.wait_for()
    if button.is_enabled():  # else another test has asked this console
        button.click()
    expect(period(page)).to_have_text("29 slots")
    page.get_by_role("combobox", name="Memory limit").click()
    page.get_by_role("option", name="no limit").click()
    expect(page.get_by_text("No plan can be shorter than 27 slots")).to_be_visible()
    plan(page)
    expect(period(page)).to_have_text("27 slots")
    expect(page.get_by_role("columnheader", name=re.compile("Before: 3 × 4 × 6"))).to_be_visible()


@pytest.mark.chaos
def test_a_profile_is_saved_and_a_link_brings_it(browser: Browser, page: Page, server: ConsoleServer) -> None:
    page.goto(f"{server.root}/planner?profile=uneven")
    page.get_by_role("button", name="Save profile").click()
    # The name is typed and the button pressed at once: both come in one run.
    page.get_by_role("textbox", name="Name of the profile").fill("stairs")
    page.get_by_test_id("stPopoverBody").get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved as stairs. The link to this page names it.")).to_be_attached()
    expect(page).to_have_url(re.compile(r"profile=saved%3Astairs%40[0-9a-f]{12}$|profile=saved:stairs@[0-9a-f]{12}$"))
    with watched(browser, server.root) as other:
        other.goto(page.url)
        expect(other.get_by_role("button", name="Saved profile")).to_be_visible()
        expect(other.get_by_role("combobox", name="Profile")).to_have_value("Saved: stairs")
    assert server.get("/profiles/stairs").json()["stages"] == 4


@pytest.mark.chaos
def test_the_papers_example_is_one_click(page: Page, server: ConsoleServer) -> None:
    page.goto(server.root)
    page.get_by_role("link", name="Planner").click()
    page.get_by_role("button", name="Worked example of the paper").click()
    steps = page.locator(".or-step .or-value")
    expect(steps).to_have_text(["27 slots", "36 slots", "29 slots", "27 slots"])
    expect(page.locator(".or-step .or-good")).to_have_count(4)
    page.get_by_role("radio", name="Adaptive pipelining").click()
    expect(period(page)).to_have_text("36 slots")


@pytest.mark.chaos
def test_a_click_on_the_map_of_a_large_grid_kills_and_revives(page: Page, server: ConsoleServer) -> None:
    page.goto(f"{server.root}/planner?grid=20x8x4")
    cells = page.locator(".stVegaLiteChart .marks").first
    cells.wait_for()
    box = cells.bounding_box()
    assert box is not None

    def click(x: float, y: float) -> None:
        settle(page)
        page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])

    click(0.3, 0.3)
    expect(page).to_have_url(re.compile(r"fail=W\d+_\d$"))
    expect(page.get_by_label("Dead workers").first).to_have_value(re.compile(r"^W\d+_\d$"))
    click(0.7, 0.6)
    expect(page).to_have_url(re.compile(r"fail=W\d+_\d\.W\d+_\d$"))
    click(0.3, 0.3)
    expect(page).to_have_url(re.compile(r"fail=W\d+_\d$"))

    # Back from another page the map has no selection, and the dead are still dead.
    page.get_by_role("link", name="Help").click()
    expect(page.locator(".or-title")).to_contain_text("Help")
    page.get_by_role("link", name="Planner").click()
    expect(page.get_by_label("Dead workers").first).to_have_value(re.compile(r"^W\d+_\d$"))
    cells.wait_for()
    click(0.5, 0.45)
    expect(page).to_have_url(re.compile(r"fail=W\d+_\d\.W\d+_\d$"))


@pytest.mark.chaos
@pytest.mark.parametrize(("scheme", "width", "height"), SCREENS)
def test_nothing_is_cut_or_pushed_out(tab: Page, server: ConsoleServer, scheme: str, width: int, height: int) -> None:
    with watched(tab, server.root, width=width, height=height, scheme=scheme) as page:
        page.goto(f"{server.root}/planner?fail=W0_2.W1_2&memory=none")
        button = page.get_by_role("button", name="Plan", exact=True)
        button.wait_for()
        if button.is_enabled():
            button.click()
        expect(period(page)).to_be_visible()
        expect(page.get_by_text("1 migration shortens the period")).to_be_visible()
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert_it_fits(page, ".or-card *", ".or-step *", ".st-key-worker-grid-planner button")


@pytest.mark.chaos
def test_help_draws_five_pictures_and_says_how_to_connect(page: Page, server: ConsoleServer) -> None:
    page.goto(f"{server.root}/help")
    pictures = page.locator(".or-idea img")
    expect(pictures).to_have_count(5)
    for i in range(5):
        assert pictures.nth(i).evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
        assert (pictures.nth(i).get_attribute("alt") or "").startswith("Schedule of ")
    page.get_by_text("Your own job", exact=True).click()
    expect(page.get_by_text(f'console="{server.root}"').first).to_be_visible()
    expect(page.get_by_text("OPENRECYCLE_TOKEN")).to_have_count(0)
