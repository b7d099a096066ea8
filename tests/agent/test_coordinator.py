"""The rules of membership, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from openrecycle.agent.coordination.generations import LINES_AT_ONCE
from openrecycle.agent.coordination.membership import (
    ConsoleRestarted,
    DrainAsked,
    Exited,
    FailureTimeouts,
    Finished,
    GenerationAcknowledged,
    HeartbeatsReceived,
    IterationsCommitted,
    LastHeartbeat,
    LeadChanged,
    NeedPlan,
    Note,
    OpRaised,
    PlanReady,
    PlanRefused,
    Stalled,
    State,
    StateLost,
    Tick,
    TransferBroken,
    WorkerRegistered,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.app.jobs.live_job import TICK_SECONDS, IncomingReport, job_columns, read_broken, run_together
from openrecycle.app.jobs.states import Condition
from tests.agent.coordinator_run import FAILURE_TIMEOUTS, Run, fingerprint
from tests.conftest import refuses
from tests.golden import golden


def test_the_first_generation_opens_when_the_last_worker_registers() -> None:
    run = Run()
    for name in run.names[:-1]:
        run.send(WorkerRegistered(name, "a"))
        assert not run.opened
    assert run.state.job_state is JobState.STARTING
    assert run.sentence() == golden("waiting-for-1-of-4")
    run.send(WorkerRegistered("W1_1", "a"))
    assert [e.number for e in run.opened] == [1]
    assert run.opened[0].living == ("W0_0", "W0_1", "W1_0", "W1_1")
    assert run.opened[0].failed == run.opened[0].joining == ()
    assert run.opened[0].plan_fingerprint == fingerprint(())


def test_the_job_runs_once_all_have_committed_an_iteration() -> None:
    run = Run()
    for name in run.names:
        run.send(WorkerRegistered(name, f"{name}-1"))
    run.resume("W0_0", "W0_1", "W1_0")
    assert run.state.job_state is JobState.STARTING
    assert run.sentence() == (golden("generation-1-all-workers-have"))
    run.resume("W1_1")
    assert run.state.job_state is JobState.RUNNING
    assert run.sentence() == golden("training-in-generation-1-with")


def test_registering_twice_changes_nothing() -> None:
    run = Run().start()
    before = run.state
    step = run.send(WorkerRegistered("W0_0", "W0_0-1"))
    assert step.refusal is None
    assert run.state is before


def test_an_exit_opens_a_generation_without_the_worker() -> None:
    run = Run().start()
    run.exit("W1_0")
    generation = run.opened[-1]
    assert (generation.number, generation.failed, generation.joining) == (2, ("W1_0",), ())
    assert generation.living == ("W0_0", "W0_1", "W1_1")
    assert generation.reason == golden("w1-0-its-process-was-killed")
    assert run.member("W1_0").state is WorkerState.FAILED
    assert run.state.job_state is JobState.RECOVERING
    run.resume()
    assert run.state.job_state is JobState.RUNNING
    assert run.sentence() == (golden("training-in-generation-2-with"))


def test_an_exit_before_the_first_generation_waits_for_the_worker_to_come_back() -> None:
    run = Run()
    for name in run.names[:-1]:
        run.send(WorkerRegistered(name, "a"))
    run.exit("W0_1")
    run.send(WorkerRegistered("W1_1", "a"))
    assert not run.opened
    assert run.sentence() == golden("waiting-for-w0-1-to")
    run.send(WorkerRegistered("W0_1", "b"))
    assert [e.number for e in run.opened] == [1]


def test_an_exit_before_registration_fences_that_process_only() -> None:
    run = Run()
    run.send(Exited("W0_0", "early", "launcher", "ended with status 1"))
    assert run.member("W0_0").state is WorkerState.FAILED
    assert run.send(WorkerRegistered("W0_0", "early")).refusal is not None
    assert run.send(WorkerRegistered("W0_0", "later")).refusal is None
    before = run.member("W0_0")
    run.send(Exited("W0_0", "another", "launcher", "ended with status 1"))
    assert run.member("W0_0").state is before.state
    assert run.member("W0_0").incarnation == "later"


def test_an_exit_that_is_known_is_accepted_and_changes_nothing() -> None:
    run = Run().start()
    run.exit("W1_0")
    before = run.state
    assert run.exit("W1_0").refusal is None
    assert run.state is before


def test_two_exits_open_two_generations_and_agents_go_to_the_newest() -> None:
    run = Run(3, 2).start()
    run.exit("W1_0")
    run.exit("W2_1")
    assert [(e.number, e.failed) for e in run.opened[1:]] == [(2, ("W1_0",)), (3, ("W1_0", "W2_1"))]


def test_workers_that_end_together_leave_in_one_generation_and_none_takes_the_place_of_another() -> None:
    """W2_1 was moved to the stage that lost everybody, and then was found to have ended, too."""
    run = Run(4, 2, checkpoints=True).start()
    gone = [*(f"W{pipeline}_0" for pipeline in range(4)), "W3_1"]
    ends = [Exited(name, f"{name}-1", "launcher", "was killed by SIGKILL") for name in gone]
    stranger = replace(ends[0], worker="W9_9", incarnation="never")
    reports = [IncomingReport(event) for event in (*ends, stranger, ends[1])]
    taken = run_together(run.state, reports, run.now, FAILURE_TIMEOUTS)
    assert [refusal and refusal.code for refusal in taken.refused] == [None] * 5 + ["unknown_worker", None]
    assert [type(decision) for decision in taken.decisions].count(NeedPlan) == 1
    moved = [note.worker for note in taken.decisions if isinstance(note, Note) and note.kind == "recovery"]
    after = taken.states[-1]
    assert moved == ["W0_0"] and after.pending and after.pending.moves == (("W2_1", "W0_0"),)
    assert {m.name for m in after.members.values() if m.state is WorkerState.FAILED} == {*gone, "W2_1"} - {"W0_0"}


def test_transfers_that_broke_between_the_ends_of_processes_change_nothing_of_that() -> None:
    run = Run(4, 2, checkpoints=True).start()
    gone = [*(f"W{pipeline}_0" for pipeline in range(4)), "W3_1"]
    ends = [Exited(name, f"{name}-1", "launcher", "was killed by SIGKILL") for name in gone]
    others = [TransferBroken(*about, "W3_0", 1, "reset") for about in (("W1_1", "W1_1-1"), ("W9_9", "never"))]
    alone = run_together(run.state, list(map(IncomingReport, ends)), run.now, FAILURE_TIMEOUTS)
    for at in range(1, len(ends)):
        reports = list(map(IncomingReport, [*ends[:at], *others, *ends[at:]]))
        taken = run_together(run.state, reports, run.now, FAILURE_TIMEOUTS)
        assert (taken.states, taken.decisions) == (alone.states, alone.decisions), at
        codes = [refusal and refusal.code for refusal in taken.refused]
        assert codes == [*[None] * (at + 1), "unknown_worker", *[None] * (len(ends) - at)]


def test_a_link_of_a_worker_that_ended_before_is_to_blame_for_nothing_in_a_job_that_halted() -> None:
    run = Run().start()
    ends = [Exited(name, f"{name}-1", "launcher", "was killed by SIGKILL") for name in ("W0_0", "W1_0")]
    broken = TransferBroken("W0_1", "W0_1-1", "W0_0", 1, "reset")
    reports = list(map(IncomingReport, [*ends, broken]))
    run.state = run_together(run.state, reports, run.now, FAILURE_TIMEOUTS).states[-1]
    assert run.state.halted
    known = len(run.notes)
    run.wait(5, "W0_1", "W1_1")
    run.send(replace(broken, reporter="W1_1", incarnation="W1_1-1", worker="W1_0"))
    run.wait(5, "W0_1", "W1_1")
    assert run.state.broken is None and not run.state.links.breaks and run.notes[known:] == []


def test_a_failure_while_the_plan_is_made_replaces_the_pending_generation() -> None:
    run = Run(3, 2).start()
    run.plans = False
    run.exit("W1_0")
    assert run.sentence().startswith(golden("making-the-plan-for-generation"))
    run.exit("W2_1")
    assert run.wanted[-2:] == [("W1_0",), ("W1_0", "W2_1")]
    run.send(PlanReady(("W1_0",), "too-late", "made"))
    assert len(run.opened) == 1
    run.send(PlanReady(("W1_0", "W2_1"), "right", "made"))
    assert (run.opened[-1].number, run.opened[-1].plan_fingerprint) == (2, "right")


def test_silence_makes_a_suspect_and_a_word_clears_it() -> None:
    run = Run().start()
    run.beat()
    run.wait(6, "W0_0", "W0_1", "W1_0")
    assert run.member("W1_1").state is WorkerState.SUSPECT
    assert run.sentence() == "Waiting for W1_1: last heard 6.0 s ago, dead at 20 s."
    run.wait(6, "W1_0")
    assert run.sentence().startswith("Waiting for W1_1 and 2 other workers: last heard 12.0 s ago")
    run.beat("W1_1")
    assert run.member("W1_1").state is WorkerState.RUNNING
    assert len(run.opened) == 1


def test_a_worker_is_out_when_its_silence_lasts() -> None:
    run = Run().start()
    run.beat()
    run.wait(20, "W0_0", "W0_1", "W1_0")
    assert len(run.opened) == 1
    run.wait(1, "W0_0", "W0_1", "W1_0")
    assert run.opened[-1].failed == ("W1_1",)
    assert run.member("W1_1").detail == golden("not-heard-for-21-0")


def test_workers_that_time_out_together_leave_in_one_generation() -> None:
    run = Run(3, 2).start()
    run.beat()
    run.wait(21, "W0_0", "W0_1", "W1_0", "W2_1")
    assert [e.failed for e in run.opened[1:]] == [("W1_1", "W2_0")]


def test_workers_that_fall_silent_within_a_heartbeat_leave_in_one_generation() -> None:
    """As behind a switch that fails: ticks are more frequent than heartbeats."""
    run = Run(6, 1).start()
    run.beat()
    for name in ("W1_0", "W2_0", "W3_0", "W4_0"):
        run.beat(name)
        run.now += TICK_SECONDS
    first = run.now - 4 * TICK_SECONDS
    while run.now < first + FAILURE_TIMEOUTS.dead + 1.5:
        run.now += TICK_SECONDS
        run.beat("W0_0", *(["W5_0"] if run.now < first + 2 else []))  # the last one is lost for another reason
        run.send(Tick())
    assert [e.failed for e in run.opened[1:]] == [("W1_0", "W2_0", "W3_0", "W4_0")]
    run.wait(3, "W0_0")
    assert len(run.opened) == 3


def test_no_link_is_blamed_while_others_are_about_to_be_lost() -> None:
    run = Run(3, 1).start()
    run.beat()
    run.now += 0.9
    run.beat("W0_0", "W2_0")
    complained = False
    while run.now < 100 + FAILURE_TIMEOUTS.dead + 2:
        run.now += TICK_SECONDS
        run.beat("W0_0")
        if not complained and run.now > 100 + FAILURE_TIMEOUTS.dead - FAILURE_TIMEOUTS.transfer_grace:
            run.send(TransferBroken("W0_0", "W0_0-1", "W1_0", 1, "timed out"))
            complained = True
        run.send(Tick())
    assert [e.failed for e in run.opened[1:]] == [("W1_0", "W2_0")] and not run.state.links.breaks


def test_one_that_is_heard_again_holds_up_nobody() -> None:
    run = Run(3, 1).start()
    run.beat()
    run.now += TICK_SECONDS
    run.beat("W2_0")
    while run.member("W1_0").state is not WorkerState.FAILED:
        run.now += TICK_SECONDS
        run.beat("W0_0", *(["W2_0"] if run.now > 119.9 else []))
        run.send(Tick())
    assert run.now - 100 <= FAILURE_TIMEOUTS.dead + TICK_SECONDS and len(run.opened) == 2


def test_time_in_which_the_console_stood_still_counts_for_nobody() -> None:
    run = Run().start()
    run.beat()
    run.now += 60
    run.send(Stalled(60))
    run.send(Tick())
    assert run.state.job_state is JobState.RUNNING
    assert len(run.opened) == 1


def test_workers_that_nobody_heard_for_hours_are_refused_nothing() -> None:
    run = Run().start()
    run.wait(3, *run.names)
    run.wait(7200)
    assert {m.state for m in run.state.members.values()} == {WorkerState.SUSPECT}
    assert run.state.job_state is JobState.HALTED and run.sentence() == golden("halted-no-worker-has-been")
    assert sum(note.severity == "error" for note in run.notes) == 1
    assert run.beat("W0_0").refusal is None
    run.wait(3, *run.names)
    assert {m.state for m in run.state.members.values()} == {WorkerState.RUNNING}
    assert run.state.generation == 1 and run.state.job_state is JobState.RUNNING


def test_a_heartbeat_of_another_incarnation_does_not_count() -> None:
    run = Run().start()
    run.wait(3, *run.names)
    heard = run.member("W0_0").last_heard
    run.now += 1
    run.send(HeartbeatsReceived({"W0_0": LastHeartbeat("someone-else", run.now)}))
    assert run.member("W0_0").last_heard == heard


@pytest.mark.parametrize(
    "event",
    [
        WorkerRegistered("W7_0", "x"),
        Exited("W7_0", "x", "launcher"),
        TransferBroken("W7_0", "x", "W0_0"),
        TransferBroken("W0_0", "W0_0-1", "W7_0"),
        GenerationAcknowledged("W7_0", "x", 1, "adopted"),
    ],
)
def test_a_worker_outside_the_grid_is_refused(event: WorkerRegistered) -> None:
    run = Run().start()
    before = run.state
    refusal = run.send(event).refusal
    assert refusal is not None
    assert refusal.code == "unknown_worker"
    assert refusal.detail.startswith("worker: got 'W7_0',")
    assert run.state is before


def test_a_broken_transfer_that_nothing_explains_makes_all_connect_anew() -> None:
    run = Run().start()
    run.beat()
    run.send(TransferBroken("W0_0", "W0_0-1", "W0_1", 1, "connection reset"))
    assert run.sentence().startswith(golden("w0-0-cant-exchange-data"))
    run.wait(1, *run.names)
    assert len(run.opened) == 1
    run.wait(1, *run.names)
    assert (run.opened[-1].number, run.opened[-1].failed) == (2, ())
    assert run.opened[-1].joining == ()


def _breaks(run: Run, *pairs: tuple[str, str]) -> None:
    for reporter, peer in pairs:
        run.send(
            TransferBroken(reporter, run.member(reporter).incarnation or "", peer, run.state.generation, "timed out")
        )
    run.now += 3
    for name in run.names:
        if run.member(name).incarnation:
            run.send(HeartbeatsReceived({name: LastHeartbeat(run.member(name).incarnation or "", run.now)}))
    run.send(Tick())


def test_a_pair_that_breaks_again_loses_an_end_and_at_last_for_good() -> None:
    run = Run(3, 2).start()
    for _ in range(2):
        _breaks(run, ("W0_0", "W1_1"), ("W1_1", "W0_0"))
        assert len(run.opened[-1].living) == 6 and "W0_0 and W1_1" in run.opened[-1].reason
        run.resume()
    # What a console remembers of it survives a restart, without a word of its own in the database.
    text = job_columns(State.new(3, 2, 9), run.state)["broken"]
    assert read_broken(text) == (None, run.state.links)
    _breaks(run, ("W0_0", "W1_1"), ("W1_1", "W0_0"))
    assert "W1_1" not in run.opened[-1].living and run.member("W1_1").state is WorkerState.FAILED
    run.resume(*run.opened[-1].living)
    run.send(WorkerRegistered("W1_1", "W1_1-2"))
    run.resume()
    assert run.member("W1_1").state is WorkerState.RUNNING, "it may re-join"
    _breaks(run, ("W2_0", "W1_1"))
    assert "W1_1" not in run.opened[-1].living and "for good" in run.opened[-1].reason
    refusal = run.send(WorkerRegistered("W1_1", "W1_1-3")).refusal
    assert refusal is not None and refusal.code == "fenced" and golden("may-not-re-join") in refusal.detail


def test_what_raised_in_a_worker_has_all_form_anew_and_is_shown() -> None:
    run = Run().start()
    run.send(OpRaised("W0_0", "W0_0-1", 1, "iteration 5, micro-batch 3: W0_0 raised ValueError"))
    assert run.state.generation == 2 and run.opened[-1].living == run.opened[0].living
    assert any("micro-batch 3" in note.text for note in run.notes) and run.state.links == State.new(2, 2, 9).links
    # Late, or of a process that does not count: no further generation.
    run.send(OpRaised("W0_1", "W0_1-1", 1, "iteration 5, micro-batch 2: W0_1 raised ValueError"))
    assert run.state.generation == 2 and any("micro-batch 2" in note.text for note in run.notes)
    assert run.send(OpRaised("W0_1", "other", 2, "x")).refusal is not None
    assert run.send(OpRaised("W9_1", "other", 2, "x")).refusal is not None


@pytest.mark.parametrize(
    "event",
    [OpRaised("W0_0", "W0_0-1", 1, "W0_0 raised ValueError"), LeadChanged({}, golden("node-1-leads-from-here"))],
)
def test_a_console_that_is_started_again_while_all_are_to_form_anew_has_them_do_it(
    event: OpRaised | LeadChanged,
) -> None:
    """The plan is made beside; meanwhile what peers report of their links is not news. They wait, and say so once."""
    run = Run().start()
    run.plans = False
    before = run.state
    run.send(event)
    run.send(TransferBroken("W0_1", "W0_1-1", "W0_0", 1, "closed"))
    assert run.state.pending is not None and len(run.opened) == 1
    broken, _ = read_broken(job_columns(before, run.state)["broken"])
    assert broken is not None and broken.detail == event.detail, "it is stored"
    run.send(ConsoleRestarted())
    run.plans = True
    run.wait(4, *run.names)
    assert run.opened[-1].number == 2 and run.opened[-1].living == run.opened[0].living
    assert run.state.broken is None
    run.resume()
    run.wait(4, *run.names)
    assert len(run.opened) == 2


def test_links_that_break_for_ever_halt_the_job_with_their_names() -> None:
    run = Run(1, 2).start()
    for _ in range(4):
        _breaks(run, ("W0_0", "W0_1"))
        assert run.state.job_state is not JobState.HALTED
        run.resume()
    _breaks(run, ("W0_0", "W0_1"))
    assert run.state.job_state is JobState.HALTED and "W0_0 and W0_1 (5 times)" in run.state.halted


def test_an_exit_explains_a_broken_transfer() -> None:
    run = Run().start()
    run.beat()
    run.send(TransferBroken("W0_0", "W0_0-1", "W1_1", 1))
    run.exit("W1_1")
    run.wait(4, *run.names)
    assert [e.number for e in run.opened] == [1, 2]


@pytest.mark.parametrize("generation", [1, 0])
def test_a_broken_transfer_of_a_generation_that_is_over_is_no_news(generation: int) -> None:
    run = Run().start()
    run.exit("W1_1")
    run.beat("W0_0", "W0_1", "W1_0")
    run.send(TransferBroken("W0_0", "W0_0-1", "W1_1", generation))
    assert run.state.broken is None


def test_a_stage_without_a_living_worker_halts_the_job() -> None:
    run = Run().start()
    run.exit("W0_1")
    run.exit("W1_1")
    assert run.state.job_state is JobState.HALTED
    assert len(run.opened) == 2
    assert run.sentence() == (golden("halted-stage-1-has-no"))
    run.back("W1_1")
    assert run.state.job_state is JobState.HALTED
    assert len(run.opened) == 2


def test_an_own_loop_goes_on_once_all_its_processes_are_started_again() -> None:
    """They may have a checkpoint that nobody else knows of."""
    run = Run(own_loop=True).start()
    run.back("W0_1")
    run.back("W1_1")
    assert run.state.job_state is JobState.HALTED, "what stage 0 has goes on with nothing that stage 1 has"
    run.back("W1_0")
    run.back("W0_0")
    assert run.opened[-1].living == tuple(run.names) and run.opened[-1].joining == tuple(run.names)
    run.resume()
    assert run.state.job_state is JobState.RUNNING


def test_parts_of_a_sharded_optimizer_that_are_gone_halt_the_job() -> None:
    """Whoever had them may have come back without them by then."""
    run = Run(pipelines=3).start()
    run.exit("W1_0")
    run.exit("W2_0")
    run.resume()
    run.back("W1_0")
    run.back("W2_0")
    run.send(StateLost("W0_0", "W0_0-1", run.opened[-1].number, "stage 0: parts are gone"))
    assert run.state.job_state is JobState.HALTED
    assert golden("all-workers-that-kept-some", "0") in run.state.halted


def test_a_peer_without_weights_yet_does_not_keep_a_stage_alive() -> None:
    run = Run().start()
    run.exit("W0_1")
    run.resume()
    run.back("W0_1")
    assert run.opened[-1].joining == ("W0_1",)
    run.exit("W1_1")
    assert run.state.job_state is JobState.HALTED


def test_a_plan_that_does_not_exist_halts_the_job_until_the_membership_changes() -> None:
    run = Run().start()
    run.plans = False
    run.exit("W0_1")
    run.send(PlanRefused(("W0_1",), "no schedule exists: too little memory"))
    assert run.state.job_state is JobState.HALTED
    assert golden("without-w0-1-no-schedule") in run.sentence()
    step = run.back("W0_1")
    assert NeedPlan(()) in step.decisions
    assert run.state.job_state is JobState.RECOVERING


def test_an_acknowledgement_can_not_go_back() -> None:
    run = Run().start()
    before = run.state
    run.send(GenerationAcknowledged("W0_0", "W0_0-1", 1, "adopted"))
    assert run.state is before


def test_an_acknowledgement_of_the_future_is_refused_one_of_the_past_ignored() -> None:
    run = Run().start()
    refusal = run.send(GenerationAcknowledged("W0_0", "W0_0-1", 2, "adopted")).refusal
    assert refusal is not None
    assert refusal.detail.startswith("generation: got 2,")
    run.exit("W1_1")
    before = run.state
    assert run.send(GenerationAcknowledged("W0_0", "W0_0-1", 1, "resumed")).refusal is None
    assert run.state is before


def test_a_worker_outside_the_generation_can_not_acknowledge_it() -> None:
    run = Run().start()
    run.exit("W1_0")
    run.back("W1_0")
    refusal = run.send(GenerationAcknowledged("W1_0", run.member("W1_0").incarnation or "", 2, "adopted")).refusal
    assert refusal is not None
    assert refusal.code == "not_member"


def test_workers_that_leave_after_the_last_iteration_are_no_failures() -> None:
    run = Run(iterations=10).start()
    run.beat("W0_0", draining=True)
    run.wait(30, "W0_1", "W1_0", "W1_1")
    assert run.member("W0_0").state is WorkerState.FINISHED
    run.send(IterationsCommitted(10))
    run.wait(30)
    assert {m.state for m in run.state.members.values()} == {WorkerState.FINISHED}
    assert len(run.opened) == 1


def test_a_worker_that_leaves_with_its_work_done_has_finished_at_once() -> None:
    """It was taken for living until its silence was judged; and by then for lost, if a generation had opened since."""
    run = Run(own_loop=True).start()
    before = run.opened[-1]
    run.close("W1_0")
    assert run.member("W1_0").state is WorkerState.FINISHED
    assert run.sentence() == golden("training-w1-0-has-finished")
    late = run.beat("W1_0")
    assert run.member("W1_0").state is WorkerState.FINISHED and not late.decisions, "sent before it left"
    run.close("W1_0")
    run.exit("W1_0")
    run.wait(60, "W0_0", "W0_1", "W1_1")
    assert run.member("W1_0").state is WorkerState.FINISHED and run.opened[-1] is before and not run.state.pending
    run.exit("W1_1")
    assert run.opened[-1].failed == ("W1_0", "W1_1") and run.opened[-1].lost == ("W1_1",)
    run.resume()
    assert run.state.settled and run.sentence() == golden("training-w1-0-has-finished-and-w1-1-failed")
    run.send(ConsoleRestarted())
    assert run.state.settled and run.member("W1_0").state is WorkerState.FINISHED


def test_who_leaves_is_in_no_generation_that_opens_later() -> None:
    run = Run(own_loop=True).start()
    run.plans = False
    run.exit("W0_1")
    run.close("W1_0")
    run.send(PlanReady(("W0_1",), "with W1_0", "made"))
    run.send(PlanReady(("W0_1", "W1_0"), "without", "made"))
    assert [generation.plan_fingerprint for generation in run.opened[1:]] == ["without"]


def test_who_is_back_does_not_wait_for_one_that_has_left() -> None:
    run = Run(own_loop=True).start()
    run.exit("W0_1")
    run.back("W0_1")
    run.resume("W0_0", "W1_1")
    assert len(run.opened) == 2
    run.close("W1_0")
    assert run.opened[-1].joining == ("W0_1",) and run.opened[-1].failed == ("W1_0",)


def test_another_process_may_take_the_place_of_one_that_has_left() -> None:
    """As where torchrun starts all workers again, since one of them has failed behind its last iteration."""
    run = Run(own_loop=True).start()
    first = WorkerRegistered("W1_0", "W1_0-1")
    run.close("W1_0")
    assert run.send(first).refusal is None and run.member("W1_0").state is WorkerState.FINISHED, "it comes twice"
    run.back("W1_0")
    assert run.opened[-1].living == tuple(run.names) and run.opened[-1].joining == ("W1_0",)
    assert not run.opened[-1].lost, "it had closed"
    run.resume()
    assert run.state.settled
    run.close("W1_0")
    run.plans = False
    run.back("W1_0")
    run.exit("W1_0")
    assert run.state.pending and run.state.pending.lost == ("W1_0",), "who came in its place is lost"


def test_no_link_is_to_blame_when_one_has_left_too_early() -> None:
    run = Run(own_loop=True).start()
    links = run.state.links
    run.close("W1_0")
    run.send(TransferBroken("W1_1", "W1_1-1", "W1_0", 1))
    run.wait(3, "W0_0", "W0_1", "W1_1")
    assert run.opened[-1].failed == ("W1_0",) and run.state.links == links
    assert run.opened[-1].reason == golden("closed-while-others-exchanged")
    assert run.member("W1_0").state is WorkerState.FINISHED


def test_the_end_of_an_own_loop_calls_nobody_back_that_has_finished() -> None:
    run = Run(own_loop=True, iterations=10).start()
    run.beat("W0_0", draining=True)
    run.wait(30, "W0_1", "W1_0", "W1_1")
    assert run.member("W0_0").state is WorkerState.FINISHED
    run.close("W0_1")
    run.exit("W1_1")
    assert run.member("W0_0").state is run.member("W0_1").state is WorkerState.FINISHED
    late = Run(own_loop=True, iterations=10).start()
    late.beat("W0_0", "W1_1", draining=True)
    late.wait(30, "W0_1", "W1_0")
    late.exit("W1_1")
    assert late.member("W0_0").state is WorkerState.FINISHED and late.opened[-1].failed == ("W0_0", "W1_1")


def test_who_leaves_before_the_first_plan_does_not_keep_the_others_from_it() -> None:
    run = Run(own_loop=True)
    run.plans = False
    for name in run.names:
        run.send(WorkerRegistered(name, f"{name}-1"))
    run.close("W0_0")
    run.send(PlanReady((), "all", "made"))
    assert [generation.plan_fingerprint for generation in run.opened] == ["all"]


def test_no_end_is_a_failure_once_all_iterations_are_done() -> None:
    run = Run(own_loop=True, iterations=10).start()
    run.send(IterationsCommitted(10))
    run.close("W0_0")
    run.exit("W0_1")
    assert run.member("W0_1").state is WorkerState.FINISHED and len(run.opened) == 1 and not run.state.pending


def test_an_own_loop_is_over_when_the_last_worker_has_left() -> None:
    """The one that should say so may not have reached the console: the job was shown as running for ever."""
    run = Run(own_loop=True).start()
    for name in ("W0_0", "W0_1", "W1_0"):
        run.close(name)
        assert run.state.over is None
    step = run.close("W1_1")
    assert run.state.over is JobState.FINISHED and step.refusal is None
    assert run.send(Finished(JobState.FINISHED)).state is run.state
    some = Run(own_loop=True).start()
    some.exit("W0_0")
    for name in ("W0_1", "W1_0"):
        some.close(name)
    some.back("W0_0")
    some.close("W1_1")
    assert some.state.over is None, "one has come back, with work to do"


def test_an_own_loop_whose_workers_leave_while_a_plan_is_made_is_about_to_end() -> None:
    """It was shown as halted until the last had left."""
    run = Run(own_loop=True).start()
    run.plans = False
    run.exit("W1_1")
    run.close("W0_0")
    run.close("W0_1")
    assert run.state.job_state is JobState.RUNNING and run.condition() is Condition.DEGRADED
    assert run.sentence() == golden("training-two-have-finished-and-w1-1-failed")
    run.send(PlanReady(("W0_0", "W0_1", "W1_1"), "too late", "made"))
    assert len(run.opened) == 1 and not any(note.severity == "error" and note.kind == "job" for note in run.notes)
    run.send(ConsoleRestarted())
    assert run.state.job_state is JobState.RUNNING
    needed = run.state
    run.close("W1_0")
    assert run.state.over is JobState.FINISHED
    run.state = needed
    run.send(TransferBroken("W1_0", "W1_0-1", "W0_0", 1))
    run.wait(3, "W1_0")
    assert run.state.job_state is JobState.HALTED, "W1_0 can't do its work, and nobody can help it"


def test_an_own_loop_does_not_end_by_those_that_left_before_its_generation() -> None:
    """It was shown as training though nobody had the last stage, for as long as no other worker complained."""
    run = Run(own_loop=True).start()
    run.close("W1_1")
    run.send(TransferBroken("W1_0", "W1_0-1", "W1_1", 1))
    run.wait(3, "W0_0", "W0_1", "W1_0")
    run.resume()
    assert run.opened[-1].living == ("W0_0", "W0_1", "W1_0") and run.state.settled
    run.exit("W0_1")
    assert run.state.job_state is JobState.HALTED


def test_who_complained_while_a_plan_was_made_halts_an_own_loop_that_would_end() -> None:
    """It complains once: the job was shown as training for as long as it waited."""
    run = Run(own_loop=True).start()
    run.plans = False
    run.exit("W1_1")
    run.send(TransferBroken("W1_0", "W1_0-1", "W1_1", 1))
    run.close("W0_0")
    run.close("W0_1")
    run.wait(3, "W1_0")
    assert run.state.job_state is JobState.HALTED
    opens = Run(own_loop=True).start()
    opens.plans = False
    opens.exit("W1_1")
    opens.send(TransferBroken("W1_0", "W1_0-1", "W1_1", 1))
    opens.send(PlanReady(("W1_1",), "without", "made"))
    opens.wait(3, "W0_0", "W0_1", "W1_0")
    assert len(opens.opened) == 2 and not opens.state.broken, "the generation that it needs has opened"


def _stage_1_is_done() -> Run:
    """An own loop at its end: W0_1 was silent with its work done, and then its peer W1_1 died."""
    run = Run(own_loop=True).start()
    run.beat()
    run.beat("W0_1", draining=True)
    run.wait(30, "W0_0", "W1_0", "W1_1")
    run.exit("W1_1")
    assert run.state.job_state is JobState.RUNNING
    return run


def test_no_link_is_to_blame_where_an_own_loop_has_lost_a_stage_at_its_end() -> None:
    run = _stage_1_is_done()
    run.send(TransferBroken("W1_0", "W1_0-1", "W1_1", 1))
    run.wait(3, "W0_0", "W1_0")
    assert run.state.job_state is JobState.HALTED
    assert not any(note.kind == "generation" and note.severity == "warning" for note in run.notes)


def test_an_own_loop_goes_on_without_one_that_failed_once_its_peer_is_heard_again() -> None:
    """The peer was taken for finished, so nobody opened a generation for those that were left."""
    run = _stage_1_is_done()
    assert len(run.opened) == 1
    run.beat("W0_1")
    assert run.opened[-1].living == ("W0_0", "W0_1", "W1_0")


@pytest.mark.parametrize("own_loop", [True, False])
def test_who_is_heard_again_while_a_plan_is_made_is_in_the_generation(own_loop: bool) -> None:
    """It was shown as running for ever, and no generation had it."""
    run = Run(own_loop=own_loop).start()
    run.beat()
    run.beat("W0_1", draining=True)
    run.wait(30, "W0_0", "W1_0", "W1_1")
    run.plans = False
    run.exit("W1_0")
    assert run.state.pending and run.state.pending.failed == ("W0_1", "W1_0")
    run.beat("W0_1")
    assert run.state.pending and run.state.pending.failed == ("W1_0",)
    back = Run(own_loop=own_loop).start()
    back.exit("W1_0")
    back.resume()
    back.beat("W0_0", "W0_1", "W1_1")
    back.beat("W0_1", draining=True)
    back.wait(30, "W0_0", "W1_1")
    back.plans = False
    back.back("W1_0")
    assert back.state.pending and back.state.pending.failed == ("W0_1",)
    back.beat("W0_1")
    assert back.state.pending and not back.state.pending.failed


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_halted_job_is_not_settled(own_loop: bool) -> None:
    """A worker could be drained for good from a job that nobody could help any more, and all were said to train."""
    run = Run(own_loop=own_loop).start()
    run.exit("W0_1")
    run.resume("W0_0", "W1_1")
    run.exit("W1_1")
    assert run.state.job_state is JobState.HALTED
    before = len(run.notes)
    run.resume("W1_0")
    assert not run.state.settled and len(run.notes) == before
    refusal = run.send(DrainAsked("W0_0", "ada")).refusal
    assert refusal is not None and refusal.code == "recovering"


@pytest.mark.parametrize("silent", [True, False])
def test_who_comes_back_while_an_own_loop_ends_halts_it_only_when_the_last_has_left(silent: bool) -> None:
    run = Run(own_loop=True).start()
    run.beat()
    run.exit("W0_0")
    run.resume()
    run.close("W0_1")
    run.close("W1_0")
    run.back("W0_0")
    assert run.state.job_state is JobState.RUNNING
    assert run.sentence() == golden("training-two-have-finished-and-w0-0-is-back")
    if silent:
        run.beat("W1_1", draining=True)
        run.wait(30, "W0_0")
    else:
        run.close("W1_1")
    assert run.state.job_state is JobState.HALTED, "nobody is left with whom it could train"


@pytest.mark.parametrize("silent", [True, False])
def test_an_own_loop_is_over_when_one_dies_that_has_come_back_too_late(silent: bool) -> None:
    """It was called halted for good."""
    run = Run(own_loop=True).start()
    run.exit("W0_0")
    run.resume()
    run.close("W0_1")
    run.close("W1_0")
    run.back("W0_0")
    run.beat("W0_0")
    run.close("W1_1")
    assert run.state.job_state is JobState.HALTED
    if silent:
        run.wait(30)
    else:
        run.exit("W0_0")
    assert run.state.over is JobState.FINISHED and run.member("W0_0").state is WorkerState.FAILED


def test_an_own_loop_halts_when_one_dies_that_has_not_done_its_work() -> None:
    """All may be started again, as torchrun does."""
    run = Run(own_loop=True).start()
    for name in ("W0_0", "W0_1", "W1_0"):
        run.close(name)
    run.exit("W1_1")
    assert run.state.job_state is JobState.HALTED
    run.back("W1_1")
    run.exit("W1_1")
    assert run.state.job_state is JobState.HALTED
    run.back("W0_0")
    run.back("W0_1")
    assert run.opened[-1].joining == ("W0_0", "W0_1")


@pytest.mark.parametrize("silent_first", [True, False])
def test_an_own_loop_is_over_too_when_one_falls_silent_with_its_work_done(silent_first: bool) -> None:
    """It could not reach the console as it left: the job was shown as training with one worker for ever."""
    run = Run(own_loop=True).start()
    run.beat(draining=False)
    run.beat("W1_1", draining=True)
    others = run.names[:-1]
    if silent_first:
        run.wait(30, *others)
    for name in others:
        assert run.state.over is None
        run.close(name)
    if not silent_first:
        run.wait(30)
    assert run.state.over is JobState.FINISHED
    working = Run(own_loop=True).start()
    working.beat()
    for name in others:
        working.close(name)
    working.wait(30)
    assert working.state.over is None, "the last one has not said that its work is done"


def test_who_has_left_is_not_called_back_with_those_that_were_silent() -> None:
    run = Run(iterations=10).start()
    run.close("W0_1")
    run.send(IterationsCommitted(10))
    run.wait(30)
    run.exit("W0_0")
    assert run.opened[-1].failed == ("W0_0", "W0_1") and run.opened[-1].living == ("W1_0", "W1_1")


def test_a_worker_that_its_launcher_sees_end_was_needed_until_the_job_is_over() -> None:
    """Its stage's final hash, say, which peers have too."""
    run = Run(iterations=10).start()
    run.send(IterationsCommitted(10))
    run.beat(draining=True)
    run.exit("W0_0")
    assert run.opened[-1].failed == ("W0_0",)
    run.send(Finished(JobState.FINISHED))
    run.exit("W0_1")
    assert len(run.opened) == 2 and run.member("W0_1").state is WorkerState.FINISHED


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
def test_workers_that_were_silent_at_the_end_are_needed_until_the_job_is_over(heard: bool) -> None:
    """They write the weights, and the console does not hear them for a while; then the one that writes is killed."""
    run = Run(iterations=10).start()
    run.send(IterationsCommitted(10))
    run.wait(30)
    assert {m.state for m in run.state.members.values()} == {WorkerState.FINISHED}
    if heard:
        run.beat()
        assert {m.state for m in run.state.members.values()} == {WorkerState.RUNNING} and run.state.settled
    run.exit("W0_0")
    assert run.opened[-1].failed == ("W0_0",) and run.opened[-1].living == ("W0_1", "W1_0", "W1_1")
    assert run.opened[-1].joining == () and len(run.state.unsettled()) == 3 == run.state.tally.unsettled


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_link_that_broke_while_all_were_silent_at_the_end_halts_no_job_for_good(checkpoints: bool) -> None:
    run = Run(3, 2, iterations=10, checkpoints=checkpoints).start()
    run.exit("W2_1")
    run.send(IterationsCommitted(10))
    run.send(TransferBroken("W0_0", "W0_0-1", "W0_1", run.state.generation))
    run.now += 30
    run.send(Tick())
    assert run.state.job_state is JobState.HALTED and not run.state.unheard
    run.beat("W0_0", "W1_0", "W2_0")
    assert run.state.job_state is JobState.HALTED and len(run.opened) == 2, "those of the other stage may be there, too"
    run.beat("W0_1", "W1_1")
    assert run.opened[-1].number == 3 and run.opened[-1].failed == ("W2_1",)
    run.resume()
    assert run.state.job_state is JobState.RUNNING


