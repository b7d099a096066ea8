"""What each patch of app.runtime.patches gives: the console with all of them, and without one, by turns.

Under load: simulated launchers of 2,048 workers, while somebody looks at the Live page. Opened: the Schedule page of a
job of 12 workers in a Chromium that has nothing in its cache, seconds until its chart is drawn, and the console's
processor time.

python -m tests.benchmarks.bench_patches [--seconds 30] [--openings 4] [--only load|pages]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from openrecycle.app import server as serving
from openrecycle.app.runtime import patches
from openrecycle.cli import main as command_line
from tests.app.console_server import Agents, ConsoleServer
from tests.benchmarks.bench_console_load import measure
from tests.benchmarks.bench_pages import CHROMIUM, PLOT, SIGHT, STAMP, opened, settled
from tests.benchmarks.machine import describe, processor_seconds
from tests.benchmarks.simulated_agents import Load


def _no_round() -> None:
    patches.GarbageCollection.start = lambda self: None  # type: ignore[method-assign]
    patches.GarbageCollection.close = lambda self: None  # type: ignore[method-assign]


def _own_interval() -> None:
    patches.SWITCH_SECONDS = sys.getswitchinterval()


def _collects_after_each_run() -> None:
    from streamlit.web import bootstrap

    original = bootstrap.load_config_options
    bootstrap.load_config_options = lambda options: original({**options, "runner.postScriptGC": True})


def _nothing_ahead() -> None:
    vars(serving)["PageBase"] = lambda app, static, on_page: patches.PageBase(app, None, on_page)


def _sent_by_starlette() -> None:
    vars(serving)["StaticFiles"] = lambda app, static: app


WITHOUT: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "rounds of garbage collection made rarely": _no_round,
    "the shorter switch interval": _own_interval,
    "no collection after each run of a page": _collects_after_each_run,
    "code named in the page's head": _nothing_ahead,
    "files sent in one piece": _sent_by_starlette,
}
OF_LOAD = [*WITHOUT][:4]
OF_PAGES = ["nothing", *[*WITHOUT][4:]]


class Without(ConsoleServer):
    """A console without one of the patches."""

    def __init__(self, what: str, database_url: str, *options: str) -> None:
        self.module = ("-m", "tests.benchmarks.bench_patches", what)
        super().__init__(database_url, *options)


def load(seconds: float) -> None:
    for what in OF_LOAD:
        with tempfile.TemporaryDirectory() as folder:
            server = Without(what, f"sqlite:///{folder}/console.db")
            try:
                print(f"without {what}", flush=True)
                told = measure(server, Load(server.port, 64, 32, 8, seconds, 0), look=True)
            finally:
                server.close()
        cuts = [1000 * value for value in statistics.quantiles(told.answered, n=100)]
        print(f"  a batch of heartbeats is answered after: p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f} ms", flush=True)


def pages(openings: int) -> None:
    took: dict[str, list[tuple[float, float, float]]] = {what: [] for what in OF_PAGES}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        servers = {what: Without(what, f"sqlite:///{folder}/{number}.db") for number, what in enumerate(OF_PAGES)}
        try:
            for server in servers.values():
                Agents(server)
                _open(browser, server)  # reads in what the pages need
            for _ in range(openings):
                for what, server in servers.items():
                    took[what].append(_open(browser, server))
        finally:
            for server in servers.values():
                server.close()
            browser.close()
    for what, found in took.items():
        sight, chart, used = (statistics.median(values) for values in zip(*found, strict=True))
        print(
            f"without {what}: picture after {sight:.2f} s, chart after {chart:.2f} s, "
            f"console {used:.2f} s of processor time ({len(found)} openings)"
        )


def _open(browser: Browser, server: ConsoleServer) -> tuple[float, float, float]:
    """Seconds until the schedule's picture is seen, and until its chart is there; processor seconds of the console."""
    with opened(browser) as (page, _):
        page.add_init_script(f"({STAMP})({json.dumps(SIGHT)})")
        job = server.get("/jobs").json()["jobs"][0]["job_id"]
        used, began = processor_seconds(server.process.pid), time.time()
        page.goto(f"{server.root}/schedule?job={job}", wait_until="commit")
        page.wait_for_function("window.shownAt")
        sight = page.evaluate("window.shownAt") / 1000 - began
        page.locator(PLOT).first.wait_for()
        seconds = time.time() - began
        settled(page)
        return sight, seconds, processor_seconds(server.process.pid) - used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--openings", type=int, default=4)
    parser.add_argument("--only", choices=("load", "pages"))
    options = parser.parse_args()
    print(describe())
    if options.only != "pages":
        load(options.seconds)
    if options.only != "load" and CHROMIUM:
        pages(options.openings)
    print(describe())


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in WITHOUT:
        WITHOUT[sys.argv.pop(1)]()
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        command_line("app")
    else:
        main()
