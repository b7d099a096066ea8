"""Plans in a real browser: files that open, links that show what their sender saw, a box on a large plan."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from openrecycle.app.plans.sources import techniques
from openrecycle.app.runtime.errors import PLAN_MIB
from openrecycle.planner.plans.plan import Plan
from tests.app.console_server import Agents, ForkedConsole
from tests.app.ui_console import ConsoleHere, JobHere
from tests.browser.layout_shifts import Shifts
from tests.browser.watching import NEEDS_CHROMIUM, SCREENS, assert_it_can_be_read, assert_it_fits, settle, watched
from tests.conftest import at_length
from tests.golden import golden

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.timeout(420)]


class Site:
    """A console with jobs that have ended: a small one with a failed worker, and one of more stages."""

    def __init__(self, folder: Path) -> None:
        here = ConsoleHere(folder)
        try:
            small = JobHere(here.console, "small job").register()
            small.commit(0, 3, 1, falls=3e-6, begins=2.30259).die("W1_2").heal("W1_2", 2)
            plan = here.console.queries.view(small.job_id).plan
            assert plan is not None
            self.plan = plan
            long_name = "wide_job_gpt175b_warmup2000_seed17_batch1536_run12"  # no place to break a line at
            wide = JobHere(
                here.console, long_name, pipelines=4, stages=6, micro_batches=8, samples_per_micro_batch=9000
            )
            wide.register().commit(0, 3, 1, falls=0.0, begins=2.302585092994046)
            self.small, self.wide = (job.finish().job_id for job in (small, wide))
        finally:
            here.close()
        self.server = ForkedConsole(f"sqlite:///{folder / 'console.db'}")
        self.root = self.server.root

    @cached_property
    def large(self) -> str:
        """A large job, for those who ask: its plan takes longer than the rest."""
        job = Agents(self.server, pipelines=8, stages=8, micro_batches=48)
        job.register_all()
        assert self.server.post(job.path("/finish"), {"state": "finished"}).ok
        return job.job_id


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.server.close()


@pytest.fixture
def page(tab: Page, site: Site) -> Iterator[Page]:
    with watched(tab, site.root, height=1000) as page:
        yield page


def downloaded(page: Page, button: str) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button).click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def bars(page: Page) -> Locator:
    return page.locator(".js-plotly-plot .bars text")


COUNTS = """e => { const n = {}; for (const x of e.querySelectorAll(".main-svg *")) {
  const k = x.tagName + "." + (x.getAttribute("class") ?? ""); n[k] = (n[k] ?? 0) + 1 }
  return Object.entries(n).sort((a, b) => b[1] - a[1]).slice(0, 8) }"""


def parameter(page: Page, name: str) -> str | None:
    found = re.search(rf"[?&]{name}=([^&]*)", page.url)
    return found[1] if found else None


def drag(page: Page, plot: Locator, left: float, right: float, down: float = 20) -> None:
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + left * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + right * box["width"], box["y"] + 80 + down, steps=4)
    page.mouse.up()


@pytest.mark.chaos
def test_files_are_downloaded_and_open(site: Site, page: Page) -> None:
    page.goto(f"{site.root}/schedule?job={site.small}")
    bars(page).first.wait_for()
    page.get_by_role("button", name="Export").click()
    expect(page.get_by_role("button", name="PyTorch pipelining CSV")).to_be_disabled()
    expect(page.get_by_text("each stage on one rank")).to_be_visible()

    name, content = downloaded(page, "Chrome trace")
    events = json.loads(content)["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == sum(map(len, site.plan.workers.values()))
    assert name.startswith(f"small-job-last-in-force-{site.small[:8]}-3x4x6-without-W1_2-staggered-")
    assert name.endswith(".trace.json")
    name, content = downloaded(page, "JSON plan document")
    assert Plan.from_json(content) == site.plan
    name, content = downloaded(page, "PNG picture")
    assert name.endswith(".png") and content.startswith(b"\x89PNG")
    name, content = downloaded(page, "Job bundle")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert Plan.from_json(archive.read("plan.json")) == site.plan
        assert any(name.startswith("catalog/") and name.endswith(".plan") for name in archive.namelist())
        assert "openrecycle train" in archive.read("README.md").decode()


def made_by_the_command_line(path: Path, *, pipelines: int, stages: int, micro_batches: int) -> Path:
    grid = ["--pipelines", str(pipelines), "--stages", str(stages), "--micro-batches", str(micro_batches)]
    command = [sys.executable, "-m", "planner", "plan", *grid, "--fail", "W1_2", "--solver", "list", "--out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("name", "grid", "least"),
    [
        at_length("schedule", {"pipelines": 64, "stages": 32, "micro_batches": 64}, 28_000_000),
        ("compare", {"pipelines": 32, "stages": 32, "micro_batches": 40}, 9_000_000),
        at_length("planner", {"pipelines": 32, "stages": 32, "micro_batches": 40}, 9_000_000),
    ],
)
def test_a_large_plan_of_the_command_line_opens(
    site: Site, page: Page, tmp_path: Path, name: str, grid: dict[str, int], least: int
) -> None:
    file = made_by_the_command_line(tmp_path / "large-plan.json", **grid)
    assert file.stat().st_size > least
    page.goto(f"{site.root}/{name}?job={site.small}")
    page.locator(f".st-key-{'planner-upload-box' if name == 'planner' else 'plan-upload'} button").first.click()
    page.locator("[data-testid='stFileUploader'] input[type=file]").first.set_input_files(file)
    page.wait_for_url("**saved**")
    workers = grid["pipelines"] * grid["stages"]
    if name == "schedule":
        expect(page.get_by_alt_text(f"Overview of {workers:,} workers")).to_be_visible()
        expect(page.get_by_text("Grey rows: 1 place without a worker.")).to_be_visible()
    elif name == "compare":
        expect(page.get_by_text("large-plan").first).to_be_visible()
    else:
        expect(page.get_by_alt_text(f"Overview of {workers:,} workers")).to_be_visible()
    expect(page.locator("[data-testid='stAlert']")).to_have_count(0)


def test_a_file_above_the_limit_is_refused_in_words_and_not_cut_off(site: Site) -> None:
    """By somebody who sends on while the answer comes, as most clients do."""
    host, port = site.root.removeprefix("http://").split(":")
    size = (PLAN_MIB + 1) << 20
    with socket.create_connection((host, int(port)), 60) as connection:
        head = f"POST /api/v1/plans HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {size}\r\nConnection: close\r\n\r\n".encode())
        for _ in range(size >> 20):
            connection.sendall(b" " * (1 << 20))
        said = b""
        while part := connection.recv(65536):
            said += part
    status, _, body = said.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 413 "), said[:300]
    problem = json.loads(body)
    assert problem["code"] == "too_large" and f"{PLAN_MIB << 20:,} bytes" in problem["detail"]


@pytest.mark.chaos
def test_a_click_shows_a_path_and_a_link_shows_it_again(site: Site, page: Page, browser: Browser) -> None:
    page.goto(f"{site.root}/schedule?job={site.small}")
    bars(page).first.wait_for()
    # For a moment there are two, as the one before is replaced.
    picker = page.locator(".st-key-path input").last
    rerouted = bars(page).filter(has_text="1·2").first
    settle(page)
    rerouted.click(force=True)
    expect(picker).to_have_value("2 of pipeline 1")
    page.wait_for_url("**path=1.2**")
    page.get_by_role("button", name="Critical path").click()
    page.wait_for_url("**draw=**")

    page.reload()
    bars(page).first.wait_for()
    expect(picker).to_have_value("2 of pipeline 1")
    other = browser.new_context().new_page()
    other.goto(page.url)
    expect(other.locator(".st-key-path input")).to_have_value("2 of pipeline 1")
    expect(other.get_by_text("Critical path:")).to_be_visible()
    other.context.close()

    settle(page)
    bars(page).filter(has_text="1·2").first.click(force=True)
    expect(picker).to_have_value("")
    assert parameter(page, "path") is None


@pytest.mark.chaos
def test_a_dragged_time_is_in_the_link_and_a_wrong_link_is_said_to_be(site: Site, page: Page) -> None:
    page.goto(f"{site.root}/schedule?job={site.small}&show=xyz&time=9-1")
    plot = page.locator(".js-plotly-plot[data-zoom]")
    plot.wait_for()
    said = page.locator(".or-field-error")
    schedule = site.plan.schedule()
    end = schedule.problem.job.units(schedule.end)
    assert said.all_inner_texts() == [
        golden("show-got-xyz-expected-one"),
        golden("time-got-9-1-expected-two", f"{end:g}", f"{end / 2:g}"),
    ]
    assert parameter(page, "show") is None and parameter(page, "time") is None
    settle(page)
    drag(page, plot, 0.3, 0.5)
    page.wait_for_url("**time=**")
    expect(said).to_have_count(1)
    low, high = shown(page)
    assert parameter(page, "time") == f"{low:g}-{high:g}" and 0 < low < high < end
    page.reload()
    plot.wait_for()
    assert shown(page) == [low, high] and not said.count()
    settle(page)
    place = plot.bounding_box()
    assert place is not None
    page.mouse.dblclick(place["x"] + 0.4 * place["width"], place["y"] + 80)
    page.wait_for_url(lambda url: "time=" not in url)
    page.wait_for_function(f"document.querySelector('.js-plotly-plot').layout.xaxis.range[1] >= {end}")


def shown(page: Page) -> list[float]:
    """From and to of the chart's time axis."""
    return page.evaluate(  # type: ignore[no-any-return]
        "document.querySelector('.js-plotly-plot').layout.xaxis.range.map(edge => Math.round(edge * 10) / 10)"
    )


