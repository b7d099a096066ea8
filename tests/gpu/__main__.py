"""Tries the product on a GPU, in one command: `python -m tests.gpu`, for a machine with one GPU or more.

Each check runs in a process of its own with a time limit, so that one that fails or hangs stops no other; only without
torch, or a GPU that it can use, nothing else is tried. Then comes a table; the exit status is 1 if a check failed.
Several workers share one GPU: over NCCL where it can do that (2.30 or later), else over gloo by way of the host's
memory. `--device cpu` runs what needs no GPU.

Needed are torch, numpy, pydantic, requests and safetensors; no pytest, no console, no solver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "failed", "skipped"]

LIMITS = {
    "environment": 60,
    "fork": 60,
    "nccl-2": 60,
    "nccl-4": 75,
    "nccl-death": 75,
    "waits": 75,
    "host": 60,
    "train": 180,
    "kills": 120,
    "hand-over": 120,
    "sharded": 120,
    "ranks": 240,
    "mesh": 240,
    "layers": 120,
    "lost-stage": 150,
    "precision": 180,
    "compiled": 240,
    "command": 120,
    "sums": 60,
    "profile": 120,
    "speed": 120,
}
"""Every check, in order, and its seconds."""
BEFORE_JOBS = {"environment", "fork", "nccl-2", "nccl-4", "nccl-death", "waits", "host", "sums"}
NEEDS_CUDA = {"nccl-2", "nccl-4", "nccl-death", "waits"}
ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES, NOTE_LETTERS = 15, 300


@dataclass(frozen=True)
class Result:
    """figure: what was measured, in words. seconds: that the check took."""

    name: str
    status: Status
    figure: str = ""
    note: str = ""
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--transport",
        choices=("auto", "nccl", "gloo"),
        default="auto",
        help="of the jobs that are trained; auto: nccl if four workers can use it here",
    )
    parser.add_argument("--only", action="append", choices=tuple(LIMITS), help="this check; may be given again")
    parser.add_argument("--minutes", type=float, default=20.0, help="what has not begun by then is skipped")
    parser.add_argument("--limit", type=float, help="seconds a check may take at most, instead of each one's own")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for logs and results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        out = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        out.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + 60 * options.minutes
        results: list[Result] = []
        transport = options.transport
        for name in LIMITS:
            if options.only and name not in options.only:
                continue
            if results and (results[0].name, results[0].status) == ("environment", "failed"):
                results.append(Result(name, "skipped", note="the environment lacks what it needs"))
                continue
            if transport == "auto" and name not in BEFORE_JOBS:
                transport = choose(results, options.device)
            results.append(_run(name, options, transport, out, deadline))
            print(f"{name}: {results[-1].status}, {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        (out / "results.json").write_text(as_json(results))
        (out / "results.md").write_text(as_markdown(results))
        print(as_json(results) if options.json else as_markdown(results) if options.markdown else as_text(results))
        for result in results:
            if result.status == "failed":
                print(f"\n-- {result.name}, its last lines:\n{_tail(out / f'{result.name}.log')}", file=sys.stderr)
    return int(any(result.status == "failed" for result in results))


def choose(results: Iterable[Result], device: str) -> str:
    """What jobs go over: NCCL only where this run has seen it work between four workers, one of which died."""
    proven = {result.name for result in results if result.status == "ok"}
    return "nccl" if device == "cuda" and proven >= {"nccl-4", "nccl-death"} else "gloo"


def _run(name: str, options: argparse.Namespace, transport: str, out: Path, deadline: float) -> Result:
    if options.device == "cpu" and name in NEEDS_CUDA:
        return Result(name, "skipped", note="needs a GPU")
    begun = time.monotonic()
    left = deadline - begun
    limit = min(options.limit or LIMITS[name], left)
    if left < 5:
        return Result(name, "skipped", note="no time is left")
    answer = out / f"{name}.json"
    answer.unlink(missing_ok=True)
    path = os.environ.get("PYTHONPATH", "")
    told = {"device": options.device, "transport": transport, "limit": limit, "folder": str(out.resolve())}
    with (out / f"{name}.log").open("w") as log:
        # A session of its own: whatever it starts ends with it.
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.checks", name, str(answer.resolve()), json.dumps(told)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (f"{ROOT}/.src", f"{ROOT}", path)))},
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds may not end
                process.wait(10.0)
    seconds = time.monotonic() - begun
    if status is None:
        return Result(name, "failed", note=f"not done within {limit:g} s", seconds=seconds)
    if not answer.exists():
        note = f"ended with exit status {status}: {_tail(out / f'{name}.log').rpartition(chr(10))[2]}"
        return Result(name, "failed", note=note[:NOTE_LETTERS], seconds=seconds)
    said = json.loads(answer.read_text())
    return Result(name, said["status"], said["figure"], said["note"][:NOTE_LETTERS], seconds)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-TAIL_LINES:])


def as_json(results: Iterable[Result]) -> str:
    return json.dumps([asdict(result) for result in results], indent=1)


def as_text(results: Iterable[Result]) -> str:
    rows = [("check", "result", "time", "figure", "note"), *map(_cells, results)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows)


def as_markdown(results: Iterable[Result]) -> str:
    rows = [("check", "result", "time", "figure", "note"), ("---",) * 5, *map(_cells, results)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _cells(result: Result) -> tuple[str, ...]:
    note = " ".join(result.note.split())
    return result.name, result.status, f"{result.seconds:.0f} s", result.figure, note


if __name__ == "__main__":
    sys.exit(main())