def test_a_worker_without_its_state_that_was_silent_at_the_end_still_lacks_it() -> None:
    run = Run(iterations=10).start()
    run.exit("W0_0")
    run.resume()
    run.back("W0_0")
    run.resume("W0_1", "W1_0", "W1_1")
    incarnation = run.member("W0_0").incarnation or ""
    run.send(IterationsCommitted(10))
    run.wait(30)
    run.beat()
    assert run.member("W0_0").state is WorkerState.REJOINING and run.member("W0_1").state is WorkerState.RUNNING
    assert run.state.tally.unsettled == 1
    run.send(GenerationAcknowledged("W0_0", incarnation, 3, "formed"))
    run.wait(30)
    run.beat()
    assert run.member("W0_0").state is WorkerState.RUNNING, "it has it by now"


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.STOPPED])
def test_a_job_that_is_over_takes_no_more_workers(state: JobState) -> None:
    run = Run().start()
    run.send(Finished(state, "all workers are gone"))
    assert run.state.job_state is state
    assert run.sentence().startswith(golden("the-job-has"))
    assert run.sentence().endswith(golden("all-workers-are-gone"))
    refusal = run.send(WorkerRegistered("W0_0", "new")).refusal
    assert refusal is not None
    assert refusal.code == "job_over"
    run.exit("W0_1")
    run.wait(30)
    assert len(run.opened) == 1


