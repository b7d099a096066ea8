"""A job that an operator has paused: every worker stops before the same iteration, with nothing in flight.

Which iteration that is nobody knows beforehand, for workers are in different ones, and none can finish
one that another has stopped before. So each stops after the one that it is in and says which that was;
the last of these is where all go on to.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.processes import WorkerProcess


class Hold:
    """The launcher's side. after: the iteration through which all go; None: the job is not paused."""

    def __init__(self) -> None:
        self.after: int | None = None

    def begin(self, entries: Iterable[WorkerProcess]) -> None:
        if self.after is None:
            self.after = -1
            for entry in entries:
                entry.post("hold", after=None)

    def heard(self, iteration: int, entries: Iterable[WorkerProcess]) -> None:
        """A worker has stopped, or will, after `iteration`."""
        if self.after is not None and iteration > self.after:
            self.after = iteration
            for entry in entries:
                entry.post("hold", after=iteration)

    def tell(self, entry: WorkerProcess) -> None:
        """One that was not there when the job was paused."""
        if self.after is not None:
            entry.post("hold", after=self.after)

    def end(self, entries: Iterable[WorkerProcess]) -> None:
        self.after = None
        for entry in entries:
            entry.post("go")
