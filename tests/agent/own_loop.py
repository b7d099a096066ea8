"""A trainer with its own loop and three lines of reporting; says what it hears, a JSON line each.

Run as `python -m tests.agent.own_loop CONSOLE RUN WORKER`; ends when its standard input does.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any

from openrecycle import Job, Reporter
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.planner.plans.plan import Plan

JOB = Job.uniform(2, 2, 3)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def take_up(deployment: Deployment, plan: Plan) -> None:
    forwards = {name: sum(op.kind == "F" for op in ops) for name, ops in plan.workers.items()}
    say(generation=deployment.generation, failed=deployment.failed, forwards=forwards)
    if deployment.generation == 1:
        raise RuntimeError("a callback that fails must not matter to anybody")


def main(console: str, run: str, worker: str) -> None:
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    reporter = Reporter(
        console=console,
        run=run,
        job=JOB,
        worker=worker,
        iterations=10**6,
        on_plan=take_up,
        on_fenced=lambda: say(fenced=True),
    )
    i, state = 0, b""
    # At most 50 iterations a second: a reporter that does not speak for all keeps the newest 1,000.
    while not stop.wait(0.02):
        with reporter.op("F"):
            state = hashlib.sha256(state + bytes(200_000)).digest()
        reporter.iteration(i, loss=1 / (1 + i))
        i += 1
    reporter.close()
    say(closed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
