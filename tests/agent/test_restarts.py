"""`--max-restarts`: workers that come back by themselves, with real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.options import Checkpoints, Faults, TrainingOptions
from openrecycle.agent.coordination.launcher import FROM_START, LauncherWarning
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.jobs.trainer import ResilientTrainer
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.messages.protocol import Command
from openrecycle.agent.models.data import Data
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent import own_jobs, streamed_jobs
from tests.agent.consoles import until
from tests.agent.local_jobs import TINY as MODEL
from tests.agent.local_jobs import LocalJob, Message, fault_free_losses, uncut
from tests.agent.node_runs import free_port, kill_group, launch_node
from tests.agent.node_runs import lines as node_lines
from tests.agent.runs import GRID as NODES_GRID
from tests.agent.runs import TINY
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}


def restarts(lines: list[Message]) -> list[Message]:
    return [line["restart"] for line in lines if "restart" in line]


def whole(job: LocalJob, iterations: int = 2) -> bool:
    """Has the job, after a failure, trained so many with all its workers?"""
    return len([i for i in job.iterations if i["living"] == 4 and i["generation"] > 1]) >= iterations


def test_a_killed_worker_comes_back_by_itself_and_no_bit_changes() -> None:
    def end(job: LocalJob, line: Message) -> None:
        if whole(job):
            job.launcher.end_soon()

    faults = Faults(max_restarts=2, restart_delay=0.2)
    job = LocalJob(**GRID, kills=("W1_1@1:I1",), pace=0.01, faults=faults, on_line=end).run()
    (restart,) = restarts(job.lines)
    assert (restart["worker"], restart["number"], restart["most"], restart["seconds"]) == ("W1_1", 1, 2, 0.2)
    assert "SIGKILL" in restart["reason"] and job.dead == ["W1_1"]
    undisturbed = uncut(**GRID, iterations=len(job.losses))
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1] and "final" in job.lines[-1]


@pytest.mark.chaos
def test_one_that_hangs_comes_back_too() -> None:
    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 1:
            job.signal("W0_1", signal.SIGSTOP)
        if whole(job):
            job.stop()

    faults = Faults(max_restarts=1, restart_delay=0.2)
    job = LocalJob(**GRID, pace=0.01, hang_seconds=4.0, faults=faults, on_line=act).run()
    (restart,) = restarts(job.lines)
    assert restart["worker"] == "W0_1" and "silent" in restart["reason"]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_one_that_dies_at_each_start_is_left_out_and_a_person_can_start_it(tmp_path: Path) -> None:
    """The others go on all the time."""
    broken, at_last = tmp_path / "broken", list[int]()

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 0:
            broken.touch()  # whoever trains has its layers
        tries = restarts(job.lines)
        if "restart" in line and line["restart"]["number"] > line["restart"]["most"]:
            at_last.append(len(job.iterations))
        if at_last and len(job.iterations) == at_last[0] + 3 and broken.exists():
            assert len(tries) == 3, "nobody has been started since"
            broken.unlink()
            job.start("W1_1")
        if whole(job):
            job.stop()

    workload = NamedWorkload("tests.agent.crashing:Crashing", {"broken": str(broken), **MODEL})
    faults = Faults(max_restarts=2, restart_delay=0.1)
    job = LocalJob(**GRID, kills=("W1_1@1:I1",), pace=0.02, faults=faults, workload=workload, on_line=act).run()
    assert [(r["worker"], r["number"], r["seconds"]) for r in restarts(job.lines)] == [
        ("W1_1", 1, 0.1),
        ("W1_1", 2, 0.2),
        ("W1_1", 3, 0.0),
    ]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_one_that_ends_before_training_began_comes_back_too(tmp_path: Path) -> None:
    """What ended it is said, whatever that was: nobody takes it for the fault of a sample."""
    broken = tmp_path / "broken"
    broken.touch()

    def mend(job: LocalJob, line: Message) -> None:
        if "restart" in line:
            broken.unlink()

    workload = NamedWorkload("tests.agent.crashing:Crashing", {"broken": str(broken), "interrupted": True, **MODEL})
    grid: dict[str, Any] = {"pipelines": 1, "stages": 1, "micro_batches": 1, "iterations": 2}
    faults = Faults(max_restarts=1, restart_delay=0.1)
    job = LocalJob(**grid, workload=workload, faults=faults, on_line=mend).run()
    (restart,) = restarts(job.lines)
    assert "KeyboardInterrupt, at " in restart["reason"] and "crashing.py" in restart["reason"]
    assert job.losses == LocalJob(**grid).run().losses


def test_a_death_that_nothing_follows_is_said() -> None:
    """No recovery tells it: all iterations are committed."""

    def kill(job: LocalJob, worker: str, message: Message) -> None:
        if message["kind"] == "committed" and len(job.said("committed", iteration=1)) == 2:
            job.launcher.obey(Command(seq=1, kind="kill", worker="W1_0"))

    job = LocalJob(pipelines=2, stages=1, micro_batches=1, iterations=2, on_message=kill).run()
    said = [line["warning"] for line in job.lines if golden("died-on-purpose") in line.get("warning", "")]
    assert [text[:4] for text in said] == ["W1_0"] and job.dead == [] and "final" in job.lines[-1]


def test_one_that_computes_otherwise_than_the_others_is_left_out(tmp_path: Path) -> None:
    """As on another GPU: what it would compute has other bits. It ends, and is not started again for ever."""
    other, left_out = tmp_path / "other", list[int]()

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 0:
            other.touch()
        if "restart" in line and line["restart"]["number"] > line["restart"]["most"]:
            left_out.append(len(job.iterations))
        if left_out and len(job.iterations) == left_out[0] + 2:
            job.launcher.end_soon()

    workload = NamedWorkload("tests.agent.crashing:Unlike", {"other": str(other), **MODEL})
    faults = Faults(max_restarts=2, restart_delay=0.1)
    # The place of the first worker, by which others could go.
    job = LocalJob(**GRID, kills=("W0_0@1:I1",), pace=0.02, faults=faults, workload=workload, on_line=act).run()
    assert [(r["worker"], r["number"]) for r in restarts(job.lines)] == [("W0_0", 1), ("W0_0", 2), ("W0_0", 3)]
    assert sum("threads" in line.get("warning", "") for line in job.lines) == 2
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


def test_one_whose_files_were_changed_meanwhile_is_left_out(tmp_path: Path) -> None:
    """What it says against the model is no reason for those to end who train it."""
    altered, left_out = tmp_path / "altered", list[int]()

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 0:
            altered.touch()
        if "restart" in line and line["restart"]["number"] > line["restart"]["most"]:
            left_out.append(len(job.iterations))
        if left_out and len(job.iterations) == left_out[0] + 2:
            job.launcher.end_soon()

    workload = NamedWorkload("tests.agent.crashing:Altered", {"altered": str(altered), **MODEL})
    faults = Faults(max_restarts=1, restart_delay=0.1)
    job = LocalJob(**GRID, kills=("W1_1@1:I1",), pace=0.02, faults=faults, workload=workload, on_line=act).run()
    said = [(r["worker"], r["number"]) for r in restarts(job.lines)]
    assert said == [("W1_1", 1), ("W1_1", 2)] and "final" in job.lines[-1]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


@pytest.mark.parametrize("victims", [("W0_1",), at_length(("W0_0", "W0_1"))])
def test_a_job_that_lost_a_stage_waits_for_those_who_come_back(victims: tuple[str, ...], tmp_path: Path) -> None:
    """Fewer are left than there are stages, or nobody; and there is a checkpoint to go back to."""

    def act(job: LocalJob, line: Message) -> None:
        if "checkpoint" in line and not restarts(job.lines):
            for victim in victims:
                job.signal(victim, signal.SIGKILL)
        # Not by how many have come since: on a busy machine workers are ahead of their launcher, which would have ended
        # the job before it heard of the death, and nobody is started again at a job's end.
        elif len([i for i in job.iterations if i["generation"] > 1]) == 4:
            job.launcher.end_soon()

    grid = GRID | {"pipelines": 1}
    job = LocalJob(
        **grid,
        pace=0.01,  # else all may be over before the launcher has read that there is a checkpoint
        faults=Faults(max_restarts=1, restart_delay=0.2),
        checkpoints=Checkpoints(directory=tmp_path, every=2, keep=50),
        checkpoint=lambda: next((str(c.path) for c in whole_checkpoints(tmp_path)), None),
        on_line=act,
    ).run()
    assert sorted(r["worker"] for r in restarts(job.lines)) == list(victims)
    undisturbed = uncut(**grid, iterations=len(job.losses))
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1] and "final" in job.lines[-1]


@pytest.mark.parametrize("given", ["modules and a stream", at_length("functions"), at_length("checkpoints")])
def test_without_a_checkpoint_all_go_back_to_the_start(given: str, tmp_path: Path) -> None:
    """There are none, or none yet. One of the other stage takes over, and whoever comes back joins. Modules that are
    given are trained in place: whoever survives begins anew with what they were. So with a stream that it has read."""
    make: Callable[..., ResilientTrainer] = own_jobs.trainer
    if given == "modules and a stream":
        layers = [streamed_jobs.build_layer(layer, 4) for layer in range(4)]
        read = Data(streamed_jobs.stateful(), prefetch=2)
        make = partial(streamed_jobs.trainer, layers=layers, layer_count=None, data=read)
    kept = Checkpoints(directory=tmp_path / "kept", every=1000) if given == "checkpoints" else Checkpoints()
    faults = Faults(kill=["W0_1@2:F0", "W1_1@2:F1"], max_restarts=1, restart_delay=0.1)
    record = tmp_path / "run.jsonl"
    result = make(faults=faults, checkpoints=kept, record=record).fit(iterations=6)
    undisturbed = make().fit(iterations=6)
    assert golden("all-begin-anew") in record.read_text()
    assert (result.losses, result.parameters_sha256) == (undisturbed.losses, undisturbed.parameters_sha256)
    assert sorted(one.worker for one in result.recoveries) == ["W0_1", "W1_1"]


def test_a_job_that_waits_ends_once_nobody_comes(tmp_path: Path) -> None:
    """It says what it waited for."""
    broken = tmp_path / "broken"

    def act(job: LocalJob, line: Message) -> None:
        if "checkpoint" in line and not broken.exists():
            broken.touch()
            job.signal("W0_1", signal.SIGKILL)

    workload = NamedWorkload("tests.agent.crashing:Crashing", {"broken": str(broken), **MODEL})
    kept = tmp_path / "kept"
    with pytest.raises(JobFailed, match="W0_1"):
        LocalJob(
            **GRID | {"pipelines": 1},
            workload=workload,
            faults=Faults(max_restarts=1, restart_delay=0.1),
            checkpoints=Checkpoints(directory=kept, every=2),
            checkpoint=lambda: next((str(c.path) for c in whole_checkpoints(kept)), None),
            on_line=act,
        ).run()


def test_a_job_that_waits_ends_though_one_has_come_who_is_not_enough(tmp_path: Path) -> None:
    """Of two stages that are lost one comes back, and the other is out of tries."""
    broken = tmp_path / "broken"

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 1 and not broken.exists():
            broken.touch()
            job.signal("W0_1", signal.SIGKILL)
            job.signal("W0_2", signal.SIGKILL)

    workload = NamedWorkload("tests.agent.crashing:Crashing", {"broken": str(broken), "only": 2, **MODEL})
    grid = {"pipelines": 1, "stages": 3, "micro_batches": 2}
    faults = Faults(max_restarts=1, restart_delay=0.1)
    job = LocalJob(
        **grid, workload=workload, faults=faults, checkpoint=lambda: FROM_START, back_to="the start", on_line=act
    )
    stop = threading.Timer(30.0, job.stop)  # one that waits for ever fails by that
    stop.start()
    with pytest.raises(JobFailed):
        job.run()
    stop.cancel()
    tries = [restart["worker"] for restart in restarts(job.lines)]
    assert tries.count("W0_1") == 1 and tries.count("W0_2") == 2


class Refusing(LocalCoordination):
    """Takes nobody who comes back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.refused: list[Worker] = []
        self.known = set[Worker]()

    def ready(self, worker: Worker, incarnation: str, *about: Any) -> None:
        if worker in self.known:
            self.refused.append(worker)
        else:
            self.known.add(worker)
            super().ready(worker, incarnation, *about)

    def poll(self, now: float) -> list[Any]:
        refused, self.refused = self.refused, []
        return [*super().poll(now), *(LauncherWarning(f"{worker} may not join", worker) for worker in refused)]


