"""What it costs to know the global gradient norm: before the step, after it, or not at all.

12 paced workers, one of them dead, where staggered steps pay most: stages that wait for each other's
gradients before they step lose what staggering gained. Then the same with gradients that are really
clipped: always (the stages wait, as they must), and once in a while (being wrong costs an iteration).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from tests.agent.runs import Run, launch
from tests.benchmarks.machine import describe

ITERATIONS, WARM = 24, 4
GRID = ("--pipelines", "3", "--stages", "4", "--micro-batches", "6", "--pace", "F=30ms,I=30ms,W=30ms")
LOSS = ("--kill", "W1_2@1:F3")


def main() -> None:
    print(describe())
    plain = _milliseconds("no clipping, staggered")
    for name, arguments, loud in (
        ("limit never reached, norm known after the step", ("--clip-norm", "100"), []),
        ("limit never reached, norm known before the step", ("--clip-norm", "100", "--synchronous"), []),
        ("clipped at every iteration", ("--clip-norm", "0.0001"), []),
        ("clipped at one iteration in 8", ("--clip-norm", "100"), [5, 13, 21]),
    ):
        ms = _milliseconds(name, *arguments, loud=loud)
        print(f"    {ms / plain:.3f} of it without clipping")
    print(describe())


def _milliseconds(name: str, *arguments: str, loud: list[int] | None = None) -> float:
    """Mean time of an iteration after the warm-up, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        task = ("--workload", "tests.agent.nan_model:NanModel", "--workload-options", json.dumps({"loud": loud or []}))
        run: Run = launch(Path(folder) / "run.jsonl", *GRID, *LOSS, *task, "--iterations", str(ITERATIONS), *arguments)
    assert run.status == 0, run.errors
    redone = sum(line["validation"]["redone"] for line in run.lines if "validation" in line)
    ms: float = 1000 * statistics.mean(line["seconds"] for line in run.iterations[WARM:])
    print(f"  {name}: {ms:.0f} ms an iteration, {redone} steps overturned")
    return ms


if __name__ == "__main__":
    main()
