"""Who is slow beside its peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.op_times import FEWEST, NEWEST, OpTimes

GRID = [f"W{p}_{s}" for p in range(3) for s in range(2)]
USUAL = {"F": 40.0, "I": 40.0, "W": 40.0, "O": 5.0}


def reported(factors: dict[str, float], times: int = FEWEST, tracker: OpTimes | None = None) -> OpTimes:
    tracker = tracker or OpTimes()
    for _ in range(times):
        for name in GRID:
            factor = factors.get(name, 1.0)
            tracker.report(name, "a", {kind: ms * factor for kind, ms in USUAL.items()})
    return tracker


def test_a_worker_is_slow_beside_its_peers_only() -> None:
    # Stage 1 takes twice as long as stage 0: that is the model's doing.
    tracker = reported({"W0_1": 2.0, "W1_1": 2.0, "W2_1": 2.0, "W1_0": 1.5})
    assert tracker.slow(GRID, {}) == {"W1_0": 1.5}
    assert tracker.slow([n for n in GRID if n != "W1_0"], {}) == {}, "a dead worker is not slow"


def test_a_worker_is_not_judged_by_its_first_reports() -> None:
    assert reported({"W1_0": 3.0}, times=FEWEST - 1).slow(GRID, {}) == {}


def test_it_stays_slow_until_it_is_clearly_not() -> None:
    tracker = reported({"W1_0": 1.25})
    assert tracker.slow(GRID, {}) == {}
    assert tracker.slow(GRID, {"W1_0": 1.5}) == {"W1_0": 1.25}
    assert reported({"W1_0": 1.15}).slow(GRID, {"W1_0": 1.5}) == {}


def test_with_two_peers_the_faster_is_the_measure() -> None:
    tracker = reported({"W1_0": 1.4})
    assert set(tracker.slow(["W0_0", "W1_0"], {})) == {"W1_0"}
    assert tracker.slow(["W1_0"], {}) == {}, "nobody to compare with"


def test_a_known_speed_is_allowed_for() -> None:
    assert reported({"W1_0": 2.0}).slow(GRID, {}, {"W1_0": 0.5}) == {}


def test_a_new_process_begins_anew() -> None:
    tracker = reported({"W1_0": 3.0})
    tracker.report("W1_0", "b", USUAL)
    assert tracker.smoothed("W1_0") == USUAL
    assert tracker.slow(GRID, {"W1_0": 3.0}) == {}


def test_a_fused_backward_counts_as_both() -> None:
    tracker = OpTimes()
    for _ in range(FEWEST):
        tracker.report("W0_0", "a", {"F": 40.0, "B": 80.0})
        tracker.report("W1_0", "a", {"F": 40.0, "I": 40.0, "W": 40.0})
    assert tracker.slow(["W0_0", "W1_0"], {}) == {}


@given(values=st.lists(st.floats(0.1, 1000), min_size=1, max_size=30))
def test_smoothing_stays_between_the_reports(values: list[float]) -> None:
    tracker = OpTimes()
    for value in values:
        tracker.report("W0_0", "a", {"F": value})
    smoothed = tracker.smoothed("W0_0")["F"]
    assert min(values) * (1 - 1e-9) <= smoothed <= max(values) * (1 + 1e-9)
    assert abs(smoothed - values[-1]) <= (1 - NEWEST) * (max(values) - min(values)) + 1e-6 or len(values) == 1
