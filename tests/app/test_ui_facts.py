"""The figures and sentences of the pages."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import ui_factory as factory

from openrecycle.agent.coordination.membership import TransferBroken, WorkerRegistered, back_to
from openrecycle.agent.messages.protocol import JobState
from openrecycle.app.charts import text
from openrecycle.app.charts.progress import generation_marks
from openrecycle.app.console.view import JobView, OpTime, WorkerDetail
from openrecycle.app.jobs.states import (
    OUT,
    TRAINING_ALONE,
    Condition,
    Loss,
    RoleState,
    WorkerStates,
    loss_of,
    sentence,
)
from openrecycle.app.jobs.throughput import Baseline, Figures
from openrecycle.app.ui import facts, tables
from openrecycle.app.ui.components import tone_of
from openrecycle.app.ui.worker_dialog import feed_html, op_times_html
from openrecycle.planner.jobs.job import Job, StageProfile
from openrecycle.planner.plans.plan import job_doc
from tests.agent.coordinator_run import FAILURE_TIMEOUTS, Run
from tests.golden import golden


def card(view: JobView, label: str) -> facts.Card:
    return next(c for c in facts.live_cards(view) if c.label.startswith(label))


def test_what_an_error_says_becomes_a_sentence() -> None:
    said = [text.whole_sentence(words) for words in ("no worker lives", "W0_1 is gone.")]
    assert said == ["No worker lives.", "W0_1 is gone."] and text.capital("") == ""


def test_cards_are_six_in_every_state() -> None:
    for make in factory.STATES.values():
        cards = facts.live_cards(make())
        assert len(cards) == 6
        assert all(c.label and c.value and c.note for c in cards)


def test_throughput_is_that_of_the_generation_without_its_first_iteration() -> None:
    iterations = factory.iteration_views(20, failed_at=16)
    settled = iterations[17:]
    expected = sum(i.samples_per_second * i.seconds for i in settled) / sum(i.seconds for i in settled)
    assert facts.recent_rate(iterations) == pytest.approx(expected)
    assert facts.recent_rate(iterations[:17]) == pytest.approx(iterations[16].samples_per_second), "all there is"
    assert facts.recent_rate(()) is None


def test_an_iteration_that_holds_a_recovery_is_no_pace() -> None:
    """It alone is known when a generation has just begun: seconds of it may have been for somebody's death."""
    degraded = replace(factory.failed(), state=JobState.RUNNING, condition=Condition.DEGRADED)
    first, second = (replace(degraded, iterations=factory.iteration_views(n, failed_at=16)) for n in (17, 18))
    shown = card(first, "Throughput")
    assert shown.value == text.rate(first.iterations[-1].samples_per_second)
    assert "%" not in shown.note and not shown.tone
    assert "%" in card(second, "Throughput").note and card(second, "Throughput").tone
    begun = replace(degraded, iterations=factory.iteration_views(1))
    assert "%" in card(begun, "Throughput").note, "the job's very first one"


def test_reference_says_where_it_is_from() -> None:
    measured = facts.fault_free_rate(factory.running())
    assert (
        measured is not None
        and measured.samples_per_second == 36.5
        and measured.words == golden("measured-at-iterations-1-to")
    )
    figures = Figures(Baseline(99.0, "planned"), None, None, 0.0, 0.0)
    planned = facts.fault_free_rate(factory.running(figures=figures))
    assert planned is not None and planned.samples_per_second == 99.0 and "predicted" in planned.words
    assert facts.fault_free_rate(factory.running(figures=None)) is None
    assert facts.fault_free_rate(factory.running(figures=replace(figures, baseline=None))) is None


def test_throughput_is_good_only_while_the_job_trains() -> None:
    running = factory.running()
    assert card(running, "Throughput").tone == "good"
    lost = card(replace(running, state=JobState.RECOVERING), "Throughput")
    assert (lost.value, lost.tone) == (card(running, "Throughput").value, "warn")
    assert lost.note == golden("before-this-change-recovering")
    silent = card(replace(running, condition=Condition.SILENT), "Throughput")
    assert (silent.value, silent.tone) == (lost.value, "warn") and "%" not in silent.note
    halted = card(replace(running, state=JobState.HALTED), "Throughput")
    assert (halted.value, halted.tone) == ("0", "bad")


