"""Makes the pictures of the tour: every page, in both themes, of a demo job that lost a worker and got it back.

python -m tests.browser.make_pictures [--address http://127.0.0.1:8501] [--to app/docs/pictures]
    [--pages live planner]

Without an address it starts a demo of its own, 12 worker processes, kills one of them (killed), waits until it is
back, and at the end kills the console under an open page (away). Needs the tests' requirements (Playwright) and
Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import requests
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
WIDTH, HEIGHT = 1280, 860
SHOWN_WIDTH = 900
MOST_BYTES = 60_000
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WAIT_MS = 300_000
LOST = "W1_2"
PEER = "W0_2"
PAGES = {
    "live": "/",
    "worker": f"/?worker={PEER}",
    "schedule": "/schedule?plan=made:staggered:uniform:JOB:W1_2",
    "planner": "/planner",
    "catalog": "/catalog",
    "compare": "/compare",
    "simulate": "/simulate",
    "help": "/help",
}
# Where there is more to see than fits a screen.
HEIGHTS = {"catalog": 1130, "schedule": 1010, "compare": 1010}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="a console that runs already, with a job")
    parser.add_argument("--to", type=Path, default=ROOT / "app/docs/pictures")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    if options.address:
        with chromium() as browser:
            take(browser, options.address.rstrip("/"), options.to, options.pages)
        return
    with demo() as (address, kill), chromium() as browser:
        lose_and_heal(browser, address, options.to)
        take(browser, address, options.to, options.pages)
        leave(browser, address, options.to, kill)


@contextmanager
def demo() -> Iterator[tuple[str, Callable[[], None]]]:
    """A console with 12 real workers, in a folder of its own: its address, and what kills the console alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "openrecycle", "demo", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "XDG_STATE_HOME": folder},
        )

        try:
            while not answers(address := f"http://127.0.0.1:{port}"):
                if process.poll() is not None:
                    raise SystemExit("the demo did not start")
                time.sleep(0.5)
            yield address, partial(kill_console, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def kill_console(demo_pid: int) -> None:
    """The console is a child of the demo's process, beside the launcher of the workers."""
    for child in Path(f"/proc/{demo_pid}/task/{demo_pid}/children").read_text().split():
        if b"\0serve\0" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


def answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/readyz", timeout=30).ok
    except requests.RequestException:
        return False


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])


@contextmanager
def opened(browser: Browser, theme: Literal["light", "dark"]) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
    page.set_default_timeout(WAIT_MS)
    yield page
    page.close()


def lose_and_heal(browser: Browser, address: str, folder: Path) -> None:
    """Kills a worker once the job trains (that is a picture), and waits until it trains with all of them again."""
    with opened(browser, "dark") as other, opened(browser, "light") as page:
        page.goto(address)
        other.goto(address)
        train(page, 12)
        page.get_by_role("button", name=LOST).click()
        page.get_by_role("dialog").get_by_role("button", name="Kill", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=f"Kill {LOST}").click()
        page.locator(f".st-key-cell-failed-{LOST}").wait_for()
        train(page, 8)
        picture(other, folder, "killed", "dark")
        picture(page, folder, "killed", "light")
        page.get_by_role("button", name=LOST).click()
        page.get_by_role("dialog").get_by_role("button", name="Restart", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=f"Restart {LOST}").click()
        page.locator(f".st-key-cell-running-{LOST}").wait_for()
        train(page, 8)


def leave(browser: Browser, address: str, folder: Path, kill: Callable[[], None]) -> None:
    """The console dies under an open page."""
    with opened(browser, "light") as light, opened(browser, "dark") as dark:
        for page in (light, dark):
            page.goto(address)
            prepare(page, "live")
        kill()
        for theme, page in zip(THEMES, (light, dark), strict=True):
            page.locator(GONE).wait_for()
            picture(page, folder, "away", theme)


def train(page: Page, more: int) -> None:
    """Waits for so many iterations."""
    done = """() => Math.max(0, ...[...document.querySelectorAll('.or-card')]
        .filter(c => c.querySelector('.or-label').textContent.startsWith('Iterations done'))
        .map(c => parseInt(c.querySelector('.or-value').textContent.replaceAll(',', '')) || 0))"""
    page.locator(".or-card").first.wait_for()
    least = page.evaluate(done) + more
    page.wait_for_function(f"least => ({done})() >= least", arg=least)


def take(browser: Browser, address: str, folder: Path, pages: list[str]) -> None:
    job = requests.get(f"{address}/api/v1/jobs", timeout=30).json()["jobs"][0]["job_id"]
    for theme in THEMES:
        with opened(browser, theme) as page:
            for name in pages:
                page.set_viewport_size({"width": WIDTH, "height": HEIGHTS.get(name, HEIGHT)})
                page.goto(address + PAGES[name].replace("JOB", job))
                prepare(page, name)
                picture(page, folder, name, theme)


def picture(page: Page, folder: Path, name: str, theme: str) -> None:
    page.mouse.move(WIDTH - 1, 1)  # no help of what was clicked stands over the page
    rest(page)
    small = shrunk(page.screenshot())
    (folder / f"{name}-{theme}.webp").write_bytes(small)
    print(f"{name}-{theme}: {len(small) / 1000:.0f} kB", flush=True)


# The page has noticed that the console does not answer.
GONE = ':is([data-test-connection-state="PINGING_SERVER"], [data-test-connection-state="CONNECTING"])'
CHART = ".js-plotly-plot .main-svg, [data-testid='stVegaLiteChart'] svg, [data-testid='stVegaLiteChart'] canvas"


def prepare(page: Page, name: str) -> None:
    """Brings a page to where there is something to see."""
    page.locator(".or-title").first.wait_for()
    rest(page)
    if name == "worker":
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("tab", name="Over time").click()
        dialog.locator(CHART).nth(1).wait_for()
    elif name == "planner":
        page.get_by_role("button", name=re.compile("worked example", re.I)).first.click()
        go = page.get_by_role("button", name="Plan all four")
        go.or_(page.locator(".or-card").first).first.wait_for()
    elif name == "catalog":
        fill = page.get_by_role("button", name="Fill", exact=True)
        if fill.count() and fill.is_enabled():  # not where all are there
            fill.click()
            page.get_by_text(re.compile(r"plans? made in|Nothing was missing")).first.wait_for()
            page.reload()
    elif name == "simulate":
        run = page.get_by_role("button", name=re.compile("^Simulate|^Run"))
        if run.count():
            run.first.click()
        page.get_by_text(re.compile("^Planned and simulated")).first.wait_for()
    if name != "help":
        page.locator(CHART).first.wait_for()


def rest(page: Page) -> None:
    """No script runs, and what is drawn has been drawn."""
    app = page.locator(".stApp")
    if "refresh" in page.url or page.get_by_text("Refresh", exact=True).count():
        page.wait_for_timeout(3_000)  # a page that follows a job never rests for long
        return
    expect(app).to_have_attribute("data-test-script-state", "notRunning", timeout=WAIT_MS)
    page.wait_for_timeout(1_500)


def shrunk(picture: bytes) -> bytes:
    """WebP, as good as the size allows."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.resize((SHOWN_WIDTH, round(image.height * SHOWN_WIDTH / image.width)), Image.Resampling.LANCZOS)
    for quality in range(90, 30, -8):
        out = io.BytesIO()
        image.save(out, "WEBP", quality=quality, method=6)
        if out.tell() <= MOST_BYTES:
            break
    return out.getvalue()


if __name__ == "__main__":
    main()
