"""Real jobs whose messages are told apart by their order alone: the bits of those with tags."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import Faults, Optimization
from tests.agent import own_jobs
from tests.agent.local_jobs import LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

ORDERED = Platform(transport="ordered")
GRID: dict[str, Any] = {"pipelines": 2, "stages": 3, "micro_batches": 3}
ITERATIONS = 5


@functools.cache
def tagged_losses(clip_norm: float | None = None) -> list[str]:
    """Of the job that nothing happens to, with tags."""
    return fault_free_losses(ITERATIONS, **GRID, optimization=Optimization(clip_norm=clip_norm))


def _ordered(
    *kills: str, optimization: Optimization | None = None, faults: Faults | None = None, **changes: Any
) -> LocalJob:
    grid = GRID | {"iterations": ITERATIONS} | changes
    return LocalJob(**grid, kills=kills, optimization=optimization, faults=faults, platform=ORDERED).run()


@pytest.mark.chaos
@pytest.mark.parametrize(
    "kills", [at_length(()), at_length(("W0_1@2:I1",)), ("W1_0@1:F2", "W0_2@3:R"), at_length(("W1_1@2:O",))]
)
def test_deaths(kills: tuple[str, ...]) -> None:
    """None; in the backward; one after the other, in a forward and in the reduction; between reduction and step."""
    job = _ordered(*kills)
    assert job.losses == tagged_losses()
    assert job.dead == sorted(kill[:4] for kill in kills)


@pytest.mark.chaos
def test_only_what_is_lost_is_run_again() -> None:
    """At the last stage's last I no stage can have stepped; how far the other pipeline is depends on the day.
    Every part that can be left over is tried in test_ordered_transfers."""
    grid = {"stages": 2, "micro_batches": 8}
    job = _ordered("W1_1@2:I7", faults=Faults(keep_finished=True), **grid)
    assert job.losses == fault_free_losses(ITERATIONS, **(GRID | grid)) and job.dead == ["W1_1"]
    (redone,) = {m["run"] for _, m in job.messages if m["kind"] == "redo" and m["generation"] == 2}
    assert 8 <= redone <= 16


@pytest.mark.chaos
def test_steps_that_are_put_right() -> None:
    """Steps taken before their validation, then clipped: iterations in flight are passed on and run again."""
    job = _ordered("W1_2@2:V", optimization=Optimization(clip_norm=0.3))
    assert job.losses == tagged_losses(0.3) != tagged_losses()
    assert any("validation" in line and line["validation"]["redone"] for line in job.lines)


def test_a_worker_returns() -> None:
    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "failure" in line:
            job.start("W1_1")
        if len([i for i in job.iterations if i["generation"] == 3]) >= 3:
            job.stop()

    changes: dict[str, Any] = {"stages": 2, "micro_batches": 2}
    job = _ordered("W1_1@1:I1", on_line=act, iterations=10_000, **changes)
    assert job.losses == fault_free_losses(len(job.losses), **(GRID | changes))
    assert job.iterations[-1]["living"] == 4


def test_several_tensors_follow_each_other() -> None:
    """Floats, integers and a mask, of which one has a gradient; through the public face."""
    parts: dict[str, Any] = {
        "stages": [own_jobs.Embedded, own_jobs.Scored],
        "data": own_jobs.ids_data,
        "loss": own_jobs.own_loss,
    }
    tagged = own_jobs.trainer(**parts).fit(iterations=3)
    ordered = own_jobs.trainer(**parts, platform=ORDERED, faults=Faults(kill=["W1_0@1:I0"])).fit(iterations=3)
    assert ordered.losses == tagged.losses and ordered.parameters_sha256 == tagged.parameters_sha256
    assert [recovery.worker for recovery in ordered.recoveries] == ["W1_0"]