def test_what_nobody_has_been_heard_of_for_seconds_is_not_said_to_be_well() -> None:
    """A console that is stuck takes no silence for a worker's: the job's state stays as it was."""
    running = factory.running()
    old = replace(running, workers=tuple(replace(w, heartbeat_age=11.0) for w in running.workers))
    one = replace(running, workers=(replace(running.workers[0], heartbeat_age=11.0), *running.workers[1:]))
    tones = [(tone_of(view), card(view, "Throughput").tone) for view in (running, one, old)]
    assert tones == [("good", "good"), ("good", "good"), ("warn", "warn")]
    assert tone_of(replace(old, state=JobState.FINISHED, condition=Condition.FINISHED)) == "done"
    for condition in (Condition.RUNNING, Condition.PAUSED, Condition.STARTING):
        assert tone_of(replace(running, condition=condition, unstorable=True)) == "warn"
    labels = ("Throughput", "Living workers")
    well, doubtful = ([card(replace(running, unstorable=bad), label) for label in labels] for bad in (False, True))
    assert [shown.tone for shown in well] == ["good", "good"]
    assert "good" not in [shown.tone for shown in doubtful], "who has died meanwhile is not stored as lost"
    patient = replace(old, suspect_seconds=30.0)
    tones = [tone_of(patient), card(patient, "Throughput").tone, card(patient, "Age of data").tone]
    assert tones == ["good", "good", ""], "where workers speak seldom"


def test_goodput_card_has_both_figures() -> None:
    goodput = card(factory.running(), "Goodput")
    assert (goodput.value, goodput.note) == ("94 %", "ETTR 97 % of 31 s")
    unknown = Figures(None, 0.97, None, 31.0, 30.07)
    assert card(factory.running(figures=unknown), "Goodput").value == "–"
    assert card(factory.running(figures=None), "Goodput").note == golden("no-iteration-done-yet")


def test_data_age_warns_when_it_is_old() -> None:
    fresh = card(factory.running(), "Age of data")
    assert (fresh.value, fresh.tone) == ("0.3 s", "")
    old = card(factory.suspect_and_joining(), "Age of data")
    assert old.tone == "warn" and "7.4 s ago" in old.note
    assert card(factory.finished(), golden("age-of-data")).note == golden("the-job-is-over")


def test_roll_out_is_counted_while_it_lasts() -> None:
    base = factory.failed()
    steps = {"W0_0": "adopted", "W0_1": "formed", "W0_2": "resumed"}
    workers = tuple(replace(w, acknowledged=steps.get(w.name, ""), generation=2) for w in base.workers)
    rolling = replace(base, state=JobState.RECOVERING, workers=workers)
    assert facts.roll_out(rolling) == golden("of-11-workers-1-trains")
    assert card(rolling, golden("plan-in-force")).tone == "warn"
    assert facts.roll_out(replace(rolling, state=JobState.RUNNING)) == ""
    words = {w.name: facts.tile_words(w) for w in workers}
    assert (words["W0_0"], words["W0_1"], words["W0_2"]) == (
        golden("has-the-plan"),
        golden("in-its-groups"),
        "+3 re-routed",
    )
    assert words["W1_0"] == words["W2_2"] == "waits", "whoever is last does not look as if it trained"
    nobody = replace(rolling, workers=tuple(replace(w, acknowledged="") for w in workers))
    assert facts.roll_out(nobody) == golden("of-11-workers-none-trains")


def test_a_slow_worker_is_shown_as_slow() -> None:
    slow = replace(factory.running().workers[0], slow=1.62, state=RoleState.SLOW)
    assert facts.tile_words(slow) == "slow, 1.6 ×"
    assert facts.tile_words(replace(slow, state=RoleState.FAILED)) == "failed"


def test_op_times_have_the_digits_that_they_differ_by() -> None:
    detail = WorkerDetail(factory.running().workers[0], (), (OpTime("F", 40.5, 40.0, 283.4),), (), (), None)
    cells = re.findall("<td>(.*?)</td>", op_times_html(detail))
    assert cells == ["40.5 ms", "40 ms (+1.2 %)", "283.4 ms (−85.7 %)"]


def test_workers_card_names_the_failed() -> None:
    living = card(factory.failed(), "Living")
    assert (living.value, living.of, living.tone) == ("11", "of 12", "bad")
    assert "W1_2" in living.note
    assert card(factory.starting(), "Living").value == "1"
    assert card(factory.suspect_and_joining(), "Living").note.startswith("suspect: W2_0")