@pytest.mark.chaos
def test_a_jobs_techniques_stand_on_one_axis(site: Site, page: Page) -> None:
    link = "&".join(f"plans={made}" for made in techniques(site.small, ("W1_2",), "none"))
    page.goto(f"{site.root}/compare?{link}")
    titles = page.locator(".js-plotly-plot .annotation-text", has_text="period")
    expect(titles).to_have_count(4)
    periods = [words.rpartition(" · period ")[2] for words in titles.all_text_contents()]
    assert page.locator(".or-card .or-value").all_inner_texts() == [f"{each} period" for each in periods]
    expect(page.locator(".js-plotly-plot .annotation-text", has_text="W0_2 and W2_2")).to_have_count(3)


@pytest.mark.chaos
def test_a_box_on_a_large_plan_opens_its_ops(site: Site, page: Page) -> None:
    page.goto(f"{site.root}/schedule?job={site.large}")
    pad = page.locator(".or-pad[data-ready]")
    pad.wait_for()
    heading = page.locator(".or-heading", has_text="Detail")
    before = heading.inner_text()
    drag(page, pad, 0.4, 0.401, 0)
    expect(pad.locator(".or-drawn")).to_be_hidden()
    assert parameter(page, "box") is None, "a click is no box"
    drag(page, pad, 0.4, 0.5)
    page.wait_for_url("**box=**")
    expect(heading).not_to_have_text(before)
    chosen = heading.inner_text()
    assert golden("of-a-part") not in chosen
    place, marked = pad.bounding_box(), pad.locator(".or-part").bounding_box()
    assert place and marked
    assert marked["x"] == pytest.approx(place["x"] + 0.4 * place["width"], abs=2)
    assert marked["width"] == pytest.approx(0.1 * place["width"], abs=3)
    assert marked["y"] <= place["y"] + 80 and marked["y"] + marked["height"] >= place["y"] + 100
    page.reload()
    expect(heading).to_have_text(chosen)

    plot = page.locator(".js-plotly-plot[data-zoom]")
    plot.wait_for()
    low, high = shown(page)
    settle(page)
    drag(page, plot, 0.3, 0.6)
    page.wait_for_url("**time=**")
    part = shown(page)
    assert low < part[0] < part[1] < high
    expect(heading).to_have_text(chosen)
    page.reload()
    plot.wait_for()
    assert shown(page) == part
    settle(page)
    drag(page, pad, 0.6, 0.7)
    page.wait_for_url(lambda url: "time=" not in url)
    page.wait_for_function(f"document.querySelector('.js-plotly-plot').layout.xaxis.range[0] > {high}")
    page.get_by_role("button", name="Forget the box").click()
    expect(heading).to_have_text(before)


