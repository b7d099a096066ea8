"""Drift: what changes the speeds that are planned with, what does not, and how often it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.jobs.job import Job, StageProfile, Worker
from openrecycle.planner.layers.drift import DriftLimits, DriftState, Ratios, assumed, drifted, forget, observe

LIMITS = DriftLimits(slow=1.25, well=1.1, window=8)
JOB = Job(3, 2, 4, (StageProfile(10, 12, 8), StageProfile(20, 0, 40)), time_unit="ms")
WORKERS = list(JOB.workers())
SLOW = Worker(1, 1)


def speeds(state: DriftState, job: Job = JOB) -> tuple[tuple[Worker, float], ...]:
    return drifted(job, state).speeds


def rounds(job: Job, *ratios: dict[Worker, float], state: DriftState | None = None) -> tuple[DriftState, list[int]]:
    """The state afterwards, and the rounds in which a speed changed."""
    state, changes = state or DriftState(), []
    for number, one in enumerate(ratios):
        drift = observe(job, state, one, LIMITS)
        state = drift.state
        if drift.changed:
            changes.append(number)
    return state, changes


def test_a_ratio_is_against_the_profile() -> None:
    assert Ratios(JOB).of(Worker(0, 0), {"F": 10, "I": 12, "W": 8, "O": 99}) == pytest.approx(1)
    assert Ratios(JOB).of(Worker(0, 0), {"F": 30, "B": 40}) == pytest.approx(70 / 30)
    # The first stage's I takes nothing and says nothing.
    assert Ratios(JOB).of(Worker(2, 1), {"F": 40, "I": 5, "W": 80}) == pytest.approx(2)
    assert Ratios(JOB).of(Worker(0, 0), {}) is None
    assert Ratios(JOB).of(Worker(0, 0), {"O": 3, "F": float("nan")}) is None
    seconds = Job(1, 1, 1, (StageProfile(0.01, 0.01, 0.01),), time_unit="s")
    assert Ratios(seconds).of(Worker(0, 0), {"F": 15}) == pytest.approx(1.5)


def test_a_slow_worker_is_found_and_forgiven() -> None:
    slow = {w: 2.0 if w == SLOW else 1.0 for w in WORKERS}
    even = dict.fromkeys(WORKERS, 1.0)
    state, changes = rounds(JOB, *[slow] * 20)
    assert changes == [LIMITS.window - 1] and speeds(state) == ((SLOW, 0.5),)
    state, changes = rounds(JOB, *[even] * 20, state=state)
    # What was heard when it was slow has left the window but for a quarter.
    assert len(changes) == 1 and changes[0] <= LIMITS.window and speeds(state) == ()


def test_all_workers_together_change_the_scale_and_no_plan() -> None:
    state, said = DriftState(), []
    for _ in range(30):
        drift = observe(JOB, state, {w: 1.7 + 0.01 * w.pipeline for w in WORKERS}, LIMITS)
        state, said = drift.state, said + ([drift.scale] if drift.scale else [])
        assert not drift.changed
    assert said == [pytest.approx(1.71)] and speeds(state) == ()
    for _ in range(30):
        drift = observe(JOB, state, dict.fromkeys(WORKERS, 1.02), LIMITS)
        state, said = drift.state, said + ([drift.scale] if drift.scale else [])
    assert said[1:] == [1.0]


def test_without_a_unit_of_time_a_worker_is_compared_with_its_stage() -> None:
    """Stage 1 takes ten times what stage 0 does, which a profile in slots does not know."""
    job = Job(2, 2, 4)
    took = {Worker(0, 0): 1.0, Worker(1, 0): 1.1, Worker(0, 1): 10.0, Worker(1, 1): 25.0}
    state, _ = rounds(job, *[took] * 10)
    assert speeds(state, job) == ((Worker(1, 1), 0.4),)


def test_a_worker_that_is_known_to_be_slow_is_measured_by_its_own_speed() -> None:
    job = replace(JOB, speeds=((SLOW, 0.5),))
    assert Ratios(job).of(SLOW, {"F": 40, "W": 80}) == pytest.approx(1)
    state, _ = rounds(job, *[{w: 2.0 if w == SLOW else 1.0 for w in WORKERS}] * 10)
    assert speeds(state, job) == ((SLOW, 0.25),)
    assert drifted(job, assumed(job, drifted(job, state))) == drifted(job, state)
    # It is as fast as the others after all.
    state, _ = rounds(job, *[{w: 0.5 if w == SLOW else 1.0 for w in WORKERS}] * 10)
    assert speeds(state, job) == () and speeds(assumed(job, JOB), job) == ()


def test_a_new_process_begins_anew() -> None:
    state, _ = rounds(JOB, *[{w: 2.0 if w == SLOW else 1.0 for w in WORKERS}] * 10)
    assert speeds(forget(state, [SLOW])) == ()


@given(st.lists(st.fixed_dictionaries({w: st.floats(0.9, 1.1) for w in WORKERS}), min_size=1, max_size=40))
def test_noise_changes_nothing(noise: list[dict[Worker, float]]) -> None:
    state, changes = rounds(JOB, *noise)
    assert changes == [] and speeds(state) == () and state.scale is None


@given(st.lists(st.tuples(st.floats(0.97, 1.03), st.floats(1.35, 40)), min_size=8, max_size=40), st.data())
def test_who_is_slow_for_long_is_found_in_one_window(reports: list[tuple[float, float]], data: st.DataObject) -> None:
    who = data.draw(st.sampled_from(WORKERS))
    state, changes = rounds(JOB, *({w: slow if w == who else well for w in WORKERS} for well, slow in reports))
    assert changes[0] == LIMITS.window - 1
    (found, speed), *others = speeds(state)
    assert found == who and speed <= 1 / LIMITS.slow and not others


@given(st.lists(st.fixed_dictionaries({w: st.floats(0.01, 100) for w in WORKERS[:3]}), max_size=60))
def test_changes_are_a_window_apart_whatever_is_heard(reports: list[dict[Worker, float]]) -> None:
    state, last = DriftState(), dict[Worker, int]()
    for number, ratios in enumerate(reports):
        drift = observe(JOB, state, ratios, LIMITS)
        state = drift.state
        for worker, (before, after) in drift.changed.items():
            assert before != after and (after == 1 or max(after, 1 / after) >= LIMITS.slow)
            assert number - last.get(worker, -1) >= LIMITS.window
            last[worker] = number
        assert all(0.01 <= speed <= 100 and speed != 1 for _, speed in speeds(state))


@given(st.integers(1, 3), st.integers(0, 40))
def test_a_quarter_of_a_window_may_be_off(off: int, start: int) -> None:
    """A pause or two in a window neither make a worker slow nor hide that it is."""
    odd = {start % 8, (start + 3) % 8} if off > 1 else {start % 8}
    odd = set(sorted(odd)[: LIMITS.window // 4])
    quiet = [{w: 9.0 if n in odd and w == SLOW else 1.0 for w in WORKERS} for n in range(8)]
    assert rounds(JOB, *quiet)[1] == []
    slow = [{w: 1.0 if n in odd or w != SLOW else 2.0 for w in WORKERS} for n in range(8)]
    assert rounds(JOB, *slow)[1] == ([7] if len(odd) <= (LIMITS.window - 1) // 4 else [])
