"""Failure traces: when workers come and go. They are read from files, made from a job's past, or drawn at random.

There is a reader for each source of files; `read_trace` recognizes the format by the first line. `from_history` makes a
trace of a job's own past, from the rows of its record of events. `generated` draws failures of workers, hosts, racks
and switches, and their repair.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.words import number_of
from openrecycle.planner.plans.plan import read_json, read_whole

# -- a failure trace ----------------------------------------------------------------------------

HOUR_MS = 3_600_000
MAX_HOURS = 24 * 365 * 10


@dataclass(frozen=True)
class Event:
    """One worker is added or removed, `time` milliseconds after the trace began."""

    time: int
    action: Literal["add", "remove"]
    worker: str


@dataclass(frozen=True)
class Trace:
    """Events in order of time. end: milliseconds; events then or later are outside the trace.

    Build it with `Trace.of`, which checks the order and that only living workers are removed.
    """

    name: str
    events: tuple[Event, ...]
    end: int

    @classmethod
    def of(cls, name: str, events: Iterable[Event], *, end: int | None = None, where: Sequence[str] = ()) -> Trace:
        """Sorts events by time; those of equal time keep their order. end: the last event's time unless given. where:
        the name of each event in errors, if the events are in order already; by default `name`.

        A worker that comes back gets a new name, W1_2#2, W1_2#3 and so on, since each name has one life only. Names
        that the events have already are left out.
        Raises InputError for an empty trace, a worker that is added while it lives, or removed while it does not.
        """
        ordered = tuple(sorted(events, key=lambda e: e.time))
        if not ordered:
            raise InputError(name, "no events", "at least one `add`")
        known = {event.worker for event in ordered}
        living: set[str] = set()
        lives: dict[str, int] = {}
        renamed: list[Event] = []
        for at, event in enumerate(ordered):
            worker, place = event.worker, where[at] if where else name
            if event.action == "add":
                if worker in living:
                    raise InputError(place, worker, f"a worker that is not there yet, at {event.time} ms")
                living.add(worker)
                lives[worker] = lives.get(worker, 0) + 1
                while lives[worker] > 1 and f"{worker}#{lives[worker]}" in known:
                    lives[worker] += 1
            else:
                if worker not in living:
                    raise InputError(place, worker, f"the removal of a worker that is there, at {event.time} ms")
                living.remove(worker)
            life = lives[worker]
            renamed.append(event if life == 1 else replace(event, worker=f"{worker}#{life}"))
        last = ordered[-1].time if end is None else end
        if not 0 < last <= MAX_HOURS * HOUR_MS:
            raise InputError(name, f"{last} ms", f"an end after 0 and within {MAX_HOURS} h")
        return cls(name, tuple(renamed), last)

    @property
    def hours(self) -> float:
        return self.end / HOUR_MS

    @cached_property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """(milliseconds, living workers from then on), one entry per time at which anything happens."""
        out: list[tuple[int, int]] = []
        living = 0
        for event in self.events:
            living += 1 if event.action == "add" else -1
            if out and out[-1][0] == event.time:
                out.pop()
            out.append((event.time, living))
        return tuple(out)

    @property
    def most(self) -> int:
        """The most workers that live at once."""
        return max(n for _, n in self.counts)


def scaled(trace: Trace, workers: int) -> Trace:
    """Scale the trace to at most `workers` at once: the fraction of workers that live stays, rounded.

    Which worker leaves is no longer known; the newest does.
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


# -- numbers from text, and names of workers for traces that only count them --------------------------

MAX_WORKERS = 200_000