def test_after_a_restart_of_the_console_nobody_is_late() -> None:
    run = Run().start()
    run.beat()
    run.now += 1000
    run.send(ConsoleRestarted())
    run.send(Tick())
    assert len(run.opened) == 1
    assert run.state.job_state is JobState.RUNNING


def test_a_console_that_only_reads_a_job_back_goes_on_counting_silence() -> None:
    """However often it does."""
    run = Run().start()
    run.beat()
    silent, *others = run.names
    for _ in range(round(FAILURE_TIMEOUTS.dead) + 2):
        run.wait(1, *others)
        run.send(ConsoleRestarted(listened=True))
    assert run.opened[-1].failed == (silent,)


def test_a_restarted_console_opens_the_generation_that_it_had_not_come_to() -> None:
    run = Run().start()
    run.plans = False
    run.exit("W1_0")
    run.plans = True
    run.send(ConsoleRestarted())
    assert run.opened[-1].failed == ("W1_0",)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"heartbeat": 0}, "heartbeat"),
        ({"heartbeat": 3, "suspect": 5}, "suspect"),
        ({"suspect": 20, "dead": 20}, "dead"),
        ({"transfer_grace": 30}, "transfer_grace"),
        ({"dead": float("nan")}, "dead"),
    ],
)
def test_failure_timeouts_in_another_order_are_refused(values: dict[str, float], field: str) -> None:
    with refuses(field):
        FailureTimeouts(**values)