def test_a_job_that_waits_ends_once_those_who_come_are_refused() -> None:
    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 1:
            job.signal("W0_1", signal.SIGKILL)

    faults = Faults(max_restarts=1, restart_delay=0.1)
    grid = GRID | {"pipelines": 1}
    job = LocalJob(**grid, faults=faults, checkpoint=lambda: FROM_START, back_to="x", decides=Refusing, on_line=act)
    stop = threading.Timer(30.0, job.stop)  # one that waits for ever fails by that
    stop.start()
    with pytest.raises(JobFailed, match="W0_1"):
        job.run()
    stop.cancel()


def test_kills_that_no_plan_survives_at_once_may_be_asked_for_where_workers_come_back() -> None:
    grid, kills = Job.uniform(2, 2, 2), ["W0_1@5:F0", "W1_1@25:F0"]
    with pytest.raises(InputError, match=r"faults\.kill"):
        TrainingOptions(job=grid, faults=Faults(kill=kills)).check()
    TrainingOptions(job=grid, faults=Faults(kill=kills, max_restarts=1)).check()


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"restart_delay": 601.0}, {"restart_delay": -1.0}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"faults.{next(iter(wrong))}"):
        Faults(**wrong)


def test_a_job_that_ends_starts_nobody() -> None:
    """All are to stop after the same iteration, and a worker dies on the way there."""

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 1:
            job.launcher.end_soon()
            job.signal("W1_1", signal.SIGKILL)

    job = LocalJob(**GRID, pace=0.01, faults=Faults(max_restarts=1, restart_delay=0.0), on_line=act).run()
    assert restarts(job.lines) == [] and "final" in job.lines[-1]
    assert job.losses == fault_free_losses(len(job.losses), **GRID)


