"""Formats numbers, times and names for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from openrecycle.planner.jobs.words import Grid as Grid
from openrecycle.planner.jobs.words import capital as capital
from openrecycle.planner.jobs.words import count as count
from openrecycle.planner.jobs.words import counts as counts
from openrecycle.planner.jobs.words import grid as grid
from openrecycle.planner.jobs.words import milliseconds as milliseconds
from openrecycle.planner.jobs.words import percent as percent
from openrecycle.planner.jobs.words import planned as planned
from openrecycle.planner.jobs.words import plural as plural
from openrecycle.planner.jobs.words import whole_sentence as whole_sentence


def seconds(value: float) -> str:
    """Formats a time that still goes on: `0.4 s`, `12 s`, `5 min 20 s`."""
    if value < 9.95:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 59.5 else milliseconds(1000 * value)


def layers(partition: Sequence[int], stage: int) -> str:
    """Formats the layers that a stage holds, counted from 0: `11–24`."""
    first = sum(partition[:stage])
    last = first + partition[stage] - 1
    return f"{first}" if first == last else f"{first}–{last}"


def grid_words(of: Grid) -> str:
    """Formats a grid: `3 pipelines × 4 stages, 6 micro-batches each`."""
    micro_batches = count(of.micro_batches, "micro-batch", "micro-batches")
    return f"{count(of.pipelines, 'pipeline')} × {count(of.stages, 'stage')}, {micro_batches} each"


def age(seconds: float | None) -> str:
    """Formats an age: `0.4 s ago`, `3 min ago`; `never` for None."""
    if seconds is None:
        return "never"
    if seconds < 60:
        return f"{seconds:.1f} s ago"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86400:.0f} days ago"


def at_most(fraction: float) -> str:
    """Formats a share, rounded up, for "at most": `2.8 %` for 0.0273."""
    return percent(math.ceil(1000 * fraction - 1e-9) / 1000)


def rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.3g}" if samples_per_second < 999.5 else f"{samples_per_second:,.0f}"


def clock(at: float, zone: str | None) -> str:
    """Formats a POSIX time as `14:03:27` in the viewer's zone (UTC if the browser names none)."""
    return local(at, zone).strftime("%H:%M:%S")


def moment(at: float, zone: str | None, now: float) -> str:
    """Formats a POSIX time as `14:03:27`, or with the day if that is not today: `20 Nov, 14:03:27`. now: POSIX
    seconds."""
    then, today = local(at, zone), local(now, zone)
    if then.date() == today.date():
        return clock(at, zone)
    year = f" {then.year}" if then.year != today.year else ""
    return f"{then.day} {then:%b}{year}, {then:%H:%M:%S}"


def local(at: float, zone: str | None) -> datetime:
    """Converts a POSIX time to the viewer's zone."""
    try:
        where = ZoneInfo(zone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        where = ZoneInfo("UTC")
    return datetime.fromtimestamp(at, where)


def plain_markdown(words: str) -> str:
    """Escapes text from outside, so that nothing in it is Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|$~:" else c for c in words)


def size_unit(most: int) -> tuple[str, int]:
    """Returns a unit for a column of bytes whose largest value is `most`, and its size: `("GiB", 2**30)`."""
    name, unit = "B", 1
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if most < 1024 * unit:
            break
        name, unit = larger, 1024 * unit
    return name, unit


def size(number: int) -> str:
    """Formats bytes: `412 MiB`."""
    name, unit = size_unit(number)
    value = number / unit
    return f"{value:.3g} {name}" if value < 999.5 else f"{value:,.0f} {name}"
