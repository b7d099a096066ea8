"""Op times that workers report, smoothed; and who is slow beside its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from planner.job import Worker

# Weight of the newest report; older ones fade with a half-life of three.
NEWEST = 0.2
# Reports before a worker is judged: fewer say more of the machine's moment than of the worker.
FEWEST = 5
# A worker is slow from so many times its peers' op times, until it is below the second again.
SLOW, USUAL_AGAIN = 1.3, 1.2


@dataclass
class _Times:
    incarnation: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    reports: int = 0


class OpTimes:
    """Of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, _Times] = {}

    def report(self, worker: str, incarnation: str, milliseconds: Mapping[Any, float]) -> None:
        """The mean of each op kind since the last report; kinds that did not run are not in it."""
        if not milliseconds:
            return
        times = self._of.get(worker)
        if times is None or times.incarnation != incarnation:
            times = self._of[worker] = _Times(incarnation)
        for kind, value in milliseconds.items():
            before = times.milliseconds.get(kind, value)
            times.milliseconds[kind] = before + NEWEST * (value - before)
        times.reports += 1

    def smoothed(self, worker: str) -> dict[str, float]:
        """Milliseconds by op kind; {} for a worker that has reported none."""
        times = self._of.get(worker)
        return dict(times.milliseconds) if times else {}

    def slow(
        self, living: Iterable[str], before: Mapping[str, float], speeds: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Who takes how many times as long as its peers of the same stage for a micro-batch.

        before: who was slow until now. speeds: of workers that are known not to be nominal. With two
        peers the faster one is the measure, with more the median. The step does not count: all wait
        in it for each other.
        """
        stages: dict[int, dict[str, float]] = {}
        for name in living:
            times = self._of.get(name)
            if times is not None and times.reports >= FEWEST and (each := _micro_batch(times.milliseconds)):
                stages.setdefault(Worker.parse(name).stage, {})[name] = each * (speeds or {}).get(name, 1.0)
        slow: dict[str, float] = {}
        for peers in stages.values():
            usual = min(peers.values()) if len(peers) < 3 else median(peers.values())
            for name, each in peers.items():
                if each > usual * (USUAL_AGAIN if name in before else SLOW):
                    slow[name] = each / usual
        return slow


def _micro_batch(milliseconds: Mapping[str, float]) -> float:
    """F and its backward, split or not; 0 until both are known."""
    forward, fused = milliseconds.get("F"), milliseconds.get("B")
    split = milliseconds.get("I", 0.0) + milliseconds.get("W", 0.0) if "W" in milliseconds else None
    backward = split if split is not None else fused
    return forward + backward if forward and backward else 0.0
