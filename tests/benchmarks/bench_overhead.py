"""What does reporting cost? The same job without a console, with one, and after that one was killed.

Paced (ops of 10 ms, so that the console's own work on this machine's cores is not what is measured)
and unpaced (where it is). Medians of the time between commits, as ratios to the job without a
console; the runs take turns, so that other programs disturb all of them alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.agent.consoles import console, until
from tests.agent.runs import TINY
from tests.benchmarks.machine import describe

GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "4")
PACE = ("--pace", "F=10ms,I=10ms,W=10ms")
WARM_UP, COUNTED, TURNS = 5, 30, 3


def main() -> None:
    print(describe())
    for name, options in (("paced", PACE), ("unpaced", ())):
        alone: list[float] = []
        live: list[float] = []
        dead: list[float] = []
        for _ in range(TURNS):
            with tempfile.TemporaryDirectory() as folder:
                alone += _alone(Path(folder), options)
                with_one, without = _with_console(Path(folder), options)
                live += with_one
                dead += without
        base = statistics.median(alone)
        print(
            f"{name}: no console {1000 * base:.1f} ms, live console x {statistics.median(live) / base:.3f}, "
            f"dead console x {statistics.median(dead) / base:.3f} ({len(alone)} iterations each)"
        )
    print(describe())


def _alone(folder: Path, options: tuple[str, ...]) -> list[float]:
    record = folder / "alone.jsonl"
    job = _launch(record, "--iterations", str(WARM_UP + COUNTED), *options)
    assert job.wait(300) == 0
    return _seconds(record)[WARM_UP:]


def _with_console(folder: Path, options: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """(while it lived, when it was dead). Seconds per iteration."""
    record = folder / "console.jsonl"
    with console(folder) as server:
        # More than can be over by the time the console is killed.
        job = _launch(record, "--iterations", "100000", *options, "--console", server.root)
        try:
            until(lambda: len(_seconds(record)) >= WARM_UP + COUNTED, "iterations with a console", 300)
            server.crash()
            killed = len(_seconds(record))
            until(lambda: len(_seconds(record)) >= killed + WARM_UP + COUNTED, "iterations without it", 300)
        finally:
            job.terminate()
            job.wait(60)
    seconds = _seconds(record)
    start = killed + WARM_UP
    return seconds[WARM_UP : WARM_UP + COUNTED], seconds[start : start + COUNTED]


def _launch(record: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "agent", "launch", *GRID, *TINY, "--record", str(record), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _seconds(record: Path) -> list[float]:
    if not record.exists():
        return []
    whole = record.read_text().rpartition("\n")[0].splitlines()
    return [line["seconds"] for line in map(json.loads, whole) if "iteration" in line]


if __name__ == "__main__":
    main()
