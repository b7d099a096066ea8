"""`milliseconds,add|remove,node` without a header: the form of the Bamboo and Oobleck traces."""

from __future__ import annotations

from typing import Literal

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import Event, Trace
from openrecycle.planner.simulation.traces.fields import whole


def looks_like(line: str) -> bool:
    """Three fields, the middle one a word."""
    fields = line.split(",")
    return len(fields) == 3 and ":" not in fields[1] and not fields[1].strip().isdigit()


def read(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Raises InputError for a row of another form, a row out of order, or one that names the wrong worker."""
    events: list[Event] = []
    living: set[str] = set()
    for number, line in lines:
        where = f"{name} line {number}"
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise InputError(where, line[:80], "milliseconds,add|remove,node")
        time = whole(fields[0], where, "milliseconds")
        if events and time < events[-1].time:
            raise InputError(where, time, f"a time of at least {events[-1].time}, that of the row above")
        worker = fields[2]
        if not worker or len(worker) > 100 or not worker.isprintable():
            raise InputError(where, worker[:80], "a node's name, of 1 to 100 characters")
        action: Literal["add", "remove"]
        if fields[1] == "add":
            if worker in living:
                raise InputError(where, worker, "a node that is not there yet")
            living.add(worker)
            action = "add"
        elif fields[1] == "remove":
            if worker not in living:
                raise InputError(where, worker, "a node that was added and not removed since")
            living.remove(worker)
            action = "remove"
        else:
            raise InputError(where, fields[1], "add or remove")
        events.append(Event(time, action, worker))
    return Trace.of(name, events)
