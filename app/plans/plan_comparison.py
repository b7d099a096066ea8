"""Is another plan worth a new generation? Pure."""

from __future__ import annotations

from dataclasses import dataclass

from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.plans.plan import Plan, job_doc
from openrecycle.planner.plans.steady import steady_period

# Above this an order is not played through with other op times.
MOST_OPS = 20_000
# Periods that differ by less than this share are the same.
ROUNDING = 1e-9


@dataclass(frozen=True)
class PlanComparison:
    """reason: in words, with the numbers."""

    better: bool
    reason: str


def gain(now: Plan, other: Plan, job: Job) -> float:
    """By how much `now`'s order takes longer than `other`'s with the op times of `job`: 0.05 = 5 %.

    Both are for the same workers. Raises InputError for an order that can't run.
    """
    first, second = (job.with_partition(p.partition) if p.partition else job for p in (now, other))
    return steady_period(now.schedule(), first) / steady_period(other.schedule(), second) - 1


def compare_plans(now: Plan, other: Plan, job: Job, iterations: int) -> PlanComparison:
    """Should `other` take the place of `now`, with so many iterations left?

    It should if what it saves until then is more than the iteration that a new generation costs. Both are for
    the same workers of `job`.
    """
    asked = job_doc(job)
    unit = job.time_unit
    if other.fingerprint == now.fingerprint:
        return PlanComparison(False, f"it is the one that was found again{_proof(now)}")
    if now.job == asked and other.job == asked:
        gained = now.metrics.period / other.metrics.period - 1
        periods = f"{other.metrics.period:.6g} {unit} against {now.metrics.period:.6g} {unit}"
    elif other.op_count > MOST_OPS:
        return PlanComparison(True, "it is for the op times that were measured, and the one before is not")
    else:
        try:
            gained = gain(now, other, job)
        except PlannerError as error:
            return PlanComparison(False, f"the two can't be compared: {error}")
        periods = "at the op times that were measured"
    if gained <= ROUNDING:
        return PlanComparison(False, f"the new one is no shorter ({periods}){_proof(other)}")
    saved = gained / (1 + gained)
    words = f"{percent(saved, 2)} of an iteration ({periods})"
    if saved * iterations <= 1:
        left = f"the {iterations} iterations that are left" if iterations != 1 else "the iteration that is left"
        return PlanComparison(
            False, f"the new one saves {words}; in {left} that is less than the one that a change costs"
        )
    return PlanComparison(True, f"it saves {words}")


def _proof(plan: Plan) -> str:
    metrics = plan.metrics
    return (
        "; it is proven optimal" if metrics.gap <= 0 else f"; no plan can be more than {percent(metrics.gap, 2)} better"
    )
