"""Workers that stand still together are suspended, not dead."""

from __future__ import annotations

import random

import pytest

from openrecycle.agent.coordination.events import Stalled
from openrecycle.agent.messages.protocol import JobState, WorkerState
from tests.agent.coordinator_run import LADDER, Run
from tests.golden import golden

ALL = {WorkerState.RUNNING}


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
    run.wait(round(LADDER.dead), *others)
    assert run.state.generation == 1
    run.wait(2, *others)
    assert run.member(silent).state is WorkerState.FAILED and run.state.generation == 2


def test_a_node_that_is_back_before_its_workers_count_as_dead_loses_none() -> None:
    run = Run(2, 3).start()
    node, others = run.names[:2], run.names[2:]
    run.wait(round(LADDER.dead) - 2, *others)
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1
    # After that they are out, and come back as new processes.
    run.wait(round(LADDER.dead) + 2, *others)
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
    run.wait(round(LADDER.dead) - 2)  # they are woken later
    run.wait(30, *run.names)
    assert states(run) == ALL and run.state.generation == 1


def test_a_job_that_is_never_heard_again_is_given_up() -> None:
    run = Run().start()
    run.wait(round(LADDER.lost) + 2)
    assert states(run) == {WorkerState.FAILED} and run.state.job_state is JobState.HALTED


def test_the_last_worker_that_is_waited_for_is_waited_for_as_all_are() -> None:
    """Nobody would go on without it: it may be suspended, or cut off with its launcher, as two may be."""
    run = Run(1, 1).start()
    run.wait(round(LADDER.dead) + 2)
    assert states(run) == {WorkerState.SUSPECT}
    run.wait(round(LADDER.lost))
    assert states(run) == {WorkerState.FAILED}
