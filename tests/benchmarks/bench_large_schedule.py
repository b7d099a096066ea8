"""Schedule with 2,048 workers x 64 micro-batches, in Chromium: seconds to the overview, and from a box to its ops.

python -m tests.benchmarks.bench_large_schedule [--pipelines 64] [--stages 32] [--micro-batches 64]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.append(str(Path(__file__).resolve().parents[1] / "app"))

from console_server import ConsoleServer
from ui_console import ConsoleHere, JobHere

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BOXES = ((0.3, 0.36), (0.6, 0.65), (0.2, 0.24))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("pipelines", 64), ("stages", 32), ("micro-batches", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = ConsoleHere(Path(folder))
        try:
            job = JobHere(here.console, "large job", **vars(sizes)).register().finish()
        finally:
            here.close()
        server = ConsoleServer(f"sqlite:///{folder}/console.db")
        try:
            print(f"load {os.getloadavg()[0]:.1f}, {sizes.pipelines * sizes.stages:,} workers")
            with sync_playwright() as playwright:
                arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
                page = browser.new_page(viewport={"width": 1440, "height": 1000})
                page.set_default_timeout(120_000)
                look(page, f"{server.root}/schedule?job={job.job_id}", server.process.pid)
                browser.close()
        finally:
            server.close()


def look(page: Page, address: str, pid: int) -> None:
    plot = page.locator(".js-plotly-plot").first
    for name in ("first", "second", "third"):
        before, begin = processor_seconds(pid), time.monotonic()
        page.goto(address)
        plot.locator("image").wait_for()
        shown = time.monotonic() - begin
        page.wait_for_timeout(3000)
        used = processor_seconds(pid) - before
        print(f"{name} opening: overview after {shown:.2f} s; {used:.2f} s of the console's processor time")
    place = plot.bounding_box()
    assert place is not None
    heading = page.locator(".or-heading", has_text="Detail")
    for left, right in BOXES:
        said, before = heading.inner_text(), processor_seconds(pid)
        page.mouse.move(place["x"] + left * place["width"], place["y"] + 80)
        page.mouse.down()
        page.mouse.move(place["x"] + right * place["width"], place["y"] + 95, steps=3)
        begin = time.monotonic()
        page.mouse.up()
        page.wait_for_function(
            "said => [...document.querySelectorAll('.or-heading')].some("
            "e => e.innerText.startsWith('Detail') && e.innerText !== said)",
            arg=said,
        )
        shown = time.monotonic() - begin
        page.wait_for_timeout(3000)
        print(f"box: its ops after {shown:.2f} s; {processor_seconds(pid) - before:.2f} s of processor time")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
