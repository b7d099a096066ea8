"""How long 12 workers need to go on after a SIGKILL, beside the length of an ordinary iteration.

Prints medians of 5 runs; each kill falls into another part of the iteration. Unpaced: the ops run as
fast as this machine's cores allow, 12 processes at once.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.agent.runs import launch
from tests.benchmarks.machine import describe

KILLS = ("W1_2@8:F1", "W0_1@8:I2", "W2_3@8:W4", "W1_0@8:R", "W2_2@8:O")
TIMES = ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms")


def main() -> None:
    print(describe())
    failures, ordinary = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kill in KILLS:
            run = launch(Path(folder) / "run.jsonl", "--iterations", "16", "--kill", kill)
            assert run.status == 0, run.errors
            failures += run.failures
            # The first iterations warm up; the killed one is not ordinary.
            ordinary += [1000 * line["seconds"] for line in run.iterations[2:8]]
            print(f"{kill}: " + ", ".join(f"{name} {run.failures[0][name]:.0f}" for name in TIMES))
    medians = {name: statistics.median(f[name] for f in failures) for name in TIMES}
    iteration = statistics.median(ordinary)
    print("median of 5: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
    print(f"ordinary iteration with 12 workers: {iteration:.0f} ms (median)")
    print(f"resumed - one iteration = {medians['resumed_ms'] - iteration:.0f} ms")
    print(describe())


if __name__ == "__main__":
    main()
