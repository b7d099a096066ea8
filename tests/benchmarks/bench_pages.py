"""The console's pages in Chromium: seconds until each shows its data, and until a click is answered.

Once with a job of 12 workers, once with a plan of 2,048 (32 pipelines of 64 stages, 64 micro-batches
each). Beside the seconds, the processor time of the console and of the page: unlike the seconds, they
hardly depend on what else the machine does. Simulate begins to simulate when it is opened first: its first
opening, and its interaction, have that in them, and the second opening has not (of processes of the console
that have ended meanwhile the processor time is not known).

python -m tests.benchmarks.bench_pages [--pipelines 32] [--stages 64] [--micro-batches 64]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, Page, expect, sync_playwright

from openrecycle.app.catalogs.contents import CatalogRequest
from openrecycle.app.console.service import ConsoleService
from openrecycle.planner.jobs.job import Job, Problem, Worker
from openrecycle.planner.solvers.portfolio import make_plan
from tests.app.console_server import ConsoleServer
from tests.app.ui_console import ConsoleHere, JobHere
from tests.benchmarks.machine import describe, processor_seconds

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 240_000
BOXES = ((0.3, 0.36), (0.6, 0.65), (0.2, 0.24))
# Drawn, and not out of sight any more.
PLOT = ".js-plotly-plot:not([style*='visibility']) .main-svg"
# Figures, before the curves of the same.
CARDS = ".or-cards .or-value"
# A schedule's picture, in the place of its chart until there is one.
SIGHT = ".or-first img, .js-plotly-plot .main-svg"
# The picture is drawn, and in the page's place for it.
PICTURE = """() => (image => image?.complete && image.naturalWidth > 0 && image.getBoundingClientRect().width > 0)(
    document.querySelector('.or-overview img'))"""
# When the first frame has been drawn that has it. Playwright is told of that once the page has a moment for it.
STAMP = """selector => { const look = () => {
    const shown = [...document.querySelectorAll(selector)].some(
        e => e.getClientRects().length && getComputedStyle(e).visibility === 'visible' && (e.complete ?? true));
    if (shown) window.shownAt = performance.timeOrigin + performance.now(); else requestAnimationFrame(look);
}; look() }"""
DETAIL = """said => [...document.querySelectorAll('.or-heading')].some(
    e => e.innerText.startsWith('Detail') && e.innerText !== said)"""


@dataclass(frozen=True)
class Shown:
    """What a page is opened for. data: a selector of what shows its data. act: does something, and waits for it.
    chart: of what takes the data's place and answers to the pointer, where that comes later."""

    name: str
    path: str
    data: str
    act: Callable[[Page], None]
    chart: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("pipelines", 32), ("stages", 64), ("micro-batches", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        here = ConsoleHere(Path(folder))
        try:
            job = JobHere(here.console, "job of 12").register().commit(0, 5, 1).beat(6, 1).die("W1_2").heal("W1_2", 2)
            job.commit(6, 9, 2).beat(10, 2).finish()
            fill_catalog(here.console, job.job_id)
            plan = make_plan(
                Problem(Job.uniform(sizes.pipelines, sizes.stages, sizes.micro_batches), frozenset({Worker(3, 5)})),
                solver="list",
            )
            fingerprint = here.console.plans.library.save(plan, "large")
        finally:
            here.close()
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
            server = ConsoleServer(f"sqlite:///{folder}/console.db")
            try:
                large(browser, server, f"{server.root}/schedule?plan=saved:{fingerprint}")
                small(browser, server, job.job_id)
            finally:
                server.close()
            browser.close()


def fill_catalog(console: ConsoleService, job_id: str) -> None:
    question = console.jobs.find(job_id).plans.question
    filling = console.catalogs.fill(CatalogRequest(question, 2))
    while filling.running:
        time.sleep(0.1)


def small(browser: Browser, server: ConsoleServer, job_id: str) -> None:
    print("12 workers")
    for page_of in pages(job_id):
        for opening in ("first", "second"):
            with opened(browser) as (page, tab):
                page.add_init_script(f"({STAMP})({json.dumps(page_of.data)})")
                started, began = start(server, tab), time.time()
                page.goto(server.root + page_of.path, wait_until="commit")
                page.wait_for_function("window.shownAt")
                seconds = page.evaluate("window.shownAt") / 1000 - began
                say(f"{page_of.name}: {opening} opening", started, server, tab, seconds)
                if page_of.chart:
                    page.locator(page_of.chart).first.wait_for()
                    say(f"{page_of.name}: {opening} opening, chart", started, server, tab)
                settled(page)
                with timed(f"{page_of.name}: interaction", server, tab):
                    page_of.act(page)


def large(browser: Browser, server: ConsoleServer, address: str) -> None:
    print("2,048 workers, or as asked for; the console has just been started")
    for opening in ("first", "second"):
        with opened(browser) as (page, tab):
            started = start(server, tab)
            page.goto(address, wait_until="commit")
            page.wait_for_function(PICTURE)
            say(f"Schedule: {opening} opening, overview", started, server, tab)
            page.locator(".or-pad[data-ready]").wait_for()
            say(f"Schedule: {opening} opening, takes a box", started, server, tab)
            page.locator(PLOT).first.wait_for()
            say(f"Schedule: {opening} opening, detail", started, server, tab)
            settled(page)
            pad = page.locator(".or-pad")
            heading = page.locator(".or-heading", has_text="Detail")
            for left, right in BOXES:
                pad.scroll_into_view_if_needed()
                place, said = pad.bounding_box(), heading.inner_text()
                assert place is not None
                page.mouse.move(place["x"] + left * place["width"], place["y"] + 80)
                page.mouse.down()
                page.mouse.move(place["x"] + right * place["width"], place["y"] + 95, steps=3)
                with timed("Schedule: box to its ops", server, tab):
                    page.mouse.up()
                    page.wait_for_function(DETAIL, arg=said)
                settled(page)


def pages(job_id: str) -> list[Shown]:
    job = f"?job={job_id}"
    return [
        Shown(
            "Live", f"/{job}", "[data-testid='stVegaLiteChart'] canvas, [data-testid='stVegaLiteChart'] svg", open_tile
        ),
        Shown("Schedule", f"/schedule{job}", SIGHT, pick("One pipeline", "W0_3"), PLOT),
        Shown("Planner", "/planner", ".st-key-worker-grid-planner button", press("Worked example of the paper")),
        Shown("Compare", f"/compare{job}", SIGHT, pick("One stage", "W0_0"), PLOT),
        Shown("Catalog", f"/catalog{job}", CARDS, change("Failures at once", "1"), PLOT),
        Shown("Simulate", "/simulate", CARDS, change("Repair (h)", "2"), PLOT),
        Shown("Help", "/help", ".or-idea img", lambda page: page.mouse.wheel(0, 600)),
    ]


def open_tile(page: Page) -> None:
    page.get_by_role("button", name="W0_0").first.click()
    page.get_by_role("dialog").wait_for()


def pick(choice: str, row: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        rows = page.locator(".js-plotly-plot").first.locator(".ytick")
        before = rows.count()
        page.get_by_text(choice, exact=True).first.click()
        # There is none for a moment, while one takes the place of another.
        page.wait_for_function(
            "n => (k => k > 0 && k < n)("
            "document.querySelector('.js-plotly-plot')?.querySelectorAll('.ytick').length ?? 0)",
            arg=before,
        )

    return act


def change(field: str, value: str) -> Callable[[Page], None]:
    """Types a number, and waits until the figures are those of it."""

    def act(page: Page) -> None:
        cards = page.locator(".or-cards").first
        before = cards.inner_text()
        entry = page.get_by_label(field, exact=True).first
        entry.fill(value)
        entry.press("Enter")
        expect(cards).not_to_have_text(before, timeout=WAIT_MS, use_inner_text=True)

    return act


def press(name: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.get_by_text(name).first.click()
        page.locator(".or-step").first.wait_for()

    return act


def settled(page: Page) -> None:
    expect(page.locator(".stApp")).to_have_attribute("data-test-script-state", "notRunning", timeout=WAIT_MS)
    page.wait_for_timeout(300)


@contextmanager
def opened(browser: Browser) -> Iterator[tuple[Page, CDPSession]]:
    """A page with an empty cache, as a new viewer has."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    tab = context.new_cdp_session(page)
    tab.send("Performance.enable", {"timeDomain": "threadTicks"})
    yield page, tab
    context.close()


@contextmanager
def timed(what: str, server: ConsoleServer, tab: CDPSession) -> Iterator[None]:
    started = start(server, tab)
    yield
    say(what, started, server, tab)


def start(server: ConsoleServer, tab: CDPSession) -> tuple[float, float, float]:
    """Processor seconds of console and page so far, and the time."""
    return processor_seconds(server.process.pid), tab_seconds(tab), time.monotonic()


def say(
    what: str, started: tuple[float, float, float], server: ConsoleServer, tab: CDPSession, seconds: float | None = None
) -> None:
    took = time.monotonic() - started[2] if seconds is None else seconds
    used, busy = processor_seconds(server.process.pid), tab_seconds(tab)
    print(
        f"  {what:42} {took:6.2f} s; processor seconds: console {used - started[0]:.2f}, page {busy - started[1]:.2f}",
        flush=True,
    )


def tab_seconds(tab: CDPSession) -> float:
    """Processor time of the page's main thread: scripts, layout, painting."""
    metrics = {metric["name"]: metric["value"] for metric in tab.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


if __name__ == "__main__":
    main()
