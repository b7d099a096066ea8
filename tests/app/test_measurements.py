"""What workers say of themselves, in memory: heartbeats, op times as they are reported and smoothed, printed lines."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.coordination.membership import LastHeartbeat, State
from openrecycle.agent.messages.protocol import Heartbeat, LogLine, LogLines
from openrecycle.app.jobs.measurements import NEWEST, JobMeasurements, LogBook, OpTimes


def beat(
    worker: str, incarnation: str, milliseconds: dict[str, float], seq: int = 0, phase: str = "training"
) -> Heartbeat:
    said = {"seq": seq, "generation": 1, "iteration": 0, "phase": phase, "op_milliseconds": milliseconds}
    return Heartbeat.model_validate({"worker": worker, "incarnation": incarnation, **said})


GRID = State.new(2, 1, 10)


def heard(measurements: JobMeasurements, *beats: Heartbeat, at: float = 5.0) -> dict[str, LastHeartbeat]:
    measurements.fresh.extend((each, at) for each in beats)
    return measurements.take()


def test_the_newest_heartbeat_counts_and_an_old_one_that_comes_late_shows_that_the_worker_lives() -> None:
    measurements = JobMeasurements(GRID.members, stages=1)
    assert heard(measurements) == {}
    taken = heard(measurements, beat("W0_0", "a", {"F": 40.0}, seq=7), beat("W0_0", "a", {"F": 90.0}, seq=6), at=9.0)
    assert taken == {"W0_0": LastHeartbeat("a", 9.0, False)}
    assert measurements.contacts["W0_0"].beat.seq == 7
    assert measurements.op_times.smoothed("W0_0") == {"F": 40.0}, "what is old is in no figure"
    assert heard(measurements, beat("W0_0", "b", {}, phase="draining"))["W0_0"].draining
    assert measurements.contacts["W0_0"].beat.incarnation == "b", "a new process counts from its first one"


def test_each_worker_that_was_heard_is_written_once_those_first_that_wait_longest() -> None:
    measurements = JobMeasurements(GRID.members, stages=1)
    heard(measurements, beat("W1_0", "b", {"F": 1.5}, seq=1), beat("W0_0", "a", {}, seq=1))
    heard(measurements, beat("W1_0", "b", {"F": 1.5}, seq=2))
    (row,) = measurements.unsaved(1)
    assert (row["name"], row["seq"]) == ("W1_0", 2)
    assert [each["name"] for each in measurements.unsaved(9)] == ["W0_0"] and measurements.unsaved(9) == []
    again = JobMeasurements(GRID.members, stages=1)
    again.read([{**row, "incarnation": "b"}, {"name": "W0_0", "incarnation": None, "heard_at": None}])
    known = measurements.contacts["W1_0"]._replace(heard=again.contacts["W1_0"].heard)
    assert again.contacts == {"W1_0": known}, "as the database has it"
    assert known.heard == pytest.approx(5.0, abs=60), "whatever the clock was when it was read"


def test_who_has_stopped_has_said_so_since_and_holds_its_place() -> None:
    members = {**GRID.members, "W0_0": replace(GRID.members["W0_0"], incarnation="a")}
    measurements = JobMeasurements(members, stages=1)
    heard(measurements, beat("W0_0", "a", {}, phase="paused"), beat("W1_0", "gone", {}, phase="paused"), at=5.0)
    assert measurements.stopped(5.0, members) == {"W0_0"}, "whatever the wall clock says, which may have been put back"
    assert measurements.stopped(5.5, members) == frozenset()
    again = JobMeasurements(members, stages=1)
    again.read({**row, "incarnation": "a"} for row in measurements.unsaved(1))
    assert again.stopped(-math.inf, members) == {"W0_0"}, "what the database has said of both"
    assert again.stopped(5.0, members) == frozenset()


def test_workers_that_come_while_a_page_asks_who_has_stopped_do_no_harm() -> None:
    grid = State.new(64, 32, 10)
    members = {name: replace(member, incarnation="a") for name, member in grid.members.items()}
    measurements, beats = JobMeasurements(members, stages=32), [beat(name, "a", {}, phase="paused") for name in members]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ticker = threading.Thread(target=lambda: [heard(measurements, each) for each in beats])
    try:
        ticker.start()
        while ticker.is_alive():
            measurements.stopped(0.0, members)
        assert measurements.stopped(0.0, members) == set(members)
    finally:
        ticker.join()
        sys.setswitchinterval(switching)


def test_each_worker_keeps_its_newest_lines() -> None:
    for workers, kept in ((12, 200), (16_384, 20)):
        book = LogBook(workers)
        for first in range(0, 250, 50):
            lines = tuple(LogLine(at=1.0, text=str(i)) for i in range(first, first + 50))
            book.take("W0_0", LogLines(worker="W0_0", incarnation="a", lines=lines))
        assert [line.text for line in book.lines("W0_0")] == [str(i) for i in range(250 - kept, 250)]


def test_only_what_is_new_is_taken() -> None:
    tracker = OpTimes()
    tracker.report([beat("W0_0", "a", {"F": 40.0})])
    tracker.report([beat("W0_0", "a", {"F": 44.0, "B": 80.0})])
    tracker.report([beat("W0_1", "b", {})])
    assert tracker.take() == {"W0_0": ("a", {"F": 44.0, "B": 80.0})}
    assert tracker.take() == {}


def test_a_new_process_begins_anew() -> None:
    tracker = OpTimes()
    tracker.report([beat("W1_0", "a", {"F": 120.0})])
    tracker.report([beat("W1_0", "b", {"F": 40.0})])
    assert tracker.smoothed("W1_0") == {"F": 40.0}
    assert tracker.smoothed("W0_0") == {}


@given(values=st.lists(st.floats(0.1, 1000), min_size=1, max_size=30))
def test_smoothing_stays_between_the_reports(values: list[float]) -> None:
    tracker = OpTimes()
    for value in values:
        tracker.report([beat("W0_0", "a", {"F": value})])
    smoothed = tracker.smoothed("W0_0")["F"]
    assert min(values) * (1 - 1e-9) <= smoothed <= max(values) * (1 + 1e-9)
    assert abs(smoothed - values[-1]) <= (1 - NEWEST) * (max(values) - min(values)) + 1e-6 or len(values) == 1
