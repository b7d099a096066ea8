"""How long a job of 12 workers takes from its command to its first iteration, for a model of 100 M parameters.

Beside it, as a ratio inside the run, what a single process takes that imports torch, makes the same twelve stages one
after the other, and their optimizers: of that two cores can do two at a time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import describe

TRIALS = 3
GRID = ("--pipelines", "3", "--stages", "4", "--micro-batches", "4")
OPTIONS = {"width": 832, "heads": 13, "layers": 12, "sequence": 16, "batch": 1}
JOB = ("--workload-options", json.dumps(OPTIONS), "--iterations", "2")
ALONE = f"""
import time
from torch import nn
from openrecycle.agent.examples.gpt import Gpt
workload = Gpt(**{OPTIONS})
kept = []
for worker in range(12):
    stage = nn.Sequential(*(workload.build_layer(3 * (worker % 4) + k, 12, 0) for k in range(3)))
    kept.append((stage, workload.optimizer(stage.parameters())))
"""


def main() -> None:
    print(describe())
    started, first, alone = [], [], []
    for _ in range(TRIALS):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", ALONE], check=True)
        alone.append(time.monotonic() - begun)
        begin, end = _start()
        started.append(begin)
        first.append(end)
    print(f"to the beginning of the first iteration: {statistics.median(started):.1f} s (median of {TRIALS})")
    print(f"to its end: {statistics.median(first):.1f} s")
    print(f"one process that makes the twelve stages: {statistics.median(alone):.1f} s")
    print(f"ratio: {statistics.median(s / a for s, a in zip(started, alone, strict=True)):.2f}")
    print(describe())


def _start() -> tuple[float, float]:
    """Seconds from the command to the beginning and to the end of iteration 0."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        begun = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, "-m", "agent", "train", *GRID, *JOB, "--record", str(record)],
            stdout=subprocess.DEVNULL,
        )
        while not (lines := _iterations(record)):
            assert job.poll() is None, "the job has ended"
            time.sleep(0.02)
        ended = time.monotonic() - begun
        assert job.wait() == 0
    return ended - lines[0]["seconds"], ended


def _iterations(record: Path) -> list[dict[str, Any]]:
    text = record.read_text() if record.exists() else ""
    return [line for line in map(json.loads, text.splitlines(keepends=False)) if "iteration" in line]


if __name__ == "__main__":
    main()