def whole(text: str, where: str, what: str, *, most: int = MAX_HOURS * HOUR_MS) -> int:
    """Parse a whole number from 0 to `most`. Raises InputError naming `where`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) <= most):
        raise InputError(where, text, f"{what}, a whole number from 0 to {most}")
    return int(text)


def milliseconds(text: str, where: str, unit_ms: int, what: str) -> int:
    """Parse a decimal number of some unit, and return milliseconds. Raises InputError naming `where`."""
    value, most = number_of(text), MAX_HOURS * HOUR_MS // unit_ms
    if value is None or not 0 <= value <= most:
        raise InputError(where, text, f"{what}, a number from 0 to {most}")
    return round(Decimal(text) * unit_ms)


def events_of_counts(counts: Iterable[tuple[int, int]], *, name: str) -> list[Event]:
    """Make events from (time, number of living workers), where the source does not name workers.

    A worker that leaves is drawn at random from the living ones, with the trace's name as the seed, so the
    same file gives the same trace everywhere. A worker that comes is a new one.
    """
    noise = random.Random(name)
    living: list[str] = []
    out: list[Event] = []
    made = 0
    for time, count in counts:
        while len(living) > count:
            out.append(Event(time, "remove", living.pop(noise.randrange(len(living)))))
        while len(living) < count:
            made += 1
            living.append(f"node{made}")
            out.append(Event(time, "add", living[-1]))
    return out


# -- ReCycle -----------------------------------------------------------------------------------------

# ReCycle's trace is written as `hour:GPUs` pairs and a closing `end hour`.

_PAIR = re.compile(r"([0-9]{0,18}\.?[0-9]{1,18}):([0-9]{1,18})")


def read_gpu_hours(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Read pairs over any number of lines. Without `end` the trace ends at its last pair."""
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


# -- Bamboo and Oobleck, by event --------------------------------------------------------------------

# `milliseconds,add|remove,node` without a header: the form of the Bamboo and Oobleck traces.


def is_events(line: str) -> bool:
    """Has the line three fields, the middle one a word?"""
    fields = line.split(",")
    return len(fields) == 3 and ":" not in fields[1] and not fields[1].strip().isdigit()


