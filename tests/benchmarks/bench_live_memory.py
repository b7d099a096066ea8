"""What does a page cost that stays open on a live job? Memory of the server and of the tab, from start to end.

A demo of 12 workers is started and its Live page kept open in Chromium; every minute both are
measured: resident memory of the console's process and of the tab's renderer; the tab's JavaScript heap as
it is (with what nobody holds any more) and after forced collections (what is held); its DOM nodes and event
listeners. The first minutes warm caches; the slope is that of the second half. With --snapshots, what the
heap holds is written every so many minutes, for the browser's own developer tools to compare.

    python -m tests.benchmarks.bench_live_memory --minutes 120
    python -m tests.benchmarks.bench_live_memory --url http://127.0.0.1:8501 --pid 4711 --snapshots folder
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests
from playwright.sync_api import Browser, CDPSession, sync_playwright

from tests.benchmarks.machine import describe

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
MINUTES = 10.0
START_SECONDS = 120.0
MIB = 2**20
# What a finalizer lets go of is found by the round after it.
COLLECTIONS = 3


@dataclass(frozen=True)
class Sample:
    """minute: since the page has its first charts. Memory in MiB.

    plain, held: the JavaScript heap as it is, and after collections. backing: array buffers, held.
    """

    minute: float
    server: float
    tab: float
    plain: float
    held: float
    backing: float
    nodes: int
    listeners: int
    iterations: int

    def line(self) -> str:
        return (
            f"{self.minute:7.1f} min  server {self.server:7.1f} MiB  tab {self.tab:7.1f} MiB  "
            f"JS heap {self.plain:6.1f} MiB, held {self.held:6.1f} MiB, buffers {self.backing:5.1f} MiB  "
            f"{self.nodes:,} nodes, {self.listeners:,} listeners  {self.iterations:,} iterations"
        )


def resident(pid: int) -> float:
    """MiB; Linux only."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def console_pid(port: int) -> int:
    """The process that serves on this port, by its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            words = entry.read_bytes().split(b"\0")
            if b"serve" in words and b"app" in words and str(port).encode() in words:
                return int(entry.parent.name)
    raise SystemExit(f"no process serves on port {port}")


@contextlib.contextmanager
def demo() -> Iterator[tuple[str, int]]:
    """Address and process of the console of a demo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "OPENRECYCLE_TOKEN")}
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "demo", "--port", str(port), "--database-url", f"sqlite:///{folder}/demo.db"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _trains(root):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the demo did not start")
                time.sleep(0.5)
            yield root, console_pid(port)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _trains(root: str) -> bool:
    try:
        jobs = requests.get(f"{root}/api/v1/jobs", timeout=5).json()["jobs"]
    except requests.RequestException:
        return False
    return any(job["state"] == "running" for job in jobs)


def tab_pid(browser: Browser) -> int:
    """The renderer with most memory: that of the page."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    renderers = [int(p["id"]) for p in processes if p["type"] == "renderer"]
    return max(renderers, key=resident)


def watch(root: str, server: int, minutes: float, snapshots: Path | None = None, each: float = 10.0) -> list[Sample]:
    """snapshots: the folder for what the heap holds, written every `each` minutes; None: not written."""
    samples: list[Sample] = []
    asking = requests.Session()
    job = asking.get(f"{root}/api/v1/jobs", timeout=5).json()["jobs"][0]["job_id"]
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(1000 * START_SECONDS)
        page.goto(root)
        page.locator(".stVegaLiteChart .marks").first.wait_for()
        tab, session = tab_pid(browser), page.context.new_cdp_session(page)
        begin, written = time.monotonic(), 0
        while True:
            minute = (time.monotonic() - begin) / 60
            committed = _committed(asking, f"{root}/api/v1/jobs/{job}")
            samples.append(Sample(minute, resident(server), resident(tab), *_heap(session), committed))
            print(samples[-1].line(), flush=True)
            if snapshots is not None and minute >= each * written:
                snapshot(session, snapshots / f"minute-{minute:03.0f}.heapsnapshot")
                written += 1
            if minute >= minutes:
                break
            page.wait_for_timeout(60_000 * min(1.0, max(0.05, minutes - minute)))
        alive = page.locator(".or-cards").count() == 1
        browser.close()
    if not alive:
        raise SystemExit("the page lost its cards on the way")
    return samples


def _committed(asking: requests.Session, url: str) -> int:
    """Tries for a while: two hours must not end because the machine had no port free in one moment of them."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return int(asking.get(url, timeout=10).json()["committed"])
        except requests.RequestException:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def _heap(session: CDPSession) -> tuple[float, float, float, int, int]:
    """As it is, held, array buffers (MiB); DOM nodes, event listeners."""
    plain = session.send("Runtime.getHeapUsage")["usedSize"]
    for _ in range(COLLECTIONS):
        session.send("HeapProfiler.collectGarbage")
    after, counters = session.send("Runtime.getHeapUsage"), session.send("Memory.getDOMCounters")
    backing = after.get("backingStorageSize", 0)
    nodes, listeners = int(counters["nodes"]), int(counters["jsEventListeners"])
    return plain / MIB, after["usedSize"] / MIB, backing / MIB, nodes, listeners


def snapshot(session: CDPSession, path: Path) -> None:
    with path.open("w") as file:

        def write(event: dict[str, str]) -> None:
            file.write(event["chunk"])

        session.on("HeapProfiler.addHeapSnapshotChunk", write)
        session.send("HeapProfiler.takeHeapSnapshot", {"reportProgress": False})
        session.remove_listener("HeapProfiler.addHeapSnapshotChunk", write)


def slope(samples: list[Sample], of: str) -> float:
    """MiB per hour over the second half, by least squares; 0 for fewer than two samples."""
    half = [s for s in samples if s.minute >= samples[-1].minute / 2]
    if len(half) < 2:
        return 0.0
    x, y = [s.minute / 60 for s in half], [float(getattr(s, of)) for s in half]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--url", help="a console that runs already, with a job; else a demo is started")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--snapshots", type=Path, help="a folder; what the heap holds is written there")
    parser.add_argument("--each", type=float, default=10.0, help="minutes between two of them")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium found: skipped")
        return
    print(describe())
    if options.url:
        pid = options.pid or console_pid(int(options.url.rstrip("/").rpartition(":")[2]))
        samples = watch(options.url.rstrip("/"), pid, options.minutes, options.snapshots, options.each)
    else:
        with demo() as (root, pid):
            samples = watch(root, pid, options.minutes, options.snapshots, options.each)
    first, last = samples[0], samples[-1]
    words_of = {"server": "server", "tab": "tab", "plain": "JavaScript heap", "held": "of it held, after collections"}
    for of, words in words_of.items():
        before, after = getattr(first, of), getattr(last, of)
        print(f"{words}: {before:.1f} -> {after:.1f} MiB in {last.minute:.0f} min; {slope(samples, of):+.1f} MiB/h")


if __name__ == "__main__":
    main()
