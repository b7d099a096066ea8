"""False alarms and real ones on a busy machine: a real job of 12 processes, and more that only burn processor time.

Counts what the console takes for a silence (suspects, deaths) while nothing is wrong, and plays plain
time-outs and the phi-accrual detector through the very same heartbeats. At the end workers are stopped
with SIGSTOP, and continued when they are suspected.

    python -m tests.benchmarks.bench_false_alarms --minutes 10
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests

from openrecycle.agent.coordination.membership import FailureTimeouts
from tests.benchmarks.machine import describe
from tests.benchmarks.phi_accrual import accrual, judge, timeout

MINUTES = 1.0
HANGS = 5
START_SECONDS = 300.0


class Job:
    """The job at a console."""

    def __init__(self, root: str) -> None:
        self._root = f"{root}/api/v1/jobs"
        self._session = requests.Session()
        self._path = ""

    def trains(self) -> bool:
        with contextlib.suppress(requests.RequestException, LookupError):
            job = self._session.get(self._root, timeout=30).json()["jobs"][0]
            self._path = f"{self._root}/{job['job_id']}"
            return bool(job["state"] == "running")
        return False

    def get(self, tail: str = "", **query: Any) -> dict[str, Any]:
        return self._session.get(self._path + tail, params=query, timeout=60).json()  # type: ignore[no-any-return]

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """All events with seq > after."""
        out: list[dict[str, Any]] = []
        while page := self.get("/events", after=after, limit=500)["events"]:
            out += page
            after = page[-1]["seq"]
        return out


@contextlib.contextmanager
def job(notes: Path) -> Iterator[Job]:
    """A console and a job of 3 x 4 workers, with op times of the demo. notes: gets the heartbeats' arrivals."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = f"http://127.0.0.1:{port}"
    hidden = ("DATABASE_URL", "OPENRECYCLE_TOKEN")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"OPENRECYCLE_HEARTBEATS": str(notes)}
    serve = ["tests.benchmarks.recorded_console", "serve", "--port", str(port)]
    serve += ["--database-url", f"sqlite:///{notes.parent}/console.db"]
    launch = ["agent", "train", "--console", root, "--iterations", "1000000", "--pace", "F=40ms,I=40ms,W=40ms"]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command in (serve, launch):
            children.append(
                subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL)
            )
            _wait(lambda: _healthy(root), children, "the console did not start")
        opened = Job(root)
        _wait(opened.trains, children, "the job did not start")
        yield opened
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _healthy(root: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(f"{root}/healthz", timeout=30).ok
    return False


def _wait(good: Any, children: list[subprocess.Popen[bytes]], otherwise: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not good():
        if time.monotonic() > deadline or any(child.poll() is not None for child in children):
            raise SystemExit(otherwise)
        time.sleep(0.25)


def _burn(nice: int) -> None:
    os.nice(nice)
    while True:
        pass


@contextlib.contextmanager
def burning(count: int, nice: int = 0) -> Iterator[None]:
    """Beside so many processes that only burn processor time. nice: as os.nice adds it to theirs."""
    burners = [multiprocessing.Process(target=_burn, args=(nice,), daemon=True) for _ in range(count)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def arrivals(notes: Path, since: float) -> list[list[float]]:
    """Of each process, seconds, from `since` on."""
    by_process: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in notes.read_text().splitlines():
        worker, incarnation, at = line.split()
        if float(at) >= since:
            by_process[worker, incarnation].append(float(at))
    return list(by_process.values())


def suspected(text: str) -> int:
    """Returns how many workers a line of the feed says to be silent. Of many at once one line tells."""
    if " workers have not been heard for " in text:
        return int(text.split()[0].replace(",", ""))
    return int(" has not been heard for " in text)


def hang(job: Job, name: str) -> float:
    """Stops a worker until it is suspected: for how long it had not been heard then, in seconds."""
    worker = next(w for w in job.get("/workers")["workers"] if w["name"] == name)
    known = job.events()[-1]["seq"]
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        silent = _event(job, known, f"{name} has not been heard for")
    finally:
        os.kill(worker["pid"], signal.SIGCONT)
    _event(job, silent["seq"], f"{name} is heard again")
    return float(silent["text"].partition("has not been heard for ")[2].split()[0])


def _event(job: Job, after: int, text: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for event in job.events(after):
            if event["text"].startswith(text):
                return event
        time.sleep(0.25)
    raise SystemExit(f"no event came that says: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 2, help="processes that only burn time")
    parser.add_argument("--hangs", type=int, default=HANGS)
    options = parser.parse_args()
    failure_timeouts = FailureTimeouts()
    print(describe())
    with tempfile.TemporaryDirectory() as folder, burning(options.burners):
        notes = Path(folder) / "heartbeats"
        with job(notes) as running:
            since, known = time.monotonic(), running.events()[-1]["seq"]
            committed = running.get()["committed"]
            time.sleep(60 * options.minutes)
            told = [e["text"] for e in running.events(known)]
            processes = arrivals(notes, since)
            committed = running.get()["committed"] - committed
            print(f"{describe()}; {options.burners} of it burn time; {committed} iterations committed")
            suspects = [text for text in told if suspected(text)]
            deaths = [text for text in told if " failed: " in text]
            count = sum(map(suspected, suspects))
            print(f"in {options.minutes:g} min without a fault: {count} suspects, {len(deaths)} deaths")
            for text in (*suspects, *deaths):
                print(f"  {text}")
            hangs = [hang(running, f"W{n % 3}_{n % 4}") for n in range(options.hangs)]
    gaps = sorted(b - a for seen in processes for a, b in pairwise(seen))
    print(
        f"gaps between heartbeats, s: median {gaps[len(gaps) // 2]:.2f}, longest {[round(gap, 2) for gap in gaps[-5:]]}"
    )
    print("detector                 gaps   false alarms   silence until alarm, s: mean  largest")
    detectors = {f"time-out {s:g} s": timeout(s) for s in (1.5, 2, 3, failure_timeouts.suspect, failure_timeouts.dead)}
    detectors |= {f"phi >= {threshold:g}": accrual(threshold) for threshold in (1, 2, 3, 5, 8, 12, 16)}
    for name, patience in detectors.items():
        found = judge(patience, processes)
        print(f"{name:<22}{found.gaps:>7}{found.false_alarms:>15}{found.mean:>30.2f}{found.largest:>9.2f}")
    if hangs:
        off = max(abs(age / failure_timeouts.suspect - 1) for age in hangs)
        print(
            f"SIGSTOP -> suspect after s of silence: {hangs} "
            f"(time-out: {failure_timeouts.suspect:g}); off by {100 * off:.0f} %"
        )


if __name__ == "__main__":
    main()
