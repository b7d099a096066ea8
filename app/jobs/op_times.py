"""Op times that workers report, smoothed for display, and as they come for app.plans.drifting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from openrecycle.agent.messages.protocol import Heartbeat, OpKind

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
