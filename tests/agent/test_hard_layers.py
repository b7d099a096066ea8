"""Moving buffers, a stage that can't be split, bf16 and fast sums, in real processes of which one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import Run, forked
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "3", "--iterations", "5")


def _run(record: Path, *arguments: str) -> Run:
    run = forked(record, *GRID, "--workload", "tests.agent.mixed_layers:MixedLayers", *arguments)
    assert run.status == 0, run.errors
    return run


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("mixed_layers") / "run.jsonl", "--autocast", "bf16")


@pytest.mark.chaos
def test_bf16_and_moving_buffers_survive_a_death_with_the_same_bits(fault_free: Run, tmp_path: Path) -> None:
    # W1_0 runs forwards that move its buffers, and dies; W0_0 runs them again.
    run = _run(tmp_path / "run.jsonl", "--autocast", "bf16", "--kill", "W1_0@2:I1")
    assert len(run.failures) == 1
    assert run.losses == fault_free.losses
    assert run.final == fault_free.final


def test_what_can_not_be_split_is_said_once_with_the_reason(fault_free: Run) -> None:
    warnings = [line["warning"] for line in fault_free.lines if "warning" in line]
    assert len(warnings) == 1 and warnings[0].startswith(golden("stage-1-the-backward-is"))
    assert golden("no-matrix-product") in warnings[0] and warnings[0] in fault_free.errors


def test_fast_sums_survive_a_death_nearly_the_same(fault_free: Run, tmp_path: Path) -> None:
    run = _run(tmp_path / "run.jsonl", "--mode", "fast", "--autocast", "bf16", "--kill", "W1_0@2:I1")
    assert len(run.failures) == 1
    ours, exact = ([float.fromhex(loss) for loss in r.losses] for r in (run, fault_free))
    assert ours == pytest.approx(exact, rel=1e-3)
