"""What does reporting cost? The same job without a console, with one, and after that one was killed.

Paced (ops of 10 ms, so that the console's own work on this machine's cores is not what is measured)
and unpaced (where it is). Medians of the time between commits, as ratios to the job without a
console, and the processor time of the launcher and all workers; the runs take turns, so that other
programs disturb all of them alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.agent.consoles import console, until
from tests.agent.runs import TINY
from tests.benchmarks.machine import describe, processor_seconds

GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "4")
PACE = ("--pace", "F=10ms,I=10ms,W=10ms")
WARM_UP, COUNTED, TURNS = 5, 60, 3
MORE_THAN_ENOUGH = "100000"


@dataclass(frozen=True)
class Span:
    """Some iterations of a job: seconds of each, and the processor seconds per iteration of all its
    processes, launcher and workers."""

    seconds: list[float]
    processor: float


def main() -> None:
    print(describe())
    for name, options in (("paced", PACE), ("unpaced", ())):
        spans: dict[str, list[Span]] = {"no console": [], "live console": [], "dead console": []}
        for _ in range(TURNS):
            with tempfile.TemporaryDirectory() as folder:
                spans["no console"].append(_alone(Path(folder), options))
                with_one, without = _with_console(Path(folder), options)
                spans["live console"].append(with_one)
                spans["dead console"].append(without)
        base = _figures(spans["no console"])
        for what, measured in spans.items():
            middle, used = _figures(measured)
            print(
                f"{name:7}, {what}: {1000 * middle:6.1f} ms an iteration (x {middle / base[0]:.3f}), "
                f"{1000 * used:6.1f} ms of processor time (x {used / base[1]:.3f})"
            )
    print(describe())


def _figures(spans: list[Span]) -> tuple[float, float]:
    """Medians: seconds of an iteration, processor seconds of one."""
    return statistics.median(s for span in spans for s in span.seconds), statistics.median(s.processor for s in spans)


def _alone(folder: Path, options: tuple[str, ...]) -> Span:
    record = folder / "alone.jsonl"
    job = _launch(record, "--iterations", MORE_THAN_ENOUGH, *options)
    try:
        return _span(job.pid, record, 0)
    finally:
        job.terminate()
        job.wait(60)


def _with_console(folder: Path, options: tuple[str, ...]) -> tuple[Span, Span]:
    """(while it lived, when it was dead)."""
    record = folder / "console.jsonl"
    with console(folder) as server:
        job = _launch(record, "--iterations", MORE_THAN_ENOUGH, *options, "--console", server.root)
        try:
            live = _span(job.pid, record, 0)
            server.crash()
            return live, _span(job.pid, record, len(_seconds(record)))
        finally:
            job.terminate()
            job.wait(60)


def _span(pid: int, record: Path, start: int) -> Span:
    """Of iterations still to come: COUNTED after WARM_UP after `start`."""
    until(lambda: len(_seconds(record)) >= start + WARM_UP, "iterations to warm up", 300)
    first, used = len(_seconds(record)), processor_seconds(pid)
    until(lambda: len(_seconds(record)) >= first + COUNTED, "iterations to measure", 300)
    last, used = len(_seconds(record)), processor_seconds(pid) - used
    return Span(_seconds(record)[first:last], used / (last - first))


def _launch(record: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "agent", "train", *GRID, *TINY, "--record", str(record), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _seconds(record: Path) -> list[float]:
    if not record.exists():
        return []
    whole = record.read_text().rpartition("\n")[0].splitlines()
    return [line["seconds"] for line in map(json.loads, whole) if "iteration" in line]


if __name__ == "__main__":
    main()
