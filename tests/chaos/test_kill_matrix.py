"""A SIGKILL before every op of one iteration, of every worker: no bit differs, nobody restarts.

`make chaos`. A sample of the same lies in tests/agent/test_survives_kills.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import ITERATIONS, Run, fault_free, small

pytestmark = pytest.mark.processes

OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(4)] + ["R", "O", "V"]
KILLS = [f"W{p}_{s}@{iteration}:{op}" for iteration in (0, 3) for p in range(2) for s in range(3) for op in OPS]


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


@pytest.mark.parametrize("kill", KILLS)
def test_one_death(kill: str, reference: Run, tmp_path: Path) -> None:
    # In the later iteration gradients are reduced in buckets, beside the last backward.
    buckets = ("--bucket-cap-mb", "0.01") if "@3:" in kill else ()
    run = small(tmp_path / "run.jsonl", "--kill", kill, *buckets)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
    # One generation before the death and one after it, with every survivor: none was replaced.
    assert {line["generation"] for line in run.iterations} <= {1, 2}
    assert run.iterations[ITERATIONS - 1]["living"] == 5


@pytest.mark.parametrize("seed", range(20))
def test_a_death_before_any_op_of_an_orphan(seed: int, reference: Run, tmp_path: Path) -> None:
    """The second death hits while the first one's micro-batches run elsewhere."""
    first, second = f"W{seed % 2}_{seed % 3}", f"W{(seed // 2) % 2}_{(seed + 1) % 3}"
    kills = ("--kill", f"{first}@1:{OPS[seed % len(OPS)]}", "--kill", f"{second}@2:{OPS[(5 * seed + 3) % len(OPS)]}")
    run = small(tmp_path / "run.jsonl", *kills)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert run.iterations[-1]["living"] == 4
