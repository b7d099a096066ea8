"""A trace taken from one cluster, for a job of another size."""

from __future__ import annotations

from openrecycle.planner.simulation.trace import Event, Trace


def scaled(trace: Trace, workers: int) -> Trace:
    """The trace with `workers` where it has most: the share of workers that live stays, rounded.

    Which worker leaves is no longer told: the youngest does.
    """
    most = trace.most
    if most == workers:
        return trace
    events: list[Event] = []
    living = 0
    for at, count in trace.counts:
        wanted = round(count / most * workers)
        events += [Event(at, "add", f"node{i}") for i in range(living, wanted)]
        events += [Event(at, "remove", f"node{i}") for i in range(living - 1, wanted - 1, -1)]
        living = wanted
    return Trace.of(trace.name, events, end=trace.end)
