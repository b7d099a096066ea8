"""Workers that stand still together are suspended, not dead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrecycle.agent.coordination.membership import PlanReady, Stalled
from openrecycle.agent.messages.protocol import JobSpec, JobState, WorkerState
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.history import Histories
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.job_rows import JobRows
from tests.agent.coordinator_run import FAILURE_TIMEOUTS, Run
from tests.app.flaky_database import FlakyDatabase
from tests.app.job_world import World
from tests.databases import sqlite_in
from tests.golden import golden

ALL = {WorkerState.RUNNING}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    database = sqlite_in(tmp_path, FlakyDatabase)
    world = World(database, JobSpec(name="job", pipelines=2, stages=2, micro_batches=2, iterations=9)).begin()
    world.tick(2, world.living)
    yield world
    database.close()


class _Only:
    """The jobs of a console: one."""

    def __init__(self, job: LiveJob) -> None:
        self._job = job

    def find(self, job_id: str) -> LiveJob:
        return self._job

    def follow(self) -> None: ...

    def let_go(self, job_id: str) -> None: ...


def states(run: Run) -> set[WorkerState]:
    return {member.state for member in run.state.members.values()}


@pytest.mark.parametrize("seconds", [25, 120, 1800])
def test_a_job_that_is_suspended_as_a_whole_goes_on_where_it_was(seconds: int) -> None:
    run = Run().start()
    run.wait(3, *run.names)
    run.wait(seconds)
    assert states(run) == {WorkerState.SUSPECT}
    assert run.sentence().startswith(golden("waiting-for-all-workers-none", seconds))
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1 and run.state.job_state is JobState.RUNNING


@pytest.mark.parametrize("seed", range(4))
def test_they_may_be_woken_in_any_order(seed: int) -> None:
    run, dice = Run(3, 4).start(), random.Random(seed)
    run.wait(60)
    order = dice.sample(run.names, len(run.names))
    for n in range(1, len(order) + 1):
        run.wait(dice.choice([0, 1, 2]), *order[:n])
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1


def test_who_does_not_wake_with_the_others_is_out_in_time() -> None:
    run = Run().start()
    run.wait(60)
    silent, *others = run.names
    run.wait(round(FAILURE_TIMEOUTS.dead), *others)
    assert run.state.generation == 1
    run.wait(2, *others)
    assert run.member(silent).state is WorkerState.FAILED and run.state.generation == 2


def test_a_node_that_is_back_before_its_workers_count_as_dead_loses_none() -> None:
    run = Run(2, 3).start()
    node, others = run.names[:2], run.names[2:]
    run.wait(round(FAILURE_TIMEOUTS.dead) - 2, *others)
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1
    # After that they are out, and come back as new processes.
    run.wait(round(FAILURE_TIMEOUTS.dead) + 2, *others)
    assert {run.member(name).state for name in node} == {WorkerState.FAILED}
    run.resume()
    for name in node:
        run.back(name)
        run.resume()
    assert states(run) == ALL


def test_a_console_that_stood_still_with_the_job_blames_nobody() -> None:
    run = Run().start()
    run.now += 120
    run.send(Stalled(119.75))
    run.wait(round(FAILURE_TIMEOUTS.dead) - 2)  # they are woken later
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_that_is_not_heard_for_hours_is_called_halted_and_goes_on_when_it_is(
    world: World, restarted: bool
) -> None:
    """Its workers may train all the while: it is this console that can't hear them."""
    histories = Histories(_Only(world.job), world.database)
    world.silence(2 * FAILURE_TIMEOUTS.lost)
    assert {m.state for m in world.job.state.members.values()} == {WorkerState.SUSPECT}
    assert world.job.state.job_state is JobState.HALTED and not histories.kept_for(world.job_id)
    assert len([e for e in world.store.events(world.job_id, limit=99) if "halted" in e["text"]]) == 1
    if restarted:
        world.restart_console()
        world.tick(2, [])
        assert world.job.state.job_state is JobState.HALTED and world.row["state"] == "halted"
    world.tick(30, world.living)
    assert len(world.living) == 4, "none was told that it is out"
    assert {m.state for m in world.job.state.members.values()} == ALL and world.job.state.generation == 1
    assert world.job.state.job_state is JobState.RUNNING and world.row["state"] == "running"
    assert Histories(_Only(world.job), world.database).kept_for(world.job_id)


def test_a_job_that_is_deleted_while_somebody_wakes_stays_deleted(world: World) -> None:
    """The ticker had it in its list, and takes a heartbeat that came before."""
    histories = Histories(_Only(world.job), world.database)
    world.silence(2 * FAILURE_TIMEOUTS.lost)
    world.beat(*world.living)
    histories.delete(world.job_id, "Ann")
    with pytest.raises(ConsoleError) as gone:
        world.job.tick()
    assert (gone.value.status, gone.value.code) == (404, "unknown_job")
    assert world.store.job(world.job_id) is None
    assert [hidden.job_id for hidden in JobRows(world.database).hidden()] == [world.job_id]


def test_a_silent_job_that_was_told_to_open_a_generation_is_not_halted_before_it_has() -> None:
    run = Run().start()
    run.plans = False
    run.wait(3, *run.names)
    run.exit("W1_1")
    run.wait(round(FAILURE_TIMEOUTS.lost) + 2)
    assert run.state.pending is not None and not run.state.halted
    run.send(PlanReady(("W1_1",), "late", "made"))
    run.wait(1)
    assert run.state.generation == 2 and run.state.job_state is JobState.HALTED
    assert run.sentence().startswith("Halted: no worker")
    run.beat("W0_0", "W0_1", "W1_0")
    run.resume()
    assert run.state.generation == 2 and run.state.job_state is JobState.RUNNING


def test_a_worker_that_is_started_anew_gives_those_that_were_suspended_with_it_their_time() -> None:
    run = Run().start()
    run.wait(round(FAILURE_TIMEOUTS.lost) + 2)
    run.back("W1_1")
    run.wait(10)
    run.wait(30, *run.names)
    run.resume()
    assert states(run) == ALL and run.state.job_state is JobState.RUNNING and not run.opened[-1].failed


def test_the_last_worker_that_is_waited_for_is_waited_for_as_all_are() -> None:
    """Nobody would go on without it: it may be suspended, or cut off with its launcher, as two may be."""
    run = Run(1, 1).start()
    run.wait(round(FAILURE_TIMEOUTS.dead) + 2)
    assert states(run) == {WorkerState.SUSPECT}
    run.wait(round(FAILURE_TIMEOUTS.lost))
    assert states(run) == {WorkerState.SUSPECT}