def test_a_worker_that_was_asked_to_go_is_drained_once_it_has_gone() -> None:
    base = factory.failed()
    asked = replace(factory.lost("W1_2"), ended="drained")
    workers = {state: tuple(replace(w, state=state) if w.name == "W1_2" else w for w in base.workers) for state in OUT}
    for state, words in ((RoleState.LEAVING, "leaving: W1_2"), (RoleState.DRAINED, "drained: W1_2")):
        living = card(replace(base, missing=(asked,), workers=workers[state]), "Living")
        assert (living.note, living.tone) == (words, "warn")


def test_no_plan_is_in_force_while_the_job_is_halted() -> None:
    plan = card(factory.halted(), "Plan")
    assert "in force" not in plan.label and "halted" in plan.note


def test_plan_card_has_generation_period_and_gap() -> None:
    view = factory.failed()
    assert view.plan is not None
    plan = card(view, "Plan in force")
    assert plan.label.endswith("generation 2")
    assert plan.value == text.milliseconds(view.plan.metrics.period)
    assert "vs 1F1B" in plan.note and ("proven optimal" in plan.note or "gap ≤" in plan.note)


def test_kill_tells_who_takes_over_and_when_nobody_can() -> None:
    view = factory.failed()
    by_name = {w.name: w for w in view.workers}
    sentence, warning = facts.consequence_of_kill(view, by_name["W0_2"], Loss())
    assert not warning and "9 micro-batches" in sentence and "W2_2" in sentence and "W1_2" not in sentence
    halted = factory.halted()
    last = replace(next(w for w in halted.workers if w.name == "W1_2"), state=RoleState.RUNNING)
    sentence, warning = facts.consequence_of_kill(halted, last, Loss(halts=True))
    assert warning == facts.STOPS and "halts" in sentence


@pytest.mark.parametrize(
    ("spec", "gone", "words", "warning"),
    [
        ({}, ("W0_1",), golden("nobody-can-take-over"), facts.STOPS),
        ({"checkpoints": True}, ("W0_1",), golden("w1-0-takes-its-place-and-all"), ""),
        ({"checkpoints": True}, ("W0_1", "W0_0"), golden("no-stage-can-spare-one"), facts.STANDS_STILL),
        ({"max_restarts": 3}, ("W0_1", "W0_0"), golden("starts-it-again-then-all-begin-anew"), ""),
        ({"max_restarts": 1, "checkpoints": True}, ("W0_1", "W0_0"), golden("starts-it-again-then-all-go-back"), ""),
        ({"max_restarts": 3}, (), golden("it-is-started-again-unless"), ""),
    ],
)
def test_a_kill_comes_to_what_is_said_of_it(
    spec: dict[str, Any], gone: tuple[str, ...], words: str, warning: str
) -> None:
    """Of W1_1 in a grid of 2 x 2, without `gone`: what the coordinator does then was said before."""
    run = Run(2, 2)
    run.state = replace(run.state, back_to=back_to(spec.get("checkpoints", False), spec.get("max_restarts", 0)))
    run.start()
    for name in gone:
        run.exit(name)
        run.resume()
    base = factory.running()
    workers = tuple(
        replace(w, state=RoleState.FAILED) if w.name in gone else w for w in base.workers if w.name in run.names
    )
    view = replace(base, spec=factory.spec(pipelines=2, stages=2, **spec), workers=workers)
    loss = loss_of(run.state, "W1_1", run.now, FAILURE_TIMEOUTS)
    sentence, warned = facts.consequence_of_kill(view, next(w for w in workers if w.name == "W1_1"), loss)
    assert words in sentence
    assert warned == warning
    run.exit("W1_1")
    opened = run.opened[-1]
    stages = {run.member(name).stage for name in opened.living}
    assert loss.halts == (bool(run.state.halted) or stages != {0, 1})
    assert loss.restore == (opened.restore and not run.state.halted)


def told(run: Run, worker: str, **states: RoleState) -> tuple[str, str, Loss]:
    """What the dialog of `worker` says of its kill, and warns of. states: of the others, all else run."""
    pipelines, stages = (1 + max(int(name[at]) for name in run.names) for at in (1, 3))
    workers = tuple(
        replace(w, state=states.get(w.name, RoleState.RUNNING))
        for w in factory.running().workers
        if w.name in run.names
    )
    spec = factory.spec(pipelines=pipelines, stages=stages, checkpoints=bool(run.state.back_to))
    view = replace(factory.running(), spec=spec, workers=workers)
    loss = loss_of(run.state, worker, run.now, FAILURE_TIMEOUTS)
    return *facts.consequence_of_kill(view, next(w for w in workers if w.name == worker), loss), loss


