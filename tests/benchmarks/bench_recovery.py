"""How long 12 workers need to go on after a SIGKILL, and how long a worker that returns holds up the others,
beside the length of an ordinary iteration.

Prints medians of 10 deaths and 3 returns; each kill falls into another part of the iteration. Unpaced: the
ops run as fast as this machine's cores allow, 12 processes at once.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.agent.runs import Run, launch
from tests.benchmarks.machine import describe

KILLS = ("W1_2@8:F1", "W0_1@8:I2", "W2_3@8:W4", "W1_0@8:R", "W2_2@8:O")
ROUNDS, RETURNS = 2, 3
TIMES = ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms")


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        _deaths(record)
        _returns(record)
    print(describe())


def _run(record: Path, *arguments: str) -> Run:
    run = launch(record, *arguments, timeout=600)
    assert run.status == 0, run.errors
    return run


def _deaths(record: Path) -> None:
    failures, ordinary = [], []
    for kill in KILLS * ROUNDS:
        run = _run(record, "--iterations", "16", "--kill", kill)
        failures += run.failures
        # The first iterations warm up; the killed one is not ordinary.
        ordinary += [1000 * line["seconds"] for line in run.iterations[2:8]]
        print(f"{kill}: " + ", ".join(f"{name} {run.failures[0][name]:.0f}" for name in TIMES))
    medians = {name: statistics.median(f[name] for f in failures) for name in TIMES}
    iteration = statistics.median(ordinary)
    print(f"median of {len(failures)}: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))
    print(f"ordinary iteration with 12 workers: {iteration:.0f} ms (median)")
    print(f"resumed - one iteration = {medians['resumed_ms'] - iteration:.0f} ms")


def _returns(record: Path) -> None:
    """The first iteration with the newcomer, less one of the full grid: leaving, forming, state and refilling."""
    pauses = []
    for _ in range(RETURNS):
        run = _run(record, "--iterations", "80", "--kill", "W1_2@4:F1", "--rejoin", "W1_2@4")
        joined = [1000 * line["seconds"] for line in run.iterations if line["generation"] == 3]
        if len(joined) < 4:
            print("the newcomer was not there before the job ended: nothing to measure")
            continue
        pauses.append((joined[0] - statistics.median(joined[1:])) / statistics.median(joined[1:]))
        print(f"return: {joined[0]:.0f} ms for the first iteration with it, then {statistics.median(joined[1:]):.0f}")
    if pauses:
        print(f"a return holds up the others for {statistics.median(pauses):.2f} iterations (median of {len(pauses)})")


if __name__ == "__main__":
    main()
