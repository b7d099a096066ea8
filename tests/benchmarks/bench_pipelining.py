"""Fault-free throughput against `torch.distributed.pipelining` (1F1B) with plain data parallelism.

The same GPT, grid, global batch, data, optimizer and number of threads; no op is paced. The jobs take
turns. Compared are the median iterations of all turns, and beside them the quickest ones, which a busy
machine disturbs less; and the processor time per iteration of all workers (user and system, all
threads), which decides where there are more workers than cores and which other programs hardly touch.
That all train the same thing is checked: their losses agree to float32 accuracy.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.agent.runs import launch
from tests.benchmarks.clocked import processor_seconds
from tests.benchmarks.machine import describe
from tests.benchmarks.reference_pipelining import Grid, Outcome, train

# Without dropout: the two draw its randomness differently.
MODEL = {"width": 256, "heads": 4, "blocks": 2, "sequence": 128, "batch": 2, "dropout": 0.0}
TURNS, WARM_UP, COUNTED = 2, 2, 6
JOBS = {
    Grid(1, 2, 8): ("torch", "fast", "deterministic"),
    Grid(2, 2, 8): ("torch", "fast", "deterministic"),
}


def main() -> None:
    print(describe())
    for grid, jobs in JOBS.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        busy: dict[str, list[float]] = defaultdict(list)
        losses: dict[str, tuple[float, ...]] = {}
        for _ in range(TURNS):
            for job in jobs:
                with tempfile.TemporaryDirectory() as notes:
                    outcome = _train(job, grid, notes)
                    workers = grid.pipelines * grid.stages
                    busy[job].append(processor_seconds(Path(notes), processes=workers, warm_up=WARM_UP))
                seconds[job] += outcome.seconds[-COUNTED:]
                losses[job] = outcome.losses
        samples = grid.pipelines * grid.micro_batches * int(MODEL["batch"])
        print(f"{grid.pipelines} x {grid.stages} workers, {grid.micro_batches} micro-batches of {MODEL['batch']} each:")
        for job in jobs:
            off = max(abs(a - b) for a, b in zip(losses[job], losses["torch"], strict=True))
            assert off < 1e-3 and all(map(math.isfinite, losses[job])), f"{job} trains something else: {losses}"
            middle, best = statistics.median(seconds[job]), min(seconds[job])
            used = statistics.median(busy[job])
            print(
                f"  {job:13} {samples / middle:6.2f} samples/s, {statistics.median(seconds['torch']) / middle:.3f} of "
                f"torch's (quickest iterations: {min(seconds['torch']) / best:.3f}); "
                f"iterations {1000 * best:.0f}, {1000 * middle:.0f}, {1000 * max(seconds[job]):.0f} ms "
                f"(least, median, most); processor time per iteration {1000 * used:.0f} ms, "
                f"{used / statistics.median(busy['torch']):.3f} of torch's; loss within {off:.1e} of torch's"
            )
    print("goal: fast at least 1.0 of torch's samples/s")
    print(describe())


def _train(job: str, grid: Grid, notes: str) -> Outcome:
    iterations, options = WARM_UP + COUNTED, {**MODEL, "notes": notes}
    if job == "torch":
        return train(grid, options, iterations=iterations)
    with tempfile.TemporaryDirectory() as folder:
        run = launch(
            Path(folder) / "run.jsonl",
            *("--pipelines", str(grid.pipelines), "--stages", str(grid.stages)),
            *("--micro-batches", str(grid.micro_batches), "--iterations", str(iterations)),
            *("--mode", job, "--workload", "tests.benchmarks.clocked:ClockedGpt"),
            *("--workload-options", json.dumps(options)),
        )
    assert run.status == 0, run.errors
    return Outcome(
        tuple(line["seconds"] for line in run.iterations), tuple(float.fromhex(line["loss"]) for line in run.iterations)
    )


if __name__ == "__main__":
    main()
