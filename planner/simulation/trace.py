"""A failure trace: when which workers come and go, whatever file or distribution it is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from openrecycle.planner.jobs.errors import InputError

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
    """Events in order of time. end: milliseconds; what happens then or later is outside the trace.

    Build it with `Trace.of`, which checks the order and that only living workers are removed.
    """

    name: str
    events: tuple[Event, ...]
    end: int

    @classmethod
    def of(cls, name: str, events: Iterable[Event], *, end: int | None = None, where: Sequence[str] = ()) -> Trace:
        """Sorts by time and keeps the order of events of one time. end: the last event's time unless given. where: what
        errors call each of the events, which are in order then; by default `name`.

        Each worker has one life: one that comes back gets a new name, W1_2#2, W1_2#3 and so on.
        Raises InputError for an empty trace, a worker that is added while it lives, or removed while it does not.
        """
        ordered = tuple(sorted(events, key=lambda e: e.time))
        if not ordered:
            raise InputError(name, "no events", "at least one `add`")
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
        """Most workers that live at once."""
        return max(n for _, n in self.counts)


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
