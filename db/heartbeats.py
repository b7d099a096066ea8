"""The history of heartbeats: blocks of samples in the table `heartbeat`, rolled up and expired.

A minute is written when it is over: its seconds as one block per group of workers, and its roll-up. When
an hour is over, its minutes become one block, and the hour's roll-up is written; a day's hours likewise.
Each step is one transaction, so that nothing is counted twice or lost between two levels, wherever the
console dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sqlalchemy import and_, delete, func, insert, or_, select

from openrecycle.db.models import HeartbeatRow
from openrecycle.db.samples import BlockError, Samples, joined, pack, rolled_up, unpack
from openrecycle.db.session import Database

# Workers in one block. More are packed a little better, and cost more to read one of.
GROUP = 32


class Level(IntEnum):
    """Seconds that a sample stands for."""

    SECOND = 1
    MINUTE = 60
    HOUR = 3600


# The roll-ups of a level, and how many seconds of it become one block.
SPAN = {Level.SECOND: 60, Level.MINUTE: 3600, Level.HOUR: 86_400}
NEXT = {Level.SECOND: Level.MINUTE, Level.MINUTE: Level.HOUR}


@dataclass(frozen=True)
class Open:
    """A span of one group of workers that is not one block yet. begin: POSIX seconds."""

    job_id: str
    level: Level
    group: int
    begin: int


class HeartbeatStore:
    """Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job_id: str, groups: Iterable[Samples]) -> None:
        """Stores samples of one second, each of the workers of one group, and their roll-up; one transaction."""
        rows = []
        for samples in groups:
            seconds = rolled_up(samples, Level.SECOND)
            if len(seconds):
                rows.append(_row(job_id, Level.SECOND, seconds, whole=True))
                rows += [_row(job_id, Level.MINUTE, m, whole=False) for m in _spans(seconds, Level.MINUTE)]
        if rows:
            with self._database.write() as session:
                session.execute(insert(HeartbeatRow), rows)

    def read(self, job_id: str, level: Level, worker: int, since: float, until: float) -> Samples:
        """The samples of one worker that begin in [since, until), in order. Damaged blocks are left out."""
        wanted = HeartbeatRow.level == level
        if level is Level.HOUR:  # of hours that are not over there are only minutes
            wanted = or_(wanted, and_(HeartbeatRow.level == Level.MINUTE, HeartbeatRow.whole.is_(False)))
        query = select(HeartbeatRow.data).where(
            HeartbeatRow.job_id == job_id,
            wanted,
            HeartbeatRow.worker_group == worker // GROUP,
            HeartbeatRow.begin < until,
            HeartbeatRow.end >= since,
        )
        found = []
        with self._database.read() as session:
            for data in session.scalars(query.order_by(HeartbeatRow.begin, HeartbeatRow.id)):
                try:
                    samples = unpack(data)
                except BlockError:
                    continue
                found.append(samples.where(samples.worker == worker))
        # A console that died or was started again within the step has left two of it.
        made = rolled_up(joined(found), level)
        return made.where((made.at >= since) & (made.at < until))

    def spans_to_pack(self, now: float, limit: int) -> list[Open]:
        """Up to `limit` spans that are over and still in parts."""
        found: list[Open] = []
        with self._database.read() as session:
            for level in (Level.MINUTE, Level.HOUR):
                # Some minutes are given to whoever writes the last of it.
                over = (int(now) - 2 * Level.MINUTE) // SPAN[level] * SPAN[level]
                query = (
                    select(HeartbeatRow.job_id, HeartbeatRow.worker_group, HeartbeatRow.begin)
                    .where(HeartbeatRow.level == level, HeartbeatRow.whole.is_(False), HeartbeatRow.begin < over)
                    .order_by(HeartbeatRow.begin)
                    .limit(limit * (SPAN[level] // level))
                )
                spans = {
                    Open(row.job_id, level, row.worker_group, row.begin // SPAN[level] * SPAN[level])
                    for row in session.execute(query)
                }
                found += sorted(spans, key=lambda s: (s.begin, s.job_id, s.group))
        return found[:limit]

    def pack(self, span: Open) -> None:
        """Makes one block of a span's parts, and a sample of the next level out of it."""
        end = span.begin + SPAN[span.level]
        where = (
            HeartbeatRow.job_id == span.job_id,
            HeartbeatRow.level == span.level,
            HeartbeatRow.worker_group == span.group,
            HeartbeatRow.whole.is_(False),
            HeartbeatRow.begin >= span.begin,
            HeartbeatRow.begin < end,
        )
        columns = HeartbeatRow.begin, HeartbeatRow.id, HeartbeatRow.data
        taken = delete(HeartbeatRow).where(*where).returning(*columns)
        with self._database.write() as session:
            parts = []
            # Deleted first: of two processes that do this at once, one gets the rows.
            for row in sorted(session.execute(taken), key=lambda row: (row.begin, row.id)):
                try:
                    parts.append(unpack(row.data))
                except BlockError:
                    continue
            samples = rolled_up(joined(parts), span.level)
            if not len(samples):
                return
            rows = [_row(span.job_id, span.level, samples, whole=True)]
            if above := NEXT.get(span.level):
                rows += [_row(span.job_id, above, s, whole=False) for s in _spans(samples, above)]
            session.execute(insert(HeartbeatRow), rows)

    def expire(self, level: Level, before: float, limit: int) -> int:
        """Deletes up to `limit` blocks of a level that end before this time; returns how many it were."""
        old = (
            select(HeartbeatRow.id)
            .where(HeartbeatRow.level == level, HeartbeatRow.begin < before, HeartbeatRow.end < before)
            .order_by(HeartbeatRow.begin)
            .limit(limit)
        )
        with self._database.write() as session:
            ids = list(session.scalars(old))
            if ids:
                session.execute(delete(HeartbeatRow).where(HeartbeatRow.id.in_(ids)))
        return len(ids)

    def bytes_by_level(self, job_id: str) -> dict[Level, int]:
        """Of the blocks alone, without what the database adds."""
        query = (
            select(HeartbeatRow.level, func.sum(func.length(HeartbeatRow.data)))
            .where(HeartbeatRow.job_id == job_id)
            .group_by(HeartbeatRow.level)
        )
        with self._database.read() as session:
            return {Level(level): size for level, size in session.execute(query)}


def groups(samples: Samples) -> Sequence[Samples]:
    """By the group that each worker is in."""
    of = samples.worker // GROUP
    return [samples.where(of == group) for group in sorted(set(of.tolist()))]


def _spans(samples: Samples, level: Level) -> list[Samples]:
    """Their roll-up to `level`, cut so that no part reaches beyond a span of it."""
    made = rolled_up(samples, level)
    span = made.at // SPAN[level]
    return [made.where(span == one) for one in sorted(set(span.tolist()))]


def _row(job_id: str, level: Level, samples: Samples, *, whole: bool) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "level": int(level),
        "worker_group": int(samples.worker[0]) // GROUP,
        "begin": int(samples.at.min()),
        "end": int(samples.at.max()),
        "whole": whole,
        "data": pack(samples),
    }
