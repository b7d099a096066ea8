"""The published fault-free schedules (see planner.plans.baseline) as plans."""

from __future__ import annotations

import time
from collections.abc import Callable

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.baseline import gpipe, one_forward_one_backward, zb_h1, zb_h2
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.portfolio import plan_of
from openrecycle.planner.solvers.base import Solution

# What each is, the least technique that allows its ops, and the memory limit that it keeps. The
# zero-bubble schedules split B and step without a barrier.
_REFERENCES: dict[str, tuple[Callable[[Problem], Schedule], Technique, Callable[[Job], str]]] = {
    "1f1b": (one_forward_one_backward, Technique.FAULT_FREE, lambda _: "1f1b"),
    "gpipe": (gpipe, Technique.FAULT_FREE, lambda _: "none"),
    "zb-h1": (zb_h1, Technique.STAGGERED, lambda _: "uniform"),
    "zb-h2": (zb_h2, Technique.STAGGERED, lambda job: str(2 * job.stages - 1)),
}


def reference_plan(job: Job, name: str) -> Plan:
    """name: 1f1b, gpipe, zb-h1 or zb-h2. Raises InputError."""
    if name not in _REFERENCES:
        raise InputError("--reference", name, "one of " + ", ".join(_REFERENCES))
    begin = time.perf_counter()
    build, technique, memory = _REFERENCES[name]
    problem = Problem(job, technique=technique, memory=MemoryLimit(memory(job)))
    schedule = build(problem)
    seconds = time.perf_counter() - begin
    return plan_of(Solution(schedule, period_bound(problem), name, seconds), seconds=seconds)
