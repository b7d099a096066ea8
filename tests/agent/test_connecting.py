"""A peer that dies while others connect to it, which nothing ends for NCCL, costs a retry and no survivor."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport.communicator import Communicator, RendezvousStore
from openrecycle.agent.transport.group import TransferError
from openrecycle.planner.jobs.job import Worker
from tests.agent.connecting import ConnectingGroup
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 2}
ITERATIONS = 8


@pytest.mark.timeout(100)
def test_a_newer_generation_ends_the_wait_for_a_peer_that_died_while_it_connected(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the groups, and exchanges nothing: a thread is left behind, and the next generation connects."""
    monkeypatch.setattr(communicator, "GlooGroup", ConnectingGroup)
    living = [Worker(0, 0), Worker(0, 1), Worker(0, 2)]
    neighbours = {living[0]: [living[1]], living[1]: [living[0], living[2]], living[2]: [living[1]]}
    patient = Timeouts(form=60.0, transfer=700.0, group=800.0)
    mine = {w: Communicator(patient, transport="ordered") for w in living}
    with ThreadPoolExecutor(3) as pool:

        def form(generation: int, me: Worker, members: list[Worker], with_whom: list[Worker]) -> Any:
            return pool.submit(mine[me].form, generation, me, members, store.address, neighbours=with_whom)

        waiting = [form(1, w, living, neighbours[w]) for w in living[:2]]
        gone = form(1, living[2], living, [])  # joins the groups, and never says a word
        assert gone.result(60).generation == 1
        time.sleep(0.2)
        assert not any(f.done() for f in waiting[1:])
        for worker in living[:2]:
            mine[worker].cancel(2)
        with pytest.raises(TransferError, match=golden("generation-1-is-superseded-by")):
            waiting[1].result(10)
        survivors = living[:2]
        again = [form(2, w, survivors, [other for other in survivors if other != w]) for w in survivors]
        assert [f.result(60).generation for f in again] == [2, 2]


@pytest.mark.timeout(100)
def test_what_a_superseded_generation_waits_for_in_its_groups_is_cancelled(store: RendezvousStore) -> None:
    """On a GPU a kernel that still waits for a peer would hold up whoever waits for the device."""
    living = [Worker(0, 0), Worker(0, 1)]
    patient = Timeouts(form=60.0, transfer=700.0, group=800.0)
    mine = {w: Communicator(patient, transport="ordered") for w in living}
    before = threading.enumerate()  # some of other tests may still end
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(mine[living[0]].form, 1, living[0], living, store.address, neighbours=[living[1]])
        silent = pool.submit(mine[living[1]].form, 1, living[1], living, store.address)
        assert silent.result(60).generation == 1
        here = [thread for thread in threading.enumerate() if thread not in before]
        (connecting,) = (thread for thread in here if thread.name == "connect-generation-1")
        connecting.join(0.2)
        assert connecting.is_alive() and not waiting.done()
        mine[living[0]].cancel(2)
        with pytest.raises(TransferError, match=golden("generation-1-is-superseded-by")):
            waiting.result(10)
        connecting.join(20)
        assert not connecting.is_alive()


@pytest.mark.timeout(200)
def test_no_survivor_ends_when_a_worker_dies_while_it_connects(tmp_path: Path) -> None:
    """A death, and another while the survivors of the first one connect."""
    once = tmp_path / "launcher"
    once.write_text(str(os.getpid()))
    workload = NamedWorkload("tests.agent.connecting:Connecting", {"once": str(once), "dies": "W1_1", **TINY})
    job = LocalJob(
        **GRID,
        iterations=ITERATIONS,
        kills=("W0_0@3:F1",),
        platform=Platform(transport="ordered"),
        workload=workload,
        # Whoever hangs for so long is ended: nobody may.
        timeouts=Timeouts(form=10.0, transfer=20.0, group=25.0),
    ).run()
    assert job.dead == ["W0_0", "W1_1"]
    assert job.iterations[-1]["living"] == 4 and job.iterations[-1]["generation"] == 3
    assert job.losses == fault_free_losses(ITERATIONS, **GRID)
