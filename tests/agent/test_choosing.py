"""Moves that the advisor proposes, manual mode, and workers that are asked to leave."""

from __future__ import annotations

import pytest

from openrecycle.agent.coordination.generations import coming_back
from openrecycle.agent.coordination.membership import (
    Candidate,
    Chosen,
    ConsoleRestarted,
    DrainAsked,
    Exited,
    Generation,
    GenerationAcknowledged,
    LayersMoved,
    LetGo,
    Mode,
    ModeSet,
    Offer,
    Offered,
    PlanReady,
    RestartAsked,
    Stalled,
    Tick,
    TransferBroken,
    UsePlan,
    WorkerRegistered,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs.words import MIGRATE, REROUTE, STAND_BY
from openrecycle.planner.simulation.policy import REPARTITION
from tests.agent.coordinator_run import Run, fingerprint
from tests.golden import golden

OUT = ("W0_0", "W1_0")
MOVED = Candidate(MIGRATE, ("W1_0", "W2_1"), (("W2_1", "W0_0"),), text="15 samples/s")
STAYED = Candidate(REROUTE, OUT, text="10 samples/s")
STOOD_BY = Candidate(STAND_BY, ("W0_0", "W0_1", "W1_0", "W1_1"), text="5 samples/s")
OFFER = Offer(OUT, (MOVED, STAYED, STOOD_BY), MIGRATE)


def told(generation: Generation) -> tuple[tuple[LetGo, ...], tuple[str, ...]]:
    return generation.let_go, generation.lost


def two_out(mode: Mode = Mode.AUTOMATIC) -> Run:
    """3 x 2; stage 0 has lost two of three, and the others train (or, in manual mode, wait for a choice)."""
    run = Run(3, 2).start()
    run.exit("W0_0")
    run.resume()
    if mode is Mode.MANUAL:
        run.send(ModeSet(mode, 30.0, "ada"))
    run.exit("W1_0")
    if mode is Mode.AUTOMATIC:
        run.resume()
    return run


# -- automatic mode -----------------------------------------------------------------------------


def test_the_better_way_is_taken_when_all_train_again() -> None:
    run = two_out()
    run.send(Offered(OUT, OFFER))
    generation = run.opened[-1]
    assert (generation.number, generation.moves, generation.restore) == (4, (("W2_1", "W0_0"),), False)
    assert generation.failed == ("W1_0", "W2_1") and generation.joining == ("W0_0",)
    assert generation.plan_fingerprint == fingerprint(("W1_0", "W2_1"))
    assert generation.reason == golden("migrate-and-re-route-15-samples")
    moved = run.member("W0_0")
    assert (moved.incarnation, moved.state) == ("W2_1-1", WorkerState.REJOINING)
    assert moved.retired == ("W0_0-1",)
    run.resume()
    assert run.member("W0_0").state is WorkerState.RUNNING
    assert run.state.job_state is JobState.RUNNING


def test_without_a_clearly_better_way_nothing_moves() -> None:
    run = two_out()
    before = run.state.generation
    run.send(Offered(OUT, Offer(OUT, (STAYED, MOVED))))
    assert run.state.generation == before and run.state.offer is not None


def test_advice_on_other_failures_is_void() -> None:
    run = two_out()
    run.exit("W2_1")
    before = run.state
    run.send(Offered(OUT, OFFER))
    assert run.state is before


def test_a_mover_that_dies_on_its_way_is_lost_at_both_places() -> None:
    run = two_out()
    run.send(Offered(OUT, OFFER))
    run.send(Exited("W2_1", "W2_1-1", "launcher", "was killed by SIGKILL"))
    generation = run.opened[-1]
    assert generation.failed == ("W0_0", "W1_0", "W2_1") and not generation.moves and not generation.joining
    run.resume()
    # The place that it gave up, and the one that it took, can be filled again.
    run.back("W2_1")
    run.resume()
    run.back("W0_0")
    run.resume()
    assert run.opened[-1].failed == ("W1_0",)


def test_a_death_during_the_move_tells_the_move_again() -> None:
    run = two_out()
    run.send(Offered(OUT, OFFER))
    run.exit("W1_1")
    generation = run.opened[-1]
    assert generation.moves == (("W2_1", "W0_0"),) and generation.failed == ("W1_0", "W1_1", "W2_1")
    assert generation.joining == ("W0_0",) and not generation.restore


def test_a_returning_worker_takes_the_place_that_was_given_up() -> None:
    run = two_out()
    run.send(Offered(OUT, OFFER))
    run.resume()
    run.back("W2_1")
    generation = run.opened[-1]
    assert generation.failed == ("W1_0",) and generation.joining == ("W2_1",) and not generation.moves


# -- manual mode --------------------------------------------------------------------------------


def test_the_job_waits_for_a_choice() -> None:
    run = two_out(Mode.MANUAL)
    assert len(run.opened) == 2 and run.state.choosing and run.state.job_state is JobState.RECOVERING
    assert run.sentence() == (golden("waiting-for-you-the-options"))
    run.send(PlanReady(OUT, "too-early", "made"))
    assert len(run.opened) == 2
    run.send(Offered(OUT, OFFER))
    run.wait(10, *run.names)
    assert run.sentence() == (golden("waiting-for-you-3-candidates"))


def test_what_is_chosen_is_done() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, OFFER))
    run.send(Chosen(REROUTE, "ada", OUT))
    assert run.opened[-1].failed == OUT
    assert run.opened[-1].reason == golden("w1-0-its-process-was")
    assert any(n.text == "ada chose to re-route: 10 samples/s" for n in run.notes)
    # It trains; the operator may still take another way.
    run.resume()
    run.send(Chosen(MIGRATE, "ada"))
    assert run.opened[-1].moves == MOVED.moves


