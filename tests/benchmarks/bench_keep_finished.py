"""What does --keep-finished save? A worker dies early, in the middle and late in an iteration; with the option,
survivors keep the micro-batches that they have finished, and redo the others only.

Milliseconds from the death to the redone iteration committed, medians, with and without it in turns.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.agent.runs import TINY, launch
from tests.benchmarks.machine import describe

GRID = ("--pipelines", "3", "--stages", "2", "--micro-batches", "6", "--technique", "adaptive")
PACE = ("--pace", "F=20ms,I=20ms,W=20ms")
MOMENTS = {"early": "F1", "middle": "F4", "late": "I5"}
TURNS = 3


def main() -> None:
    print(describe())
    for moment, op in MOMENTS.items():
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(TURNS):
            for keeps in found:
                found[keeps].append(_resumed(op, keeps=keeps))
        without, kept = (statistics.median(found[keeps]) for keeps in (False, True))
        print(f"death {moment} (before {op}): {without:.0f} ms without, {kept:.0f} ms with it, x {kept / without:.3f}")
    print(describe())


def _resumed(op: str, *, keeps: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ("--keep-finished",) if keeps else ()
        run = launch(
            Path(folder) / "run.jsonl", *GRID, *TINY, *PACE, *options, "--iterations", "6", "--kill", f"W1_1@3:{op}"
        )
        assert run.status == 0, run.errors
        return float(next(line["failure"]["resumed_ms"] for line in run.lines if "failure" in line))


if __name__ == "__main__":
    main()
