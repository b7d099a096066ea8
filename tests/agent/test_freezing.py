"""A frozen plan: what waits, what is handled all the same, and what happens when it is not frozen any more."""

from __future__ import annotations

from openrecycle.agent.coordination.membership import (
    Candidate,
    Chosen,
    ConsoleRestarted,
    Finished,
    Mode,
    ModeSet,
    Offer,
    Offered,
    PlanFrozen,
    UsePlan,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs.words import MIGRATE, REROUTE
from tests.agent.coordinator_run import Run, fingerprint
from tests.golden import golden

OUT = ("W0_0", "W1_0")
MOVED = Candidate(MIGRATE, ("W1_0", "W2_1"), (("W2_1", "W0_0"),), text="15 samples/s")
STAYED = Candidate(REROUTE, OUT, text="10 samples/s")
OFFER = Offer(OUT, (MOVED, STAYED), MIGRATE)


def frozen(pipelines: int = 3, stages: int = 2) -> Run:
    run = Run(pipelines, stages).start()
    run.send(PlanFrozen(True, "ada"))
    return run


def test_freezing_changes_nothing_but_what_may_follow() -> None:
    run = Run(3, 2).start()
    before = run.state
    step = run.send(PlanFrozen(True, "ada"))
    assert (run.state.frozen_by, run.state.current) == ("ada", before.current)
    assert golden("stays-while-its-workers-do") in step.reason and run.notes[-1].kind == "operator"
    assert "frozen by ada" in run.sentence()
    assert "already" in run.send(PlanFrozen(True, "eve")).reason
    assert run.state.frozen_by == "ada"


def test_a_better_plan_is_refused_until_it_is_unfrozen() -> None:
    run = frozen()
    for actor in ("ada", ""):  # an operator's, and the console's own for the speeds measured
        refusal = run.send(UsePlan("better", (), actor)).refusal
        assert refusal is not None and refusal.code == "frozen"
    run.send(PlanFrozen(False, "ada"))
    assert "frozen" not in run.sentence()
    run.send(UsePlan("better", (), "ada"))
    assert run.opened[-1].plan_fingerprint == "better"


def test_a_failure_is_handled_all_the_same() -> None:
    run = frozen()
    run.exit("W1_0")
    assert run.opened[-1].plan_fingerprint == fingerprint(("W1_0",))
    run.resume()
    assert run.state.job_state is JobState.RUNNING
    assert run.state.frozen_by == "ada", "the plan that followed is frozen in turn"


def test_a_worker_that_is_back_waits_and_joins_when_it_may() -> None:
    run = frozen()
    run.exit("W1_0")
    run.resume()
    generation = run.state.generation
    run.back("W1_0")
    run.wait(3, *run.names)
    assert run.state.generation == generation and run.member("W1_0").state is WorkerState.REJOINING
    assert golden("w1-0-is-back-and") in run.sentence()
    run.send(ConsoleRestarted())
    assert run.state.generation == generation, "nor does a console that restarts let it in"
    run.send(PlanFrozen(False, "eve"))
    opened = run.opened[-1]
    assert (opened.number, opened.failed, opened.joining) == (generation + 1, (), ("W1_0",))
    assert opened.reason == golden("eve-unfroze-the-plan-w1")
    run.resume()
    assert run.member("W1_0").state is WorkerState.RUNNING


def test_a_worker_that_comes_back_while_the_others_recover_waits_too() -> None:
    run = frozen()
    run.exit("W1_0")
    run.back("W1_0")
    run.resume()
    assert run.state.settled and run.member("W1_0").state is WorkerState.REJOINING
    assert run.opened[-1].failed == ("W1_0",)


def test_a_generation_that_must_open_takes_in_who_is_back() -> None:
    run = frozen()
    run.exit("W1_0")
    run.resume()
    run.back("W1_0")
    run.exit("W2_1")
    assert (run.opened[-1].failed, run.opened[-1].joining) == (("W2_1",), ("W1_0",))


def test_a_worker_that_waits_may_die_without_a_generation() -> None:
    run = frozen()
    run.exit("W1_0")
    run.resume()
    run.back("W1_0")
    generation = run.state.generation
    run.exit("W1_0")
    assert run.state.generation == generation and run.state.settled
    assert run.member("W1_0").state is WorkerState.FAILED


def test_the_better_way_on_waits_for_the_thaw() -> None:
    run = frozen()
    run.exit("W0_0")
    run.resume()
    run.exit("W1_0")
    run.resume()
    before = run.state.generation
    run.send(Offered(OUT, OFFER))
    assert run.state.generation == before
    assert golden("would-be-better-and-waits", MIGRATE) in run.notes[-1].text
    refusal = run.send(Chosen(MIGRATE, "eve", OUT)).refusal
    assert refusal is not None and refusal.code == "frozen"
    run.send(PlanFrozen(False, "ada"))
    assert run.opened[-1].moves == (("W2_1", "W0_0"),)


def test_in_manual_mode_a_loss_is_asked_about_and_the_choice_counts() -> None:
    run = frozen()
    run.send(ModeSet(Mode.MANUAL, 30.0, "ada"))
    run.exit("W0_0")
    assert run.state.choosing
    out = ("W0_0",)
    moved = Candidate(MIGRATE, ("W1_1",), (("W1_1", "W0_0"),), text="11 samples/s")
    run.send(Offered(out, Offer(out, (Candidate(REROUTE, out), moved), "")))
    run.send(Chosen(MIGRATE, "eve", out))
    assert run.opened[-1].moves == (("W1_1", "W0_0"),), "the plan before can't run any more"


def test_a_job_that_is_over_has_nothing_to_freeze() -> None:
    run = Run(2, 2).start()
    run.send(Finished(JobState.FINISHED))
    refusal = run.send(PlanFrozen(True, "ada")).refusal
    assert refusal is not None and refusal.code == "job_over"
    assert "not frozen" in Run(2, 2).start().send(PlanFrozen(False, "ada")).reason