@pytest.mark.chaos
def test_a_box_of_thousands_of_ops_does_not_fill_the_page_with_elements(site: Site, page: Page) -> None:
    page.goto(f"{site.root}/schedule?job={site.large}&box=0,999999,0,20")
    plot = page.locator(".js-plotly-plot[data-zoom]")
    plot.wait_for()
    expect(page.locator("[data-testid=stCaptionContainer]", has_text="so many have no numbers")).to_be_visible()
    said = page.locator(".or-heading", has_text="Detail").inner_text()
    found = re.search(r"([\d,]+) ops", said)
    assert found and int(found[1].replace(",", "")) > 2500
    count = plot.locator(".main-svg *").count()
    assert count < 2000, plot.evaluate(COUNTS)
    settle(page)
    plot.scroll_into_view_if_needed()
    place = plot.bounding_box()
    assert place is not None
    # The chart is higher than the window, so its first rows lie below the bar with the pages.
    page.mouse.move(place["x"] + 0.5 * place["width"], place["y"] + 130)
    expect(plot.locator(".hoverlayer .hovertext").first).to_contain_text("micro-batch")


@pytest.mark.chaos
def test_a_large_plan_is_seen_and_takes_a_box_before_the_code_of_charts_is_there(site: Site, browser: Browser) -> None:
    held: list[Route] = []
    scripts: list[str] = []
    with watched(browser, site.root, height=1000) as page:
        page.route("**/PlotlyChart.*.js", lambda route: held.append(route))
        page.on("request", lambda request: scripts.append(request.url.rpartition("/static/js/")[2]))
        page.goto(f"{site.root}/schedule?job={site.large}", wait_until="commit")
        picture, pad = page.locator(".or-overview img"), page.locator(".or-pad[data-ready]")
        picture.wait_for()
        first = picture.bounding_box()
        assert picture.get_attribute("alt") == golden("overview-of-64-workers-over")
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1600
        pad.wait_for()
        page.evaluate("document.fonts.ready")
        before = picture.bounding_box()
        assert pad.bounding_box() == before and first and before
        assert (first["x"], first["width"], first["height"]) == (before["x"], before["width"], before["height"])
        assert abs(first["y"] - before["y"]) < 20, "the rows above have had their places"
        drag(page, pad, 0.4, 0.5)
        page.wait_for_url("**box=**")
        assert held and not page.locator(".js-plotly-plot").count()
        moves = "box => box.getAnimations({subtree: true}).length"
        assert page.locator("[data-testid=stSkeleton]").first.evaluate(moves) == 0, "what waits stands still"
        for route in held:
            route.continue_()
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert picture.bounding_box() == before, "nothing on the page has moved it"
        page.locator("[data-testid=stDataFrame]").first.wait_for()
        ahead = page.locator("link[rel=modulepreload], script[type=module]")
        named = {link.rpartition("/")[2] for link in ahead.evaluate_all("all => all.map(one => one.href || one.src)")}
        assert {name for name in scripts if name.endswith(".js")} <= named, (
            "nothing that it draws with is asked for late"
        )