def test_those_that_stand_by_leave_with_those_that_are_lost() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, OFFER))
    run.send(Chosen(STAND_BY, "ada"))
    generation = run.opened[-1]
    assert generation.living == ("W2_0", "W2_1") and not generation.joining
    assert run.member("W0_1").leaving and run.member("W0_1").state is WorkerState.FAILED
    run.resume()
    run.send(Exited("W0_1", "W0_1-1", "launcher"))
    assert not run.member("W0_1").goes
    run.back("W0_1")
    assert "W0_1" in run.opened[-1].living
    assert coming_back(run.state) == (), "nobody that was lost is back"


def test_those_that_stood_by_come_back_with_the_worker_that_was_lost() -> None:
    """All that stood by for it, once they have gone."""
    run = Run(3, 3).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.exit("W0_0")
    run.exit("W1_1")
    out = ("W0_0", "W1_1")
    both = tuple(f"W{p}_{s}" for p in (0, 1) for s in range(3))
    run.send(Offered(out, Offer(out, (Candidate(STAND_BY, both),), STAND_BY)))
    run.send(Chosen(STAND_BY, "ada"))
    run.resume()
    for name in ("W0_1", "W1_0", "W1_2"):
        run.send(Exited(name, f"{name}-1", "launcher"))
    run.back("W1_2")
    assert coming_back(run.state) == (), "it stood by itself"
    run.back("W0_0")
    assert coming_back(run.state) == ("W0_1",)
    run.send(Exited("W0_2", "W0_2-1", "launcher"))
    assert coming_back(run.state) == ("W0_1", "W0_2")
    for name in ("W0_1", "W0_2"):
        run.back(name)
    assert coming_back(run.state) == (), "pipeline 1 stands by on"


def test_who_leaves_with_its_work_done_gives_the_operator_no_more_time() -> None:
    """Each worker that closed its reporter meanwhile started the wait anew."""
    run = Run(3, 2, own_loop=True).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.exit("W0_0")
    run.wait(20, *run.names)
    asked = len(run.notes)
    run.close("W1_1")
    assert run.state.choosing and run.state.pending and run.state.pending.failed == ("W0_0", "W1_1")
    assert len(run.notes) == asked
    run.wait(10, *run.names)
    assert run.opened[-1].failed == ("W0_0", "W1_1")


def test_nobody_chooses() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, OFFER))
    run.wait(29, *run.names)
    assert run.state.choosing
    run.wait(1, *run.names)
    assert run.opened[-1].moves == MOVED.moves
    assert golden("nobody-chose-within-30-s") in run.opened[-1].reason


def test_nobody_chooses_and_nothing_is_known() -> None:
    run = two_out(Mode.MANUAL)
    run.wait(30, *run.names)
    assert run.opened[-1].failed == OUT and not run.opened[-1].moves


def test_ways_that_can_not_be_compared_are_not_waited_for() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, None, "it took more than 60 s"))
    assert run.opened[-1].failed == OUT
    assert any(golden("it-took-more-than-60") in note.text for note in run.notes)


def test_automatic_mode_ends_the_wait_with_the_best() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, OFFER))
    run.send(ModeSet(Mode.AUTOMATIC, 30.0, "ada"))
    assert run.opened[-1].moves == MOVED.moves and not run.state.choosing