def test_a_kill_while_all_go_back_for_another_stage_promises_no_move() -> None:
    """Stage 1 was lost, and a worker of stage 0 is to take its place; those of stage 0 have peers."""
    run = Run(3, 2, checkpoints=True).start()
    for name in ("W0_1", "W1_1", "W2_1"):
        run.exit(name)
        if name != "W2_1":
            run.resume()
    gone = dict.fromkeys(("W1_1", "W2_1", "W2_0"), RoleState.FAILED)
    sentence, _, loss = told(run, "W0_0", **gone, W0_1=RoleState.JOINING)
    assert loss == Loss(restore=True)
    assert sentence == golden("all-go-back-to-the-newest")


def test_a_kill_while_a_peer_joins_moves_nobody() -> None:
    run = Run(2, 2, checkpoints=True).start()
    run.exit("W1_1")
    run.resume()
    run.back("W1_1")
    sentence, _, loss = told(run, "W0_1", W1_1=RoleState.JOINING)
    assert loss == Loss(restore=True)
    assert sentence == golden("all-go-back-to-the-newest")


def test_a_move_that_was_decided_before_is_none_that_a_kill_brings() -> None:
    """W2_0 is to take a place on stage 1, and W1_1 is back there: whoever is killed of the two has the other one."""
    run = Run(3, 2, checkpoints=True).start()
    for name in ("W0_1", "W1_1"):
        run.exit(name)
        run.resume()
    run.plans = False
    run.exit("W2_1")
    run.back("W1_1")
    assert run.state.pending is not None and run.state.pending.moves == (("W2_0", "W0_1"),)
    losses = {name: loss_of(run.state, name, run.now, FAILURE_TIMEOUTS).by for name in ("W0_1", "W1_1")}
    assert losses == {"W0_1": "", "W1_1": ""}
    run.exit("W1_1")
    assert loss_of(run.state, "W0_1", run.now, FAILURE_TIMEOUTS).by == "W1_0", "now it is the last one of stage 1"


def test_the_kill_of_one_that_joins_changes_nothing_for_the_others() -> None:
    view = factory.suspect_and_joining()
    joining = next(w for w in view.workers if w.state is RoleState.JOINING)
    alone = replace(view, workers=(joining,))
    for each in (view, alone):
        words, warning = facts.consequence_of_kill(each, joining, Loss(share=0.7))
        assert not warning and golden("it-does-not-train-yet") in words


def test_the_kill_of_one_that_joins_while_all_go_back_is_told_as_the_coordinator_takes_it() -> None:
    """W1_0 is to take the place of the last worker of stage 1; nobody trains before it is ready."""
    run = Run(2, 2, checkpoints=True).start()
    for name in ("W0_1", "W1_1"):
        run.exit(name)
        if name != "W1_1":
            run.resume()
    assert run.member("W0_1").incarnation == "W1_0-1", "it has moved"
    gone = dict.fromkeys(("W1_0", "W1_1"), RoleState.FAILED)
    sentence, _, loss = told(run, "W0_1", **gone, W0_1=RoleState.JOINING)
    assert loss.halts and golden("it-does-not-train-yet") not in sentence
    run.back("W1_1")
    sentence, _, loss = told(run, "W0_1", W1_0=RoleState.FAILED, W0_1=RoleState.JOINING, W1_1=RoleState.JOINING)
    assert loss == Loss(restore=True) and sentence == golden("all-go-back-to-the-newest")


def test_the_last_worker_of_a_stage_can_be_replaced_where_there_are_checkpoints_or_the_job_has_not_begun() -> None:
    view = factory.halted()
    dead = next(w for w in view.workers if w.name == "W1_2")
    last, kept = replace(dead, state=RoleState.RUNNING), replace(view, spec=factory.spec(checkpoints=True))
    assert not facts.consequence_of_restart(view, dead)[1]
    comes_back = replace(view, spec=factory.spec(max_restarts=3))
    for job, where in ((kept, "checkpoint"), (comes_back, golden("to-the-start"))):
        said, helps = facts.consequence_of_restart(job, dead)
        assert helps and where in said
    begins = replace(view, generation=0)
    assert facts.consequence_of_restart(begins, dead)[1] and not facts.consequence_of_kill(begins, last, Loss())[1]


