"""Fault-free throughput against `torch.distributed.pipelining` (1F1B) with plain data parallelism.

The same GPT, grid, global batch, data, optimizer and number of threads; no op is paced. The jobs take
turns. Compared are the median iterations of all turns, and beside them the quickest ones, which a busy
machine disturbs less. That all train the same thing is checked: their losses agree to float32 accuracy.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.agent.runs import launch
from tests.benchmarks.machine import describe
from tests.benchmarks.reference_pipelining import Grid, Outcome, train

# Without dropout: the two draw its randomness differently.
MODEL = {"width": 256, "heads": 4, "blocks": 2, "sequence": 128, "batch": 2, "dropout": 0.0}
TURNS, WARM_UP, COUNTED = 2, 2, 6
JOBS = {
    Grid(1, 2, 8): ("torch", "fast"),
    Grid(2, 2, 8): ("torch", "fast", "deterministic"),
}


def main() -> None:
    print(describe())
    for grid, jobs in JOBS.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        losses: dict[str, tuple[float, ...]] = {}
        for _ in range(TURNS):
            for job in jobs:
                outcome = _train(job, grid)
                seconds[job] += outcome.seconds[-COUNTED:]
                losses[job] = outcome.losses
        samples = grid.pipelines * grid.micro_batches * int(MODEL["batch"])
        print(f"{grid.pipelines} x {grid.stages} workers, {grid.micro_batches} micro-batches of {MODEL['batch']} each:")
        for job in jobs:
            off = max(abs(a - b) for a, b in zip(losses[job], losses["torch"], strict=True))
            assert off < 1e-3 and all(map(math.isfinite, losses[job])), f"{job} trains something else: {losses}"
            middle, best = statistics.median(seconds[job]), min(seconds[job])
            print(
                f"  {job:13} {samples / middle:6.2f} samples/s, {statistics.median(seconds['torch']) / middle:.3f} of "
                f"torch's (quickest iterations: {min(seconds['torch']) / best:.3f}); "
                f"iterations {1000 * best:.0f}, {1000 * middle:.0f}, {1000 * max(seconds[job]):.0f} ms "
                f"(least, median, most); loss within {off:.1e} of torch's"
            )
    print("goal: fast at least 1.0 of torch's")
    print(describe())


def _train(job: str, grid: Grid) -> Outcome:
    iterations = WARM_UP + COUNTED
    if job == "torch":
        return train(grid, MODEL, iterations=iterations)
    with tempfile.TemporaryDirectory() as folder:
        run = launch(
            Path(folder) / "run.jsonl",
            *("--pipelines", str(grid.pipelines), "--stages", str(grid.stages)),
            *("--micro-batches", str(grid.micro_batches), "--iterations", str(iterations)),
            *("--mode", job, "--workload-options", json.dumps(MODEL)),
        )
    assert run.status == 0, run.errors
    return Outcome(
        tuple(line["seconds"] for line in run.iterations), tuple(float.fromhex(line["loss"]) for line in run.iterations)
    )


if __name__ == "__main__":
    main()
