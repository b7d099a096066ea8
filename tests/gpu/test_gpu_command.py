"""The command that tries the product on a GPU, as far as a machine without one can run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from openrecycle.planner.jobs.job import Worker
from tests.gpu import ranks
from tests.gpu.__main__ import Result, choose

pytestmark = pytest.mark.processes


def _gpu(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--json", *arguments], capture_output=True, text=True, timeout=170
    )
    try:
        return done.returncode, json.loads(done.stdout)
    except json.JSONDecodeError:
        pytest.fail(done.stderr)


@pytest.mark.chaos
def test_it_trains_through_a_death_and_says_so(tmp_path: Path) -> None:
    only = [part for name in ("environment", "nccl-4", "train", "profile") for part in ("--only", name)]
    status, results = _gpu("--device", "cpu", "--out", str(tmp_path), *only)
    assert [(r["name"], r["status"]) for r in results] == [
        ("environment", "ok"),
        ("nccl-4", "skipped"),
        ("train", "ok"),
        ("profile", "ok"),
    ], results
    assert status == 0
    assert json.loads((tmp_path / "results.json").read_text()) == results
    table = (tmp_path / "results.md").read_text().splitlines()
    assert len(table) == 6 and all(line.count(" | ") == 4 for line in table)
    # What was compared: four losses, and what the parameters were at the end.
    *losses, final = json.loads((tmp_path / "reference-gloo.json").read_text())
    assert len(set(losses)) == 4 and final["iterations"] == 4


def test_a_check_that_hangs_stops_no_other(tmp_path: Path) -> None:
    """Nothing is imported in so little time."""
    status, results = _gpu(
        "--device", "cpu", "--limit", "0.1", "--out", str(tmp_path), "--only", "host", "--only", "speed"
    )
    assert status == 1 and [r["status"] for r in results] == ["failed", "failed"]


@pytest.mark.chaos
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_fails_and_says_why(tmp_path: Path) -> None:
    status, results = _gpu("--only", "environment", "--only", "fork", "--out", str(tmp_path))
    assert status == 1 and [r["status"] for r in results] == ["failed", "skipped"]
    assert torch.__version__ in results[0]["note"]


@pytest.mark.parametrize(
    ("device", "results", "transport"),
    [
        ("cuda", {"nccl-2": "ok", "nccl-4": "ok", "nccl-death": "ok"}, "nccl"),
        ("cuda", {"nccl-2": "ok", "nccl-4": "ok", "nccl-death": "failed"}, "gloo"),
        ("cuda", {"nccl-2": "ok", "nccl-4": "skipped", "nccl-death": "skipped"}, "gloo"),
        ("cuda", {}, "gloo"),
        ("cpu", {"nccl-4": "ok", "nccl-death": "ok"}, "gloo"),
    ],
)
def test_jobs_go_over_what_has_been_seen_to_work(device: str, results: dict[str, Any], transport: str) -> None:
    assert choose([Result(name, status) for name, status in results.items()], device) == transport


@pytest.mark.chaos
@pytest.mark.parametrize("transport", ["ordered", "tagged"])
def test_groups_after_a_death(transport: Any) -> None:
    """What the check of NCCL asks of a transport, of gloo."""
    members = tuple(Worker(pipeline, stage) for pipeline in range(2) for stage in range(2))
    found = ranks.run(ranks.death, members, "cpu", transport)
    assert [sorted(one) for one in found] == [["again", "halted", "woken"]] * 3 + [[]]


@pytest.mark.chaos
def test_a_rank_that_finds_a_wrong_number_is_heard() -> None:
    """So that a check of numbers can fail."""
    with pytest.raises(ranks.RanksError, match="rank 1: RuntimeError: a message arrived changed"):
        ranks.run(_wrong, (Worker(0, 0), Worker(1, 0)), "cpu", "tagged")


def _wrong(rank: ranks.Rank) -> dict[str, float]:
    rank.take()
    if rank.number == 1:
        raise RuntimeError("a message arrived changed")
    return {}
