"""Deaths at many moments of a hand-over of state that is slow to come: the same bits in all."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from agent.devices import Platform
from agent.recipe import HandOver, Recipe
from agent.timeouts import Timeouts
from agent.workload import NamedWorkload
from tests.agent.local_jobs import LocalJob, fault_free_losses

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("local-jobs"), pytest.mark.timeout(600)]

GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 2}
MODEL = NamedWorkload("agent.examples.gpt:Gpt", {"width": 96, "heads": 2, "sequence": 16, "batch": 2})
RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(clip_norm=0.5),
    "synchronous": Recipe(staggered=False),
    "keep-finished": Recipe(keep_finished=True),
}


@pytest.mark.parametrize("moment", [1, 2, 6, 14])
@pytest.mark.parametrize("victim", ["W1_1", "W0_1", "W2_1", "W0_0"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("transport", ["tagged", "ordered"])
def test_a_death(transport: str, recipe: str, victim: str, moment: int) -> None:
    """moment: iterations that the others have trained since the newcomer entered the groups."""
    struck: list[str] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "failure" in line and line["failure"]["worker"] == "W1_1" and not job.said("ready")[6:]:
            job.start("W1_1")
        if len([i for i in job.iterations if i["epoch"] == 3]) >= moment and not struck:
            struck.append(victim)
            job.signal(victim, signal.SIGKILL)
        newest = job.iterations[-1]["epoch"] if job.iterations else 0
        complete = victim == "W1_1" or "W1_1" in job.said("formed", epoch=newest)
        if newest > 3 and complete and len([i for i in job.iterations if i["epoch"] == newest]) >= 4:
            job.stop()

    job = LocalJob(
        **GRID,
        workload=MODEL,
        recipe=RECIPES[recipe],
        platform=Platform.of("cpu", transport),
        hand_over=HandOver(at_once=0, rate=4e5),
        timeouts=Timeouts(form=60.0, transfer=20.0, group=21.0),
        kills=("W1_1@1:I1",),
        pace=0.005,
        on_line=act,
    ).run()
    assert struck and job.dead == sorted(["W1_1", victim])
    assert job.losses == fault_free_losses(len(job.losses), **GRID, workload=MODEL, recipe=RECIPES[recipe])
    assert job.iterations[-1]["living"] == 5
