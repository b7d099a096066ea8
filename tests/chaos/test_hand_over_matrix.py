"""Deaths at many moments of a hand-over of state that is slow to come: the same bits in all.

16 of the 128 combinations of transport, recipe, victim and moment, such that any two values of two of them meet;
three or four values together do not all. And each recipe where the newcomer has but one peer.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform, Transport
from openrecycle.agent.config.options import Faults, HandOver, Optimization, Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import LocalJob, fault_free_losses

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

GRID: dict[str, Any] = {"stages": 2, "micro_batches": 2}
MODEL = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {"width": 96, "heads": 2, "sequence": 16, "batch": 2})
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"optimization": Optimization(clip_norm=0.5)},
    "synchronous": {"optimization": Optimization(synchronous=True)},
    "keep-finished": {"faults": Faults(keep_finished=True)},
}
VICTIMS = ("W1_1", "W0_1", "W2_1", "W0_0")
MOMENTS = (1, 2, 6, 14)
TWICE = (0, 2, 3, 1)
"""Times two in the field of four elements: a ^ b and a ^ TWICE[b] are two Latin squares that are orthogonal."""
ROWS = [
    (("tagged", "ordered")[(a ^ TWICE[b]) >> 1], recipe, victim, MOMENTS[a ^ b])
    for a, recipe in enumerate(RECIPES)
    for b, victim in enumerate(VICTIMS)
]
BESIDE_ONE = [
    ("tagged", "plain", "W0_0", 1),
    ("ordered", "clipped", "W1_1", 2),
    ("ordered", "synchronous", "W0_0", 6),
    ("tagged", "keep-finished", "W1_0", 14),
]


@pytest.mark.parametrize(
    ("transport", "recipe", "victim", "moment", "pipelines"),
    [*((*row, 3) for row in ROWS), *((*row, 2) for row in BESIDE_ONE)],
)
def test_a_death(transport: Transport, recipe: str, victim: str, moment: int, pipelines: int) -> None:
    """moment: iterations that the others have trained since the newcomer entered the groups."""
    grid = GRID | {"pipelines": pipelines}
    struck: list[str] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "failure" in line and line["failure"]["worker"] == "W1_1" and job.said("ready").count("W1_1") == 1:
            job.start("W1_1")
        if len([i for i in job.iterations if i["generation"] == 3]) >= moment and not struck:
            struck.append(victim)
            job.signal(victim, signal.SIGKILL)
        newest = job.iterations[-1]["generation"] if job.iterations else 0
        complete = victim == "W1_1" or "W1_1" in job.said("formed", generation=newest)
        if newest > 3 and complete and len([i for i in job.iterations if i["generation"] == newest]) >= 4:
            job.stop()

    job = LocalJob(
        **grid,
        workload=MODEL,
        **RECIPES[recipe],
        platform=Platform(transport=transport),
        hand_over=HandOver(at_once=0, rate=4e5),
        timeouts=Timeouts(form=60.0, transfer=20.0, group=21.0),
        kills=("W1_1@1:I1",),
        pace=0.005,
        on_line=act,
    ).run()
    assert struck and job.dead == sorted(["W1_1", victim])
    assert job.losses == fault_free_losses(len(job.losses), **grid, workload=MODEL, **RECIPES[recipe])
    assert job.iterations[-1]["living"] == pipelines * GRID["stages"] - 1
