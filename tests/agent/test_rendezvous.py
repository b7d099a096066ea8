"""Whole jobs over the product's NCCL group, with gloo in NCCL's place: same bits, through deaths and a return."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 3, "micro_batches": 3}
ITERATIONS = 5


@pytest.mark.parametrize(
    "kills",
    [
        ("W0_1@2:I1",),
        at_length(()),
        at_length(("W1_0@1:F1",)),
        at_length(("W1_2@2:R",)),
        at_length(("W0_2@2:O",)),
        at_length(("W0_1@1:W1", "W1_0@3:F2")),
    ],
)
def test_the_same_bits_through_deaths(kills: tuple[str, ...], tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(str(os.getpid()))
    workload = NamedWorkload("tests.agent.rendezvous:Rendezvous", {"launcher": str(launcher), **TINY})
    job = LocalJob(
        **GRID, iterations=ITERATIONS, kills=kills, platform=Platform(transport="ordered"), workload=workload
    ).run()
    assert job.losses == fault_free_losses(ITERATIONS, **GRID)
    assert (tmp_path / "used").exists()
    assert job.dead == sorted(kill[:4] for kill in kills)
