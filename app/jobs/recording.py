"""Heartbeats of one job on their way into its history: in memory until their minute is over."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable

import numpy as np

from openrecycle.agent.messages.protocol import Heartbeat
from openrecycle.db.heartbeats import GROUP
from openrecycle.db.samples import METRICS, PHASES, Samples, from_beats
from openrecycle.planner.jobs.job import Worker

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
