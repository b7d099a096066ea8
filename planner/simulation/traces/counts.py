"""How many instances live at what time: Bamboo's Google Cloud samples and its older AWS series."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import HOUR_MS, Trace
from openrecycle.planner.simulation.traces.fields import MAX_WORKERS, events_of_counts, milliseconds, whole

_DATED = re.compile(r"([0-9]{4}-[0-9][0-9]-[0-9][0-9])\s*,\s*([0-9][0-9]:[0-9][0-9]:[0-9][0-9])\s*,\s*([0-9]+)")


def looks_like_dated(line: str) -> bool:
    return _DATED.fullmatch(line) is not None


def read_dated(name: str, lines: list[tuple[int, str]]) -> Trace:
    """`date, time, count` samples, in any order (the files have rows that are late); time 0 is the earliest."""
    samples: list[tuple[datetime, int]] = []
    for number, line in lines:
        where = f"{name} line {number}"
        match = _DATED.fullmatch(line)
        if not match:
            raise InputError(where, line[:80], "date, time, count, such as 2021-12-11, 11:11:30, 55")
        try:
            time = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC)
        except ValueError:
            raise InputError(where, f"{match[1]}, {match[2]}", "a date and a time of day") from None
        samples.append((time, whole(match[3], where, "an instance count", most=MAX_WORKERS)))
    samples.sort(key=lambda sample: sample[0])
    first = samples[0][0]
    counts = [(round((time - first).total_seconds() * 1000), count) for time, count in samples]
    return _trace(name, counts)


def looks_like_steps(line: str) -> bool:
    """Two fields that begin with a digit."""
    fields = line.split(",")
    return len(fields) == 2 and all(field.strip()[:1].isdigit() for field in fields)


def read_steps(name: str, lines: list[tuple[int, str]]) -> Trace:
    """`seconds,count`, or `hours,count` where the times have decimals; two rows per change, before and after."""
    hours = any("." in line.split(",")[0] for _, line in lines)
    unit, what = (HOUR_MS, "hours") if hours else (1000, "seconds")
    counts: list[tuple[int, int]] = []
    for number, line in lines:
        where = f"{name} line {number}"
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2:
            raise InputError(where, line[:80], f"{what},count")
        time = milliseconds(fields[0], where, unit, what)
        if counts and time < counts[-1][0]:
            raise InputError(where, fields[0], "a time that is not before that of the row above")
        counts.append((time, whole(fields[1], where, "an instance count", most=MAX_WORKERS)))
    return _trace(name, counts)


def _trace(name: str, counts: list[tuple[int, int]]) -> Trace:
    if not any(count for _, count in counts):
        raise InputError(name, "counts that are all 0", "at least one instance at some time")
    return Trace.of(name, events_of_counts(counts, name=name), end=counts[-1][0])
