"""Traces drawn from distributions: failures of workers, hosts, racks and switches, and their repair."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import HOUR_MS, MAX_HOURS, Event, Trace
from openrecycle.planner.simulation.traces import MAX_WORKERS

MOST_FAILURES = 2_000_000
# Workers of one host.
HOST = 8
# Longer than any trace; of much larger numbers there are no whole milliseconds.
MOST_HOURS = 1e9


@dataclass(frozen=True)
class Domain:
    """Workers that fail together: groups of `size` neighbours (1: each for itself; 8: a host; a rack,
    a switch), each group with a mean of `mtbf` hours between failures and `repair` hours until it is back.

    shape: of the Weibull distribution of times between failures; 1 is Poisson, below 1 failures
    come in bursts.
    """

    size: int
    mtbf: float
    repair: float
    shape: float = 1.0

    def check(self, where: str) -> None:
        for name, value, least in (("mtbf", self.mtbf, 0.0), ("repair", self.repair, 0.0), ("shape", self.shape, 0.05)):
            if not least <= value <= MOST_HOURS or (name == "mtbf" and value == 0):
                expected = "a number above 0" if name == "mtbf" else f"at least {least:g}"
                raise InputError(f"{where} {name}", value, f"{expected}, at most {MOST_HOURS:g}")
        if isinstance(self.size, bool) or not 1 <= self.size <= MAX_WORKERS:
            raise InputError(f"{where} size", self.size, f"a whole number of workers from 1 to {MAX_WORKERS}")


def generated(workers: int, hours: float, domains: list[Domain], *, seed: int = 0, name: str = "generated") -> Trace:
    """All workers live at 0; each domain's groups fail and return on their own. Raises InputError.

    A worker that is down with one group stays down until every group that took it down is repaired.
    """
    if isinstance(workers, bool) or not 1 <= workers <= MAX_WORKERS:
        raise InputError("workers", workers, f"a whole number from 1 to {MAX_WORKERS}")
    if not 0 < hours <= MAX_HOURS:
        raise InputError("hours", hours, f"a number above 0, at most {MAX_HOURS}")
    if not domains:
        raise InputError("domains", 0, "at least one kind of failure")
    for i, domain in enumerate(domains):
        domain.check(f"domains[{i}]")
    # In bursts (`shape`) there are far more failures than one expects, so those that are drawn are counted too.
    lost = sum(hours / d.mtbf * workers for d in domains)
    too_many = InputError("mtbf", min(d.mtbf for d in domains), f"at most {MOST_FAILURES:,} lost workers in all")
    if lost > MOST_FAILURES:
        raise too_many
    lost = 0
    noise = random.Random(seed)
    end = round(hours * HOUR_MS)
    # (time, whether it ends, group, domain): the failures of each group one after the other.
    heap: list[tuple[int, int, int, int]] = []
    for d, domain in enumerate(domains):
        for group in range(-(-workers // domain.size)):
            heapq.heappush(heap, (_wait(noise, domain), 0, group, d))
    events = [Event(0, "add", f"node{w}") for w in range(workers)]
    down = [0] * workers
    while heap and heap[0][0] < end:
        time, repaired, group, d = heapq.heappop(heap)
        domain = domains[d]
        members = range(group * domain.size, min(workers, (group + 1) * domain.size))
        lost += 0 if repaired else len(members)
        if lost > MOST_FAILURES:
            raise too_many
        for w in members:
            down[w] += -1 if repaired else 1
            if repaired and not down[w]:
                events.append(Event(time, "add", f"node{w}"))
            elif not repaired and down[w] == 1:
                events.append(Event(time, "remove", f"node{w}"))
        if repaired:
            heapq.heappush(heap, (time + _wait(noise, domain), 0, group, d))
        else:
            heapq.heappush(heap, (time + max(1, round(domain.repair * HOUR_MS)), 1, group, d))
    return Trace.of(name, events, end=end)


def _wait(noise: random.Random, domain: Domain) -> int:
    """Milliseconds until a group's next failure, of the mean asked for."""
    scale = domain.mtbf / math.gamma(1 + 1 / domain.shape)
    return max(1, round(noise.weibullvariate(scale, domain.shape) * HOUR_MS))