@pytest.mark.parametrize("when", ["dying", at_length("restart")])
@pytest.mark.parametrize("kept", [True, at_length(False)])
def test_a_job_that_loses_a_stage_when_it_is_to_end_comes_to_its_end(when: str, kept: bool, tmp_path: Path) -> None:
    """Without the one that died in an iteration nobody could finish that, or go back. It is asked to before that end is
    seen, or while somebody waits to be started; there is a checkpoint, or none."""

    def dies(job: LocalJob, worker: str, message: Message) -> None:
        if message["kind"] == when:
            job.launcher.end_soon()

    def waits(job: LocalJob, line: Message) -> None:
        if when in line:
            job.launcher.end_soon()

    def newest() -> str | None:
        return next((str(c.path) for c in whole_checkpoints(tmp_path)), None) if kept else FROM_START

    grid = GRID | {"pipelines": 1}
    job = LocalJob(
        **grid,
        kills=("W0_1@6:F1",),
        faults=Faults(max_restarts=1, restart_delay=0.1),
        checkpoints=Checkpoints(directory=tmp_path, every=2, keep=50),
        checkpoint=newest,
        on_message=dies,
        on_line=waits,
    ).run()
    assert [(r["worker"], r["number"]) for r in restarts(job.lines)] == [("W0_1", 1)]
    undisturbed = uncut(**grid, iterations=len(job.losses))
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1] and "final" in job.lines[-1]


