"""How long /healthz waits while a console takes documents of several megabytes: plans, and what is none.

A real console process over HTTP, one probe that asks all the time: what it waits is how long the event loop, and
with it every heartbeat, stood still. Prints median, p99 and the longest answer for a quiet console and each upload.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time

import requests

from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.solvers.portfolio import make_plan
from tests.app.console_server import ConsoleServer
from tests.benchmarks.bench_large_plan_stall import QUIET_SECONDS, watched
from tests.benchmarks.machine import describe

LIMIT = 8 * 1024 * 1024
STAGE = {"forward": 1, "input_backward": 1, "weight_backward": 1, "optimizer": 0}


def documents() -> list[tuple[str, str, int, bytes]]:
    """(what, path, status that is expected, body)"""
    plan = make_plan(Problem(Job.uniform(32, 30, 32)), solver="list").to_json()
    indented = json.dumps(json.loads(make_plan(Problem(Job.uniform(16, 20, 32)), solver="list").to_json()), indent=1)
    stages = 3000
    job = {
        "pipelines": 2,
        "stages": stages,
        "micro_batches": 2,
        "profiles": [{**STAGE, "reductions": [0.001 * n for n in range(20)]}] * stages,
        "transfers": [0] * (stages - 1),
    }
    spec = {"name": "x", "pipelines": 2, "stages": stages, "micro_batches": 2, "iterations": 9}
    beat = {"worker": "W0_0", "incarnation": "a", "seq": 1, "generation": 0, "iteration": 0, "phase": "starting"}
    lists = "[" * 200 + "]" * 200
    return [
        ("a plan", "/plans", 201, f'{{"name":"large","plan":{plan}}}'.encode()),
        ("a plan with line breaks", "/plans", 201, f'{{"name":"indented","plan":{indented}}}'.encode()),
        ("lists in lists", "/plans", 422, ("[" + ",".join([lists] * 20_000) + "]").encode()[: LIMIT - 1] + b"]"),
        ("a plan's ops that are none", "/plans", 422, json.dumps({"name": "x", "plan": ["x" * 40] * 180_000}).encode()),
        ("wrong times", "/jobs", 422, json.dumps({**spec, "profile": {**job, "transfers": [-1] * 400_000}}).encode()),
        ("wrong stages", "/jobs", 422, json.dumps({**spec, "profile": {**job, "profiles": [{}] * 400_000}}).encode()),
        ("wrong fields", "/jobs", 422, json.dumps({**spec, **{str(i): 1 for i in range(130_000)}}).encode()),
        ("wrong heartbeats", "/jobs/x/heartbeats", 422, json.dumps({"heartbeats": [{}] * 8_192}).encode()),
        ("heartbeats", "/jobs/x/heartbeats", 404, json.dumps({"heartbeats": [beat] * 8_192}).encode()),
        ("a profile", "/solves", 422, json.dumps({"kind": "plan", "job": {**job, "pipelines": 10**6}}).encode()),
    ]


def main() -> None:
    print(describe())
    bodies = documents()
    with tempfile.TemporaryDirectory() as folder:
        server = ConsoleServer(f"sqlite:///{folder}/console.db", "--api-only", "--tolerance", "0")
        try:
            with watched(server, "nothing"):
                time.sleep(QUIET_SECONDS)
            for what, path, status, body in bodies:
                with watched(server, f"{what}, {len(body) / 2**20:.1f} MiB to {path}"):
                    headers = {"Content-Type": "application/json"}
                    answer = requests.post(server.base + path, data=body, headers=headers, timeout=300)
                assert answer.status_code in (status, 413), answer.text[:300]
        finally:
            server.close()
    print(describe())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
