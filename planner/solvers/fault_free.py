"""What is best without failures: the one baseline that `slowdown_vs_best` is measured against."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.list_scheduler import ListScheduler

# Of one period the plainest: what comes first asks least of the job.
_TECHNIQUES = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)


def best_fault_free(job: Job, memory: MemoryLimit) -> Schedule:
    """The shortest fault-free plan of `job` at a memory limit, of one pipeline where all are alike: the best of all
    techniques, each the best of the list scheduler's rules and of the published schedules (1F1B, GPipe, ZB-H1, ZB-H2)
    that it and the limit allow.

    Whatever the technique of the plan that is compared: what a job loses by its failures, or by doing without
    a technique, is measured from one mark. It depends on job and limit alone, so all who ask get the same.
    A job that has layers is cut as it is without failures, or, where that does not fit in memory, as it is.
    Raises InputError, and InfeasibleError where no technique has a plan.
    """
    try:
        return _best(job.at_home, memory)
    except InfeasibleError:
        if job.at_home is job:
            raise
        return _best(job, memory)


@lru_cache(maxsize=64)
def _best(job: Job, memory: MemoryLimit) -> Schedule:
    # Pipelines without failures are independent of each other: where their workers are equally fast,
    # one stands for all.
    alone = job if job.speeds else replace(job, pipelines=1)
    best: Schedule | None = None
    refused: InfeasibleError | None = None
    for technique in _TECHNIQUES:
        try:
            problem = Problem(alone, technique=technique, memory=memory)
            schedule = ListScheduler().solve(problem).schedule
        except InfeasibleError as error:
            refused = error
            continue
        if best is None or schedule.period < best.period:
            best = schedule
    if best is None:
        assert refused is not None
        raise refused
    return best
