"""How long ops take, between two heartbeats."""

from __future__ import annotations

from dataclasses import dataclass, field


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
