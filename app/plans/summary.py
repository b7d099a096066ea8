"""What a list of plans says of one."""

from __future__ import annotations

from typing import Any

from openrecycle.planner.plan import Plan


def summary_of(plan: Plan) -> dict[str, Any]:
    """Plain data."""
    job, metrics = plan.job, plan.metrics
    return {
        "period": metrics.period,
        "lower_bound": metrics.lower_bound,
        "gap": metrics.gap,
        "time_unit": job.time_unit,
        "failed": list(plan.failed),
        "technique": plan.technique.value,
        "memory": plan.memory,
        "pipelines": job.pipelines,
        "stages": job.stages,
        "micro_batches": job.micro_batches,
        "workers": job.pipelines * job.stages,
    }
