"""`hour:GPUs` pairs and a closing `end hour`: how ReCycle's trace is written down."""

from __future__ import annotations

import re

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import HOUR_MS, Trace
from openrecycle.planner.simulation.traces.fields import MAX_WORKERS, events_of_counts, milliseconds, whole

_PAIR = re.compile(r"([0-9]{0,18}\.?[0-9]{1,18}):([0-9]{1,18})")


def looks_like(line: str) -> bool:
    return _PAIR.fullmatch(line.split()[0].rstrip(",")) is not None


def read(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Pairs over any number of lines. Without `end` the trace ends at its last pair."""
    counts: list[tuple[int, int]] = []
    end: int | None = None
    closing = False
    for number, line in lines:
        where = f"{name} line {number}"
        for word in line.replace(",", " ").split():
            if end is not None:
                raise InputError(where, word, "nothing after the end")
            if word == "end":
                closing = True
                continue
            if closing:
                end = milliseconds(word, where, HOUR_MS, "the hour at which the trace ends")
                if end <= counts[-1][0]:
                    raise InputError(where, word, "an end after the last pair")
                continue
            match = _PAIR.fullmatch(word)
            if not match:
                raise InputError(where, word, "hour:GPUs, such as .56:22, or `end 6.32`")
            time = milliseconds(match[1], where, HOUR_MS, "hours")
            if counts and time <= counts[-1][0]:
                raise InputError(where, word, "a later hour than that of the pair before")
            counts.append((time, whole(match[2], where, "a number of GPUs", most=MAX_WORKERS)))
    if closing and end is None:
        raise InputError(f"{name} line {lines[-1][0]}", "end", "an hour after `end`")
    return Trace.of(name, events_of_counts(counts, name=name), end=end)
