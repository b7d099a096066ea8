"""False deaths of a job that is suspended again and again, and how soon a worker that hangs is out of it.

A real job of 3 x 4 workers with ops of 40 ms. At random moments everybody, the launcher alone or all workers stand
still for 5 to 120 s, while other processes burn processor time; nobody should be lost. Then jobs in which one worker
hangs in its forward: seconds until it is put out, which should be 30 at most.

    python -m tests.benchmarks.bench_liveness --minutes 30 --burners 40
    python -m tests.benchmarks.bench_liveness --minutes 2 --longest 30     # shorter
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from agent.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob
from tests.benchmarks.bench_false_alarms import burning
from tests.benchmarks.machine import describe

GRID: dict[str, Any] = {"pipelines": 3, "stages": 4, "micro_batches": 6}
PACE = 0.04
CALM = (5.0, 15.0)
"""Seconds between two suspensions."""


def suspended(minutes: float, longest: float, dice: random.Random) -> tuple[LocalJob, dict[str, int]]:
    """The job, run that long; and how often whom stood still."""
    counts = {"everybody": 0, "the launcher": 0, "all workers": 0}
    end = time.monotonic() + 60 * minutes
    due = [float("inf")]

    def act(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        """In the launcher's own thread, which stands still while this sleeps."""
        now = time.monotonic()
        if due[0] == float("inf") and message["kind"] == "committed" and message["iteration"] >= 2:
            due[0] = now + dice.uniform(*CALM)
        if now > end:
            job.stop()
        elif now > due[0]:
            who, seconds = dice.choice(list(counts)), dice.uniform(5, longest)
            counts[who] += 1
            pids = [pid for name, pid in job.launcher.pids.items() if name != "store"]
            if who != "the launcher":
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            waker = threading.Thread(target=wake, args=(pids, seconds, who, dice.random()), daemon=True)
            if who != "the launcher":
                waker.start()
            if who != "all workers":
                time.sleep(seconds)
            due[0] = time.monotonic() + dice.uniform(*CALM) + (seconds if who == "all workers" else 0)

    def wake(pids: list[int], seconds: float, who: str, seed: float) -> None:
        time.sleep(seconds)
        order = random.Random(seed).sample(pids, len(pids))
        for pid in order:
            os.kill(pid, signal.SIGCONT)
            if who == "all workers":
                time.sleep(0.5)

    return LocalJob(**GRID, pace=PACE, hang_seconds=20.0, on_message=act).run(), counts


def hang(number: int) -> float:
    """Seconds from a hang in forward until its worker is out."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        once = Path(folder) / "once"
        once.touch()

        def watch(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
            if not times and not once.exists():
                times.append(time.monotonic())

        def act(job: LocalJob, line: dict[str, Any]) -> None:
            if "failure" in line:
                times.append(time.monotonic())
                job.stop()

        options = {"once": str(once), "iteration": 4, "pipeline": number % 3, **TINY}
        LocalJob(
            **GRID,
            pace=PACE,
            hang_seconds=20.0,
            workload=NamedWorkload("tests.agent.hanging:SlowForward", options),
            on_message=watch,
            on_line=act,
        ).run()
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--longest", type=float, default=120.0, help="seconds of a suspension")
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 2, help="processes that only burn time")
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe())
    with burning(options.burners):
        job, counts = suspended(options.minutes, options.longest, random.Random(options.seed))
        print(describe())
        stood = ", ".join(f"{who} {count} times" for who, count in counts.items())
        print(f"{options.minutes:g} min, {len(job.iterations)} iterations; for 5 to {options.longest:g} s stood still:")
        print(f"  {stood}")
        print(f"false deaths: {len(job.dead)} {job.dead or ''}")
        times = [round(hang(number), 1) for number in range(options.hangs)]
        print(describe())
    print(f"a hang in forward at ops of {1000 * PACE:g} ms is noticed and its worker out after {times} s")


if __name__ == "__main__":
    main()
