"""A SIGKILL before every op of two iterations, of every worker, where the optimizer's state is sharded: no bit differs
from the job without shards.

`make chaos`. In the first of the two, steps are put right after the fact; in the second a worker that has returned
lacks its share of the state. A sample of the same lies in tests/agent/test_sharding.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import Run, forked
from tests.agent.test_sharding import GRID, LATE, SLOWLY, TINY, sharded

pytestmark = pytest.mark.processes

OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(3)] + ["R", "O", "V"]
FIRST = [f"W{p}_{s}@1:{op}" for p in range(3) for s in range(2) for op in OPS]
SECOND = [f"W{p}_{s}@4:{op}" for p in (0, 2) for s in range(2) for op in OPS]
BEFORE = ("--kill", "W1_0@1:F2", "--rejoin", "W1_0@2", "--kill", "W1_1@1:F2", "--rejoin", "W1_1@2")
PACED = ("--pace", "F=20ms,I=20ms,W=20ms")
"""What only one worker has, since the other owner has died, comes to a third before the next death."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = forked(tmp_path_factory.mktemp("whole") / "run.jsonl", *GRID, *TINY, *LATE)
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("kill", FIRST)
def test_the_death_of_a_worker(kill: str, reference: Run, tmp_path: Path) -> None:
    run = sharded(tmp_path / "run.jsonl", "--kill", kill)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    assert run.iterations[-1]["living"] == 5


@pytest.mark.parametrize("kill", SECOND)
def test_a_death_while_another_takes_its_share(kill: str, reference: Run, tmp_path: Path) -> None:
    """Whom the newcomer has its share from may be the one that dies: the others keep all of it until it is there."""
    run = sharded(tmp_path / "run.jsonl", *BEFORE, "--kill", kill, *SLOWLY, *PACED)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert run.failures[-1]["worker"] == kill[:4]