def _launch(folder: Path, rank: int, place: tuple[str, ...], name: str = "") -> Any:
    job = (*NODES_GRID, *TINY, "--iterations", "100000", "--pace", "F=15ms,I=15ms,W=15ms")
    own = ("--node-rank", str(rank), "--record", str(folder / f"run{rank}.jsonl"))
    faults = ("--max-restarts", "1", "--restart-delay", "0.5")
    return launch_node(folder / f"node{rank}{name}.log", *job, *place, *own, *faults)


@pytest.mark.chaos
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.chaos)])
def test_workers_of_a_lost_node_come_back_with_it(lost: int, tmp_path: Path) -> None:
    """Of the one that leads, the other has taken the lead, and goes on with what that one knew."""
    place = ("--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    record = f"run{1 - lost}.jsonl" if lost == 0 else "run0.jsonl"
    launchers = [_launch(tmp_path, rank, place) for rank in range(2)]

    def living() -> list[int]:
        return [line["living"] for line in node_lines(tmp_path, record) if "iteration" in line]

    try:
        until(lambda: len(node_lines(tmp_path, "run0.jsonl")) >= 2, "two iterations")
        kill_group(launchers[lost])
        until(lambda: living()[-3:] == [3, 3, 3], "three iterations without it")
        launchers[lost] = _launch(tmp_path, lost, place, "-again")
        until(lambda: living()[-3:] == [6, 6, 6], "three iterations with all")
        os.kill(launchers[1 - lost].pid, signal.SIGTERM)
        assert launchers[1 - lost].wait(30) == 128 + signal.SIGTERM
        assert launchers[lost].wait(30) == 1, "the job has not come to its end"
    finally:
        for launcher in launchers:
            kill_group(launcher)
    lines = node_lines(tmp_path, record)
    assert sorted((r["worker"], r["number"], r["node"]) for r in restarts(lines)) == [
        (f"W{lost}_{stage}", 1, lost) for stage in range(3)
    ]
    losses = [line["loss"] for line in lines if "iteration" in line]
    assert losses == fault_free_losses(len(losses), pipelines=2, stages=3)


@pytest.mark.chaos
def test_a_node_is_lost_whose_launcher_stood_still_and_the_checkpoint_is_ahead_of_the_record(tmp_path: Path) -> None:
    """Its workers trained on, and wrote checkpoints; the losses, which the last stage alone has, are lost with them."""
    saved, place = tmp_path / "saved", ("--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    job = ("--pipelines", "1", "--stages", "2", "--micro-batches", "2", "--iterations", "40", *TINY, *place)
    job = (*job, "--pace", "F=15ms,I=15ms,W=15ms", "--checkpoint", str(saved), "--checkpoint-every", "2")
    job = (*job, "--max-restarts", "1", "--restart-delay", "0.5", "--record", str(tmp_path / "run.jsonl"))

    def begin(rank: int, name: str = "") -> Any:
        return launch_node(tmp_path / f"node{rank}{name}.log", *job, "--node-rank", str(rank))

    def recorded() -> dict[int, str]:
        return {line["iteration"]: line["loss"] for line in node_lines(tmp_path) if "loss" in line}

    launchers = [begin(0), begin(1)]
    try:
        until(lambda: len(recorded()) >= 2, "two iterations")
        os.kill(launchers[1].pid, signal.SIGSTOP)
        until(
            lambda: any(c.iteration > max(recorded()) + 3 for c in whole_checkpoints(saved)), "a checkpoint further on"
        )
        kill_group(launchers[1])
        launchers[1] = begin(1, "-again")
        assert [launcher.wait(90) for launcher in launchers] == [0, 0], (tmp_path / "node0.log").read_text()
    finally:
        for launcher in launchers:
            kill_group(launcher)
    known, lines = recorded(), node_lines(tmp_path)
    undisturbed = uncut(**GRID | {"pipelines": 1}, iterations=40)
    assert 1 < len(set(range(40)) - known.keys()) < 38
    assert all(known[number] == undisturbed.losses[number] for number in known)
    assert lines[-1] == undisturbed.lines[-1] and "final" in lines[-1]
