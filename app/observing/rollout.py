"""How the newest generation's plan is taken up: each worker's acknowledgements, and when they came."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import storing
from openrecycle.db.store import Store

STEPS = ("adopted", "formed", "resumed")


@dataclass(frozen=True)
class Taken:
    """Milliseconds from the opening of the generation until the console heard of each step; None: not yet."""

    worker: str
    adopted: float | None = None
    formed: float | None = None
    resumed: float | None = None

    @property
    def last(self) -> str:
        return next((step for step, at in reversed([*zip(STEPS, self.steps, strict=True)]) if at is not None), "")

    @property
    def steps(self) -> tuple[float | None, float | None, float | None]:
        return self.adopted, self.formed, self.resumed


@dataclass(frozen=True)
class RollOut:
    """workers: those of the generation, in grid order. opened_at: POSIX seconds."""

    generation: int
    opened_at: float
    reason: str
    workers: tuple[Taken, ...]

    def now_at(self, step: str) -> int:
        """Workers that have come to `step` and no further; "": those of which nothing is known yet."""
        return sum(w.last == step for w in self.workers)

    @property
    def done(self) -> bool:
        """Do all train by the plan?"""
        return self.now_at("resumed") == len(self.workers)

    def slowest_first(self) -> list[Taken]:
        """Who is furthest behind first; of those that all train, who came last."""
        never = float("inf")
        return sorted(
            self.workers, key=lambda w: [never if at is None else at for at in reversed(w.steps)], reverse=True
        )


class RollOuts:
    """One per console. Thread-safe: what is over is read once, and what goes on once per look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._of: WeakKeyDictionary[LiveJob, RollOut] = WeakKeyDictionary()

    def of(self, job: LiveJob) -> RollOut | None:
        """None before the first generation. Raises ConsoleError."""
        current = job.state.current
        if current is None:
            return None
        known = self._of.get(job)
        if known is not None and known.generation == current.number and known.done:
            return known
        with storing():
            if known is None or known.generation != current.number:
                row = self._store.generation(job.job_id, current.number)
                opened = row["opened_at"] if row else None
            else:
                opened = known.opened_at
            acknowledged = self._store.acknowledgements(job.job_id, current.number)
        if opened is None:
            return None
        at: dict[str, dict[str, float]] = {}
        for row in acknowledged:
            # By its process: one that has moved may still call itself by the place it came from.
            at.setdefault(row["incarnation"], {})[row["state"]] = max(0.0, 1000 * (row["at"] - opened))
        living = frozenset(current.living)
        members = (member for name, member in job.state.members.items() if name in living)
        workers = tuple(
            Taken(m.name, **next((at[i] for i in reversed(m.incarnations) if i in at), {})) for m in members
        )
        found = RollOut(current.number, opened, current.reason, workers)
        with self._lock:
            self._of[job] = found
        return found
