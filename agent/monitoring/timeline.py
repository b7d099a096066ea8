"""When each op of one iteration ran, as this worker saw it, and how long ops take on average. No torch here.

An iteration is recorded when the console has asked for it by its number, ahead of time, so that all
workers record the same one; any other costs a comparison per op.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from openrecycle.planner.plans.schedule import Op

_NONE = -1


@dataclass(frozen=True)
class IterationTimeline:
    """One whole iteration. ops: in the order they ran. ends, seconds: of each, on this process's
    monotonic clock; seconds is what it took on the device, waiting for inputs not counted."""

    generation: int
    iteration: int
    ops: Sequence[Op]
    ends: Sequence[float]
    seconds: Sequence[float]


class Timeline:
    """Filled by the training thread; `want` and `take` are for the reporting one.

    generation: the one that the iterations to come belong to. recording: is this iteration wanted?
    """

    def __init__(self) -> None:
        self.generation = 0
        self.recording = False
        self._wanted = _NONE
        self._iteration = _NONE
        self._count = 0
        self._ends = array("d")
        self._seconds = array("d")
        self._done: deque[IterationTimeline] = deque(maxlen=1)

    def want(self, iteration: int) -> None:
        """Asks for an iteration that has not begun; said again, or too late, it changes nothing."""
        self._wanted = iteration

    def take(self) -> IterationTimeline | None:
        """What was asked for, once it is there; once."""
        return self._done.pop() if self._done else None

    # -- the training thread --------------------------------------------------------------------

    def begin(self, iteration: int, ops: int) -> None:
        """Iteration `iteration` begins, of so many ops, all of which run here; 0: not all of them will."""
        self.recording = iteration == self._wanted and ops > 0
        if self.recording:
            self._iteration, self._count = iteration, 0
            if len(self._ends) != ops:
                self._ends, self._seconds = array("d", bytes(8 * ops)), array("d", bytes(8 * ops))

    def add(self, end: float, seconds: float) -> None:
        """The next op has ended. Only while `recording`."""
        self._ends[self._count] = end
        self._seconds[self._count] = seconds
        self._count += 1

    def finish(self, ops: Sequence[Op]) -> None:
        """The iteration that `begin` spoke of is done, with these ops."""
        if self.recording:
            self.recording, self._wanted = False, _NONE
            if self._count == len(ops):
                self._done.append(
                    IterationTimeline(
                        self.generation, self._iteration, ops, self._ends.tolist(), self._seconds.tolist()
                    )
                )

    def drop(self) -> None:
        """The iteration in flight is abandoned, or its numbers count no more."""
        self.recording = False


@dataclass
class OpSeconds:
    """Seconds spent per op kind since the last `take`; waiting for inputs does not count."""

    total: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.total[kind] = self.total.get(kind, 0.0) + seconds
        self.count[kind] = self.count.get(kind, 0) + 1

    def take(self) -> dict[str, float]:
        """Mean milliseconds per kind; starts anew."""
        total, count = self.total, self.count
        self.total, self.count = {}, {}
        return {kind: 1000 * total[kind] / count[kind] for kind in total if kind in count}
