"""A SIGKILL before every op of one iteration, of every rank of every worker: no bit differs, nobody restarts.

`make chaos`. A sample of the same lies in tests/agent/test_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import Run
from tests.agent.test_ranks import two_ranks

pytestmark = pytest.mark.processes

OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(3)] + ["R", "O", "V"]
KILLS = [f"W{p}_{s}.{rank}@2:{op}" for rank in range(2) for p in range(3) for s in range(2) for op in OPS]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = two_ranks(tmp_path_factory.mktemp("ranks") / "reference.jsonl", grid="3x2")
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("kill", KILLS)
def test_the_death_of_a_rank(kill: str, reference: Run, tmp_path: Path) -> None:
    run = two_ranks(tmp_path / "run.jsonl", "--kill", kill, grid="3x2")
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    assert {line["generation"] for line in run.iterations} <= {1, 2}
    assert run.iterations[-1]["living"] == 5
