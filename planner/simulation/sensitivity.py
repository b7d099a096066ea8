"""How policies compare as failures become rarer, and where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from openrecycle.planner.simulation.outcome import SimulationOutcome
from openrecycle.planner.simulation.trace import Trace


@dataclass(frozen=True)
class Crossing:
    """Between two MTBFs `after` becomes better than `before`. hours: where the lines between them meet."""

    before: str
    after: str
    hours: float


@dataclass(frozen=True)
class Sweep:
    """One outcome per MTBF (hours, ascending) and policy."""

    hours: tuple[float, ...]
    outcomes: tuple[tuple[SimulationOutcome, ...], ...]

    def rates(self, policy: int) -> list[float]:
        """Samples per second over the whole trace, by MTBF."""
        return [row[policy].trace_samples_per_second for row in self.outcomes]

    @property
    def crossings(self) -> list[Crossing]:
        """Of each pair of policies, by MTBF; the hours are interpolated on a logarithmic scale."""
        out = []
        names = [outcome.policy for outcome in self.outcomes[0]]
        for a in range(len(names)):
            for b in range(a + 1, len(names)):
                rates = zip(self.hours, self.rates(a), self.rates(b), strict=True)
                gaps = [(hours, x - y) for hours, x, y in rates if x != y]  # where they are equal nobody leads
                for (before, lead), (after, behind) in pairwise(gaps):
                    if (lead > 0) != (behind > 0):
                        share = lead / (lead - behind)
                        low, high = math.log(before), math.log(after)
                        first, second = (names[a], names[b]) if lead > 0 else (names[b], names[a])
                        out.append(Crossing(first, second, math.exp(low + share * (high - low))))
        return sorted(out, key=lambda crossing: crossing.hours)


def sweep(
    hours: Sequence[float], trace: Callable[[float], Trace | None], run: Callable[[Trace], Sequence[SimulationOutcome]]
) -> Sweep:
    """trace(mtbf) makes the trace, None: that value is left out; run(trace) plays all policies against it."""
    played = {value: tuple(run(made)) for value in sorted(set(hours)) if (made := trace(value)) is not None}
    return Sweep(tuple(played), tuple(played.values()))
