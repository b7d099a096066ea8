"""The published fault-free schedules (see planner.plans.baseline) as plans."""

from __future__ import annotations

import time

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem
from openrecycle.planner.plans.baseline import REFERENCES, reference_schedule
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.portfolio import plan_of
from openrecycle.planner.solvers.base import Solution


def reference_plan(job: Job, name: str) -> Plan:
    """name: 1f1b, gpipe, zb-h1 or zb-h2. Raises InputError."""
    if name not in REFERENCES:
        raise InputError("--reference", name, "one of " + ", ".join(REFERENCES))
    begin = time.perf_counter()
    published = REFERENCES[name]
    problem = Problem(job, technique=published.technique, memory=MemoryLimit(published.memory(job)))
    schedule = reference_schedule(problem, name)
    seconds = time.perf_counter() - begin
    return plan_of(Solution(schedule, period_bound(problem), name, seconds), seconds=seconds)
