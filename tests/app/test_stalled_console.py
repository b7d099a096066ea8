"""A console that did not get to run holds nobody's silence of that time against the workers, wherever it stood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.protocol import JobSpec, WorkerState
from app.live import TICK_SECONDS
from tests.app.coordinator_run import LADDER
from tests.app.flaky_database import FlakyDatabase
from tests.app.job_world import World

STOOD_STILL = 3 * LADDER.dead


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    database = FlakyDatabase(f"sqlite:///{tmp_path / 'console.db'}")
    database.upgrade()
    world = World(database, JobSpec(name="job", pipelines=2, stages=2, micro_batches=2, iterations=9)).begin()
    world.tick(2, world.living)
    yield world
    database.close()


def _states(world: World) -> set[WorkerState]:
    return {member.state for member in world.job.state.members.values()}


def test_nobody_is_lost_to_a_pause_between_two_ticks(world: World) -> None:
    world.now += STOOD_STILL
    world.job.tick()
    assert _states(world) == {WorkerState.RUNNING}
    texts = [row["text"] for row in world.store.events(world.job_id, after=0, limit=500)]
    assert any(text.startswith(f"the console stood still for {STOOD_STILL - TICK_SECONDS:.1f} s") for text in texts)


def test_nobody_is_lost_to_a_pause_in_the_middle_of_a_tick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking what was heard and looking for what was not."""
    take = world.job.take_heartbeats

    def slowly() -> None:
        take()
        world.now += STOOD_STILL

    monkeypatch.setattr(world.job, "take_heartbeats", slowly)
    world.job.tick()
    assert _states(world) == {WorkerState.RUNNING}


def test_a_pause_that_could_not_be_stored_is_not_forgotten(world: World) -> None:
    world.now += STOOD_STILL
    world.database.fault = "refused"
    assert not world.attempt(world.job.tick)
    world.database.heal()
    world.now += TICK_SECONDS
    assert world.attempt(world.job.tick)
    assert _states(world) == {WorkerState.RUNNING}


def test_silence_while_the_console_runs_still_counts(world: World) -> None:
    world.now += STOOD_STILL
    silent, *others = world.living
    world.tick(round(LADDER.dead) + 2, others)
    assert world.job.state.members[silent.name].state is WorkerState.FAILED
    assert {world.job.state.members[p.name].state for p in others} == {WorkerState.RUNNING}
