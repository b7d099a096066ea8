"""What a job's workers report of themselves, in memory: their newest heartbeats, op times, samples on their way into
the history, and the lines that they print. The coordinator needs none of it, and nothing here waits for the database.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import orjson

from openrecycle.agent.coordination.membership import LastHeartbeat, Member
from openrecycle.agent.messages.protocol import Heartbeat, LogLine, LogLines, OpKind
from openrecycle.db.heartbeats import GROUP, METRICS, PHASES, Samples, from_beats
from openrecycle.db.store import Record
from openrecycle.planner.jobs.job import Worker


class JobMeasurements:
    """The measurements of one job. workers: the names of its grid. stages: the number of stages of a pipeline.

    Any thread appends heartbeats to `fresh`, each with the monotonic time at which it was heard; only one thread takes
    them. slow: by worker, how many times the others' op times it takes, as was found last.
    """

    def __init__(self, workers: Iterable[str], stages: int) -> None:
        self.fresh: deque[tuple[Heartbeat, float]] = deque()
        self.contacts: dict[str, Contact] = {}
        self.op_times = OpTimes()
        self.recording = Recording(workers, stages)
        self.logs = LogBook(len(self.recording.places))
        self.slow: Mapping[str, float] = {}
        self._unsaved: dict[str, None] = {}
        # Why the last write of heartbeats to the database failed; empty: it did not.
        self.refused = ""

    def take(self) -> dict[str, LastHeartbeat]:
        """Takes the heartbeats since the last call. Returns what the coordinator needs of them, and keeps the rest."""
        beats: dict[str, LastHeartbeat] = {}
        news: list[tuple[Heartbeat, float]] = []
        fresh, contacts = self.fresh, self.contacts
        while fresh:
            beat, heard = arrived = fresh.popleft()
            name, incarnation = beat.worker, beat.incarnation
            known = contacts.get(name)
            # A heartbeat that comes after a newer one shows that the worker lives, but nothing else of it is used.
            if known is None or known.beat.incarnation != incarnation or beat.seq > known.beat.seq:
                contacts[name] = Contact(beat, heard)
                news.append(arrived)
            beats[name] = LastHeartbeat(incarnation, heard, beat.phase == "draining")
        if news:
            self.op_times.report(beat for beat, _ in news)
            self.recording.take(news)
            self._unsaved.update(dict.fromkeys(beat.worker for beat, _ in news))
        return beats

    def unsaved(self, most: int) -> list[Record]:
        """Returns the worker columns that new heartbeats have changed, for at most `most` workers, those first that
        have waited longest. They count as saved from then on."""
        names = list(islice(self._unsaved, most))
        for name in names:
            del self._unsaved[name]
        return [_contact_row(name, self.contacts[name]) for name in names]

    def written(self, refused: str) -> None:
        """Notes that heartbeats were written to the database, or why they could not be. refused: in words; empty: they
        were."""
        self.refused = refused

    def read(self, worker_rows: Iterable[Record]) -> None:
        """Takes each worker's newest heartbeat from the rows of the database."""
        for row in worker_rows:
            if row["incarnation"] and row["heard_at"] is not None:
                self.contacts[row["name"]] = _read_contact(row)

    def found_slow(self, factors: Mapping[str, float]) -> None:
        """Sets which workers are slow: by worker, how many times the others' op times it takes. All other workers are
        not slow."""
        self.slow = factors

    def stopped(self, since: float, members: Mapping[str, Member]) -> frozenset[str]:
        """Returns the workers that have reported, after `since` (monotonic seconds), that they wait before an
        iteration."""
        return frozenset(
            name
            # Another thread adds workers. A list of the items could start the garbage collector, and so let that thread
            # run in the middle; `copy` can't.
            for name, known in self.contacts.copy().items()
            if known.beat.phase == "paused"
            and known.heard >= since
            and known.beat.incarnation == members[name].incarnation
        )


class Contact(NamedTuple):
    """The newest heartbeat of a worker, and when it came, in monotonic seconds. The database has the time by the wall
    clock instead, which means the same to the next process."""

    beat: Heartbeat
    heard: float


def _contact_row(name: str, contact: Contact) -> Record:
    """Returns the columns of a worker's row that a heartbeat sets."""
    beat = contact.beat
    return {
        "name": name,
        "seq": beat.seq,
        "generation": beat.generation,
        "iteration": beat.iteration,
        "phase": beat.phase,
        "op_milliseconds": orjson.dumps(beat.op_milliseconds).decode(),
        "resident_bytes": beat.resident_bytes,
        "heard_at": time.time() - (time.monotonic() - contact.heard),
    }


def _read_contact(row: Record) -> Contact:
    beat = Heartbeat.model_construct(
        worker=row["name"],
        incarnation=row["incarnation"],
        seq=row["seq"],
        generation=row["generation"],
        iteration=row["iteration"],
        phase=row["phase"],
        op_milliseconds=json.loads(row["op_milliseconds"]),
        resident_bytes=row["resident_bytes"],
    )
    return Contact(beat, time.monotonic() - max(0.0, time.time() - row["heard_at"]))


# -- op times ----------------------------------------------------------------------------------

# Weight of the newest report in the running mean; older reports fade with a half-life of three.
NEWEST = 0.2


@dataclass
class _Times:
    incarnation: str
    milliseconds: dict[OpKind, float] = field(default_factory=dict)


