"""The paced device's clock, on a clock of the test's own."""

from __future__ import annotations

import pytest

from openrecycle.agent.config.faults import GRACE, PROMPT, PacedDevice, profile_pace
from openrecycle.planner.jobs.job import Job, StageProfile, Worker
from tests.conftest import refuses


class Clock:
    """Sleeping takes what was asked for and `late` on top."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late


def device(clock: Clock, **pace: float) -> PacedDevice:
    return PacedDevice(pace, now=lambda: clock.now, sleep=clock.sleep)


def test_late_wake_ups_do_not_add_up() -> None:
    clock = Clock(late=0.002)
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    for _ in range(10):
        started = clock.now
        clock.now += 0.001  # the computation
        assert paced.finish("F", started) == pytest.approx(0.04)
    assert clock.now == pytest.approx(100.0 + 10 * 0.04 + 0.002)


def test_an_op_that_waited_starts_when_its_computation_does() -> None:
    clock = Clock(late=0.002)
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    paced.finish("F", clock.now)
    clock.now += 0.1
    paced.waited()
    started = clock.now
    assert paced.finish("I", started) == pytest.approx(0.04)
    assert clock.now == pytest.approx(started + 0.042)


def test_an_op_that_received_late_starts_when_it_has_its_input() -> None:
    clock = Clock(late=0.002)
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    paced.finish("F", clock.now)
    clock.now += 0.01
    paced.received()
    started = clock.now
    paced.finish("I", started)
    assert clock.now == pytest.approx(started + 0.042)


@pytest.mark.parametrize(("late", "short"), [(0.0004, 0.0004), (0.005, GRACE)])
def test_an_op_that_received_in_time_makes_up_for_little(late: float, short: float) -> None:
    clock = Clock(late=late)
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    paced.finish("F", clock.now)
    clock.now += PROMPT / 2
    paced.received()
    started = clock.now
    paced.finish("I", started)
    assert clock.now - late == pytest.approx(started + 0.04 - min(short + PROMPT / 2, GRACE))
    # What the op received says nothing about the next one.
    paced.finish("W", clock.now)
    assert clock.now - late == pytest.approx(started + 0.08 - min(short + PROMPT / 2, GRACE))


def test_a_computation_longer_than_the_pace_counts_whole() -> None:
    clock = Clock()
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    started = clock.now
    clock.now += 0.07
    assert paced.finish("W", started) == pytest.approx(0.07)
    # And the next op starts after it, not at the deadline that was missed.
    assert paced.finish("W", clock.now) == pytest.approx(0.04)
    assert clock.now == pytest.approx(100.11)


def test_coupled_backward_takes_i_and_w() -> None:
    clock = Clock()
    assert device(clock, F=0.04, I=0.03, W=0.02).finish("B", clock.now) == pytest.approx(0.05)


def test_an_op_without_a_pace_takes_what_it_takes() -> None:
    clock = Clock()
    paced = device(clock, F=0.04, I=0.04, W=0.04)
    started = clock.now
    clock.now += 0.005
    assert paced.finish("O", started) == pytest.approx(0.005)
    assert device(Clock()).finish("F", 100.0) == 0.0


def test_the_pace_of_a_profile_is_that_of_stage_speed_and_living_peers() -> None:
    profiles = (StageProfile(10, 20, 30, 1, reductions=(0, 4, 8)), StageProfile(1.5, 0.5, 2))
    job = Job(3, 2, 1, profiles, time_unit="ms", speeds=((Worker(2, 0), 0.5),))
    everybody = list(job.workers())
    pace = profile_pace(job, Worker(0, 0), everybody)
    assert pace == pytest.approx({"F": 0.010, "I": 0.020, "W": 0.030, "O": 0.009})
    slow = profile_pace(job, Worker(2, 0), [w for w in everybody if w != Worker(1, 0)])
    assert slow == pytest.approx({"F": 0.020, "I": 0.040, "W": 0.060, "O": 0.006})
    # Of a step that the profile says nothing of, nothing is known.
    assert profile_pace(job, Worker(0, 1), everybody) == pytest.approx({"F": 0.0015, "I": 0.0005, "W": 0.002})
    with refuses("planning.pace", "profile"):
        profile_pace(Job(1, 1, 1), Worker(0, 0), [Worker(0, 0)])


def test_a_new_pace_holds_from_the_next_op_on() -> None:
    clock = Clock()
    paced = device(clock, F=0.01)
    paced.finish("F", clock.now)
    paced.set_pace({"I": 0.02, "W": 0.03})
    assert paced.finish("B", clock.now) == pytest.approx(0.05)
    assert clock.now == pytest.approx(100.06)
