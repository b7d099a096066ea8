"""The event feed of a job. Lines that say the same again and again are one line with a count, and when it was said
last.

On a machine that is busy for an hour the console stands still every other minute, and workers fall silent and are
heard again: dozens of lines would hide the one that matters. Only such lines are folded, and only as long as
nothing else happens in the job: the feed stays in order.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from openrecycle.agent.coordination.membership import Note
from openrecycle.db.store import Record

KINDS = frozenset({"console", "worker"})
# A line that was not repeated for so long has come to its end: seconds.
WITHIN = 600.0
# So many of the newest lines may be folded into.
LOOK_BACK = 50

# What differs from one time to the next; not the digits of a worker's name.
_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")

Key = tuple[str, str, str | None, str]


class _FoldedLine(NamedTuple):
    seq: int
    times: int
    last_at: float


class Folding:
    """The lines of one job that may still be repeated. Immutable."""

    def __init__(self, lines: dict[Key, _FoldedLine] | None = None) -> None:
        self._lines = lines or {}

    @classmethod
    def read(cls, newest: Iterable[Record]) -> Folding:
        """newest: rows of the feed, newest first."""
        lines: dict[Key, _FoldedLine] = {}
        for row in newest:
            key = _key(row["kind"], row["severity"], row["worker"], row["text"])
            if key is None:
                break
            lines.setdefault(key, _FoldedLine(row["seq"], row["count"], row["last_at"]))
        return cls(lines)

    def split(self, notes: Iterable[Note], now: float) -> tuple[list[Note], list[Record]]:
        """Those that are lines of their own; and rows (seq, count, last_at, text) of those that are repeated."""
        fresh: list[Note] = []
        repeats: dict[int, Record] = {}
        lines = dict(self._lines)
        for note in notes:
            key = _key(note.kind, note.severity, note.worker, note.text)
            line = None if key is None else lines.get(key)
            if key is None:
                lines.clear()
            if key is None or line is None or now - line.last_at > WITHIN:
                fresh.append(note)
                continue
            lines[key] = line._replace(times=line.times + 1, last_at=now)
            repeats[line.seq] = {"seq": line.seq, "count": line.times + 1, "last_at": now, "text": note.text}
        return fresh, list(repeats.values())

    def after(self, events: Sequence[Record], repeats: Sequence[Record]) -> Folding:
        """When these rows are stored."""
        if not (events or repeats):
            return self
        counted = {row["seq"]: row for row in repeats}
        lines = {
            key: _FoldedLine(line.seq, counted[line.seq]["count"], counted[line.seq]["last_at"])
            if line.seq in counted
            else line
            for key, line in self._lines.items()
        }
        for row in events:
            key = _key(row["kind"], row["severity"], row["worker"], row["text"])
            if key is None:
                lines = {}
            else:
                lines[key] = _FoldedLine(row["seq"], 1, row["at"])
        newest = sorted(lines.items(), key=lambda item: item[1].seq)[-LOOK_BACK:]
        return Folding(dict(newest))


def _key(kind: str, severity: str, worker: str | None, text: str) -> Key | None:
    """Equal for lines that say the same; None for those that are never folded."""
    return (kind, severity, worker, _NUMBER.sub("#", text)) if kind in KINDS else None


class JobFeed:
    """What the next lines of one job's feed go by: the number of the newest line, and which may still be repeated.
    For whoever holds the job's lock; `last` may be read by anybody."""

    def __init__(self) -> None:
        self.last = 0
        self._folding = Folding()

    def rows(self, notes: Iterable[Note]) -> list[Record]:
        """Numbered, of now."""
        now = time.time()
        return [{"seq": self.last + i, "at": now, **vars(note)} for i, note in enumerate(notes, start=1)]

    def split(self, notes: Iterable[Note], now: float) -> tuple[list[Record], list[Record]]:
        """Numbered rows of new lines; and rows of those that are repeated."""
        fresh, repeats = self._folding.split(notes, now)
        return self.rows(fresh), repeats

    def stored(self, events: Sequence[Record], repeats: Sequence[Record]) -> None:
        """Such rows are in the database."""
        self.last += len(events)
        self._folding = self._folding.after(events, repeats)

    def added(self, events: int) -> None:
        """So many numbered rows that are not to be repeated are in the database."""
        if events:
            self.unfold()
        self.last += events

    def unfold(self) -> None:
        """What was said so far has been seen, or something else has happened: said again, it is a new line."""
        self._folding = Folding()

    def read(self, last: int, newest: Iterable[Record]) -> None:
        """As the database has it. newest: the newest LOOK_BACK rows, newest first."""
        self.last, self._folding = last, Folding.read(newest)