def read_events(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Read events. Raises InputError for a row of another form, a row out of order, or one with the wrong worker."""
    events: list[Event] = []
    places: list[str] = []
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
        if fields[1] not in ("add", "remove"):
            raise InputError(where, fields[1], "add or remove")
        events.append(Event(time, "add" if fields[1] == "add" else "remove", worker))
        places.append(where)
    return Trace.of(name, events, where=places)


# -- Bamboo, by count --------------------------------------------------------------------------------

# How many instances live at what time: the format of Bamboo's Google Cloud samples and its older AWS series.

_DATED = re.compile(r"([0-9]{4}-[0-9][0-9]-[0-9][0-9])\s*,\s*([0-9][0-9]:[0-9][0-9]:[0-9][0-9])\s*,\s*([0-9]+)")


def read_dated(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Read `date, time, count` samples in any order (some files have late rows); time 0 is the earliest."""
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
    return _counted(name, counts)


def is_steps(line: str) -> bool:
    """Has the line two fields that begin with a digit?"""
    fields = line.split(",")
    return len(fields) == 2 and all(field.strip()[:1].isdigit() for field in fields)


def read_steps(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Read `seconds,count`, or `hours,count` if times have decimals; two rows per change, before and after."""
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
    return _counted(name, counts)


def _counted(name: str, counts: list[tuple[int, int]]) -> Trace:
    if not any(count for _, count in counts):
        raise InputError(name, "counts that are all 0", "at least one instance at some time")
    return Trace.of(name, events_of_counts(counts, name=name), end=counts[-1][0])


# -- Parcae ------------------------------------------------------------------------------------------

# Parcae's replay segments: one JSON array per minute, `[milliseconds, action, {"nodes": [...], ...}]`.
#
# Only the workers that come and go are read; the strategies that Parcae chose for each minute are ignored.

QUIET = ("no-op", "migration")


def read_replay(name: str, lines: list[tuple[int, str]]) -> Trace:
    """Read segments. The trace ends with the last minute. Raises InputError."""
    events: list[Event] = []
    places: list[str] = []
    end = 0
    for number, line in lines:
        where = f"{name} line {number}"
        time, action, nodes, duration = _segment(line, where)
        if time < end:
            raise InputError(where, time, f"a time of at least {end}, when the row above ends")
        end = time + duration
        if action in QUIET:
            continue
        events += [Event(time, "add" if action == "add" else "remove", node) for node in nodes]
        places += [where] * len(nodes)
    return Trace.of(name, events, end=end, where=places)


def _segment(line: str, where: str) -> tuple[int, str, list[str], int]:
    expected = '[milliseconds, "add" | "remove" | "no-op" | "migration", {"nodes": [names], "duration": milliseconds}]'
    try:
        row: Any = read_json(line)
    except ValueError:
        raise InputError(where, line[:80], expected) from None
    match row:
        case [int(time), str(action), {"nodes": list(nodes), "duration": int(duration)}]:
            named = all(isinstance(n, str) and 0 < len(n) <= 100 for n in nodes)
            named = named and not isinstance(time, bool) and not isinstance(duration, bool)
            most = MAX_HOURS * HOUR_MS
            if named and action in ("add", "remove", *QUIET) and 0 <= time <= most and 0 < duration <= most:
                return time, action, nodes, duration
    raise InputError(where, line[:80], expected)


# -- the choice of a reader, and the traces that come with the product --------------------------------

MAX_BYTES = 64_000_000

Lines = list[tuple[int, str]]  # (line number, text), blank lines left out

# In the order in which they are tried: (does the first line look like it?, reader).
FORMATS: tuple[tuple[Callable[[str], object], Callable[[str, Lines], Trace]], ...] = (
    (lambda line: line.startswith("["), read_replay),
    (lambda line: _PAIR.fullmatch(line.split()[0].rstrip(",")), read_gpu_hours),
    (is_events, read_events),
    (_DATED.fullmatch, read_dated),
    (is_steps, read_steps),
)


def read_trace(path: Path) -> Trace:
    """Read a trace from a file. Raises InputError naming file, line, value and what was expected."""
    try:
        text = read_whole(path, most=MAX_BYTES).decode()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a trace file that can be read") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "bytes that are not UTF-8", "a text file") from None
    return parse_trace(text, name=path.name)


def parse_trace(text: str, *, name: str) -> Trace:
    """Read a trace from text; `name` is its name, also in errors."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(name, "an empty file", "a trace")
    for fits, read in FORMATS:
        if fits(lines[0][1]):
            return read(name, lines)
    raise InputError(
        f"{name} line {lines[0][0]}",
        lines[0][1][:80],
        "`milliseconds,add|remove,node`, `date, time, count`, `seconds,count`, `hours,count`, "
        "`hour:GPUs hour:GPUs ...`, or a JSON array of a replay segment",
    )


@cache
def public_traces() -> dict[str, Trace]:
    """Return the traces by `folder/name`, such as `recycle/gcp-6h`; sources and licences are beside the files."""
    out: dict[str, Trace] = {}
    for folder in sorted(files("openrecycle.planner.simulation").joinpath("data").iterdir(), key=lambda f: f.name):
        if not folder.is_dir():
            continue
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if not file.name.endswith((".csv", ".txt")):
                continue
            try:
                trace = parse_trace(file.read_text(encoding="utf-8"), name=file.name)
            except InputError:
                continue  # the file is a table, not a trace
            out[f"{folder.name}/{file.name.rsplit('.', 1)[0]}"] = trace
    return out


# -- a job's own past --------------------------------------------------------------------------------


def from_history(
    rows: Iterable[tuple[float, str, Literal["failed", "joined"]]], workers: Iterable[str], *, end: float
) -> Trace:
    """Make a trace from a job's record. rows: (seconds since the job began, worker, event). workers: those that it
    began with. end: seconds. A second loss of a worker in a row, or a second return, is left out.
    """
    living = set(workers)
    events = [Event(0, "add", worker) for worker in sorted(living)]
    for time, worker, what in sorted(rows, key=lambda row: row[0]):
        if (worker in living) is (what == "joined"):
            continue
        events.append(Event(round(time * 1000), "remove" if worker in living else "add", worker))
        living ^= {worker}
    return Trace.of("its own history", events, end=round(end * 1000))


# -- traces drawn from distributions ------------------------------------------------------------

MOST_FAILURES = 2_000_000
# Default number of workers per host.
HOST = 8
# Longer than any trace; much larger numbers can't be converted to whole milliseconds.
MOST_HOURS = 1e9


@dataclass(frozen=True)
class Domain:
    """Workers that fail together, in groups of `size` neighbours: 1 for single workers, 8 for hosts, more for racks or
    switches. Each group has a mean of `mtbf` hours between failures, and is back after `repair` hours.

    shape: of the Weibull distribution of times between failures; 1 is Poisson, below 1 failures
    come in bursts.
    """

    size: int
    mtbf: float
    repair: float
    shape: float = 1.0

    def check(self, where: str) -> None:
        for name, value, least in (("mtbf", self.mtbf, 0.0), ("repair", self.repair, 0.0), ("shape", self.shape, 0.05)):
            if not least <= value <= MOST_HOURS or (name == "mtbf" and value == 0):
                expected = "a number above 0" if name == "mtbf" else f"at least {least:g}"
                raise InputError(f"{where} {name}", value, f"{expected}, at most {MOST_HOURS:g}")
        if isinstance(self.size, bool) or not 1 <= self.size <= MAX_WORKERS:
            raise InputError(f"{where} size", self.size, f"a whole number of workers from 1 to {MAX_WORKERS}")


def generated(workers: int, hours: float, domains: list[Domain], *, seed: int = 0, name: str = "generated") -> Trace:
    """Draw a trace. All workers live at 0; the groups of each domain fail and return independently. Raises InputError.

    A worker that several groups have taken down is back once all of them are repaired.
    """
    if isinstance(workers, bool) or not 1 <= workers <= MAX_WORKERS:
        raise InputError("workers", workers, f"a whole number from 1 to {MAX_WORKERS}")
    if not 0 < hours <= MAX_HOURS:
        raise InputError("hours", hours, f"a number above 0, at most {MAX_HOURS}")
    if not domains:
        raise InputError("domains", 0, "at least one kind of failure")
    for i, domain in enumerate(domains):
        domain.check(f"domains[{i}]")
    # With a small `shape` far more failures are drawn than expected, so the number drawn is checked as well.
    lost = sum(hours / d.mtbf * workers for d in domains)
    too_many = InputError("mtbf", min(d.mtbf for d in domains), f"at most {MOST_FAILURES:,} lost workers in all")
    if lost > MOST_FAILURES:
        raise too_many
    lost = 0
    noise = random.Random(seed)
    end = round(hours * HOUR_MS)
    # (time, is it a repair?, group, domain): the next event of each group.
    heap: list[tuple[int, int, int, int]] = []
    for d, domain in enumerate(domains):
        for group in range(-(-workers // domain.size)):
            heapq.heappush(heap, (_wait(noise, domain), 0, group, d))
    events = [Event(0, "add", f"node{w}") for w in range(workers)]
    down = [0] * workers
    while heap and heap[0][0] < end:
        time, repaired, group, d = heapq.heappop(heap)
        domain = domains[d]
        members = range(group * domain.size, min(workers, (group + 1) * domain.size))
        lost += 0 if repaired else len(members)
        if lost > MOST_FAILURES:
            raise too_many
        for w in members:
            down[w] += -1 if repaired else 1
            if repaired and not down[w]:
                events.append(Event(time, "add", f"node{w}"))
            elif not repaired and down[w] == 1:
                events.append(Event(time, "remove", f"node{w}"))
        if repaired:
            heapq.heappush(heap, (time + _wait(noise, domain), 0, group, d))
        else:
            heapq.heappush(heap, (time + max(1, round(domain.repair * HOUR_MS)), 1, group, d))
    return Trace.of(name, events, end=end)


def _wait(noise: random.Random, domain: Domain) -> int:
    """Draw the milliseconds until a group's next failure, with the mean asked for."""
    scale = domain.mtbf / math.gamma(1 + 1 / domain.shape)
    return max(1, round(noise.weibullvariate(scale, domain.shape) * HOUR_MS))
