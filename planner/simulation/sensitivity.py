"""How policies compare as failures become rarer, and where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
                gaps = [x - y for x, y in zip(self.rates(a), self.rates(b), strict=True)]
                for i in range(len(gaps) - 1):
                    if gaps[i] * gaps[i + 1] < 0:
                        share = gaps[i] / (gaps[i] - gaps[i + 1])
                        low, high = math.log(self.hours[i]), math.log(self.hours[i + 1])
                        first, second = (names[a], names[b]) if gaps[i] > 0 else (names[b], names[a])
                        out.append(Crossing(first, second, math.exp(low + share * (high - low))))
        return sorted(out, key=lambda crossing: crossing.hours)


def sweep(
    hours: Sequence[float], trace: Callable[[float], Trace], run: Callable[[Trace], Sequence[SimulationOutcome]]
) -> Sweep:
    """trace(mtbf) makes the trace, run(trace) plays all policies against it."""
    ascending = tuple(sorted(set(hours)))
    return Sweep(ascending, tuple(tuple(run(trace(value))) for value in ascending))
