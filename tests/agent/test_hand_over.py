"""A worker that joins takes a state that is slow to come: the others train on, and nothing shows in the bits."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from openrecycle.agent.config.options import HandOver, Optimization, Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import LocalJob, fault_free_losses
from tests.conftest import at_length

pytestmark = pytest.mark.processes

# Some 1.6 MB of state a stage, which take 8 s to come, and a time-out for transfers that is shorter.
WIDE = {"width": 96, "heads": 2, "sequence": 16, "batch": 2}
GRID: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 2}
ALONE = GRID | {"pipelines": 2}
"""Its only peer runs all micro-batches of the stage meanwhile."""
SLOW = HandOver(at_once=0, rate=2e5)
SHORT = Timeouts(form=60.0, transfer=5.0, group=6.0)


def _job(pace: float = 0.02, grid: dict[str, Any] = GRID, **options: Any) -> LocalJob:
    return LocalJob(
        **grid,
        workload=NamedWorkload("openrecycle.agent.examples.gpt:Gpt", WIDE),
        hand_over=SLOW,
        timeouts=SHORT,
        kills=("W1_1@1:I1",),
        pace=pace,
        **options,
    )


def _losses(iterations: int, grid: dict[str, Any] = GRID, **options: Any) -> list[str]:
    return fault_free_losses(
        iterations, **grid, workload=NamedWorkload("openrecycle.agent.examples.gpt:Gpt", WIDE), **options
    )


def _restart_at_the_first_failure(job: LocalJob, line: dict[str, Any]) -> None:
    if "failure" in line and line["failure"]["worker"] == "W1_1" and job.said("ready").count("W1_1") == 1:
        job.start("W1_1")


def _trained_while_it_came(job: LocalJob, generation: int) -> int:
    """Iterations that the others committed in the generation before the newcomer had its state."""
    at = next(
        i
        for i, (w, m) in enumerate(job.messages)
        if (w, m["kind"], m.get("generation")) == ("W1_1", "formed", generation)
    )
    before = {
        m["iteration"] for w, m in job.messages[:at] if m["kind"] == "committed" and m["generation"] == generation
    }
    return len(before)


@pytest.mark.chaos
@pytest.mark.parametrize("grid", [GRID, ALONE], ids=["of several", "of one"])
@pytest.mark.parametrize("optimization", [Optimization(), Optimization(clip_norm=0.5)], ids=["plain", "clipped"])
def test_the_others_train_on_while_the_state_comes(optimization: Optimization, grid: dict[str, Any]) -> None:
    """It takes longer than any time-out; with clipping, steps are put right while it comes."""

    def until_it_trains(job: LocalJob, line: dict[str, Any]) -> None:
        _restart_at_the_first_failure(job, line)
        if "iteration" in line and "W1_1" in job.said("formed", generation=3) and job.iterations[-1]["generation"] == 3:
            formed = next(
                m["iteration"]
                for w, m in job.messages
                if m["kind"] == "formed" and w == "W1_1" and m["generation"] == 3
            )
            if line["iteration"] >= formed + 2:
                job.stop()

    job = _job(0.05, grid, optimization=optimization, on_line=until_it_trains).run()
    assert job.losses == _losses(len(job.losses), grid, optimization=optimization)
    assert job.dead == ["W1_1"], "nobody was fenced"
    assert not job.said("broken", generation=3)
    assert _trained_while_it_came(job, 3) >= 6
    assert {i["generation"] for i in job.iterations} == {1, 2, 3}


@pytest.mark.parametrize(
    ("victim", "grid"),
    [
        at_length("W1_1", GRID),
        at_length("W0_1", GRID),
        at_length("W2_0", GRID),
        ("W1_1", ALONE),
        at_length("W1_0", ALONE),
    ],
)
def test_a_death_while_the_state_comes(victim: str, grid: dict[str, Any]) -> None:
    """Of the newcomer, of one of the two peers that give it, of somebody else: what has come stays good."""
    struck: list[str] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        _restart_at_the_first_failure(job, line)
        trained = [i for i in job.iterations if i["generation"] == 3]
        if len(trained) >= 5 and not struck:
            struck.append(victim)
            job.signal(victim, signal.SIGKILL)
        newest = job.iterations[-1]["generation"] if job.iterations else 0
        if newest > 3:
            complete = victim == "W1_1" or "W1_1" in job.said("formed", generation=newest)
            if complete and len([i for i in job.iterations if i["generation"] == newest]) >= 4:
                job.stop()

    job = _job(grid=grid, on_line=act).run()
    assert struck and job.losses == _losses(len(job.losses), grid)
    assert job.dead == sorted(["W1_1", victim])
    assert job.iterations[-1]["living"] == grid["pipelines"] * grid["stages"] - 1


@pytest.mark.chaos
def test_a_job_that_ends_meanwhile_ends() -> None:
    job = _job(iterations=25, on_line=_restart_at_the_first_failure).run()
    undisturbed = LocalJob(
        iterations=25, **GRID, workload=NamedWorkload("openrecycle.agent.examples.gpt:Gpt", WIDE)
    ).run()
    assert job.losses == undisturbed.losses
    (final,) = [line["final"] for line in job.lines if "final" in line]
    assert [final] == [line["final"] for line in undisturbed.lines if "final" in line]