class OpTimes:
    """The smoothed op times of one job's workers, in milliseconds. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, _Times] = {}
        self._fresh: dict[str, tuple[str, Mapping[OpKind, float]]] = {}

    def report(self, beats: Iterable[Heartbeat]) -> None:
        """Takes op times out of heartbeats. Each has the mean of every op kind that ran since the worker's last one."""
        known, fresh = self._of, self._fresh
        for beat in beats:
            worker, incarnation, milliseconds = beat.worker, beat.incarnation, beat.op_milliseconds
            if not milliseconds:
                continue
            times = known.get(worker)
            if times is None or times.incarnation != incarnation:
                times = known[worker] = _Times(incarnation)
            smoothed = times.milliseconds
            for kind, value in milliseconds.items():
                before = smoothed.get(kind, value)
                smoothed[kind] = before + NEWEST * (value - before)
            fresh[worker] = incarnation, milliseconds

    def smoothed(self, worker: str) -> dict[OpKind, float]:
        """Returns milliseconds by op kind; {} for a worker that has reported none."""
        times = self._of.get(worker)
        return dict(times.milliseconds) if times else {}

    def take(self) -> dict[str, tuple[str, Mapping[OpKind, float]]]:
        """Returns, by worker, (incarnation, newest report) of each worker that has reported since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh


# -- on the way into the history ----------------------------------------------------------------

_WIDTH = 4 + len(METRICS)
_PHASES = {phase: float(i) for i, phase in enumerate(PHASES)}
_NAN = float("nan")
# At most this many heartbeats of one group wait to be stored: some minutes' worth; 3 MB.
_MOST = 32_768


class Recording:
    """Heartbeats on their way into the history, by groups of GROUP workers. Thread-safe.

    workers: the names of the grid. stages: the number of stages of a pipeline.
    """

    def __init__(self, workers: Iterable[str], stages: int) -> None:
        self.places = {name: grid_place(name, stages) for name in workers}
        self._waiting: dict[int, array[float]] = {}
        self._heard: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def take(self, beats: Iterable[tuple[Heartbeat, float]]) -> None:
        """Keeps heartbeats, each with the monotonic time at which it was heard, until they are drained. Heartbeats of
        workers that are not in the grid are dropped."""
        places, last, rows = self.places, self._heard, dict[int, list[float]]()
        for beat, heard in beats:
            name, incarnation = beat.worker, beat.incarnation
            place = places.get(name)
            if place is None:
                continue
            before = last.get(name)
            silence = heard - before[1] if before and before[0] == incarnation else _NAN
            last[name] = incarnation, heard
            op = beat.op_milliseconds.get
            row = rows.get(place // GROUP)
            if row is None:
                row = rows[place // GROUP] = []
            row += (
                place,
                heard,
                beat.iteration,
                _PHASES[beat.phase],
                op("F", _NAN),
                op("I", _NAN),
                op("W", _NAN),
                op("B", _NAN),
                op("O", _NAN),
                beat.resident_bytes or _NAN,
                silence,
            )
        with self._lock:
            for group, row in rows.items():
                waiting = self._waiting.get(group)
                if waiting is None:
                    waiting = self._waiting[group] = array("d")
                if len(waiting) >= _MOST * _WIDTH:  # the database has long been down: history goes, state is kept
                    del waiting[: len(waiting) // 2 // _WIDTH * _WIDTH]
                waiting.extend(row)

    def drain(self, until: float, offset: float) -> list[Samples]:
        """Removes and returns the heartbeats heard before `until` (POSIX seconds), one Samples per group.

        offset: POSIX seconds minus monotonic seconds.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            done: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]] = []
            for group, values in waiting.items():
                rows = np.frombuffer(values).reshape(-1, _WIDTH)
                over = rows[:, 1] + offset < until
                if not over.all():
                    self._waiting[group] = array("d", rows[~over].tobytes())
                if over.any():
                    done.append(rows[over])
        for rows in done:
            rows[:, 1] += offset
        return [from_beats(rows) for rows in done]

    def peek(self, place: int, offset: float) -> Samples:
        """Returns one worker's heartbeats that wait, and keeps them. place, offset: see `grid_place` and `drain`."""
        with self._lock:
            rows = np.array(self._waiting.get(place // GROUP, ())).reshape(-1, _WIDTH)
        rows = rows[rows[:, 0] == place]
        rows[:, 1] += offset
        return from_beats(rows)


def grid_place(name: str, stages: int) -> int:
    """Returns the number of a worker's place in the grid, counted along the pipelines. stages: of a pipeline."""
    worker = Worker.parse(name)
    return worker.pipeline * stages + worker.stage


# -- what workers print --------------------------------------------------------------------------

# Lines that are kept of a worker, and of all workers of a job together: of large jobs, each worker's are fewer, but not
# fewer than FEWEST.
LINES = 200
ALL_LINES = 50_000
FEWEST = 20


class LogBook:
    """The newest lines that each worker has printed. Thread-safe.

    Lines of a process that has ended stay until newer lines replace them. workers: how many the grid has.
    """

    def __init__(self, workers: int) -> None:
        self._most = max(FEWEST, min(LINES, ALL_LINES // max(1, workers)))
        self._of: dict[str, deque[LogLine]] = {}
        self._lock = threading.Lock()

    def take(self, worker: str, message: LogLines) -> None:
        with self._lock:
            lines = self._of.setdefault(worker, deque(maxlen=self._most))
            if message.skipped and message.lines:
                lines.append(LogLine(at=message.lines[0].at, text=f"… {message.skipped:,} lines left out …"))
            lines.extend(message.lines)

    def lines(self, worker: str) -> tuple[LogLine, ...]:
        """Returns the lines of a worker, oldest first."""
        with self._lock:
            return tuple(self._of.get(worker, ()))
