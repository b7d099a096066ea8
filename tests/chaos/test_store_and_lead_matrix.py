"""The store, or the launcher that leads, gets a SIGKILL before every op of two iterations of a small grid: no bit
differs, and no worker of another node ends.

`make chaos`. Samples lie in tests/agent/test_store_death.py and test_lead_lost.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.workers import worker
from tests.agent.consoles import until
from tests.agent.launches import Launched
from tests.agent.local_jobs import ENDLESS, LocalJob, fault_free_losses
from tests.agent.node_runs import free_port, kill_group
from tests.agent.node_runs import lines as lines_of
from tests.agent.runs import TINY, Run, forked
from tests.chaos.struck import strike

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
OPS = [f"{kind}{micro_batch}" for kind in "FIW" for micro_batch in range(2)] + ["R", "O", "V"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", [f"W{p}_{s}@{i}" for p in range(2) for s in range(2) for i in (2, 3)])
def test_the_store_is_lost(where: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is needed when groups are formed: W1_1 dies an iteration later. However late the launcher hears of that
    iteration, the job has not ended by then."""
    victim = tmp_path / "victim"

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 4:
            job.signal("W1_1", 9)
        if "failure" in line:
            job.launcher.end_soon()

    monkeypatch.setattr(worker, "main", strike(victim))
    job = LocalJob(**GRID, iterations=ENDLESS, kills=(f"{where}:{op}",), on_line=act)
    first = job.launcher.pids["store"]
    victim.write_text(str(first))
    job.run()
    monkeypatch.undo()
    assert job.launcher.pids.get("store") != first
    assert job.losses == fault_free_losses(len(job.losses), **GRID) and job.dead == ["W1_1"]


NODES = ("--pipelines", "3", "--stages", "2", "--micro-batches", "2", "--iterations", "8")


@functools.cache
def calm(folder: Path) -> Run:
    run = forked(folder / "calm-leads.jsonl", *NODES, *TINY)
    assert run.status == 0, run.errors
    return run


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", [f"{name}@{i}" for name in ("W0_1", "W1_0", "W2_1") for i in (2, 3)])
def test_the_lead_is_lost(where: str, op: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pipeline 0 is on the node that leads, and ends with it."""
    victim, address = tmp_path / "victim", f"127.0.0.1:{free_port()}"
    victim.touch()
    job = (*NODES, *TINY, "--nodes", "3", "--lead", address, "--kill", f"{where}:{op}")

    def begin(rank: int) -> Launched:
        own = ("--node-rank", str(rank), "--record", str(tmp_path / f"run{rank}.jsonl"))
        command = (str(victim), "launch", *job, *own)
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
    expected = calm(tmp_path_factory.getbasetemp())
    assert run.losses == expected.losses and run.final == expected.final
    assert sorted(failure["worker"] for failure in run.failures) == ["W0_0", "W0_1"]
