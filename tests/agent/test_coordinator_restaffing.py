"""A stage that lost everybody, in a job that writes checkpoints: who takes its places, and who is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.coordination.membership import (
    PRESENT,
    AckState,
    DrainAsked,
    Exited,
    GenerationAcknowledged,
    LeadChanged,
    PlanReady,
    PlanRefused,
    StateLost,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from tests.agent.coordinator_run import Run, fingerprint
from tests.conftest import examples
from tests.golden import golden


def lost_stage(pipelines: int = 3, stages: int = 3) -> Run:
    """Stage 1 has lost everybody, one death after the other."""
    run = Run(pipelines, stages, checkpoints=True).start()
    for pipeline in range(pipelines):
        run.exit(f"W{pipeline}_1")
    return run


def test_a_worker_of_the_fullest_stage_moves_and_all_go_back_to_the_checkpoint() -> None:
    run = Run(3, 3, checkpoints=True).start()
    for name in ("W0_0", "W0_1", "W1_1", "W2_1"):
        run.exit(name)
    generation = run.opened[-1]
    # Stage 2 has three workers left, stage 0 two.
    assert generation.moves == (("W2_2", "W0_1"),) and generation.restore
    assert "W0_1" in generation.living and "W2_2" in generation.failed and generation.joining == ("W0_1",)
    assert run.member("W0_1").incarnation == "W2_2-1" and run.member("W0_1").state is WorkerState.REJOINING
    assert golden("its-process-took-the-place") in run.member("W2_2").detail
    assert any(note.text == golden("w2-2-gives-up-its") for note in run.notes)
    run.resume()
    assert run.state.job_state is JobState.RUNNING and not run.state.restoring


def test_a_process_that_moved_is_not_fenced_while_it_does_not_know_yet() -> None:
    run = lost_stage()
    (source, target), generation = run.opened[-1].moves[0], run.opened[-1].number
    moved = run.member(target).incarnation or ""
    assert run.send(GenerationAcknowledged(source, moved, generation, "adopted")).refusal is None
    assert run.member(target).acknowledged == "adopted"
    # Its end is the end of the worker it has become: another one moves there.
    run.send(Exited(source, moved, "launcher", "was killed by SIGKILL"))
    assert moved in run.member(target).retired
    ((other, there),) = run.opened[-1].moves
    assert other != source and there == target and run.opened[-1].restore


def test_a_newcomer_that_was_given_another_place_keeps_it_when_the_next_one_asks_for_that() -> None:
    """Nobody was left. The second to come back moves before it has trained, and the launcher does not know of it."""
    run = Run(2, 2, checkpoints=True).start()
    for name in run.names:
        run.exit(name)
    run.plans = False
    for name in ("W0_1", "W1_1"):
        run.back(name)
    assert {run.member(name).incarnation for name in ("W0_1", "W0_0")} == {"W0_1-again1", "W1_1-again2"}
    run.plans = True
    run.back("W0_0")
    here = {m.incarnation for m in run.state.members.values() if m.state in PRESENT}
    assert here == {"W0_1-again1", "W1_1-again2", "W0_0-again3"} == {*run.opened[-1].incarnations.values()}
    run.back("W1_0")  # the launcher has not been told of that generation either
    run.resume()
    assert not run.state.pending and {*run.opened[-1].incarnations.values()} == here | {"W1_0-again4"}


def test_who_moves_leaves_the_place_of_one_that_was_asked_to_leave_to_it() -> None:
    """It is still there, and is told to leave in order."""
    run = Run(3, 2, checkpoints=True).start()
    run.send(DrainAsked("W0_1", "ada"))
    run.plans = False
    run.exit("W1_1")
    run.exit("W2_1")
    assert run.state.pending is not None and run.state.pending.moves == (("W2_0", "W1_1"),)
    assert run.member("W0_1").goes


def test_moves_into_a_place_that_was_given_up_are_told_again_however_many_die_meanwhile() -> None:
    run = Run(4, 2).start()
    run.plans = False
    moves = (("W3_0", "W0_1"), ("W3_1", "W3_0"))
    for dead, move in zip(("W0_1", "W0_0"), moves, strict=True):
        run.exit(dead)
        run.send(PlanReady(run.wanted[-1], "p", "made", (move,)))
    run.exit("W1_0")
    run.exit("W1_1")
    run.send(PlanReady(run.wanted[-1], "p", "made"))
    assert run.opened[-1].moves == moves


@pytest.mark.parametrize("comes", ["W0_2", "W0_1"])
def test_a_process_that_moved_and_got_no_plan_still_counts(comes: str) -> None:
    """No launcher has been told of the move: a newcomer may ask for the place that the process was given."""
    run = Run(2, 3, checkpoints=True).start()
    run.plans = False
    for name in ("W0_1", "W1_1", "W0_2", "W1_2"):
        run.exit(name)
        if {run.member(living).stage for living in run.state.pending.living} != {0, 1, 2}:  # type: ignore[union-attr]
            run.send(PlanRefused(run.state.pending.failed, "no schedule exists"))  # type: ignore[union-attr]
    assert run.state.job_state is JobState.HALTED
    here = {m.incarnation for m in run.state.members.values() if m.state in PRESENT}
    assert here == {"W0_0-1", "W1_0-1"}
    run.plans = True
    run.back(comes)
    generation = run.opened[-1] if len(run.opened) > 1 else run.state.pending
    assert generation is not None and generation.restore
    held = {name: run.member(name).incarnation for name in generation.living}
    assert {*held.values()} == {"W0_0-1", "W1_0-1", f"{comes}-again1"} and len(held) == 3
    assert {name for name, process in held.items() if process == "W1_0-1"} == {to for _, to in generation.moves}
    assert not {"W0_0", "W1_0"} & {*generation.lost}


def test_the_place_that_was_given_up_can_be_taken_by_a_new_process() -> None:
    run = lost_stage()
    ((source, _),) = run.opened[-1].moves
    run.resume()
    run.back(source)
    generation = run.opened[-1]
    assert source in generation.living and generation.joining == (source,)
    assert not generation.restore and not generation.moves


def test_a_death_before_all_have_gone_back_goes_back_again_and_tells_the_move_again() -> None:
    run = lost_stage()
    moves, first = run.opened[-1].moves, run.opened[-1].number
    run.exit("W0_0")
    generation = run.opened[-1]
    assert generation.number == first + 1 and generation.restore and generation.moves == moves


@pytest.mark.parametrize("step", ["adopted", "formed"])
def test_after_a_change_of_lead_nobody_goes_back_twice_whose_first_iteration_was_not_told(step: AckState) -> None:
    run = lost_stage()
    generation = run.opened[-1]
    for name in generation.living:
        run.send(GenerationAcknowledged(name, run.member(name).incarnation or "", generation.number, step))
    run.send(LeadChanged({}, "node 1 leads from here on"))
    assert run.opened[-1].number == generation.number + 1
    assert run.opened[-1].restore is (step == "adopted"), "who has formed has gone back"


def test_a_newcomer_of_the_lost_stage_needs_nobody_to_move() -> None:
    run = Run(2, 2, checkpoints=True).start()
    run.exit("W0_1")
    run.resume()
    run.plans = False
    run.back("W0_1")
    run.exit("W1_1")
    run.send(PlanReady(("W1_1",), fingerprint(("W1_1",)), "made"))
    generation = run.opened[-1]
    assert generation.restore and not generation.moves and generation.living == ("W0_0", "W0_1", "W1_0")


@examples(150)
@given(st.data())
def test_whatever_dies_and_returns_each_process_has_one_place(data: st.DataObject) -> None:
    """No incarnation at two places, no generation with an empty stage, no move from a place that still lives on. Who is
    called lost is so, and nobody is whose stage has only lost its state."""
    run = Run(3, 3, checkpoints=True).start()
    for _ in range(data.draw(st.integers(1, 14))):
        present = [m.name for m in run.state.members.values() if m.state in PRESENT]
        out = [m.name for m in run.state.members.values() if m.state is WorkerState.FAILED]
        choice = data.draw(st.sampled_from(["exit", "exit", "exit", "back", "resume", "state"]))
        if choice == "exit" and len(present) > 3:
            run.exit(data.draw(st.sampled_from(present)))
        elif choice == "back" and out:
            run.back(data.draw(st.sampled_from(out)))
        elif choice == "resume" and run.state.pending is None:
            run.resume()
        elif choice == "state" and present:
            worker = data.draw(st.sampled_from(present))
            run.send(StateLost(worker, run.member(worker).incarnation or "", run.state.generation, "it is gone"))
        held = [m.incarnation for m in run.state.members.values() if m.state in PRESENT]
        assert len(held) == len(set(held)) and None not in held
        generation = run.opened[-1]
        assert {run.member(name).stage for name in generation.living} == {0, 1, 2}
        for source, to in generation.moves:
            assert to in generation.living and source != to
    assert [e.number for e in run.opened] == list(range(1, len(run.opened) + 1))
    assert [{*generation.lost} for generation in run.opened[1:]] == run.lost()