def test_a_console_that_does_not_get_on_says_that_training_goes_on_only_where_it_does() -> None:
    """Of all others it says how they are, as far as it knows: halted, say, and why."""
    trains, begins, halted, breaks, silent = Run().start(), Run(), Run().start(), Run().start(), Run().start()
    begins.send(WorkerRegistered("W0_0", "a"))
    for name in ("W0_1", "W1_1"):
        halted.exit(name)
    assert halted.state.halted
    breaks.send(TransferBroken("W0_0", "W0_0-1", "W0_1", 1, "connection reset"))
    assert breaks.state.settled and breaks.state.broken is not None
    silent.wait(FAILURE_TIMEOUTS.suspect + 1.0, *(name for name in silent.names if name != "W0_1"))

    def said(run: Run, **more: Any) -> tuple[str, str]:
        """At once, and after a stall."""
        states = WorkerStates(run.state, run.processes, **more)
        return sentence(states, run.now, FAILURE_TIMEOUTS), sentence(
            states, run.now + 9.0, FAILURE_TIMEOUTS, stood_still=9.0
        )

    assert said(trains)[1].endswith(f" {TRAINING_ALONE}")
    assert "W0_1" in said(silent)[0]
    for run, more in ((trains, {"paused": True}), (begins, {}), (halted, {}), (breaks, {}), (silent, {})):
        usual, stalled = said(run, **more)
        assert stalled.startswith(golden("the-console-has-been-stuck", "9")) and stalled.endswith(f" {usual}")


def test_tables_hold_what_the_chart_shows() -> None:
    plan = factory.plan(("W1_2",))
    schedule = plan.schedule()
    workers = list(schedule.problem.job.workers())
    by_worker = tables.workers_table(schedule, workers)
    assert by_worker["worker"] == [str(w) for w in workers]
    assert by_worker["re-routed"][2] == 3
    assert by_worker["state"][6] == "out", "a plan alone does not know why"
    assert tables.workers_table(schedule, workers, {"W1_2": "drained"})["state"][6] == "drained"
    by_op = tables.operations_table(schedule, workers)
    assert len(by_op["op"]) == sum(map(len, schedule.ops.values()))
    assert by_op["start"] == sorted(by_op["start"])  # type: ignore[type-var]
    assert sum(map(bool, by_op["re-routed"])) == 18


def test_numbers_of_a_column_have_the_same_digits() -> None:
    columns = tables.columns_of(
        {"worker": ["W0_0"], "busy": [1820.79, 963.847], "end": [0.5, None], "ops": [19, 28], "peak": [4.0, 2.0]}
    )
    assert columns.pop("worker") == {"pinned": True}
    formats = {name: column["type_config"]["format"] for name, column in columns.items()}
    assert formats == {"busy": "%.3f", "end": "%.1f"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0 ms"),
        (9.94, "9.9 ms"),
        (9.96, "10 ms"),
        (283, "283 ms"),
        (999.6, "1 s"),
        (1080, "1.08 s"),
        (59_949, "59.9 s"),
        (125_000, "2 min 5 s"),
        (3_599_900, "1 h"),
        (12_000_000, "3 h 20 min"),
        (12.2 * 86_400_000, "12 days 5 h"),
    ],
)
def test_milliseconds_read_well(value: float, expected: str) -> None:
    assert text.milliseconds(value) == expected


def test_other_numbers_read_well() -> None:
    assert text.planned(27, "slot") == "27 slots" and text.planned(1, "slot") == "1 slot"
    assert text.percent(0.074, sign=True) == "+7.4 %" and text.percent(-0.222, sign=True) == "−22.2 %"
    assert text.percent(0.0001, sign=True) == "±0 %" and text.percent(0.5) == "50 %"
    assert [text.percent(x) for x in (0.0, 0.0001, 0.0006)] == ["0 %", "<0.1 %", "0.1 %"], "a gap that is left is no 0"
    assert text.percent(0.222, digits=0) == "22 %" and text.percent(0.004, digits=0) == "<1 %"
    assert [text.seconds(x) for x in (0.42, 12.3, 59.4, 320)] == ["0.4 s", "12 s", "59 s", "5 min 20 s"]
    assert [text.planned(x, "ms", 5) for x in (960.4, 1083.25)] == ["960.4 ms", "1.0833 s"]
    assert [text.at_most(x) for x in (0.0001, 0.0273, 0.05)] == ["0.1 %", "2.8 %", "5 %"]
    assert text.age(None) == "never" and text.age(0.42) == "0.4 s ago" and text.age(7200) == "2 h ago"
    assert text.count(1, "worker") == "1 worker" and text.count(2048, "worker") == "2,048 workers"
    assert text.size(412 * 2**20) == "412 MiB" and text.size(1010 * 2**20) == "1,010 MiB"
    assert text.rate(81.04) == "81" and text.rate(999.7) == "1,000"
    assert text.clock(0, "Europe/Zurich") == "01:00:00" and text.clock(0, "Nowhere/City") == "00:00:00"


