"""Op times as they are reported, and smoothed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.messages.protocol import Heartbeat
from openrecycle.app.jobs.measurements import NEWEST, OpTimes


def beat(worker: str, incarnation: str, milliseconds: dict[str, float]) -> Heartbeat:
    said = {"seq": 0, "generation": 1, "iteration": 0, "phase": "training", "op_milliseconds": milliseconds}
    return Heartbeat.model_validate({"worker": worker, "incarnation": incarnation, **said})


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