def says_that_it_scrolls(page: Page, frame: str) -> bool | None:
    """Of the first such frame, whose content must be wider than it if it does; None: there is none."""
    found = page.locator(frame).first
    if not found.count():
        return None
    words = "e => { const cue = getComputedStyle(e, '::before'); return cue.display === 'none' ? '' : cue.content }"
    wider, said = found.evaluate("e => e.scrollWidth > e.clientWidth"), "Scroll sideways" in found.evaluate(words)
    assert wider == said
    return said


@pytest.mark.chaos
@pytest.mark.parametrize(("scheme", "width", "height"), [at_length("light", 1440, 900), *SCREENS[1:]])
def test_nothing_is_cut_or_pushed_out(site: Site, browser: Browser, scheme: Any, width: int, height: int) -> None:
    with watched(browser, site.root, width=width, height=height, scheme=scheme) as page:
        shifts = Shifts(page)
        for path in (f"/schedule?job={site.small}", f"/compare?job={site.small}", "/simulate"):
            page.goto(site.root + path)
            page.locator(".js-plotly-plot .main-svg").first.wait_for()
            settle(page)
            shifts.assert_few("as it came")
            assert_it_fits(page, ".or-card *", ".or-heading", ".or-title")
            assert says_that_it_scrolls(page, "[class*=st-key-wide-chart]") in (None, width == 390)
        page.goto(f"{site.root}/help")
        page.locator(".or-idea img").first.wait_for()
        assert says_that_it_scrolls(page, ".or-idea > div") == (width == 390)
        page.goto(f"{site.root}/help?section=Your+own+job")
        page.locator(".stCode .token").first.wait_for()
        assert_it_can_be_read(page)
        page.goto(f"{site.root}/?job={site.wide}")
        page.locator(".stVegaLiteChart .marks").first.wait_for()
        settle(page)
        shifts.assert_few("as it came")
        assert_it_fits(page, ".or-card *", ".or-heading", ".or-title", ".st-key-worker-grid button")


