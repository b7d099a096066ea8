"""What do several nodes cost? The same job under one launcher, and under two that talk over loopback.

Every message of the second node's workers takes one more step there, over TLS. A worker
of that node is killed: seen, freed, re-formed and resumed are told by the lead. The round trip is that of
a message to a node and its answer, as the lead measures it when a node comes.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.agent.node_runs import lines, two_nodes
from tests.agent.runs import GRID, TINY, launch
from tests.benchmarks.machine import describe

TURNS, ITERATIONS = 5, 14
KILL = ("--kill", "W1_1@8:I2", "--iterations", str(ITERATIONS))
TIMES = ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms")


def main() -> None:
    print(describe())
    one: list[dict[str, Any]] = []
    two: list[dict[str, Any]] = []
    round_trips: list[float] = []
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = launch(folder / "one.jsonl", *GRID, *TINY, "--iterations", str(ITERATIONS), *KILL)
            assert run.status == 0, run.errors
            one += run.lines
            with two_nodes(folder, *KILL) as (lead, node):
                assert lead.wait(120) == 0 and node.wait(30) == 0
                told = re.search(r"answers in ([\d.]+) ms", (folder / "lead.log").read_text())
            assert told
            round_trips.append(float(told[1]))
            two += lines(folder)
    for name, said in (("one node", one), ("two nodes", two)):
        print(f"{name}: " + ", ".join(_medians(said)))
    print(f"a message to a node and its answer: {statistics.median(round_trips):.2f} ms (median of {TURNS})")
    print(describe())


def _medians(said: Iterable[dict[str, Any]]) -> list[str]:
    said = list(said)
    ordinary = [1000 * line["seconds"] for line in said if 2 <= line.get("iteration", 0) < 8]
    failures = [line["failure"] for line in said if "failure" in line]
    return [f"iteration {statistics.median(ordinary):.1f} ms"] + [
        f"{name} {statistics.median(f[name] for f in failures):.0f}" for name in TIMES
    ]


if __name__ == "__main__":
    main()
