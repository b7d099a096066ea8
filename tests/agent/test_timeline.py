"""An iteration is recorded when it was asked for, whole or not at all."""

from __future__ import annotations

import pytest

from openrecycle.agent.messages.client import Offset, measure_offset
from openrecycle.agent.messages.protocol import ClockReading, clock_name
from openrecycle.agent.monitoring.heartbeat import measured_ops
from openrecycle.agent.monitoring.liveness import IterationTimeline, Timeline
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.schedule import Op


def ops() -> tuple[Op, ...]:
    me = Worker(0, 0)
    return (Op("F", 0, 0, 0, me, 0, 1), Op("B", 0, 0, 0, me, 1, 2), Op("O", 0, -1, 0, me, 3, 0))


def run(timeline: Timeline, iteration: int, *, ops_here: int = 3) -> None:
    timeline.begin(iteration, ops_here)
    for i in range(3):
        if timeline.recording:
            timeline.add(100.0 + i, 0.25)
    timeline.finish(ops())


def test_only_the_iteration_that_was_asked_for_is_recorded() -> None:
    timeline = Timeline()
    timeline.generation = 4
    timeline.want(7)
    for iteration in (6, 7, 8):
        run(timeline, iteration)
    taken = timeline.take()
    assert taken is not None
    assert (taken.generation, taken.iteration) == (4, 7)
    assert taken.ends == [100.0, 101.0, 102.0] and taken.seconds == [0.25, 0.25, 0.25]
    assert timeline.take() is None, "once"
    run(timeline, 7)
    assert timeline.take() is None, "a wish is fulfilled once"


def test_what_is_asked_for_too_late_is_not_recorded() -> None:
    timeline = Timeline()
    timeline.begin(7, 3)
    timeline.want(7)
    assert not timeline.recording
    timeline.finish(ops())
    assert timeline.take() is None


def test_an_abandoned_iteration_and_part_of_one_are_not_kept() -> None:
    timeline = Timeline()
    timeline.want(7)
    timeline.begin(7, 3)
    timeline.add(1.0, 0.5)
    timeline.drop()
    timeline.finish(ops())
    assert timeline.take() is None
    run(timeline, 7, ops_here=0)
    assert timeline.take() is None, "the rest of a redone iteration is none"
    run(timeline, 7)
    assert timeline.take() is not None, "redone as a whole it counts"


def test_what_is_posted_says_when_each_op_ran() -> None:
    timeline = Timeline()
    timeline.generation = 2
    timeline.want(0)
    run(timeline, 0)
    taken = timeline.take()
    assert taken is not None
    message = measured_ops(taken, "W0_0", "a")
    assert message is not None
    assert message.kinds == "FBO" and message.pipelines == (0, 0, 0) and message.micro_batches == (0, 0, -1)
    assert message.started_us == 99_750_000
    assert message.starts_us == (0, 1_000_000, 2_000_000)
    assert message.durations_us == (250_000,) * 3
    assert message.clock == clock_name()


def test_ops_that_follow_each_other_at_once_do_not_overlap() -> None:
    """Every op takes 1.6 microseconds, which is two in whole ones."""
    ends = [50.0 + 1.6e-6 * i for i in range(1, 10)]
    recorded = IterationTimeline(1, 0, [Op("F", 0, m, 0, Worker(0, 0), 0, 1) for m in range(9)], ends, [1.6e-6] * 9)
    message = measured_ops(recorded, "W0_0", "a")
    assert message is not None
    finished = [start + took for start, took in zip(message.starts_us, message.durations_us, strict=True)]
    assert all(end <= start for end, start in zip(finished, message.starts_us[1:], strict=False))
    assert finished[-1] == 14


def test_clocks_of_one_host_need_no_comparing() -> None:
    readings = [ClockReading(name=clock_name(), microseconds=1)]
    assert measure_offset(readings.pop) == Offset(0, 0)
    assert not readings, "asked once"


@pytest.mark.parametrize("ahead", [-3_000_000, 0, 7_000_000])
def test_the_shortest_round_trip_gives_the_offset(ahead: int) -> None:
    """A clock that is `ahead` microseconds ahead, over a network whose way back is sometimes slow."""
    now = 50_000_000_000
    delays = iter([(400, 9_000), (400, 500), (300, 4_000)] + [(400, 20_000)] * 5)

    def ask() -> ClockReading:
        nonlocal now
        there, back = next(delays)
        now += 1000 * there
        reading = ClockReading(name="other", microseconds=now // 1000 + ahead)
        now += 1000 * back
        return reading

    offset = measure_offset(ask, lambda: now)
    assert offset.uncertainty <= 460
    assert abs(offset.microseconds - ahead) <= offset.uncertainty


def test_an_iteration_of_weeks_is_not_posted() -> None:
    """It was suspended in an op: no message takes so long a time, and it ends no worker."""
    ops = [Op("F", 0, 0, 0, Worker(0, 0), 0, 1)]
    assert measured_ops(IterationTimeline(1, 0, ops, [2e6], [1.9e6]), "W0_0", "a") is None
    assert measured_ops(IterationTimeline(1, 0, ops, [2e6], [1e5]), "W0_0", "a") is not None