def test_another_death_begins_the_choice_anew() -> None:
    run = two_out(Mode.MANUAL)
    run.send(Offered(OUT, OFFER))
    run.wait(20, *run.names)
    run.exit("W2_1")
    assert run.state.choosing and len(run.opened) == 2
    refused = run.send(Chosen(MIGRATE, "ada", OUT)).refusal
    assert refused is not None and refused.code == "no_choice" and refused.detail.startswith("failed: ")
    refused = run.send(Chosen(MIGRATE, "ada")).refusal
    assert refused is not None and refused.detail.startswith("name: got 'migrate and re-route',")
    run.wait(29, "W0_1", "W1_1", "W2_0")
    assert run.state.choosing
    run.wait(1, "W0_1", "W1_1", "W2_0")
    assert run.opened[-1].failed == ("W0_0", "W1_0", "W2_1")


def test_who_returns_before_the_choice_needs_none() -> None:
    run = two_out(Mode.MANUAL)
    run.back("W1_0")
    assert not run.state.choosing
    assert run.opened[-1].failed == ("W0_0",) and run.opened[-1].joining == ("W1_0",)


def test_a_console_that_stood_still_or_was_restarted_gives_the_time_back() -> None:
    run = two_out(Mode.MANUAL)
    run.wait(20, *run.names)
    run.now += 100
    run.send(Stalled(100))
    run.send(Tick())
    assert run.state.choosing
    run.send(ConsoleRestarted())
    assert run.state.choosing and run.sentence().endswith("in 30 s.")


def test_a_returning_worker_and_a_broken_transfer_ask_nobody() -> None:
    run = Run(3, 2).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.send(TransferBroken("W0_0", "W0_0-1", "W0_1", 1))
    run.wait(2, *run.names)
    assert [e.number for e in run.opened] == [1, 2]
    run.resume()
    run.exit("W1_1")
    run.send(Chosen(REROUTE, "ada"))
    run.resume()
    run.back("W1_1")
    assert run.opened[-1].joining == ("W1_1",)


def test_nobody_is_asked_about_a_worker_that_left_with_its_work_done() -> None:
    run = Run(own_loop=True).start()
    run.exit("W0_1")
    run.resume()
    run.send(ModeSet(Mode.MANUAL, 60.0, "ada"))
    run.close("W1_0")
    run.back("W0_1")
    assert not run.state.choosing and run.opened[-1].failed == ("W1_0",)


def test_a_stage_that_is_lost_is_staffed_without_a_choice() -> None:
    run = Run(2, 2, checkpoints=True).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.exit("W0_1")
    assert run.state.choosing
    run.exit("W1_1")
    assert not run.state.choosing and run.opened[-1].restore


def test_nothing_to_choose_is_a_sentence() -> None:
    run = Run(2, 2).start()
    refused = run.send(Chosen(REROUTE, "ada")).refusal
    assert refused is not None and refused.code == "no_choice"


@pytest.mark.parametrize("operator", [True, False], ids=["chosen", "overdue"])
def test_layers_that_are_on_their_way_are_had_before_others(operator: bool) -> None:
    """Some workers may have taken them into use already, and others not."""
    run = Run(3, 2, partition=(3, 3)).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.send(UsePlan("other-layers", (), "ada", partition=(4, 2)))
    run.resume()
    run.plans = False
    run.exit("W1_1")
    assert run.state.moving and run.state.choosing
    others = Candidate(REPARTITION, ("W1_1",), partition=(2, 4))
    run.send(Offered(("W1_1",), Offer(("W1_1",), (others, Candidate(REROUTE, ("W1_1",))), REPARTITION)))
    if operator:
        run.send(Chosen(REPARTITION, "ada"))
    else:
        run.wait(30, *run.names)
    assert run.state.pending is not None and not run.state.choosing
    assert run.state.pending.partition == (4, 2) and run.state.pending.failed == ("W1_1",)
    run.send(PlanReady(("W1_1",), "rerouted", "made"))
    run.resume()
    run.send(LayersMoved(3, 9, (4, 2)))
    run.send(Chosen(REPARTITION, "ada"))
    assert run.state.pending is not None and run.state.pending.partition == (2, 4)


