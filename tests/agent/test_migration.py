"""Workers that change their stage: to shorten the plan, and where nobody is left."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.options import Checkpoints, Timeouts
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob, Message, fault_free_losses
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}


def test_a_stage_that_lost_everybody_is_re_staffed_from_the_checkpoint(tmp_path: Path) -> None:
    """Both workers of stage 1 die at once. One of stage 0 takes over there, both go back to the checkpoint, and
    what they run again has the same bits. A worker that is started anew takes the place that was given up."""
    struck: list[int] = []

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "checkpoint" in line and not struck:
            assert line["checkpoint"]["problem"] is None
            struck.append(len(job.iterations))
            job.signal("W0_1", signal.SIGKILL)
            job.signal("W1_1", signal.SIGKILL)
        if "failure" in line and len(job.dead) == 2:
            job.start("W0_1")
        if len([i for i in job.iterations if i["living"] == 3 and i["generation"] > 2]) >= 4:
            job.stop()

    checkpoints = Checkpoints(directory=tmp_path, every=2, keep=50)

    def newest() -> str | None:
        return next((str(c.path) for c in whole_checkpoints(tmp_path)), None)

    job = LocalJob(**GRID, checkpoints=checkpoints, checkpoint=newest, on_line=act).run()
    assert struck and job.dead == ["W0_1", "W1_1"]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    # It was redone, and by whom: the one that moved speaks as a worker of stage 1.
    movers = [w for w, m in job.messages if m["kind"] == "formed" and m["generation"] > 1 and w.endswith("_1")]
    assert movers
    back = min(m["iteration"] for _, m in job.messages if m["kind"] == "formed" and m["generation"] > 1)
    assert 0 < back <= struck[0] + 1


def test_who_needs_longer_for_a_checkpoint_than_others_wait_takes_it_up_once(tmp_path: Path) -> None:
    """The others give up on it, in each generation anew; it goes on with what it has taken up when it is through."""
    kept, given_up = tmp_path / "kept", tmp_path / "given-up"
    back, broken = list[int](), list[int]()

    def say() -> None:
        (tmp_path / "next").write_text(str(len(broken)))
        (tmp_path / "next").replace(given_up)

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "checkpoint" in line and not given_up.exists():
            say()
            job.signal("W0_1", signal.SIGKILL)
            job.signal("W1_1", signal.SIGKILL)
        elif broken and job.iterations[-1]["generation"] > back[0]:
            job.launcher.end_soon()

    def opened(job: LocalJob, deployment: Any) -> None:
        if job.moves and not back:
            back.append(deployment.generation)

    def heard(job: LocalJob, worker: str, message: Message) -> None:
        if message["kind"] == "broken" and back and message["generation"] >= back[0]:
            broken.append(message["generation"])
            say()

    workload = NamedWorkload("tests.agent.kept_weights:SlowToReturn", TINY | {"given_up": str(given_up)})
    job = LocalJob(
        **GRID,
        workload=workload,
        checkpoints=Checkpoints(directory=kept, every=2, keep=50),
        checkpoint=lambda: next((str(c.path) for c in whole_checkpoints(kept)), None),
        timeouts=Timeouts(form=1.0),
        on_line=act,
        on_generation=opened,
        on_message=heard,
    ).run()
    assert job.dead == ["W0_1", "W1_1"] and broken
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_an_evaluation_that_went_with_its_stage_is_made_again(tmp_path: Path) -> None:
    """Those who knew it are gone, and have not told it; the others had their part in it."""
    lost = set[int]()

    def heard(job: LocalJob, worker: str, message: Message) -> None:
        if message["kind"] != "evaluated" or not any("checkpoint" in line for line in job.lines):
            return
        if not lost:
            lost.add(message["iteration"])
            job.signal("W0_1", signal.SIGKILL)
            job.signal("W1_1", signal.SIGKILL)
        if message["generation"] == 1 and message["iteration"] in lost:
            message["kind"] = "lost on its way"

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if lost and len(job.dead) == 2 and len(job.iterations) > max(lost) + 2:
            job.launcher.end_soon()

    job = LocalJob(
        **GRID,
        workload=NamedWorkload("tests.agent.evaluated:Evaluated", TINY),
        evaluate_every=2,
        checkpoints=Checkpoints(directory=tmp_path, every=2, keep=50),
        checkpoint=lambda: next((str(c.path) for c in whole_checkpoints(tmp_path)), None),
        on_line=act,
        on_message=heard,
    ).run()
    found = [line["evaluation"]["iteration"] for line in job.lines if "evaluation" in line]
    assert lost and job.dead == ["W0_1", "W1_1"] and lost <= set(found)
    assert found == sorted({*range(2, len(job.losses), 2), len(job.losses)})
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_without_a_checkpoint_the_job_ends_with_a_sentence() -> None:
    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 2:
            job.signal("W0_1", signal.SIGKILL)
            job.signal("W1_1", signal.SIGKILL)

    with pytest.raises(JobFailed, match=golden("stage-1-has-no-living-worker")):
        LocalJob(**GRID, on_line=act).run()


def test_a_planned_move_keeps_the_bits() -> None:
    """Two of three workers of stage 0 die; one of stage 1 changes over, with the state of the peer that lives."""
    grid = GRID | {"pipelines": 3}

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if len([i for i in job.iterations if i["living"] == 4 and i["generation"] > 1]) >= 4:
            job.stop()

    kills = ("W0_0@1:F1", "W1_0@3:I0")
    job = LocalJob(**grid, kills=kills, migrate=True, on_line=act).run()
    assert job.losses == fault_free_losses(len(job.losses), **grid)
    last = max(m["generation"] for _, m in job.messages if m["kind"] == "formed")
    assert [w[-2:] for w in sorted(job.said("formed", generation=last), key=lambda w: w[-1])] == [
        "_0",
        "_0",
        "_1",
        "_1",
    ]
    assert job.iterations[-1]["living"] == 4


@pytest.mark.chaos
def test_two_that_return_at_once_both_find_a_place() -> None:
    """W1_1 is back first, and the failure that is left costs least in the middle stage: one from there takes the
    place of W0_0, where a new process is just being started. That one finds the place that was given up."""
    grid: dict[str, Any] = {"pipelines": 3, "stages": 3, "micro_batches": 2}
    moved: list[str] = []

    def line(job: LocalJob, said: dict[str, Any]) -> None:
        if "failure" in said and len(job.dead) == 2:
            job.start("W1_1")
        if len([i for i in job.iterations if i["living"] == 9 and i["generation"] > 3]) >= 3:
            job.stop()

    def message(job: LocalJob, worker: str, said: dict[str, Any]) -> None:
        if said["kind"] == "ready" and worker == "W1_1" and len(job.dead) == 2:
            job.start("W0_0")

    def generation(job: LocalJob, deployment: Any) -> None:
        moved.extend(f"{source} to {to}" for source, to in job.moves)

    job = LocalJob(
        **grid,
        kills=("W1_1@1:F1", "W0_0@3:F1"),
        migrate=True,
        on_line=line,
        on_message=message,
        on_generation=generation,
    ).run()
    assert moved and all(move.endswith("_1 to W0_0") for move in moved)
    assert job.iterations[-1]["living"] == 9
    assert job.losses == fault_free_losses(len(job.losses), **grid)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["mover", at_length("W2_1")])
def test_a_death_during_a_move(victim: str) -> None:
    """Of the worker that moves, or of one on the stage that it leaves."""
    grid = GRID | {"pipelines": 4}
    struck: list[str] = []

    def strike(job: LocalJob, deployment: Any) -> None:
        if job.moves and not struck:
            struck.append(str(job.moves[0][1]) if victim == "mover" else victim)
            job.signal(struck[0], signal.SIGKILL)

    def until_it_trains(job: LocalJob, line: dict[str, Any]) -> None:
        if struck and len([i for i in job.iterations if i["living"] == 5]) >= 3:
            job.stop()

    kills = ("W0_0@1:F1", "W1_0@3:I0")
    job = LocalJob(**grid, kills=kills, migrate=True, on_generation=strike, on_line=until_it_trains).run()
    assert job.losses == fault_free_losses(len(job.losses), **grid)
    assert struck and job.dead == sorted(["W0_0", "W1_0", struck[0]])
