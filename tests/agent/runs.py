"""Real jobs for tests: `openrecycle train` as a user runs it, and its record."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent.launches import Launched
from tests.agent.local_jobs import uncut

GRID = ("--pipelines", "2", "--stages", "3", "--micro-batches", "4")
# Where the shape does not matter.
SQUARE = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2")
TINY = ("--workload-options", '{"width": 32, "heads": 2, "sequence": 16, "batch": 2}')
ITERATIONS = 6


@dataclass(frozen=True)
class Run:
    """What a job left behind."""

    status: int
    errors: str
    lines: tuple[dict[str, Any], ...]

    @property
    def iterations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "iteration" in line]

    @property
    def losses(self) -> list[str]:
        return [line["loss"] for line in self.iterations]

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [line["failure"] for line in self.lines if "failure" in line]

    @property
    def final(self) -> dict[str, Any]:
        final: dict[str, Any] = self.lines[-1]["final"]
        return final


def launch(record: Path, *arguments: str, timeout: float = 120.0) -> Run:
    """Runs a job to its end; its own time-out ends it before pytest's does."""
    done = subprocess.run(
        [sys.executable, "-m", "agent", "train", "--record", str(record), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return _run(done.returncode, done.stderr, record)


def forked(record: Path, *arguments: str, timeout: float = 120.0) -> Run:
    """As `launch`, in a process that need not import torch first."""
    errors = record.with_suffix(".errors")
    process = Launched("train", "--record", str(record), *arguments, errors=errors)
    try:
        status = process.wait(timeout)
    finally:
        process.end()
    return _run(status, errors.read_text(), record)


def _run(status: int, errors: str, record: Path) -> Run:
    lines = tuple(map(json.loads, record.read_text().splitlines())) if record.exists() else ()
    return Run(status, errors, lines)


def small(record: Path, *arguments: str, iterations: int = ITERATIONS) -> Run:
    """The small grid with the tiny model."""
    return forked(record, *GRID, *TINY, "--iterations", str(iterations), *arguments)


def nan_model(record: Path, *arguments: str, iterations: int, options: dict[str, Any]) -> Run:
    """Two pipelines of two stages whose gradients misbehave as `options` say (see tests.agent.nan_model)."""
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", str(iterations))
    task = ("--workload", "tests.agent.nan_model:NanModel", "--workload-options", json.dumps(options))
    return forked(record, *grid, *task, *arguments)


@functools.cache
def fault_free(*, iterations: int = ITERATIONS, **grid: Any) -> Run:
    """What others are compared with, once per test process: of the small grid, or of another one. Nobody cuts it into
    stages: the same bits, from a third of the processes."""
    job = uncut(iterations=iterations, **({"pipelines": 2, "stages": 3, "micro_batches": 4} | grid))
    assert len(job.losses) == iterations and not job.dead
    return Run(0, "", tuple(job.lines))
