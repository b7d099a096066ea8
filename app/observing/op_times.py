"""Op times that workers report, smoothed for display, and as they come for app.observing.drifting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Weight of the newest report; older ones fade with a half-life of three.
NEWEST = 0.2


@dataclass
class _Times:
    incarnation: str
    milliseconds: dict[str, float] = field(default_factory=dict)


class OpTimes:
    """Of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, _Times] = {}
        self._fresh: dict[str, tuple[str, dict[str, float]]] = {}

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
        self._fresh[worker] = incarnation, {str(kind): value for kind, value in milliseconds.items()}

    def smoothed(self, worker: str) -> dict[str, float]:
        """Milliseconds by op kind; {} for a worker that has reported none."""
        times = self._of.get(worker)
        return dict(times.milliseconds) if times else {}

    def take(self) -> dict[str, tuple[str, dict[str, float]]]:
        """The newest report, with its incarnation, of each worker that has made one since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh
