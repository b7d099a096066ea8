"""The history of heartbeats: what workers reported over time, stored as columns in blocks of the table `heartbeat`.
Blocks are rolled up and expire.

A sample stands for the heartbeats of one worker in one step of time. It has the smallest, the mean and the largest
value of each metric, and the number of heartbeats with that metric. Samples of one second, one minute and one hour have
the same form, so one function makes longer ones out of shorter ones, exactly.

When a minute is over, its seconds are written as one block per group of workers, together with their roll-up. When an
hour is over, its minutes become one block, and the hour's roll-up is written; likewise the hours of a day.
Each step is one transaction, so nothing is counted twice or lost between two levels, whenever the console dies.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import and_, delete, insert, or_, select

from openrecycle.db.models import HeartbeatRow
from openrecycle.db.session import Database

# Milliseconds of each op kind, bytes of the process, seconds since the worker's previous heartbeat.
METRICS = ("F", "I", "W", "B", "O", "resident_bytes", "silence_seconds")
PHASES = ("starting", "waiting", "forming", "training", "draining", "paused")
FORMAT = 1
# The most samples of one block: a damaged or hostile block can't ask for more memory than these take, about 27 MB.
MAX_SAMPLES = 200_000

# How many bits of a value's fraction are kept: 12 bits are precise to 0.012 %. More bits are noise, and take space.
_BITS = 12
_DROPPED = 23 - _BITS
_HEAD = struct.Struct("<BI")
_ZLIB_LEVEL = 6

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]


class BlockError(ValueError):
    """Bytes that are not a block of samples. `str(error)` says what is wrong with them."""


@dataclass(frozen=True)
class Samples:
    """n samples, ordered by worker and time.

    worker: its place in the grid, pipeline x stages + stage. at: begin of the step in POSIX seconds. beats: number of
    heartbeats in the step. iteration, phase (index into PHASES): of the last heartbeat. By metric [n, 7]: counts, the
    heartbeats that had it; low, mean and high, NaN where counts is 0.
    """

    worker: Whole
    at: Whole
    beats: Whole
    iteration: Whole
    phase: NDArray[np.uint8]
    counts: Whole
    low: Floats
    mean: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.worker)

    def where(self, chosen: NDArray[Any]) -> Samples:
        """Returns the samples that a mask or a list of indices selects."""
        return Samples(*(getattr(self, f.name)[chosen] for f in fields(self)))


def from_beats(rows: NDArray[np.float64]) -> Samples:
    """Make one sample per heartbeat, in the order of `rows`: worker, POSIX seconds, iteration, phase, METRICS.

    NaN: the heartbeat did not have this metric. The step is the heartbeat's whole second.
    """
    values = _rounded(rows[:, 4:].astype(np.float32))
    worker, at, iteration = (np.floor(rows[:, i]).astype(np.int64) for i in range(3))
    counts = (~np.isnan(values)).astype(np.int64)
    phase = rows[:, 3].astype(np.uint8)
    return Samples(worker, at, np.ones_like(worker), iteration, phase, counts, values, values, values)


def joined(parts: Sequence[Samples]) -> Samples:
    """Join all samples; those of one worker and step stay in the order given."""
    if not parts:
        return from_beats(np.empty((0, 4 + len(METRICS))))
    together = Samples(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Samples)))
    return together.where(np.lexsort((together.at, together.worker)))


def rolled_up(samples: Samples, step: int) -> Samples:
    """Make one sample per worker and `step` seconds; samples of equal time count in their order."""
    samples = replace(samples, at=samples.at // step * step)
    samples = samples.where(np.lexsort((samples.at, samples.worker)))
    if not len(samples):
        return samples
    new = (np.diff(samples.worker) != 0) | (np.diff(samples.at) != 0)
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    last = np.concatenate((first[1:], [len(samples)])) - 1
    counts = np.add.reduceat(samples.counts, first)
    sums = np.add.reduceat(np.where(samples.counts, samples.mean, 0).astype(np.float64) * samples.counts, first)
    with np.errstate(invalid="ignore"):
        mean = sums / counts
    low, high = np.fmin.reduceat(samples.low, first), np.fmax.reduceat(samples.high, first)
    return Samples(
        worker=samples.worker[first],
        at=samples.at[first],
        beats=np.add.reduceat(samples.beats, first),
        iteration=samples.iteration[last],
        phase=samples.phase[last],
        counts=counts,
        low=low,
        # Rounding must not move a mean beyond its own extremes.
        mean=np.clip(_rounded(mean.astype(np.float32)), low, high),
        high=high,
    )


def pack(samples: Samples) -> bytes:
    """Make a block. Neighbours are similar, so each column holds differences, and bytes of equal weight stand together.

    low and high are stored as differences of bits from the mean, counts from beats: mostly zeros.
    """
    mean = _bits(samples.mean)
    columns: list[NDArray[Any]] = [
        _steps(samples.worker),
        _steps(samples.at),
        samples.beats,
        _steps(samples.iteration),
        samples.phase,
        (samples.counts - samples.beats[:, None]).T,
        np.diff(mean, axis=0, prepend=np.uint32(0)).T,
        (_bits(samples.low) ^ mean).T,
        (_bits(samples.high) ^ mean).T,
    ]
    body = b"".join(map(_shuffled, columns))
    return _HEAD.pack(FORMAT, len(samples)) + zlib.compress(body, _ZLIB_LEVEL)


def unpack(data: bytes) -> Samples:
    """Read a block. Raises BlockError; takes no more memory than MAX_SAMPLES need."""
    if len(data) < _HEAD.size:
        raise BlockError("a block of samples ends early")
    version, n = _HEAD.unpack_from(data)
    if version != FORMAT:
        raise BlockError(f"a block of samples is of format {version}, expected {FORMAT}")
    if n > MAX_SAMPLES:
        raise BlockError(f"a block says that it has {n:,} samples, expected at most {MAX_SAMPLES:,}")
    m = len(METRICS)
    size = n * (4 * 8 + 1 + m * (8 + 3 * 4))
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(data[_HEAD.size :], size + 1)
    except zlib.error:
        raise BlockError("a block of samples is damaged") from None
    if len(body) != size or not inflate.eof or inflate.unused_data:
        raise BlockError(f"a block of samples has not the {size:,} bytes that {n:,} samples take")
    reader = _Reader(body)
    worker, at, beats = np.cumsum(reader.take(n, "<i8")), np.cumsum(reader.take(n, "<i8")), reader.take(n, "<i8")
    iteration = np.cumsum(reader.take(n, "<i8"))
    phase = reader.take(n, "|u1")
    counts = reader.take(m * n, "<i8").reshape(m, n).T + beats[:, None]
    steps = reader.take(m * n, "<u4").reshape(m, n).T
    mean = np.cumsum(steps, axis=0, dtype=np.uint32)
    low, high = (reader.take(m * n, "<u4").reshape(m, n).T ^ mean for _ in range(2))
    made = Samples(worker, at, beats, iteration, phase, counts, *(_floats(v) for v in (low, mean, high)))
    if n and (phase.max() >= len(PHASES) or beats.min() < 1 or counts.min() < 0 or worker.min() < 0):
        raise BlockError("a block of samples has a phase, a count or a worker that can't be")
    return made


class _Reader:
    def __init__(self, body: bytes) -> None:
        self._body, self._place = body, 0

    def take(self, n: int, dtype: str) -> NDArray[Any]:
        width = np.dtype(dtype).itemsize
        raw = np.frombuffer(self._body, np.uint8, n * width, self._place).reshape(width, n)
        self._place += n * width
        return np.ascontiguousarray(raw.T).view(dtype).reshape(n)


def _shuffled(column: NDArray[Any]) -> bytes:
    """Put the first bytes of all values first, then all second bytes, and so on."""
    flat = np.ascontiguousarray(column).reshape(-1)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(len(flat), flat.itemsize).T).tobytes()


def _steps(column: Whole) -> Whole:
    return np.diff(column, prepend=np.int64(0))


def _bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _floats(bits: NDArray[np.uint32]) -> Floats:
    return np.ascontiguousarray(bits).view(np.float32)


def _rounded(values: Floats) -> Floats:
    """Round to the bits that are kept; every NaN becomes the same one."""
    half, mask = np.uint32(1 << (_DROPPED - 1)), np.uint32(0xFFFFFFFF << _DROPPED & 0xFFFFFFFF)
    rounded = ((_bits(values) + half) & mask).view(np.float32)
    return np.where(np.isnan(values), np.float32("nan"), rounded)


# Workers per block. With more, blocks are a little smaller, and reading one worker takes longer.
GROUP = 32


class Level(IntEnum):
    """How many seconds a sample stands for."""

    SECOND = 1
    MINUTE = 60
    HOUR = 3600


# By level, how many seconds become one block, and the level of the roll-up.
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
    """The table of heartbeats. Thread-safe. Raises SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job_id: str, groups: Iterable[Samples]) -> None:
        """Stores samples of one second, group by group of workers, and their roll-up, in one transaction."""
        rows = []
        for samples in groups:
            seconds = rolled_up(samples, Level.SECOND)
            if len(seconds):
                rows.append(_row(job_id, Level.SECOND, seconds, whole=True))
                rows += [_row(job_id, Level.MINUTE, m, whole=False) for m in _spans(seconds, Level.MINUTE)]
        if rows:
            with self._database.write(lasting=False) as session:
                session.execute(insert(HeartbeatRow), rows)

    def read(self, job_id: str, level: Level, worker: int, since: float, until: float) -> Samples:
        """Returns one worker's samples that begin in [since, until), in order. Damaged blocks are left out."""
        wanted = HeartbeatRow.level == level
        if level is Level.HOUR:  # an hour that is not over has only minutes
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
        # If a console died or was restarted within a step, there are two samples of that step.
        made = rolled_up(joined(found), level)
        return made.where((made.at >= since) & (made.at < until))

    def spans_to_pack(self, now: float, limit: int) -> list[Open]:
        """Returns up to `limit` spans that are over and not one block yet."""
        found: list[Open] = []
        with self._database.read() as session:
            for level in (Level.MINUTE, Level.HOUR):
                # Waits two more minutes, for the process that writes the last part of the span.
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
        """Makes one block of a span's parts, and from it a sample of the next level."""
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
        with self._database.write(lasting=False) as session:
            parts = []
            # Deletes first: if two processes do this at once, only one of them gets the rows.
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
        """Deletes up to `limit` blocks of a level that end before this time; returns how many. Parts of a span stay
        until they have been rolled up, however long no console was there to do it."""
        old = (
            select(HeartbeatRow.id)
            .where(
                HeartbeatRow.level == level,
                HeartbeatRow.whole,
                HeartbeatRow.begin < before,
                HeartbeatRow.end < before,
            )
            .order_by(HeartbeatRow.begin)
            .limit(limit)
        )
        with self._database.write(lasting=False) as session:
            ids = list(session.scalars(old))
            if ids:
                session.execute(delete(HeartbeatRow).where(HeartbeatRow.id.in_(ids)))
        return len(ids)


def groups(samples: Samples) -> Sequence[Samples]:
    """Divide samples by the group of their worker."""
    of = samples.worker // GROUP
    return [samples.where(of == group) for group in sorted(set(of.tolist()))]


def _spans(samples: Samples, level: Level) -> list[Samples]:
    """Roll samples up to `level`, and cut them so that each part lies in one span of it."""
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
