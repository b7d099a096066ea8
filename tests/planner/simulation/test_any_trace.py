"""Every policy survives every trace, and its numbers keep within what can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openrecycle.planner.simulation
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.simulation.engine import RecoveryCosts, SimulationOutcome, simulate
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policies import PLANNED, PUBLISHED, READY_AFTER, planned_policy, published
from openrecycle.planner.simulation.traces import Event, Trace
from tests.conftest import examples

OOBLECK = Path(openrecycle.planner.simulation.__file__).parent / "data" / "oobleck"
SMALL = PlannedJob(Job.uniform(3, 3, 4), samples=12, least_stages=2)


@st.composite
def traces(draw: st.DrawFn, most: int) -> Trace:
    """Bursts of arrivals and losses of up to `most` workers, seconds to hours apart, at times together."""
    events: list[Event] = []
    living: list[str] = []
    time = made = 0
    for _ in range(draw(st.integers(1, 15))):
        for _ in range(draw(st.integers(1, most))):
            if living and draw(st.booleans()):
                events.append(Event(time, "remove", living.pop(draw(st.integers(0, len(living) - 1)))))
            elif len(living) < most:
                living.append(f"n{made}")
                made += 1
                events.append(Event(time, "add", living[-1]))
        time += draw(st.sampled_from([0, 1, 500, 3_000, 45_000, 60_000, 700_000, 9_000_000]))
    if not events:
        events.append(Event(0, "add", "n"))
    return Trace.of("drawn", events, end=time + draw(st.integers(1, 10_000_000)))


def check(outcome: SimulationOutcome, trace: Trace) -> None:
    end = trace.end * 1000
    assert 0 <= outcome.productive <= end and outcome.lost >= 0 and outcome.iterations >= 0
    assert 0 <= outcome.last <= end + 1
    assert outcome.begin is None or 0 <= outcome.begin <= end
    assert outcome.failures == sum(e.action == "remove" for e in trace.events if e.time < trace.end)
    times = [time for time, _ in outcome.rates]
    assert times == sorted(set(times)) and all(rate >= 0 for _, rate in outcome.rates)
    assert 0 <= outcome.ettr <= 1.0001
    assert outcome.worker_time >= 0


@examples(60)
@given(traces(12), st.integers(0, 3))
def test_planned_policies(trace: Trace, spares: int) -> None:
    full = simulate(trace, planned_policy("fault-free", SMALL, RecoveryCosts()))
    for name in (*PLANNED, "spares"):
        outcome = simulate(trace, planned_policy(name, SMALL, RecoveryCosts(), spares=spares))
        check(outcome, trace)
        assert outcome.samples <= full.samples + 12, name
        assert outcome == simulate(trace, planned_policy(name, SMALL, RecoveryCosts(), spares=spares))


@pytest.mark.parametrize("name", PUBLISHED)
def test_measured_policies(name: str) -> None:
    folder, model = (OOBLECK, "gpt-2") if name != "recycle" else (OOBLECK.parent / "recycle", "gpt-3-350m")
    throughput = folder / ("throughput-by-node-count.csv" if name != "recycle" else "throughput-by-gpu-count.csv")

    @examples(40)
    @given(traces(32))
    def holds(trace: Trace) -> None:
        policy = published(name, throughput, folder / "cost-constants.csv", model)
        best = policy.fault_free
        outcome = simulate(trace, policy, ready_after=READY_AFTER)
        check(outcome, trace)
        assert outcome.average_samples_per_second <= best * 1.01

    holds()
