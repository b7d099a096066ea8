"""What a simulated run came to, and the one definition of each of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from openrecycle.planner.simulation.policy_base import SECOND
from openrecycle.planner.simulation.trace import Trace

HOUR = 3600 * SECOND


@dataclass(frozen=True)
class SimulationOutcome:
    """Totals of one policy on one trace. Times in microseconds.

    begin: the first iteration's start. last: the last completed iteration's end. end: of the trace.
    samples, iterations, productive: of the iterations whose work counts, and the time that they took.
    lost: iterations begun whose work was lost. worker_time: living workers x time. failures: workers lost.
    rates: (time, samples per second from then on), 0 while nothing trains.
    """

    policy: str
    trace: str
    begin: int | None
    last: int
    end: int
    samples: float
    iterations: int
    productive: int
    lost: int
    worker_time: int
    failures: int
    fault_free: float
    workers: int
    rates: tuple[tuple[int, float], ...]

    @property
    def hours(self) -> float:
        """Of the trace, from its start to its end."""
        return self.end / HOUR

    @property
    def window(self) -> int:
        """From the first iteration's start to the last one's end: what the published averages are over."""
        return 0 if self.begin is None else max(0, self.last - self.begin)

    @property
    def average_samples_per_second(self) -> float:
        """Samples that count, over `window`."""
        return self.samples * SECOND / self.window if self.window else 0.0

    @property
    def trace_samples_per_second(self) -> float:
        """The same over the whole trace, waiting before the start and after the last iteration included."""
        return self.samples * SECOND / self.end

    @property
    def ettr(self) -> float:
        """Time of the iterations that count / wall time from the first start to the end of the trace."""
        return 0.0 if self.begin is None else self.productive / (self.end - self.begin)

    @property
    def goodput(self) -> float:
        """The same, weighted with throughput / fault-free throughput."""
        if self.begin is None or not self.fault_free:
            return 0.0
        return self.samples * SECOND / (self.end - self.begin) / self.fault_free

    @property
    def worker_hours(self) -> float:
        """Hours of living workers: what is paid for."""
        return self.worker_time / HOUR

    @property
    def worker_hours_wasted(self) -> float:
        """Those beyond what the samples take on the fault-free job: below 0 where fewer workers do more each."""
        if not self.fault_free:
            return self.worker_hours
        return self.worker_hours - self.samples / self.fault_free * self.workers / 3600

    def dollars(self, per_worker_hour: float) -> float:
        return self.worker_hours * per_worker_hour

    def dollars_per_million_samples(self, per_worker_hour: float) -> float | None:
        """None where nothing was trained."""
        return self.dollars(per_worker_hour) / self.samples * 1e6 if self.samples else None

    def document(self, model: str, *, price: float | None = None, over_time: bool = False) -> dict[str, Any]:
        """The JSON object that `openrecycle simulate --json` prints. price: dollars per worker and hour.

        over_time: with the rates as well, as (hours, samples per second from then on).
        """
        out: dict[str, Any] = {
            "policy": self.policy,
            "model": model,
            "trace": self.trace,
            "average_samples_per_second": self.average_samples_per_second,
            "goodput": self.goodput,
            "ettr": self.ettr,
            "iterations_lost": self.lost,
            "failures": self.failures,
            "hours": self.hours,
            "iterations": self.iterations,
            "trace_samples_per_second": self.trace_samples_per_second,
            "fault_free_samples_per_second": self.fault_free,
            "worker_hours": self.worker_hours,
            "worker_hours_wasted": self.worker_hours_wasted,
        }
        if price is not None:
            out["dollars"] = self.dollars(price)
            out["dollars_per_million_samples"] = self.dollars_per_million_samples(price)
        if over_time:
            out["throughput_over_time"] = [[time / HOUR, rate] for time, rate in self.rates]
        return out


# -- how policies compare as failures become rarer ---------------------------------------------------


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
