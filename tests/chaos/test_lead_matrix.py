"""The launcher that leads gets a SIGKILL before every op of two iterations of a small grid: no bit differs, and no
worker of another node ends.

`make chaos`. Samples lie in tests/agent/test_lead_lost.py.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.agent.consoles import until
from tests.agent.launches import Launched
from tests.agent.node_runs import free_port, kill_group
from tests.agent.node_runs import lines as lines_of
from tests.agent.runs import TINY, Run, forked
from tests.agent.test_ranks import TWO_RANKS

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(2)] + ["R", "O", "V"]
NODES = ("--pipelines", "3", "--stages", "2", "--micro-batches", "2", "--iterations", "8")


SHARDED = (*TINY, "--optimizer-sharding", "zero1")


@functools.cache
def calm(folder: Path, model: tuple[str, ...]) -> Run:
    run = forked(folder / f"calm-leads-{len(model)}.jsonl", *NODES, *model)
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize(
    ("where", "op", "model"),
    [
        *((f"{name}@{i}", op, TINY) for op in OPS for name in ("W0_1", "W1_0", "W2_1") for i in (2, 3)),
        ("W1_0@3", "O", SHARDED),
        ("W1_0@3", "W1", TWO_RANKS),
    ],
)
def test_the_lead_is_lost(
    where: str, op: str, model: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pipeline 0 is on the node that leads, and ends with it."""
    victim, address = tmp_path / "victim", f"127.0.0.1:{free_port()}"
    victim.touch()
    job = (*NODES, *model, "--nodes", "3", "--lead", address, "--kill", f"{where}:{op}")

    def begin(rank: int) -> Launched:
        own = ("--node-rank", str(rank), "--record", str(tmp_path / f"run{rank}.jsonl"))
        command = (str(victim), "train", *job, *own)
        return Launched(*command, errors=tmp_path / f"node{rank}.log", alone=True, module="tests.chaos.struck")

    launchers = [begin(rank) for rank in range(3)]
    victim.write_text(str(launchers[0].pid))
    try:
        for rank in (1, 2):
            assert launchers[rank].wait(120) == 0, (tmp_path / f"node{rank}.log").read_text()
        until(lambda: launchers[0].poll() is not None, "the end of the lead")
        records = [Run(0, "", tuple(lines_of(tmp_path, f"run{rank}.jsonl"))) for rank in (1, 2)]
    finally:
        for launcher in launchers:
            kill_group(launcher)
    (run,) = [record for record in records if record.lines]
    expected = calm(tmp_path_factory.getbasetemp(), model)
    assert run.losses == expected.losses and run.final == expected.final
    assert sorted(failure["worker"] for failure in run.failures) == ["W0_0", "W0_1"]