def test_layers_that_nobody_could_take_are_not_asked_for_again() -> None:
    """But by a person, who may have put right what was wrong."""
    run = Run(3, 2, partition=(3, 3)).start()
    run.exit("W1_1")
    run.resume()
    better = Offer(("W1_1",), (Candidate(REPARTITION, ("W1_1",), partition=(4, 2)),), REPARTITION)
    run.send(Offered(("W1_1",), better))
    assert run.state.moving and run.opened[-1].partition == (4, 2)
    stays = LayersMoved(3, 9, (3, 3), problem="W0_0 can't build layer 3")
    run.send(stays)
    assert not run.state.moving and run.opened[-1].partition == (3, 3) and len(run.opened) == 4
    run.send(stays)  # of another worker
    run.resume()
    run.send(Offered(("W1_1",), better))
    assert len(run.opened) == 4 and sum("W0_0 can't build" in n.text for n in run.notes if n.severity == "warning") == 1
    run.send(Chosen(REPARTITION, "ada"))
    assert run.state.moving and run.opened[-1].partition == (4, 2)


def test_a_way_that_no_longer_fits_is_not_taken() -> None:
    """The one that was to move has failed in the same moment: the offer speaks of fewer failures."""
    run = two_out(Mode.MANUAL)
    wrong = Offer(OUT, (Candidate(MIGRATE, ("W1_0", "W2_0"), (("W2_0", "W0_0"),)),), MIGRATE)
    run.send(Offered(OUT, wrong))
    run.send(Chosen(MIGRATE, "ada"))
    assert run.opened[-1].failed == OUT and not run.opened[-1].moves
    assert any(golden("nobody-would-be-left-who") in note.text for note in run.notes)


def test_one_that_has_never_trained_and_stands_by_is_told_and_counts_until_it_has_left() -> None:
    run = Run(3, 2).start()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.exit("W1_0")
    run.send(Chosen(REROUTE, "ada"))
    run.back("W1_0")
    run.exit("W1_1")
    out, stood_by = ("W1_1",), Candidate(STAND_BY, ("W1_0", "W1_1"), text="5 samples/s")
    run.send(Offered(out, Offer(out, (stood_by,))))
    assert run.member("W1_0").state is WorkerState.REJOINING and run.member("W1_0").generation == 0
    run.send(Chosen(STAND_BY, "ada"))
    assert run.opened[-1].failed == ("W1_0", "W1_1")
    member = run.member("W1_0")
    assert member.leaving and member.goes, "its launcher is told that it is to leave"
    assert run.send(WorkerRegistered("W1_0", member.incarnation or "")).refusal is not None
    run.exit("W1_0")
    assert not run.member("W1_0").goes


# -- leaving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", [False, True])
def test_who_was_asked_to_leave_stays_if_its_stage_has_lost_all_others_since(checkpoints: bool) -> None:
    """It trains until a generation without it opens. The job halted, or went back to a checkpoint, for nothing."""
    run = Run(checkpoints=checkpoints).start()
    run.plans = False
    run.send(DrainAsked("W1_1", "ada"))
    assert run.state.pending and run.state.pending.failed == ("W1_1",)
    run.exit("W0_1")
    run.send(PlanReady(("W0_1",), "without W0_1", "made"))
    generation = run.opened[-1]
    assert generation.living == ("W0_0", "W1_0", "W1_1") and not generation.joining and not generation.restore
    assert told(generation) == ((), ("W0_1",)) and not run.state.halted
    run.resume()
    assert run.state.settled and run.member("W1_1").state is WorkerState.RUNNING
    told_already = Run(checkpoints=checkpoints).start()
    told_already.send(DrainAsked("W1_1", "ada"))
    told_already.exit("W0_1")
    assert checkpoints or told_already.state.halted, "its launcher may have ended it by now"


def test_who_stays_after_all_is_given_its_full_time_to_be_heard() -> None:
    """Its heartbeats did not count meanwhile: the next tick took it for dead, and the job halted."""
    run = Run().start()
    run.beat()
    run.plans = False
    run.send(DrainAsked("W1_1", "ada"))
    run.wait(30, *run.names)
    run.exit("W0_1")
    run.send(Tick())
    assert run.member("W1_1").state is WorkerState.RUNNING and not run.state.halted
    run.wait(30, "W0_0", "W1_0")
    assert run.member("W1_1").state is WorkerState.FAILED


