"""A job that an operator has paused: every worker stops before the same iteration, with nothing in flight.

Which iteration that is nobody knows beforehand, for workers are in different ones, and none can finish
one that another has stopped before. So each stops after the one that it is in and says which that was;
the last of these is where all go on to. A job that is asked to end early is paused first, too: then there is
an iteration that all have committed, and after which nobody has begun another. One that can't commit an
iteration, whatever it does, ends before that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openrecycle.agent.launcher.processes import WorkerProcess


class PauseRequest:
    """The launcher's side. after: the iteration through which all go; None: the job is not paused.
    last: how many iterations there are in all, where the job is to end early."""

    def __init__(self) -> None:
        self.after: int | None = None
        self.last: int | None = None
        self._asked: set[str] = set()

    def saved(self) -> dict[str, Any]:
        return {"after": self.after, "last": self.last, "asked": sorted(self._asked)}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Goes on from what another launcher has `saved`."""
        self.after, self.last, self._asked = document["after"], document["last"], set(document["asked"])

    def begin(self, entries: Iterable[WorkerProcess]) -> None:
        if self.after is None and self.last is None:
            self.after = -1
            for entry in entries:
                self._asked.add(entry.incarnation)
                entry.post("hold", after=None)

    def heard(self, iteration: int, entries: Iterable[WorkerProcess], by: str = "") -> None:
        """A worker, the incarnation `by`, has stopped, or will, after `iteration`."""
        self._asked.discard(by)
        if self.after is not None and iteration > self.after:
            self.after = iteration
            for entry in entries:
                entry.post("hold", after=iteration)

    def tell(self, entry: WorkerProcess) -> None:
        """One that was not there when the job was paused, or told to end."""
        if self.last is not None:
            entry.post("last", iterations=self.last)
        elif self.after is not None:
            entry.post("hold", after=self.after)

    def settled(self, entries: Iterable[WorkerProcess]) -> bool:
        """Paused, and everybody has said after which iteration?"""
        return self.after is not None and self._asked.isdisjoint(entry.incarnation for entry in entries)

    def end_at(self, iterations: int, entries: Iterable[WorkerProcess]) -> None:
        """There is none after so many: all are held before it, or it can't be committed."""
        self.after, self.last = None, iterations
        for entry in entries:
            self.tell(entry)

    def end(self, entries: Iterable[WorkerProcess]) -> None:
        self.after = None
        self._asked.clear()
        for entry in entries:
            entry.post("go")
