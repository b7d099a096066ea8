"""A job's own past as a trace: from the plain rows that its record of events gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import Event, Trace

# What a record calls it: the worker is gone, or is back.
LOST = ("failed", "lost", "killed", "left", "remove")
BACK = ("joined", "rejoined", "recovered", "restarted", "add")


def from_history(
    rows: Iterable[tuple[float, str, str]], workers: Iterable[str], *, end: float, name: str = "history"
) -> Trace:
    """rows: (seconds since the job began, worker, event). workers: those it began with. end: seconds.

    A worker's second loss in a row, or return, says nothing new and is left out. Raises InputError
    for an event that is neither a loss nor a return.
    """
    living = set(workers)
    events = [Event(0, "add", worker) for worker in sorted(living)]
    for time, worker, what in sorted(rows, key=lambda row: row[0]):
        if not 0 <= time < float("inf"):
            raise InputError(f"{name} time of {worker}", time, "seconds since the job began")
        if what not in (*LOST, *BACK):
            raise InputError(f"{name} event of {worker}", what, "one of " + ", ".join((*LOST, *BACK)))
        if (worker in living) is (what in BACK):
            continue
        action: Literal["add", "remove"] = "remove" if what in LOST else "add"
        (living.remove if what in LOST else living.add)(worker)
        events.append(Event(round(time * 1000), action, worker))
    return Trace.of(name, events, end=round(end * 1000))