@pytest.mark.parametrize("mode", list(Mode))
def test_a_worker_that_is_asked_to_leave_is_out_without_a_failure(mode: Mode) -> None:
    run = Run(3, 2).start()
    run.send(ModeSet(mode, 30.0, "ada"))
    run.send(DrainAsked("W1_0", "ada"))
    generation = run.opened[-1]
    assert generation.failed == ("W1_0",) and generation.reason == "ada asked W1_0 to leave"
    assert not [n for n in run.notes if n.kind == "failure"]
    # Until it has left it counts, so that it can leave at the iteration's end; it changes nothing any more.
    assert run.send(GenerationAcknowledged("W1_0", "W1_0-1", 1, "resumed")).refusal is None
    before = run.state
    run.resume("W0_0", "W0_1")
    run.send(Exited("W1_0", "W1_0-1", "launcher", "ended with exit code 3"))
    assert run.state.generation == before.generation and not run.member("W1_0").goes
    assert run.send(GenerationAcknowledged("W1_0", "W1_0-1", 2, "adopted")).refusal is not None
    run.resume()
    run.back("W1_0")
    assert run.opened[-1].joining == ("W1_0",)


def test_what_happens_before_the_plan_is_there_does_not_hide_who_was_asked_to_leave() -> None:
    run = Run(3, 2).start()
    run.plans = False
    run.send(DrainAsked("W1_0", "ada"))
    run.exit("W0_1")
    run.send(ConsoleRestarted())
    run.exit("W2_0")
    run.plans = True
    run.back("W0_1")
    assert run.opened[-1].failed == ("W1_0", "W2_0")
    assert run.opened[-1].reason == "W0_1 re-joins; ada asked W1_0 to leave"
    assert told(run.opened[-1]) == ((LetGo("W1_0", False),), ("W0_1", "W2_0"))
    run.resume()
    run.back("W2_0")
    assert run.opened[-1].reason == "W2_0 re-joins" and not run.opened[-1].let_go, "that it has left is old news"


def test_what_happens_before_the_plan_is_there_does_not_hide_who_stands_by() -> None:
    run = Run(3, 2).start()
    run.exit("W2_0")
    run.resume()
    run.plans = False
    out, stood_by = ("W2_0",), Candidate(STAND_BY, ("W2_0", "W2_1"))
    run.send(Offered(out, Offer(out, (stood_by,), STAND_BY)))
    run.plans = True
    run.exit("W1_1")
    assert run.opened[-1].reason.endswith("; W2_1 is to stand by")
    assert told(run.opened[-1]) == ((LetGo("W2_1", True),), ("W1_1",))


def test_of_many_who_stand_by_each_is_named() -> None:
    run = Run(2, 9).start()
    run.exit("W1_0")
    run.resume()
    out, pipeline = ("W1_0",), tuple(f"W1_{stage}" for stage in range(9))
    run.send(Offered(out, Offer(out, (Candidate(STAND_BY, pipeline),), STAND_BY)))
    assert told(run.opened[-1]) == (tuple(LetGo(n, True) for n in pipeline[1:]), ())


def test_the_launcher_of_one_that_ends_before_it_could_leave_is_told_that_it_was_to() -> None:
    run = Run(3, 2).start()
    run.plans = False
    run.send(DrainAsked("W1_0", "ada"))
    run.send(Exited("W1_0", "W1_0-1", "launcher", "was killed by SIGKILL"))
    assert not [n for n in run.notes if n.kind == "failure"]
    run.send(PlanReady(("W1_0",), "p", "made"))
    # As app.console.service tells it.
    assert run.opened[-1].failed == ("W1_0",) and run.member("W1_0").leaving and not run.member("W1_0").goes
    run.resume()
    run.plans = True
    run.exit("W1_1")
    assert not run.member("W1_0").leaving, "with the next one that is old news"


def test_one_that_is_to_be_started_again_is_none_that_is_to_leave() -> None:
    run = Run(3, 2).start()
    run.plans = False
    run.send(DrainAsked("W1_0", "ada"))
    run.send(RestartAsked("W1_0"))
    assert run.member("W1_0").goes, "it has not left yet"
    run.send(Exited("W1_0", "W1_0-1", "launcher", "was killed by SIGKILL"))
    run.send(RestartAsked("W1_0"))
    run.send(PlanReady(("W1_0",), "p", "made"))
    assert run.opened[-1].failed == ("W1_0",) and not run.member("W1_0").leaving


def test_who_can_not_leave() -> None:
    run = Run(2, 2).start()
    run.exit("W1_0")
    refused = run.send(DrainAsked("W0_1", "ada")).refusal
    assert refused is not None and refused.code == "recovering"
    run.resume()
    for worker, words in (
        ("W0_0", "the last one that holds stage 0"),
        ("W1_0", "W1_0 is failed, expected one that runs"),
        ("W9_9", "expected a worker of the job's grid"),
    ):
        refused = run.send(DrainAsked(worker, "ada")).refusal
        assert refused is not None and words in refused.detail