@pytest.mark.parametrize(
    ("transfer", "group", "field"),
    [
        (20.0, 150.0, "transfer_timeout"),
        (120.0, 120.0, "group_timeout"),
    ],
)
def test_agents_that_wait_for_less_than_the_failure_timeouts_allow_are_refused(
    transfer: float, group: float, field: str
) -> None:
    with refuses(field):
        FAILURE_TIMEOUTS.check_above(transfer, group)


def test_agents_that_wait_long_enough_or_do_not_say_are_taken() -> None:
    FAILURE_TIMEOUTS.check_above(FAILURE_TIMEOUTS.dead + 1, FAILURE_TIMEOUTS.dead + 2)
    FAILURE_TIMEOUTS.check_above(None, None)


@pytest.mark.parametrize("phase", [0.0, 0.1, 0.249])
@pytest.mark.parametrize(("rung", "state"), [(FAILURE_TIMEOUTS.suspect, "suspect"), (FAILURE_TIMEOUTS.dead, "failed")])
def test_a_silence_is_noticed_by_the_next_tick(phase: float, rung: float, state: str) -> None:
    run = Run().start()
    run.beat()
    heard = run.now
    run.now += phase
    while run.member("W1_1").state != state:
        run.now += TICK_SECONDS
        run.beat("W0_0", "W0_1", "W1_0")
        run.send(Tick())
    assert rung < run.now - heard <= rung + TICK_SECONDS <= 1.1 * rung


