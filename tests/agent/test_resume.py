"""Jobs that end and go on from a checkpoint, on real processes: the bits of one that never ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.options import Optimization
from tests.agent.consoles import until
from tests.agent.launches import Launched
from tests.agent.local_jobs import uncut
from tests.agent.runs import TINY, Run, forked
from tests.conftest import NO_BYTECODE
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "3", *TINY, "--clip-norm", "1.0")
ITERATIONS = 8


def _run(record: Path, *arguments: str, iterations: int = ITERATIONS) -> Run:
    return forked(record, *GRID, "--iterations", str(iterations), *arguments)


@pytest.fixture(scope="module")
def unbroken() -> Run:
    clipped = Optimization(clip_norm=1.0)
    job = uncut(pipelines=2, stages=2, micro_batches=3, iterations=ITERATIONS, optimization=clipped)
    return Run(0, "", tuple(job.lines))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, of iterations 2 and 4, of a job that ended after four."""
    folder = tmp_path_factory.mktemp("half")
    run = _run(folder / "run.jsonl", "--checkpoint", str(folder / "ck"), "--checkpoint-every", "2", iterations=4)
    assert run.status == 0, run.errors
    written = [line["checkpoint"] for line in run.lines if "checkpoint" in line]
    assert written == [{"iteration": 2, "problem": None}, {"iteration": 4, "problem": None}]
    return folder / "ck"


def _copy(folder: Path, to: Path) -> str:
    subprocess.run(["cp", "-r", str(folder), str(to)], check=True)
    return str(to)


def test_a_resumed_job_has_the_bits_of_an_unbroken_one(unbroken: Run, half: Path, tmp_path: Path) -> None:
    checkpoints = _copy(half, tmp_path / "ck")
    # A death soon after the start: nothing depends on the workers that wrote.
    arguments = ("--checkpoint", checkpoints, "--resume", "newest", "--kill", "W0_1@5:I1")
    run = _run(tmp_path / "run.jsonl", *arguments)
    assert run.status == 0, run.errors
    assert run.losses == unbroken.losses[4:] and run.final == unbroken.final
    assert [line["iteration"] for line in run.iterations] == [4, 5, 6, 7]
    assert [c.iteration for c in whole_checkpoints(tmp_path / "ck")] == [8, 4, 2]
    # As a scheduler repeats a command whose weights found no room.
    weights = ("--resume", "if-any", "--weights", str(tmp_path / "weights"))
    again = _run(tmp_path / "again.jsonl", "--checkpoint", checkpoints, *weights)
    assert again.status == 0, again.errors
    assert not again.iterations and again.final == unbroken.final
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == [f"layer{i}.safetensors" for i in range(2)]


def test_a_damaged_checkpoint_is_passed_over_only_when_asked_for(unbroken: Run, half: Path, tmp_path: Path) -> None:
    checkpoints = _copy(half, tmp_path / "ck")
    part = tmp_path / "ck" / "iteration-0000000004" / "stage-1" / "share-1" / "optimizer.safetensors"
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    refused = _run(tmp_path / "refused.jsonl", "--checkpoint", checkpoints, "--resume", "newest")
    assert refused.status == 2 and not refused.lines
    assert (
        "error: --resume: got 'newest'" in refused.errors and "share-1/optimizer.safetensors: damaged" in refused.errors
    )
    assert "Traceback" not in refused.errors
    run = _run(tmp_path / "run.jsonl", "--checkpoint", checkpoints, "--resume", "newest-intact")
    assert run.status == 0, run.errors
    assert run.losses == unbroken.losses[2:] and run.final == unbroken.final


def test_another_number_of_pipelines_goes_on_from_the_same_parameters(half: Path, tmp_path: Path) -> None:
    checkpoints = _copy(half, tmp_path / "ck")
    arguments = ("--pipelines", "3", "--micro-batches", "2", "--checkpoint", checkpoints, "--resume", "4")
    run = _run(tmp_path / "run.jsonl", *arguments, iterations=6)
    assert run.status == 0, run.errors
    assert golden("2-x-3-micro-batches-an") in run.errors
    assert [line["living"] for line in run.iterations] == [6, 6]


def test_the_whole_job_is_killed_while_it_writes(unbroken: Run, tmp_path: Path) -> None:
    """Launcher, workers and their server at once, with checkpoints under way all the time."""
    folder, record = tmp_path / "ck", tmp_path / "killed.jsonl"
    arguments = (
        "--iterations",
        "5000",
        "--checkpoint",
        str(folder),
        "--checkpoint-every",
        "1",
        "--record",
        str(record),
    )
    log = tmp_path / "log.txt"
    job = Launched("train", *GRID, *arguments, errors=log, alone=True)
    until(lambda: "checkpoint of iteration 3 is written" in log.read_text(), "checkpoints")
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)
    newest = whole_checkpoints(folder)
    assert newest and newest[0].iteration >= 3, log.read_text()
    # Where an unbroken job would have ended, or just after what is there.
    last = max(ITERATIONS, newest[0].iteration + 1)
    run = _run(
        tmp_path / "run.jsonl", "--checkpoint", str(folder), "--resume", str(newest[-1].iteration), iterations=last
    )
    assert run.status == 0, run.errors
    begun = newest[-1].iteration
    assert run.losses[: max(0, ITERATIONS - begun)] == unbroken.losses[begun:]
    if last == ITERATIONS:
        assert run.final == unbroken.final


@pytest.mark.chaos
def test_a_full_disk_is_a_warning(unbroken: Run, tmp_path: Path) -> None:
    """No file may grow beyond 16 KB; a stage's part is larger."""
    record = tmp_path / "run.jsonl"
    arguments = ("--iterations", str(ITERATIONS), "--checkpoint", str(tmp_path / "ck"), "--checkpoint-every", "4")
    done = subprocess.run(
        [sys.executable, "-m", "agent", "train", *GRID, *arguments, "--record", str(record)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14)),
        env=os.environ | NO_BYTECODE,
    )
    run = Run(done.returncode, done.stderr, tuple(map(json.loads, record.read_text().splitlines())))
    assert run.status == 0, run.errors
    assert run.losses == unbroken.losses and run.final == unbroken.final
    for iteration in (4, 8):
        assert golden("warning-no-checkpoint-of-iteration", iteration, tmp_path) in run.errors
    assert golden("cant-be-written-oserror-errno") in run.errors
    assert "Traceback" not in run.errors
    assert whole_checkpoints(tmp_path / "ck") == []
    assert not list((tmp_path / "ck").rglob("*.safetensors"))
