"""Messages told apart by their order against messages with tags, over gloo: what the order costs.

The same small GPT, whose ops are short so that transfers show. The jobs take turns. Compared are the
processor time per iteration of all workers, which other programs on the machine hardly touch, and the
median iterations. Both must train to the same bits.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from tests.agent.runs import launch
from tests.benchmarks.clocked import processor_seconds
from tests.benchmarks.machine import describe

TRANSPORTS = "tagged", "ordered"
GRID = ("--pipelines", "2", "--stages", "3", "--micro-batches", "4")
MODEL = {"width": 64, "heads": 4, "sequence": 32, "batch": 2}
WORKERS, TURNS, WARM_UP, COUNTED = 6, 3, 3, 30


def main() -> None:
    print(describe())
    busy: dict[str, list[float]] = {t: [] for t in TRANSPORTS}
    taken: dict[str, list[float]] = {t: [] for t in TRANSPORTS}
    hashes: set[str] = set()
    for _ in range(TURNS):
        for transport in TRANSPORTS:
            with tempfile.TemporaryDirectory() as folder:
                notes = Path(folder) / "notes"
                notes.mkdir()
                run = launch(
                    Path(folder) / "run.jsonl",
                    *GRID,
                    *("--iterations", str(WARM_UP + COUNTED), "--transport", transport),
                    *("--workload", "tests.benchmarks.clocked:ClockedGpt"),
                    *("--workload-options", json.dumps({**MODEL, "notes": str(notes)})),
                )
                assert run.status == 0, run.errors
                busy[transport].append(processor_seconds(notes, processes=WORKERS, warm_up=WARM_UP))
                taken[transport] += [line["seconds"] for line in run.iterations[WARM_UP:]]
                hashes.add(run.final["parameters_sha256"])
    assert len(hashes) == 1, "the transports trained different parameters"
    for transport in TRANSPORTS:
        used, middle = statistics.median(busy[transport]), statistics.median(taken[transport])
        print(
            f"  {transport:8} processor time per iteration {1000 * used:.1f} ms "
            f"({used / statistics.median(busy['tagged']):.3f} of tagged), median iteration {1000 * middle:.1f} ms "
            f"({middle / statistics.median(taken['tagged']):.3f})"
        )
    print(describe())


if __name__ == "__main__":
    main()