def test_one_iteration_stands_at_one_place_in_charts_above_each_other(site: Site, page: Page) -> None:
    """However wide the numbers beside them are, or would be: losses that are all the same have every digit."""
    page.goto(f"{site.root}/?job={site.wide}")
    axes = page.locator(".stVegaLiteChart svg")
    expect(axes).to_have_count(2)
    expect(axes.first.get_by_text("200,000")).to_be_visible()
    expect(axes.last.get_by_text("2.302585", exact=True)).to_be_visible()
    box = (
        "charts => charts.map(e => e.querySelector('.background').getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    first, second = axes.evaluate_all(box)
    assert first == second
    page.goto(f"{site.root}/?job={site.small}")
    for losses in ("2.302584", "2.302586", "2.302588"):
        expect(axes.last.get_by_text(losses)).to_be_visible()
    first, second = axes.evaluate_all(box)
    assert first == second, "losses that differ by little"


@pytest.mark.chaos
def test_clicks_that_come_at_once_all_count(site: Site, page: Page) -> None:
    """Each is sent with an address in which those before it are not yet."""
    page.goto(f"{site.root}/schedule?job={site.small}")
    bars(page).first.wait_for()
    settle(page)
    page.get_by_role("button", name="Critical path").click()
    page.get_by_text("One pipeline", exact=True).click()
    page.get_by_role("button", name="Memory").click()
    page.get_by_role("tab", name="Ops").click()
    page.wait_for_url("**figures=Ops**")
    expect(page.get_by_text("Critical path:")).to_be_visible()
    settle(page)
    assert parse_qs(urlsplit(page.url).query)["draw"] == ["next", "critical"]
    assert (parameter(page, "show"), parameter(page, "figures")) == ("pipeline", "Ops")
    expect(page.get_by_role("tab", name="Ops")).to_have_attribute("aria-selected", "true")
