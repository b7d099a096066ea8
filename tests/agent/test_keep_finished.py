"""In-step recovery: what survivors have finished of the iteration in flight is kept, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from openrecycle.agent.config.options import Faults, Optimization
from tests.agent.local_jobs import LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 4}
ITERATIONS = 5
KEEP = Faults(keep_finished=True)


@pytest.fixture(scope="module")
def losses() -> list[str]:
    return fault_free_losses(ITERATIONS, **GRID)


def _run(*kills: str, **options: Any) -> LocalJob:
    return LocalJob(**GRID, iterations=ITERATIONS, kills=kills, faults=KEEP, optimization=Optimization(**options)).run()


@pytest.mark.parametrize(
    "kill", [at_length("W1_1@2:F0"), at_length("W0_1@2:I2"), at_length("W1_0@2:W3"), "W1_0@2:R", at_length("W0_1@2:O")]
)
def test_the_bits_stay(kill: str, losses: list[str]) -> None:
    """Wherever it falls: nothing finished yet, half of it, sums that a reduction has begun to mix, a stage that
    has stepped."""
    job = _run(kill)
    assert job.losses == losses and job.dead == [kill[:4]]
    assert len({m["run"] for _, m in job.messages if m["kind"] == "redo" and m["generation"] == 2}) <= 1


def test_what_a_survivor_has_finished_is_kept(losses: list[str]) -> None:
    """When W0_1 is at I3 it has the activations of F3, which W0_0, for want of memory, ran after its W1."""
    job = _run("W0_1@2:I3")
    assert job.losses == losses
    (kept,) = [m["kept"] for w, m in job.messages if w == "W0_0" and m["kind"] == "redo" and m["generation"] == 2]
    assert kept >= 2


@pytest.mark.chaos
def test_a_second_death_while_the_rest_is_done(losses: list[str]) -> None:
    grid = GRID | {"pipelines": 3}
    job = LocalJob(**grid, iterations=ITERATIONS, kills=("W1_1@2:W3", "W0_0@2:I3"), faults=KEEP).run()
    assert job.losses == fault_free_losses(ITERATIONS, **grid)
    assert job.dead == ["W0_0", "W1_1"]


@pytest.mark.chaos
def test_with_a_validation_that_is_still_out(losses: list[str]) -> None:
    """Clipping: the step before may be put right in the agreement, and then nothing of this iteration counts."""
    kept = LocalJob(
        **GRID, iterations=ITERATIONS, kills=("W1_1@2:F0",), faults=KEEP, optimization=Optimization(clip_norm=0.5)
    ).run()
    plain = LocalJob(**GRID, iterations=ITERATIONS, optimization=Optimization(clip_norm=0.5)).run()
    assert kept.losses == plain.losses != losses
