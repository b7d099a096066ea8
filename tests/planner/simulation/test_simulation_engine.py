"""The engine against a plain loop that plays every iteration, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.simulation.engine import (
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Reaction,
    Stop,
    simulate,
)
from openrecycle.planner.simulation.traces import Event, Trace
from tests.conftest import examples
from tests.golden import golden

WORKERS = 6


@dataclass(frozen=True)
class Rules:
    """All that a scripted policy does; milliseconds."""

    iteration: int
    pause: int
    grace: bool
    rollback: bool
    every: int
    checkpoint: int
    stretch: float
    rejoin: int | None  # pause at the iteration's end after a return; None: it waits for the next loss
    stops: bool  # at a loss; else the iteration goes on, stretched

    def pace_of(self, usable: int) -> int | None:
        """Milliseconds of an iteration among so many."""
        return self.iteration * WORKERS // usable if usable >= 2 else None


class Scripted:
    name = "scripted"
    workers = WORKERS
    extra_workers = 0

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.fault_free = 1000 / rules.iteration

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if not training:
            return Stop(self.rules.pause * 1000) if change.lost or not paused else KeepTraining()
        if change.lost and self.rules.stops:
            return Stop(self.rules.pause * 1000, grace=self.rules.grace, rollback=self.rules.rollback)
        stretch = self.rules.stretch if change.lost else 1.0
        return KeepTraining(stretch=stretch, ask=self.rules.rejoin is not None and bool(change.ready))

    def iteration_end(self, cluster: Cluster) -> Reaction:
        assert self.rules.rejoin is not None
        return Stop(self.rules.rejoin * 1000, save=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        length = self.rules.pace_of(cluster.usable)
        return (length and Pace(length * 1000, 1.0, self.rules.every, self.rules.checkpoint * 1000)) or None


def plain_loop(trace: Trace, rules: Rules) -> tuple[int, int, int, int | None, int]:
    """One millisecond at a time: (iterations that count, their time, lost, first start, last end)."""
    living = 0
    state, left, length, spent = "halted", 0, 0, 0
    saved = unsaved = saved_time = unsaved_time = lost = since = last = 0
    begin: int | None = None
    asked = False
    events = {time: [e for e in trace.events if e.time == time] for time in {e.time for e in trace.events}}
    for now in range(trace.end + 1):
        # What ends now ends before what happens now only if it began to end earlier: an iteration
        # that ends exactly at an event is in flight for it.
        happening = events.get(now, []) if now < trace.end else []
        lost_now = [e for e in happening if e.action == "remove"]
        back = [e for e in happening if e.action == "add"]
        if happening:
            living += len(back) - len(lost_now)
            if state in ("halted", "paused"):
                if lost_now or state == "halted":
                    state, left = "paused", rules.pause
            elif lost_now and rules.stops:
                if state == "training":
                    if left == 0 or (rules.grace and left < rules.pause):
                        if now + left < trace.end:
                            unsaved, unsaved_time, last = unsaved + 1, unsaved_time + spent + left, now + left
                            since += 1
                        if not rules.every:
                            saved, saved_time = saved + unsaved, saved_time + unsaved_time
                            unsaved = unsaved_time = since = 0
                    elif spent:
                        lost += 1
                if rules.rollback:
                    lost += unsaved
                    unsaved = unsaved_time = since = 0
                state, left, asked = "paused", rules.pause, False
            else:
                if lost_now and rules.stretch != 1 and state == "training" and spent:
                    left += int(left * 1000 * (rules.stretch - 1)) // 1000
                asked = asked or (rules.rejoin is not None and bool(back))
        if now == trace.end:
            break
        while left == 0 and state != "halted":
            if state == "training":
                unsaved, unsaved_time, last, since = unsaved + 1, unsaved_time + spent, now, since + 1
                if not rules.every:
                    saved, saved_time = saved + unsaved, saved_time + unsaved_time
                    unsaved = unsaved_time = since = 0
                if asked:
                    asked = False
                    saved, saved_time = saved + unsaved, saved_time + unsaved_time
                    unsaved = unsaved_time = since = 0
                    assert rules.rejoin is not None
                    state, left = "paused", rules.rejoin
                    continue
                if rules.every and since >= rules.every:
                    state, left = "saving", rules.checkpoint
                    continue
            elif state == "saving":
                saved, saved_time = saved + unsaved, saved_time + unsaved_time
                unsaved = unsaved_time = since = 0
                state = "training"
            else:
                made = rules.pace_of(living) if living else None
                if made is None:
                    state = "halted"
                    break
                length, state = made, "training"
                begin = now if begin is None else begin
                last = now if last == 0 and saved + unsaved + lost == 0 else last
                if rules.every and since >= rules.every:
                    state, left = "saving", rules.checkpoint
                    continue
            left, spent = length, 0
        if state != "halted":
            left -= 1
            spent += 1
    return saved + unsaved, saved_time + unsaved_time, lost, begin, last


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    events = [Event(0, "add", f"n{i}") for i in range(WORKERS)]
    living, made = list(range(WORKERS)), WORKERS
    time = 0
    for _ in range(draw(st.integers(1, 12))):
        time += draw(st.integers(1, 400))
        if len(living) > 1 and draw(st.booleans()):
            events.append(Event(time, "remove", f"n{living.pop(draw(st.integers(0, len(living) - 1)))}"))
        else:
            living.append(made)
            events.append(Event(time, "add", f"n{made}"))
            made += 1
    return Trace.of("drawn", events, end=time + draw(st.integers(1, 500)))


@examples(300)
@given(
    traces(),
    st.builds(
        Rules,
        iteration=st.integers(5, 60),
        pause=st.integers(1, 120),
        grace=st.booleans(),
        rollback=st.booleans(),
        every=st.integers(0, 4),
        checkpoint=st.integers(1, 50),
        stretch=st.sampled_from([1.0, 1.5, 2.0]),
        rejoin=st.none() | st.integers(1, 60),
        stops=st.booleans(),
    ),
)
def test_equals_the_plain_loop(trace: Trace, rules: Rules) -> None:
    made = simulate(trace, Scripted(rules))
    count, time, lost, begin, last = plain_loop(trace, rules)
    assert made.iterations == count
    assert made.productive == time * 1000
    assert made.lost == lost
    assert made.begin == (None if begin is None else begin * 1000)
    if count:
        assert made.last == last * 1000
    assert simulate(trace, Scripted(rules)) == made


RULES = Rules(100, 50, False, False, 0, 0, 1.0, 20, True)


def test_numbers() -> None:
    """Six workers, 100 ms an iteration; a death at 1,030 ms; 500 ms later it is back."""
    events = [Event(0, "add", f"n{i}") for i in range(6)]
    events += [Event(1030, "remove", "n5"), Event(1530, "add", "n6")]
    outcome = simulate(Trace.of("numbers", events, end=2000), Scripted(RULES))
    # 50 ms until the start; 9 iterations to 950, one in flight is lost; 1,080 on with 120 ms each: 1,200,
    # 1,320, 1,440, 1,560, where the return costs 20 ms; 1,580 on with 100 ms: 4 more by 1,980.
    assert (outcome.iterations, outcome.lost, outcome.failures) == (9 + 4 + 4, 1, 1)
    assert outcome.begin == 50_000 and outcome.last == 1_980_000
    assert outcome.average_samples_per_second == pytest.approx(17 / 1.93)
    assert outcome.trace_samples_per_second == pytest.approx(17 / 2)
    assert outcome.ettr == pytest.approx((9 * 100 + 4 * 120 + 4 * 100) / 1950)
    assert outcome.goodput == pytest.approx(17 / 1.95 / 10)
    assert outcome.worker_hours == pytest.approx((6 * 2 - 0.5) / 3600)
    assert outcome.worker_hours_wasted == pytest.approx((6 * 2 - 0.5 - 17 / 10 * 6) / 3600)
    assert outcome.dollars_per_million_samples(3600) == pytest.approx((6 * 2 - 0.5) / 17 * 1e6)
    rates = [(0, 0.0), (50, 10.0), (1030, 0.0), (1080, 1000 / 120), (1560, 0.0), (1580, 10.0)]
    assert [(time // 1000, pytest.approx(rate)) for time, rate in outcome.rates] == rates


def test_an_iteration_that_would_end_after_the_trace_does_not_count() -> None:
    """A loss at 1,030 ms leaves the iteration in flight until 1,050: in a trace that ends before, it is not there."""
    events = [Event(0, "add", f"n{i}") for i in range(6)] + [Event(1030, "remove", "n5")]
    rules = replace(RULES, grace=True)
    ends = {end: simulate(Trace.of("cut", events, end=end), Scripted(rules)) for end in (1045, 1051)}
    assert [(ends[end].iterations, ends[end].last, ends[end].lost) for end in ends] == [
        (9, 950_000, 0),
        (10, 1_050_000, 0),
    ]


def test_a_document_has_what_the_command_promises() -> None:
    events = [Event(0, "add", "a"), Event(0, "add", "b")]
    outcome = simulate(Trace.of("two", events, end=1000), Scripted(RULES))
    document = outcome.document("gpt-2", price=1.5)
    promised = "policy model trace average_samples_per_second goodput ettr iterations_lost failures hours"
    assert list(document)[:9] == promised.split()
    assert document["model"] == "gpt-2" and document["dollars"] == pytest.approx(2 * 1.5 / 3600)


def test_a_pace_is_checked() -> None:
    with pytest.raises(ValueError, match=golden("not-a-pace")):
        Pace(0, 1.0)