@pytest.mark.parametrize(("silent", "lines"), [(LINES_AT_ONCE, LINES_AT_ONCE), (LINES_AT_ONCE + 1, 1)])
def test_many_that_fall_silent_at_once_do_not_flood_the_feed(silent: int, lines: int) -> None:
    run = Run(silent + 1, 1).start()
    run.beat()
    run.wait(FAILURE_TIMEOUTS.suspect + 1, "W0_0")
    notes = [note for note in run.notes if note.kind == "worker" and note.severity == "warning"]
    assert len(notes) == lines
    assert Counter(m.state for m in run.state.members.values()) == {WorkerState.SUSPECT: silent, WorkerState.RUNNING: 1}
    before = len(run.notes)
    run.beat()
    assert len(run.notes) - before == lines
    assert {m.state for m in run.state.members.values()} == {WorkerState.RUNNING}


@pytest.mark.parametrize(("lost", "lines"), [(LINES_AT_ONCE, LINES_AT_ONCE), (LINES_AT_ONCE + 1, 1)])
def test_many_that_are_lost_at_once_do_not_flood_the_feed(lost: int, lines: int) -> None:
    run = Run(lost + 1, 1).start()
    run.beat()
    run.wait(FAILURE_TIMEOUTS.dead + 1, "W0_0")
    notes = [note for note in run.notes if note.kind == "failure"]
    assert len(notes) == lines
    assert all(note.worker for note in notes) == (lines > 1)
    assert {name for name in run.names if name in notes[0].text} >= {"W1_0"}
    assert Counter(m.state for m in run.state.members.values()) == {WorkerState.FAILED: lost, WorkerState.RUNNING: 1}


