"""What operators have asked of a job, and when it waited for a person: for a choice, or for the end of a pause. That is
no cost of any recovery, and no throughput is reckoned with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from openrecycle.agent.messages.protocol import Command
from openrecycle.db.store import Record


class CommandQueue:
    """What operators have asked the launchers and workers of one job for. Written under the job's lock.

    sent: oldest first. held: `pause` or `resume`, and when (POSIX seconds).
    """

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.held: list[tuple[str, float]] = []

    def add(self, command: Command, at: float) -> None:
        """One that is stored."""
        self.sent.append(command)
        if command.kind in ("pause", "resume"):
            self.held.append((command.kind, at))

    def read(self, rows: Iterable[Record]) -> None:
        """As the database has them."""
        read = CommandQueue()
        for row in rows:
            read.add(Command(seq=row["seq"], kind=row["kind"], worker=row["worker"] or None), row["at"])
        self.sent, self.held = read.sent, read.held

    def after(self, seq: int) -> list[Command]:
        return [command for command in self.sent if command.seq > seq]

    @property
    def paused_at(self) -> float | None:
        """Since when all workers are to stop; None: nobody has asked for that, or somebody to go on since."""
        return self.held[-1][1] if self.held and self.held[-1][0] == "pause" else None


class Wait(NamedTuple):
    """POSIX seconds. end: None while it lasts. generation: that a choice led to, the first time it was asked for; 0: a
    pause."""

    begin: float
    end: float | None
    generation: int = 0


def read_waits(stored: str) -> tuple[Wait, ...]:
    """Those for a choice."""
    try:
        return tuple(Wait(float(b), None if e is None else float(e), int(n)) for b, e, n in json.loads(stored))
    except (TypeError, ValueError):
        return ()  # of a file from elsewhere


def after_change(waits: tuple[Wait, ...], choosing: bool, generation: int, now: float) -> tuple[Wait, ...]:
    """choosing: does the job wait for a choice by now? generation: that is to open next."""
    last = waits[-1] if waits else None
    lasts = last is not None and last.end is None
    if choosing and not lasts:
        return (*waits, Wait(now, None, generation))
    if last is not None and lasts and not choosing:
        return (*waits[:-1], Wait(last.begin, max(now, last.begin), generation))
    return waits


def pauses(held: Iterable[tuple[str, float]]) -> tuple[Wait, ...]:
    """held: (`pause` or `resume`, POSIX seconds) of what operators asked for."""
    found: list[Wait] = []
    for kind, at in held:
        if kind == "pause" and (not found or found[-1].end is not None):
            found.append(Wait(at, None))
        elif kind == "resume" and found and found[-1].end is None:
            found[-1] = Wait(found[-1].begin, max(at, found[-1].begin))
    return tuple(found)


@dataclass(frozen=True)
class Waited:
    """Seconds. by_iteration: of those that were committed after a wait; by_generation: that a choice which led to the
    generation took; pauses: each from the last commit in it, since workers end first what they are at, and but for what
    of them is in a choice. waits: all of them, in order, of which no two overlap."""

    by_iteration: Mapping[int, float] = field(default_factory=dict)
    by_generation: Mapping[int, float] = field(default_factory=dict)
    pauses: tuple[Wait, ...] = ()
    waits: tuple[Wait, ...] = ()

    def within(self, begin: float, end: float) -> float:
        """Seconds of waiting between two times (POSIX seconds)."""
        return _within(self.waits, begin, end)

    def in_recovery(self, row: Record) -> tuple[float, float]:
        """Of a recovery (a row of the database): seconds of choosing, which are before anybody took up the plan that
        came of it, and of a pause, which is before training resumed."""
        begin, end = row["at"] - row["resumed_ms"] / 1000, row["at"]
        return self.by_generation.get(row["generation"], 0.0), _within(self.pauses, begin, end)


def _within(waits: Iterable[Wait], begin: float, end: float) -> float:
    return sum(max(0.0, (end if w.end is None else min(w.end, end)) - max(w.begin, begin)) for w in waits)


NOTHING = Waited()


def trained(row: Record, waited: Waited) -> float:
    """Seconds of an iteration (a row of the database) without those of waiting for a person."""
    return float(max(0.0, row["seconds"] - waited.by_iteration.get(row["iteration"], 0.0)))


def joined(waits: Iterable[Wait]) -> list[Wait]:
    """Where two overlap, one."""
    out: list[Wait] = []
    for wait in sorted(waits, key=lambda w: w.begin):
        last = out[-1] if out else None
        if last is not None and (last.end is None or wait.begin <= last.end):
            end = None if last.end is None or wait.end is None else max(last.end, wait.end)
            out[-1] = Wait(last.begin, end)
        else:
            out.append(Wait(wait.begin, wait.end))
    return out


def apart(waits: Iterable[Wait], others: Iterable[Wait]) -> tuple[Wait, ...]:
    """What of `waits` is in none of `others`, in order."""
    left = list(waits)
    for other in others:
        ends = math.inf if other.end is None else other.end
        parts: list[Wait] = []
        for wait in left:
            end = math.inf if wait.end is None else wait.end
            if wait.begin < min(end, other.begin):
                parts.append(wait if end <= other.begin else wait._replace(end=other.begin))
            if max(wait.begin, ends) < end:
                parts.append(wait._replace(begin=max(wait.begin, ends)))
        left = parts
    return tuple(left)


def segments(row: Record, waited: Waited) -> list[tuple[str, float]]:
    """The steps of a recovery, in milliseconds that add up to the whole, each with its words; a person's time apart."""
    marks = [0.0]
    for name in ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms"):
        marks.append(max(marks[-1], row[name]))
    steps = [after - before for before, after in pairwise(marks)]
    chose, paused = (1000 * seconds for seconds in waited.in_recovery(row))
    left = chose
    for i in (1, 2):  # survivors let go, and form anew, by the plan that was chosen
        steps[i], left = max(0.0, steps[i] - left), max(0.0, left - steps[i])
    took = min(steps[3], paused)
    steps[3] -= took
    words = ("until it was seen", "until the last survivor was free", "groups formed anew", "iteration done again")
    return [*zip(words, steps, strict=True), ("waited for a person", chose - left + took)]
