"""Parcae's replay segments: one JSON array per minute, `[milliseconds, action, {"nodes": [...], ...}]`.

Only who comes and goes is read; the strategies that Parcae chose for each minute are left aside.
"""

from __future__ import annotations

from typing import Any, Literal

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.plan import read_json
from openrecycle.planner.simulation.trace import HOUR_MS, MAX_HOURS, Event, Trace

QUIET = ("no-op", "migration")


def looks_like(line: str) -> bool:
    return line.startswith("[")


def read(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Ends when the last minute does. Raises InputError."""
    events: list[Event] = []
    living: set[str] = set()
    end = 0
    for number, line in lines:
        where = f"{name} line {number}"
        time, action, nodes, duration = _row(line, where)
        if time < end:
            raise InputError(where, time, f"a time of at least {end}, when the row above ends")
        end = time + duration
        if action in QUIET:
            continue
        for node in nodes:
            if (action == "add") == (node in living):
                state = "is not there yet" if action == "add" else "is there"
                raise InputError(where, node, f"a node that {state}")
            (living.add if action == "add" else living.remove)(node)
            kind: Literal["add", "remove"] = "add" if action == "add" else "remove"
            events.append(Event(time, kind, node))
    return Trace.of(name, events, end=end)


def _row(line: str, where: str) -> tuple[int, str, list[str], int]:
    expected = '[milliseconds, "add" | "remove" | "no-op" | "migration", {"nodes": [names], "duration": milliseconds}]'
    try:
        row: Any = read_json(line)
    except ValueError:
        raise InputError(where, line[:80], expected) from None
    match row:
        case [int(time), str(action), {"nodes": list(nodes), "duration": int(duration)}]:
            whole = all(isinstance(n, str) and 0 < len(n) <= 100 for n in nodes)
            most = MAX_HOURS * HOUR_MS
            if whole and action in ("add", "remove", *QUIET) and 0 <= time <= most and 0 < duration <= most:
                return time, action, nodes, duration
    raise InputError(where, line[:80], expected)