def test_who_dies_while_many_join_is_not_said_to_have_joined() -> None:
    run = Run(LINES_AT_ONCE + 3, 1).start()
    for name in run.names[1:]:
        run.exit(name)
    run.resume()
    for name in run.names[1:]:
        run.back(name)  # the first one joins at once, and the others in the generation after that
    run.resume()
    first, *others = run.opened[-1].joining
    assert len(others) == LINES_AT_ONCE
    run.plans = False
    run.exit(first)
    before = len(run.notes)
    run.resume(*others)
    (note,) = (note for note in run.notes[before:] if note.kind == "recovery")
    assert first not in note.text and others[0] in note.text


@pytest.mark.parametrize("back", [LINES_AT_ONCE, LINES_AT_ONCE + 30])
def test_many_that_come_back_do_not_flood_the_feed(back: int) -> None:
    run = Run(back + 2, 1).start()
    came = [note for note in run.notes if note.kind == "worker"]
    assert [note.worker for note in came] == [*run.names[:LINES_AT_ONCE], None]
    run.beat()
    run.wait(FAILURE_TIMEOUTS.dead + 1, "W0_0")
    run.resume()
    before = len(run.notes)
    for name in run.names[1:]:
        run.back(name)  # the first one joins at once, and the others in the generation after that
    run.resume()
    run.resume()
    assert [m.state for m in run.state.members.values()] == [WorkerState.RUNNING] * (back + 2)
    said = [note for note in run.notes[before:] if note.kind == "worker"]
    first, more = run.names[1 : LINES_AT_ONCE + 2], [None] * (back > LINES_AT_ONCE)
    assert [note.worker for note in said] == [*first, *more]
    joined = [note.worker for note in run.notes[before:] if note.kind == "recovery" and "re-joined" in note.text]
    assert joined == [run.names[1], *([None] if more else run.names[2:])]


def test_the_failure_timeouts_of_these_tests_are_the_default_ones() -> None:
    assert FailureTimeouts() == FAILURE_TIMEOUTS
