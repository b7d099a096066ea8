"""How long the API's answers take while jobs of 16,384 workers are created, of any shape.

A real console process over HTTP. One probe asks for what people, agents and supervisors ask for; jobs of a shape are
posted meanwhile, eight at a time. Prints median, p99 and the longest answer for each path, what creating takes, and
whether any answer took more than LIMIT or was refused: then the exit status is 1.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import requests

from tests.app.console_server import ConsoleServer
from tests.benchmarks.machine import describe

WORKERS = 16_384
SHAPES = ((1, WORKERS), (WORKERS, 1), (128, 128))
JOBS, TOGETHER = 8, 8
PROBE_SECONDS = 0.01
LIMIT = 0.5  # seconds that no answer may take


class Asker:
    """Asks for each path in turn; keeps how long each answer took, in seconds."""

    def __init__(self, root: str, paths: tuple[str, ...]) -> None:
        self._root, self._paths = root, paths
        self._end = threading.Event()
        self.answers: dict[str, list[float]] = defaultdict(list)
        self.refused: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with requests.Session() as session:
            while not self._end.is_set():
                for path in self._paths:
                    began = time.perf_counter()
                    answer = session.get(self._root + path, timeout=120)
                    self.answers[path].append(time.perf_counter() - began)
                    if answer.status_code >= 400:
                        self.refused.append(f"{path}: {answer.status_code} {answer.text[:200]}")
                    self._end.wait(PROBE_SECONDS)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def create(server: ConsoleServer, pipelines: int, stages: int, number: int) -> tuple[str, float]:
    """(the job's id, seconds)"""
    spec: dict[str, Any] = {"name": f"job {number}", "pipelines": pipelines, "stages": stages}
    began = time.perf_counter()
    answer = requests.post(f"{server.base}/jobs", json={**spec, "micro_batches": 1, "iterations": 5}, timeout=120)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"], time.perf_counter() - began


def measure(server: ConsoleServer, pipelines: int, stages: int, jobs: int = JOBS) -> tuple[Asker, list[float]]:
    """The answers meanwhile, and the seconds that each creation took."""
    first, _ = create(server, pipelines, stages, 0)
    job = f"/api/v1/jobs/{first}"
    paths = ("/healthz", "/readyz", "/metrics", "/api/v1/jobs?limit=20", job, f"{job}/catalog", f"{job}/events")
    with Asker(server.root, paths) as asker, ThreadPoolExecutor(TOGETHER) as pool:
        took = [seconds for _, seconds in pool.map(partial(create, server, pipelines, stages), range(1, jobs + 1))]
        time.sleep(1.0)
    return asker, took


def main() -> int:
    """The exit status."""
    print(describe())
    slow, refused, longest = 0, 0, 0.0
    for pipelines, stages in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            server = ConsoleServer(f"sqlite:///{folder}/console.db", "--api-only")
            try:
                asker, took = measure(server, pipelines, stages)
                print(f"{pipelines} x {stages}: {JOBS} jobs; each created in {min(took):.1f} to {max(took):.1f} s")
                for path, waits in asker.answers.items():
                    waits.sort()
                    p99 = waits[int(0.99 * (len(waits) - 1))]
                    figures = f"median {1000 * statistics.median(waits):.0f}, p99 {1000 * p99:.0f}"
                    print(f"  {path}: {figures}, longest {1000 * waits[-1]:.0f} ms ({len(waits)})", flush=True)
                    slow += sum(seconds > LIMIT for seconds in waits)
                    longest = max(longest, waits[-1])
                refused += len(asker.refused)
                print("".join(f"  {line}\n" for line in asker.refused[:3]), end="")
                print(f"  SIGTERM to its end: {server.stop():.1f} s")
                began = time.perf_counter()
                server.start()
                print(f"  start with these jobs: {time.perf_counter() - began:.1f} s")
            finally:
                server.close()
    print(describe())
    print(f"longest answer {1000 * longest:.0f} ms; {slow} of more than {1000 * LIMIT:.0f} ms, {refused} refused")
    print("missed" if slow or refused else "held")
    return int(bool(slow or refused))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
