"""Workers that return, and processes that are out of the job: the rules, one by one."""

from __future__ import annotations

import pytest

from openrecycle.agent.coordination.membership import (
    MOST_RETIRED,
    ConsoleRestarted,
    GenerationAcknowledged,
    OpRaised,
    TransferBroken,
    WorkerRegistered,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from tests.agent.coordinator_run import Run
from tests.golden import golden


def test_a_returned_worker_joins_when_the_others_have_recovered() -> None:
    run = Run().start()
    run.exit("W1_0")
    run.back("W1_0")
    assert run.member("W1_0").state is WorkerState.REJOINING
    assert len(run.opened) == 2
    run.resume()
    generation = run.opened[-1]
    assert (generation.number, generation.failed, generation.joining) == (3, (), ("W1_0",))
    assert generation.living == ("W0_0", "W0_1", "W1_0", "W1_1")
    assert generation.reason == "W1_0 re-joins"
    assert run.member("W1_0").state is WorkerState.REJOINING
    run.resume()
    assert run.member("W1_0").state is WorkerState.RUNNING
    assert run.state.job_state is JobState.RUNNING
    assert len(run.opened) == 3


def test_a_returned_worker_joins_at_once_in_a_settled_job() -> None:
    run = Run().start()
    run.exit("W1_0")
    run.resume()
    run.back("W1_0")
    assert run.opened[-1].joining == ("W1_0",)


def test_a_failure_takes_a_waiting_worker_along() -> None:
    run = Run(3, 2).start()
    run.exit("W1_0")
    run.back("W1_0")
    run.exit("W2_1")
    assert (run.opened[-1].failed, run.opened[-1].joining) == (("W2_1",), ("W1_0",))


def test_who_joined_and_has_no_state_yet_is_not_lost_when_the_next_generation_opens() -> None:
    run = Run(3, 2).start()
    run.exit("W1_1")
    run.resume()
    run.back("W1_1")
    run.exit("W2_0")
    run.send(OpRaised("W0_0", "W0_0-1", run.state.generation, "iteration 7 raised in W0_0"))
    assert [generation.lost for generation in run.opened] == [(), ("W1_1",), (), ("W2_0",), ()]
    assert [generation.joining for generation in run.opened[2:]] == [("W1_1",)] * 3


def test_who_joined_and_joins_anew_is_lost() -> None:
    run = Run(3, 2).start()
    run.back("W1_1")
    run.back("W1_1")
    assert [generation.lost for generation in run.opened[1:]] == [("W1_1",), ("W1_1",)]
    assert [generation.joining for generation in run.opened[1:]] == [("W1_1",), ("W1_1",)]


def test_who_is_lost_is_known_after_a_restart_of_the_console() -> None:
    run = Run(3, 2).start()
    run.plans = False
    run.exit("W1_1")
    run.back("W1_1")
    run.plans = True
    run.send(ConsoleRestarted())
    assert run.opened[-1].lost == ("W1_1",) and run.opened[-1].joining == ("W1_1",)


def test_a_worker_that_still_takes_weights_joins_again_in_the_next_generation() -> None:
    run = Run(3, 2).start()
    run.exit("W1_0")
    run.resume()
    run.back("W1_0")
    incarnation = run.member("W1_0").incarnation or ""
    run.send(GenerationAcknowledged("W1_0", incarnation, 3, "adopted"))
    run.exit("W2_1")
    assert run.opened[-1].joining == ("W1_0",)


def returned_with_state(checkpoints: bool) -> tuple[Run, GenerationAcknowledged]:
    """A job in which W1_1 is back, and what it says as soon as it has all of its state."""
    run = Run(checkpoints=checkpoints).start()
    run.exit("W1_1")
    run.resume()
    run.back("W1_1")
    run.resume("W0_0", "W0_1", "W1_0")
    assert run.opened[-1].joining == ("W1_1",)
    return run, GenerationAcknowledged("W1_1", run.member("W1_1").incarnation or "", 3, "formed")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_worker_that_has_its_state_keeps_its_stage_alive(checkpoints: bool) -> None:
    """It has not committed an iteration yet when the only other one of its stage ends."""
    run, has_state = returned_with_state(checkpoints)
    run.send(has_state)
    assert run.member("W1_1").state is WorkerState.RUNNING and not run.state.settled
    run.exit("W0_1")
    generation = run.opened[-1]
    assert (generation.number, generation.failed, generation.joining) == (4, ("W0_1",), ())
    assert not generation.restore and not run.state.halted


def test_a_halted_job_goes_on_when_it_hears_late_that_somebody_has_the_state() -> None:
    """The end of a process overtakes what another one has said before."""
    run, has_state = returned_with_state(checkpoints=False)
    run.exit("W0_1")
    assert run.state.job_state is JobState.HALTED
    run.send(has_state)
    generation = run.opened[-1]
    assert (generation.number, generation.failed, generation.joining) == (4, ("W0_1",), ())
    run.resume()
    assert run.state.job_state is JobState.RUNNING


def test_a_returned_worker_that_dies_while_it_waits_changes_no_generation() -> None:
    run = Run().start()
    run.exit("W1_0")
    run.back("W1_0")
    run.exit("W1_0")
    assert len(run.opened) == 2
    run.resume()
    assert len(run.opened) == 2


def test_a_new_incarnation_of_a_running_worker_means_that_the_old_one_died() -> None:
    run = Run().start()
    run.back("W0_1")
    assert (run.opened[-1].number, run.opened[-1].joining) == (2, ("W0_1",))
    assert "W0_1-1" in run.member("W0_1").retired


def test_of_a_place_that_has_had_many_processes_the_newest_are_remembered() -> None:
    run = Run().start()
    for _ in range(MOST_RETIRED + 9):
        run.back("W0_1")
    member = run.member("W0_1")
    assert len(member.retired) == MOST_RETIRED and member.retired[-1] == f"W0_1-again{MOST_RETIRED + 8}"
    here = [process for process in run.processes.values() if process.slot == "W0_1"]
    assert [process.incarnation for process in here if not process.ended] == [member.incarnation]
    before = run.state
    for old in ("W0_1-1", member.retired[0]):
        refusal = run.send(GenerationAcknowledged("W0_1", old, run.state.generation, "adopted")).refusal
        assert refusal is not None and refusal.code == "fenced" and run.state is before


@pytest.mark.parametrize("incarnation", ["W1_0-1", "never-seen"])
def test_a_fenced_worker_changes_nothing(incarnation: str) -> None:
    run = Run().start()
    run.exit("W1_0")
    run.resume()
    run.back("W1_0")
    before = run.state
    for event in (
        GenerationAcknowledged("W1_0", incarnation, 3, "resumed"),
        TransferBroken("W1_0", incarnation, "W0_0", 3),
    ):
        refusal = run.send(event).refusal
        assert refusal is not None
        assert refusal.code == "fenced"
        assert "W1_0" in refusal.detail
        assert run.state is before


def test_a_fenced_worker_can_not_register_as_itself() -> None:
    run = Run().start()
    run.exit("W1_0")
    refusal = run.send(WorkerRegistered("W1_0", "W1_0-1")).refusal
    assert refusal is not None
    assert refusal.code == "fenced"
    assert golden("may-only-re-join-as-a") in refusal.detail
