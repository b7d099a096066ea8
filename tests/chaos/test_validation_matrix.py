"""A SIGKILL around a step that is overturned: before every op of the iteration that is clipped, of the one
that begins anew because of it, and of one whose update is skipped, of every worker.

`make chaos`. A sample of the same lies in tests/agent/test_late_validation.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import Run, nan_model

pytestmark = pytest.mark.processes

ITERATIONS = 6
CLIPPED = ("--clip-norm", "2.0")
OPTIONS = {"loud": [2], "poisoned": [4]}
OPS = ["F0", "F1", "I0", "I1", "W0", "W1", "R", "O", "V"]
KILLS = [f"W{p}_{s}@{iteration}:{op}" for iteration in (2, 3, 4) for p in range(2) for s in range(2) for op in OPS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    record = tmp_path_factory.mktemp("reference") / "run.jsonl"
    run = nan_model(record, *CLIPPED, "--synchronous", iterations=ITERATIONS, options=OPTIONS)
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("kill", KILLS)
def test_one_death(kill: str, reference: Run, tmp_path: Path) -> None:
    run = nan_model(tmp_path / "run.jsonl", *CLIPPED, "--kill", kill, iterations=ITERATIONS, options=OPTIONS)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    assert run.iterations[-1]["living"] == 3
