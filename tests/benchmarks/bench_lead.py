"""The launcher that leads a job of three nodes gets a SIGKILL: how long until another one leads, and until all train.

Real launchers on this machine, each in a process group of its own; 3 pipelines of 2 stages, one pipeline a node.
Whoever leads next writes a record: its first lines say how long after the death the others were in a generation, and
had committed an iteration in it.

python -m tests.benchmarks.bench_lead [--times 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.agent.consoles import until
from tests.agent.node_runs import lines
from tests.agent.test_lead_lost import PACED, leading, log_of, nodes, record_of
from tests.benchmarks.machine import describe


def lost(folder: Path) -> tuple[float, float, float, int]:
    """Seconds from the death until another leads, has opened a generation, and an iteration of it is committed; and how
    many iterations were done again, of those that the lead had recorded."""
    with nodes(folder, 3, *PACED) as launchers:
        until(lambda: leading(folder, [0], 4) is not None, "four iterations")
        before = len(record_of(folder, 0).iterations)
        died = time.monotonic()
        os.kill(launchers[0].pid, signal.SIGKILL)
        until(lambda: any("leads from here on" in log_of(folder, rank) for rank in (1, 2)), "another lead", 60)
        led = time.monotonic() - died

        def opened() -> bool:
            return any(line.get("generation", 0) >= 2 for rank in (1, 2) for line in lines(folder, f"run{rank}.jsonl"))

        until(opened, "an iteration of the next generation", 60)
        trained = time.monotonic() - died
        new = next(rank for rank in (1, 2) if "leads from here on" in log_of(folder, rank))
        for rank in (1, 2):
            assert launchers[rank].wait(90) == 0, log_of(folder, rank)
        record = record_of(folder, new)
        first = next(i["iteration"] for i in record.iterations if i["generation"] >= 2)
        formed = next(f["reformed_ms"] for f in record.failures) / 1000
        return led, formed, trained, max(0, before - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    print(describe())
    found = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            found.append(lost(Path(folder)))
    for place, what in enumerate(("another leads", "all are in groups again", "an iteration more")):
        values = [one[place] for one in found]
        print(f"{what} after {median(values):.2f} s (median of {times}; {min(values):.2f} to {max(values):.2f})")
    print(f"iterations that the lead had recorded and that were done again: {sum(again for *_, again in found)}")
    print(describe())


if __name__ == "__main__":
    main()
