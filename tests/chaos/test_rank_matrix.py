"""A SIGKILL before every op of two iterations, of every rank of every worker: no bit differs, nobody restarts.

`make chaos`. Samples of the same lie in tests/agent/test_ranks.py (tensor parallel) and test_fully_sharded.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import Run
from tests.agent.test_fully_sharded import job, on_a_mesh
from tests.agent.test_ranks import two_ranks

pytestmark = pytest.mark.processes

OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(3)] + ["R", "O", "V"]
PLACES = [(rank, p, s, i) for rank in range(2) for p in range(3) for s in range(2) for i in (2, 3)]
KILLS = [f"W{p}_{s}.{rank}@{i}:{op}" for rank, p, s, i in PLACES for op in OPS]


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


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = job(tmp_path_factory.mktemp("sharded") / "reference.jsonl")
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("kill", [kill for kill in KILLS if kill[:4] in ("W0_1", "W1_0", "W2_1")])
def test_the_death_of_a_rank_that_has_rows_of_every_parameter(kill: str, sharded: Run, tmp_path: Path) -> None:
    run = job(tmp_path / "run.jsonl", "--kill", kill)
    assert run.status == 0, run.errors
    assert run.losses == sharded.losses and run.final == sharded.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    assert run.iterations[-1]["living"] == 5


# Of a mesh of two dimensions each rank once: those of a line wait for each other, and for those of other lines.
RANKS_OF_A_MESH = ("W0_1", "W1_0.1", "W1_1.2", "W0_0.3")
OPS_OF_A_MESH = [op for op in OPS if "2" not in op]


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = on_a_mesh(tmp_path_factory.mktemp("mesh") / "reference.jsonl", grid="2x2x2")
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("kill", [f"{rank}@1:{op}" for rank in RANKS_OF_A_MESH for op in OPS_OF_A_MESH])
def test_the_death_of_a_rank_of_a_mesh(kill: str, meshed: Run, tmp_path: Path) -> None:
    run = on_a_mesh(tmp_path / "run.jsonl", "--kill", kill, grid="2x2x2")
    assert run.status == 0, run.errors
    assert run.losses == meshed.losses and run.final == meshed.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    assert run.iterations[-1]["living"] == 3
