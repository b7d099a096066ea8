"""How long /healthz waits while a console handles plans of 2,048 workers (64 x 32 x 64 micro-batches).

A real console process over HTTP; one probe asks all the time. Prints, for a quiet console and for each thing that
is done with a large plan, how long that took, and the median, p99 and longest answer meanwhile.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import requests

from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.packed import unpack
from openrecycle.planner.plans.plan import job_doc
from tests.app.console_server import ConsoleServer
from tests.benchmarks.machine import describe

GRID = {"pipelines": 64, "stages": 32, "micro_batches": 64}
PROBE_SECONDS = 0.01
QUIET_SECONDS = 3.0


class Probe:
    """Asks /healthz every 10 ms; keeps how long each answer took, in seconds."""

    def __init__(self, server: ConsoleServer) -> None:
        self._server = server
        self._end = threading.Event()
        self.answers: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with requests.Session() as session:
            while True:
                began = time.perf_counter()
                session.get(f"{self._server.root}/healthz", timeout=60).raise_for_status()
                self.answers.append(time.perf_counter() - began)
                if self._end.wait(PROBE_SECONDS):
                    return

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@contextmanager
def watched(server: ConsoleServer, what: str) -> Iterator[None]:
    began = time.perf_counter()
    with Probe(server) as probe:
        yield
        took = time.perf_counter() - began
    waits = sorted(probe.answers)
    p99 = waits[int(0.99 * (len(waits) - 1))]
    figures = f"median {1000 * statistics.median(waits):.1f}, p99 {1000 * p99:.0f}, longest {1000 * waits[-1]:.0f} ms"
    print(f"{what}: {took:.1f} s; /healthz {figures}", flush=True)


def until(look: Callable[[], Any], seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        # Nobody sends heartbeats here: silence must not pass for death.
        failure_timeouts = ("--suspect", "3000", "--dead", "3600")
        server = ConsoleServer(f"sqlite:///{folder}/console.db", "--api-only", "--tolerance", "0", *failure_timeouts)
        try:
            _measure(server)
        finally:
            server.close()
    print(describe())


def _measure(server: ConsoleServer) -> None:
    with watched(server, "nothing"):
        time.sleep(QUIET_SECONDS)
    spec = {"name": "large", "iterations": 100, "technique": "staggered", **GRID}
    job = f"/jobs/{server.post('/jobs', spec).json()['job_id']}"
    names = [f"W{p}_{s}" for p in range(GRID["pipelines"]) for s in range(GRID["stages"])]

    def in_generation(number: int) -> bool:
        return bool(server.get(job).json()["generation"] == number)

    came = [{"worker": name, "incarnation": "a", "host": "h", "pid": 1} for name in names]
    server.post(f"{job}/workers", {"registrations": came}).raise_for_status()
    until(partial(in_generation, 1))
    for turn, dead in enumerate(("W5_3", "W9_7"), start=2):
        with watched(server, f"replan without {dead}, to its generation"):
            body = {"worker": dead, "incarnation": "a", "cause": "exit", "reporter": "launcher"}
            server.post(f"{job}/failures", {"failures": [body]}).raise_for_status()
            until(partial(in_generation, turn))
    fingerprint = server.get(job).json()["plan_fingerprint"]
    with watched(server, "the plan's document"):
        size = len(server.get(f"{job}/plans/{fingerprint}").content)
    print(f"  ({size / 1e6:.0f} MB)")
    with watched(server, "the plan as launchers get it"):
        unpack(server.get(f"{job}/plans/{fingerprint}?packed=true").content)
    with watched(server, "a solve, to its end, and its document"):
        doc = job_doc(Job.uniform(64, 32, 64)).model_dump(mode="json")
        asked = server.post("/solves", {"kind": "plan", "job": doc, "failed": ["W1_0"], "solver": "list"})
        solve = f"/solves/{asked.json()['id']}"
        until(lambda: server.get(solve).json()["state"] == "done")
        server.get(f"{solve}/plan")
    half = job_doc(Job.uniform(16, 16, 32)).model_dump(mode="json")
    asked = server.post("/solves", {"kind": "plan", "job": half, "solver": "list"})
    solve = f"/solves/{asked.json()['id']}"
    until(lambda: server.get(solve).json()["state"] == "done")
    plan = server.get(f"{solve}/plan").text
    with watched(server, f"the upload of a plan of {len(plan) / 1e6:.1f} MB"):
        data = f'{{"name":"half","plan":{plan}}}'
        answer = requests.post(
            f"{server.base}/plans", data=data, headers={"Content-Type": "application/json"}, timeout=120
        )
        assert answer.status_code == 201, answer.text[:300]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
