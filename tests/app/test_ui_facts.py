"""The figures and sentences of the pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ui_factory as factory

from app.ui import facts, tables, text
from app.view import JobView
from planner.job import Job, StageProfile
from planner.plan import job_doc


def card(view: JobView, label: str) -> facts.Card:
    return next(c for c in facts.live_cards(view) if c.label.startswith(label))


def test_cards_are_six_in_every_state() -> None:
    for make in factory.STATES.values():
        cards = facts.live_cards(make())
        assert len(cards) == 6
        assert all(c.label and c.value and c.note for c in cards)


def test_throughput_is_that_of_the_epoch_without_its_first_iteration() -> None:
    iterations = factory.iteration_views(20, failed_at=16)
    settled = iterations[17:]
    expected = sum(i.samples_per_second * i.seconds for i in settled) / sum(i.seconds for i in settled)
    assert facts.recent_rate(iterations) == pytest.approx(expected)
    assert facts.recent_rate(iterations[:17]) == pytest.approx(iterations[16].samples_per_second), "all there is"
    assert facts.recent_rate(()) is None


def test_reference_is_measured_when_it_can_be() -> None:
    view = factory.running(fault_free_samples_per_second=99.0)
    reference = facts.fault_free_rate(view)
    assert reference is not None and "measured" in reference.source
    assert reference.samples_per_second == pytest.approx(36.5, abs=0.5)
    early = facts.fault_free_rate(replace(view, iterations=view.iterations[:2]))
    assert early is not None and early.samples_per_second == 99.0 and "predicted" in early.source
    assert facts.fault_free_rate(replace(early_view(), fault_free_samples_per_second=None)) is None


def early_view() -> JobView:
    return replace(factory.running(), iterations=())


def test_workers_card_names_the_failed() -> None:
    living = card(factory.failed(), "Living")
    assert (living.value, living.of, living.tone) == ("11", "of 12", "bad")
    assert "W1_2" in living.note
    assert card(factory.starting(), "Living").value == "1"
    assert card(factory.suspect_and_joining(), "Living").note.startswith("suspect: W2_0")


def test_plan_card_has_epoch_period_and_gap() -> None:
    view = factory.failed()
    assert view.plan is not None
    plan = card(view, "Plan in force")
    assert plan.label.endswith("epoch 2")
    assert plan.value == text.milliseconds(view.plan.metrics.period)
    assert plan.note == facts.gap_words(view.plan)


def test_kill_tells_who_takes_over_and_when_nobody_can() -> None:
    view = factory.failed()
    by_name = {w.name: w for w in view.workers}
    sentence, survives = facts.consequence_of_kill(view, by_name["W0_2"])
    assert survives and "9 micro-batches" in sentence and "W2_2" in sentence and "W1_2" not in sentence
    halted = factory.halted()
    last = replace(next(w for w in halted.workers if w.name == "W1_2"), state="running")
    sentence, survives = facts.consequence_of_kill(halted, last)  # type: ignore[arg-type]
    assert not survives and "halts" in sentence


def test_tables_hold_what_the_chart_shows() -> None:
    plan = factory.plan(("W1_2",))
    schedule = plan.schedule()
    workers = list(schedule.problem.job.workers())
    by_worker = tables.workers_table(schedule, workers)
    assert by_worker["worker"] == [str(w) for w in workers]
    assert by_worker["re-routed micro-batches"][2] == 3
    assert by_worker["state"][6] == "failed"
    by_op = tables.operations_table(schedule, workers)
    assert len(by_op["op"]) == sum(map(len, schedule.ops.values()))
    assert by_op["start"] == sorted(by_op["start"])  # type: ignore[type-var]
    assert sum(map(bool, by_op["re-routed"])) == 18


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.0 ms"),
        (9.94, "9.9 ms"),
        (9.96, "10 ms"),
        (283, "283 ms"),
        (999.6, "1 s"),
        (1080, "1.08 s"),
        (59_949, "59.9 s"),
        (125_000, "2 min 5 s"),
    ],
)
def test_milliseconds_read_well(value: float, expected: str) -> None:
    assert text.milliseconds(value) == expected


def test_other_numbers_read_well() -> None:
    assert text.planned(27, "slot") == "27 slots" and text.planned(1, "slot") == "1 slot"
    assert text.percent(0.074, sign=True) == "+7.4 %" and text.percent(-0.222, sign=True) == "−22.2 %"
    assert text.percent(0.0001, sign=True) == "±0 %" and text.percent(0.5) == "50 %"
    assert text.age(None) == "never" and text.age(0.42) == "0.4 s ago" and text.age(7200) == "2 h ago"
    assert text.count(1, "worker") == "1 worker" and text.count(2048, "worker") == "2,048 workers"
    assert text.size(412 * 2**20) == "412 MiB"
    assert text.clock(0, "Europe/Zurich") == "01:00:00" and text.clock(0, "Nowhere/City") == "00:00:00"


def test_op_times_are_said_by_stage_where_stages_differ() -> None:
    assert facts.op_time_words(factory.spec()) == "F 40 ms, I 40 ms, W 40 ms"
    assert facts.op_time_words(factory.spec(durations={})) == ""
    profiles = (StageProfile(6, 0, 12), StageProfile(12, 9, 12), StageProfile(6, 9, 12))
    job = Job(2, 3, 4, profiles, time_unit="ms")
    sizes = {"pipelines": 2, "stages": 3, "micro_batches": 4, "durations": {}}
    spec = factory.spec(**sizes, profile=job_doc(job))
    assert facts.op_time_words(spec) == "F 6.0 ms to 12 ms, I 0.0 ms to 9.0 ms, W 12 ms"
    slots = factory.spec(**sizes, profile=job_doc(replace(job, time_unit="slot")))
    assert facts.op_time_words(slots) == ""
