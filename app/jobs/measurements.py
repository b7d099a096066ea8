"""What a job's workers say of themselves, in memory: their newest heartbeats, op times, what is on its way into the
history, and what they print. None of it is a matter of the coordinator, and none waits for the database.
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
    """Of one job. workers: the names of its grid. stages: of its pipelines.

    Heartbeats are appended to `fresh` by any thread, each with the monotonic time at which it was heard; one thread
    alone takes them. slow: workers, and how many times the others' op times they take, as was found last.
    """

    def __init__(self, workers: Iterable[str], stages: int) -> None:
        self.fresh: deque[tuple[Heartbeat, float]] = deque()
        self.contacts: dict[str, Contact] = {}
        self.op_times = OpTimes()
        self.recording = Recording(workers, stages)
        self.logs = LogBook(len(self.recording.places))
        self.slow: Mapping[str, float] = {}
        self._unsaved: dict[str, None] = {}
        # Why the database took no heartbeats when they were to be stored last; empty: it did.
        self.refused = ""

    def take(self) -> dict[str, LastHeartbeat]:
        """What came in since the last call, for the coordinator; the rest of it is noted here."""
        beats: dict[str, LastHeartbeat] = {}
        news: list[tuple[Heartbeat, float]] = []
        fresh, contacts = self.fresh, self.contacts
        while fresh:
            beat, heard = arrived = fresh.popleft()
            name, incarnation = beat.worker, beat.incarnation
            known = contacts.get(name)
            if known is None or known.beat.incarnation != incarnation or beat.seq > known.beat.seq:
                # An older one that came late still shows that the worker lives, and no more.
                contacts[name] = Contact(beat, heard)
                news.append(arrived)
            beats[name] = LastHeartbeat(incarnation, heard, beat.phase == "draining")
        if news:
            self.op_times.report(beat for beat, _ in news)
            self.recording.take(news)
            self._unsaved.update(dict.fromkeys(beat.worker for beat, _ in news))
        return beats

    def unsaved(self, most: int) -> list[Record]:
        """Worker columns out of the heartbeats since the last call, of `most` workers at most: those first that have
        waited longest."""
        names = list(islice(self._unsaved, most))
        for name in names:
            del self._unsaved[name]
        return [_contact_row(name, self.contacts[name]) for name in names]

    def read(self, worker_rows: Iterable[Record]) -> None:
        """Takes the newest heartbeats out of the database."""
        for row in worker_rows:
            if row["incarnation"] and row["heard_at"] is not None:
                self.contacts[row["name"]] = _read_contact(row)

    def found_slow(self, factors: Mapping[str, float]) -> None:
        """By how many times the others' op times each takes; of those that it does not name none is slow."""
        self.slow = factors

    def stopped(self, since: float, members: Mapping[str, Member]) -> frozenset[str]:
        """Who has said since then (monotonic seconds) that it waits before an iteration."""
        return frozenset(
            name
            # Another thread adds those that come; to make a list of pairs may be to collect garbage, and so to let it.
            for name, known in self.contacts.copy().items()
            if known.beat.phase == "paused"
            and known.heard >= since
            and known.beat.incarnation == members[name].incarnation
        )


class Contact(NamedTuple):
    """The newest heartbeat of a worker, and when it came, in monotonic seconds. Only the database has it by the wall
    clock, which outlives a process."""

    beat: Heartbeat
    heard: float


def _contact_row(name: str, contact: Contact) -> Record:
    """The worker columns that a heartbeat brings."""
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

# Weight of the newest report; older ones fade with a half-life of three.
NEWEST = 0.2


@dataclass
class _Times:
    incarnation: str
    milliseconds: dict[OpKind, float] = field(default_factory=dict)


class OpTimes:
    """Of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, _Times] = {}
        self._fresh: dict[str, tuple[str, Mapping[OpKind, float]]] = {}

    def report(self, beats: Iterable[Heartbeat]) -> None:
        """Each with the mean of each op kind since the worker's last one; kinds that did not run are not in it."""
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
        """Milliseconds by op kind; {} for a worker that has reported none."""
        times = self._of.get(worker)
        return dict(times.milliseconds) if times else {}

    def take(self) -> dict[str, tuple[str, Mapping[OpKind, float]]]:
        """The newest report, with its incarnation, of each worker that has made one since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh


# -- on the way into the history ----------------------------------------------------------------

_WIDTH = 4 + len(METRICS)
_PHASES = {phase: float(i) for i, phase in enumerate(PHASES)}
_NAN = float("nan")
# Heartbeats of one group that wait, at most: some minutes' worth; 3 MB.
_MOST = 32_768


class Recording:
    """Thread-safe. workers: the names of the grid. stages: of its pipelines."""

    def __init__(self, workers: Iterable[str], stages: int) -> None:
        self.places = {name: grid_place(name, stages) for name in workers}
        self._waiting: dict[int, array[float]] = {}
        self._heard: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def take(self, beats: Iterable[tuple[Heartbeat, float]]) -> None:
        """Each with when it was heard, in monotonic seconds. Of a worker that is not of the grid any more, nothing
        is kept."""
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
                if len(waiting) >= _MOST * _WIDTH:  # the database has been down for long: state goes before history
                    del waiting[: len(waiting) // 2 // _WIDTH * _WIDTH]
                waiting.extend(row)

    def drain(self, until: float, offset: float) -> list[Samples]:
        """Those heard before `until` (POSIX seconds), one Samples per group; they are not kept any longer.

        offset: what, added to the monotonic clock, gives POSIX seconds.
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
        """Those of one worker, which are still kept."""
        with self._lock:
            rows = np.array(self._waiting.get(place // GROUP, ())).reshape(-1, _WIDTH)
        rows = rows[rows[:, 0] == place]
        rows[:, 1] += offset
        return from_beats(rows)


def grid_place(name: str, stages: int) -> int:
    worker = Worker.parse(name)
    return worker.pipeline * stages + worker.stage


# -- what workers print --------------------------------------------------------------------------

LINES = 200
# Of all workers of a job together; of large jobs each keeps less.
ALL_LINES = 50_000
FEWEST = 20


class LogBook:
    """What workers print. Lines of a process that has ended stay until its successor has as many. Thread-safe.

    workers: how many the grid has.
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
        """Oldest first."""
        with self._lock:
            return tuple(self._of.get(worker, ()))