def test_times_of_another_day_say_which() -> None:
    now = factory.T0
    assert text.moment(now, "UTC", now) == text.clock(now, "UTC")
    assert text.moment(0, "Europe/Zurich", now) == "1 Jan 1970, 01:00:00"
    events = [replace(factory.running().events[0], at=at) for at in (now, now - 5, now - 86_400, now - 86_405)]
    rows = feed_html(events, "UTC", now).split("<li")[1:]
    assert ["or-day" in row for row in rows] == [False, False, True, False]
    assert ">Sunday 20 September 2026<" in rows[2]


def test_a_plan_in_milliseconds_says_how_many_slots_that_is() -> None:
    def period(**options: Any) -> facts.Card:
        plan = factory.plan(("W1_2",), **options)
        return facts.plan_cards(plan, plan.schedule())[0]

    slots = period(unit="slot")
    assert slots.of == "" and slots.value.endswith("slots")
    milliseconds = period()
    assert milliseconds.of == f"= {slots.value}" and milliseconds.note.startswith("of 40 ms each; makespan")
    uneven = replace(factory.plan().schedule().problem.job, profiles=(StageProfile(6, 0, 12),) * 4)
    assert facts.slot_of(uneven) is None


def test_iterations_are_in_a_table_with_what_changed() -> None:
    view = factory.failed()
    marks = generation_marks(view.iterations, view.recoveries, view.generations)
    table = tables.iterations_table(view.iterations, marks, 6)
    assert table["iteration"] == list(range(29, -1, -1))
    changed = dict(zip(table["iteration"], table["what changed"], strict=True))
    assert changed.pop(18) == "✕ W1_2: resumed after 283 ms" and not any(changed.values())


def test_an_iteration_without_a_loss_is_shown_as_one() -> None:
    running = factory.running()
    *others, last = running.iterations
    view = replace(running, iterations=(*others, replace(last, loss=None)))
    shown, before = card(view, "Iterations"), card(running, "Iterations")
    assert shown.value == before.value and not re.search("[0-9]", shown.note) and re.search("[0-9]", before.note)
    assert tables.iterations_table(view.iterations, (), 6)["loss"][:2] == [None, round(others[-1].loss or 0.0, 4)]


def test_op_times_are_said_by_stage_where_stages_differ() -> None:
    assert facts.op_time_words(factory.spec()) == "F 40 ms, I 40 ms, W 40 ms"
    assert facts.op_time_words(factory.spec(durations={})) == ""
    profiles = (StageProfile(6, 0, 12), StageProfile(12, 9, 12), StageProfile(6, 9, 12))
    job = Job(2, 3, 4, profiles, time_unit="ms")
    sizes = {"pipelines": 2, "stages": 3, "micro_batches": 4, "durations": {}}
    spec = factory.spec(**sizes, profile=job_doc(job))
    assert facts.op_time_words(spec) == "F 6.0 ms to 12 ms, I 0 ms to 9.0 ms, W 12 ms"
    slots = factory.spec(**sizes, profile=job_doc(replace(job, time_unit="slot")))
    assert facts.op_time_words(slots) == ""


def test_where_plans_are_said_there_are_words_until_the_job_is_over() -> None:
    """A line that comes and goes moves all below it."""
    assert facts.ready_words(factory.running(planned_ahead=0, plans_to_make=0))
    assert facts.ready_words(factory.running(planned_ahead=3, plans_to_make=79)).startswith(
        golden("plans-made-ahead-3-of")
    )
    assert not facts.ready_words(factory.running(state=JobState.FINISHED))
