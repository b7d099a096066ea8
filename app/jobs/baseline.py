"""What a job's throughput is measured by: its fault-free rate, pinned and named.

It is the rate of the first stable window of whole iterations with all workers living; until there is one, that of
the fault-free plan where its times are real ones. Once measured it stays: a machine that becomes slower does not make
the job any healthier. It changes when an operator has it measured anew, and when a fault-free plan that is quicker
than the one it was measured with turns out to be; each change is a line of the event feed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Literal

from openrecycle.planner.jobs.words import percent

# So many iterations make a window; it is stable where their middle four fifths differ by no more than this share of
# the median. Where none is after so many iterations, the newest window is taken, and said to be unsteady.
WINDOW, STABLE, PATIENCE = 20, 0.15, 200


@dataclass(frozen=True)
class Baseline:
    """first, last: the iterations that it was measured at, and plan: the fingerprint of the fault-free plan that they
    ran by, where the source is `measured`. renew: look for a window from this iteration on; None: it stays."""

    samples_per_second: float
    source: Literal["measured", "planned"]
    first: int = 0
    last: int = 0
    plan: str = ""
    renew: int | None = None

    @property
    def words(self) -> str:
        """Where the number comes from."""
        if self.source == "planned":
            return "predicted by the fault-free plan"
        return f"measured at iterations {self.first:,} to {self.last:,}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_baseline(stored: str) -> Baseline | None:
    """None: there is none, or what is stored is none (of a file from elsewhere)."""
    try:
        made = Baseline(**json.loads(stored)) if stored else None
        return made if made is None or made.samples_per_second > 0 else None
    except (TypeError, ValueError):
        return None


@dataclass
class Window:
    """The newest iterations with all workers living, one after the other, in one generation: (number, seconds)."""

    through: int
    generation: int = 0
    seen: int = 0
    newest: list[tuple[int, float]] = field(default_factory=list)

    def add(self, iteration: int, seconds: float, generation: int, *, whole: bool) -> None:
        """The next iteration. whole: all workers lived, and nothing but training was in it."""
        first = generation != self.generation
        self.through, self.generation = iteration, generation
        if first or not whole or seconds <= 0:
            # The first iteration of a generation has what came before it in it.
            self.newest = []
            return
        self.seen += 1
        self.newest = [*self.newest[1 - WINDOW :], (iteration, seconds)]

    @property
    def spread(self) -> float | None:
        """Of its middle four fifths, as a share of the median; None: it is not full."""
        if len(self.newest) < WINDOW:
            return None
        tenths = quantiles([seconds for _, seconds in self.newest], n=10)
        return (tenths[-1] - tenths[0]) / self.seconds

    @property
    def seconds(self) -> float:
        return median(seconds for _, seconds in self.newest)

    @property
    def found(self) -> bool:
        spread = self.spread
        return spread is not None and (spread <= STABLE or self.seen >= PATIENCE)

    def baseline(self, samples: float, plan: str) -> tuple[Baseline, str]:
        """The rate, and what is to be said of how steady it is. samples: of one iteration."""
        first, last, spread = self.newest[0][0], self.newest[-1][0], self.spread or 0.0
        unsteady = f", which vary by {percent(spread)}" if spread > STABLE else ""
        return Baseline(samples / self.seconds, "measured", first, last, plan), unsteady
