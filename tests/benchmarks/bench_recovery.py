"""How long 12 workers need to go on after a SIGKILL, and how long a worker that returns holds up the others,
beside the length of an ordinary iteration.

One job, in which one worker after the other dies, each in another part of an iteration, and returns. Unpaced: the ops
run as fast as this machine's cores allow, 12 processes at once. Printed: medians over the deaths, from the SIGKILL, and
over the iterations of the full grid in the same job.

    python -m tests.benchmarks.bench_recovery --jobs 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.agent.runs import launch
from tests.benchmarks.machine import describe

KILLS = ("W1_2:F1", "W0_1:I2", "W2_3:W4", "W1_0:R", "W2_2:O", "W0_3:F3", "W1_1:W2", "W2_0:I4")
FIRST, APART = 8, 20
"""Iterations before the first death, and from one to the next: by then the newcomer trains with the others."""
TIMES = ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    print(describe())
    failures, ordinary, pauses = list[dict[str, Any]](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(jobs):
            kills = [(kill, FIRST + place * APART) for place, kill in enumerate(KILLS)]
            faults = list[str]()
            for kill, iteration in kills:
                worker, op = kill.split(":")
                faults += ["--kill", f"{worker}@{iteration}:{op}", "--rejoin", f"{worker}@{iteration}"]
            record = Path(folder) / "run.jsonl"
            run = launch(record, "--iterations", str(FIRST + len(kills) * APART), *faults, timeout=600)
            assert run.status == 0, run.errors
            record.unlink()
            failures += run.failures
            generations: dict[int, list[float]] = {line["generation"]: [] for line in run.iterations}
            for line in run.iterations:
                generations[line["generation"]].append(1000 * line["seconds"])
            full = {line["generation"] for line in run.iterations if line["living"] == 12}
            # The first ones warm up, or have been waited for by a newcomer.
            ordinary += [seconds for number in full for seconds in generations[number][2:]]
            for number in sorted(full)[1:]:
                joined, *rest = generations[number]
                if len(rest) > 2:
                    pauses.append((joined - statistics.median(rest)) / statistics.median(rest))
    medians = {name: statistics.median(f[name] for f in failures) for name in TIMES}
    usual = statistics.median(ordinary)
    print(f"median of {len(failures)} deaths: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
    print(f"ordinary iteration with 12 workers: {usual:.0f} ms (median)")
    print(f"resumed - one iteration = {medians['resumed_ms'] - usual:.0f} ms")
    if pauses:
        print(f"a return holds up the others for {statistics.median(pauses):.2f} iterations (median of {len(pauses)})")
    print(describe())


if __name__ == "__main__":
    main()
