"""A worker that the plan gives nothing, and that nobody waits for, falls behind, and others die meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 2}
IDLE = Worker(1, 1)


class WithoutIdle(Catalog):
    """Its plans do without IDLE, which is there, for as long as it has a peer."""

    def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
        failed = frozenset(failed)
        without = {*failed, IDLE}
        peers = {w for w in self.job.workers() if w.stage == IDLE.stage}
        return super().plan_for(failed if peers <= without else without)


@pytest.mark.parametrize(
    "dead", [at_length(("W2_0@6:F0",)), ("W0_1@6:F0", "W2_1@6:F0")], ids=["elsewhere", "its-peers"]
)
def test_a_worker_that_falls_behind_is_no_reason_to_end(dead: tuple[str, ...]) -> None:
    """Its pipeline has no worker on the other stage, so that it has nobody to tell anything either. It stands between
    reduction and step of iteration 4 while the others are in 6; with its peers gone it is its stage's last one."""
    lagging = NamedWorkload("tests.agent.lagging:Lagging", {"worker": "W1_1", "iteration": 4, "seconds": 3.0, **TINY})
    job = LocalJob(iterations=12, **GRID, kills=("W1_0@1:F1", *dead), workload=lagging, plans=WithoutIdle).run()
    assert job.losses == fault_free_losses(12, **GRID)
    assert job.dead == sorted(["W1_0", *(kill.partition("@")[0] for kill in dead)])
