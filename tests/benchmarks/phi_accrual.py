"""The phi-accrual failure detector (Hayashibara, Défago, Yared, Katayama: "The φ accrual failure detector",
SRDS 2004), beside the plain time-out: how long a silence must last until either raises an alarm. Pure.

phi(t) = -log10 P(a heartbeat still comes after a silence of t), for gaps that are normally distributed with
the mean and deviation of the last `window` ones. An alarm at a threshold of 8 is wrong once in 10^8 gaps, if
gaps are what they are taken for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev

Patience = Callable[[Sequence[float]], float]
"""Seconds of silence until the alarm, by the gaps so far."""

LEAST_DEVIATION = 0.1
"""Of gaps, in seconds: what implementations in use (Akka, for one) take at least."""
# Beyond this the normal distribution's tail is below the smallest float.
MOST_PHI = 300.0


def phi(silence: float, mean: float, deviation: float) -> float:
    """How unlikely it is that the heartbeat still comes, as -log10."""
    tail = 0.5 * math.erfc((silence - mean) / (deviation * math.sqrt(2)))
    return -math.log10(tail) if tail > 0 else MOST_PHI


def timeout(seconds: float) -> Patience:
    return lambda gaps: seconds


def accrual(threshold: float, window: int = 200, first: float = 5.0) -> Patience:
    """The silence at which phi reaches `threshold`. first: seconds, while there are fewer than ten gaps."""
    deviations = -NormalDist().inv_cdf(10.0**-threshold)

    def patience(gaps: Sequence[float]) -> float:
        seen = gaps[-window:]
        if len(seen) < 10:
            return first
        return fmean(seen) + deviations * max(LEAST_DEVIATION, pstdev(seen))

    return patience


@dataclass(frozen=True)
class ValidationResult:
    """False alarms among `gaps` silences that all ended; seconds of silence until an alarm, had the worker
    stopped right after a heartbeat: mean and largest."""

    gaps: int
    false_alarms: int
    mean: float
    largest: float


def judge(patience: Patience, workers: Iterable[Sequence[float]]) -> ValidationResult:
    """Plays a detector through arrivals, one sequence of seconds per process."""
    waits: list[float] = []
    wrong = 0
    for arrivals in workers:
        gaps: list[float] = []
        for before, after in pairwise(arrivals):
            waits.append(patience(gaps))
            wrong += after - before > waits[-1]
            gaps.append(after - before)
    return ValidationResult(len(waits), wrong, fmean(waits) if waits else 0.0, max(waits, default=0.0))
