"""The CP-SAT model of a slice: is there an order of its ops that meets the target?"""

from __future__ import annotations

from ortools.sat.python import cp_model

from openrecycle.planner.solvers.lns import OpKey, ScheduleGraph, SliceWindows


class SliceModel:
    """A feasibility question, to be answered within the windows of `room`."""

    def __init__(self, room: SliceWindows) -> None:
        self.room = room
        self.model = cp_model.CpModel()
        frame = room.frame
        self.starts = {key: self.model.new_int_var(low, high, "") for key, (low, high) in room.windows.items()}
        for one, then, lag in frame.links:
            if one in self.starts and then in self.starts:
                self.model.add(self.starts[then] >= self.starts[one] + lag)
        for worker, row in frame.rows.items():
            inside = [key for key in row if key in self.starts]
            if inside:
                self.model.add_no_overlap(
                    self.model.new_fixed_size_interval_var(self.starts[key], frame.length(key), "") for key in inside
                )
                self._memory(row, worker.stage)
        for key, start in self.starts.items():
            self.model.add_hint(start, frame.starts[key])

    def _memory(self, row: list[OpKey], stage: int) -> None:
        """At most `limit` activations at once, counting those that reach into the slice.

        An F after the slice waits for the release whose rank is `limit` less. Where that release
        is inside, its rank is open, so that F and all F's before it are counted too.
        """
        room, frame = self.room, self.room.frame
        limit = frame.limit(stage)
        forwards = [key for key in row if key[0] == "F"]
        if limit is None or len(forwards) <= limit:
            return
        last = frame.kinds[-1]
        releases = [key for key in row if key[0] == last]
        waiting = max(
            (rank for rank in range(limit, len(forwards)) if releases[rank - limit] in self.starts), default=-1
        )
        held = []
        for rank, forward in enumerate(forwards):
            release = (last, forward[1], stage)
            reaches = release not in room.earliest and (frame.place[forward] < room.end or rank <= waiting)
            if reaches:
                begin, end = self._start(forward), self._start(release) + frame.length(release)
                size = self.model.new_int_var(0, 2 * room.target, "")
                held.append(self.model.new_interval_var(begin, size, end, ""))
        if len(held) > limit:
            self.model.add_cumulative(held, [1] * len(held), limit)

    def _start(self, key: OpKey) -> cp_model.LinearExprT:
        if key in self.starts:
            return self.starts[key]
        return self.room.earliest[key] if key in self.room.earliest else self.room.latest[key]

    def read(self, solver: cp_model.CpSolver) -> ScheduleGraph:
        """The whole schedule with the slice as solved."""
        inside = {key: solver.value(start) for key, start in self.starts.items()}
        return self.room.frame.with_starts({**self.room.earliest, **inside, **self.room.latest})
