"""Puts a plan of somebody's own in force in a job that it fits."""

from __future__ import annotations

import time

from openrecycle.agent.coordination.events import UsePlan
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError, plain
from openrecycle.planner.jobs.job import MemoryLimit, Worker
from openrecycle.planner.jobs.words import names
from openrecycle.planner.plans.plan import Plan, job_doc


def misfit(job: LiveJob, plan: Plan) -> str:
    """Why the job can't run `plan` now; "": it can."""
    if job.state.over:
        return f"it has {job.state.over}"
    own, document = job_doc(job.job), plan.job
    if (own.pipelines, own.stages, own.micro_batches) != (
        document.pipelines,
        document.stages,
        document.micro_batches,
    ):
        grids = [f"{d.pipelines} × {d.stages} × {d.micro_batches}" for d in (document, own)]
        return f"the plan is for a grid of {grids[0]}, the job's is {grids[1]}"
    if own != document:
        return "the plan was made for another profile; take the job over and plan again"
    current = job.state.current
    if current is None:
        return "its workers have not all registered"
    if sorted(current.failed) != sorted(plan.failed):
        plans, jobs = (
            (f"without {names(lost)}" if lost else "with all workers") for lost in (plan.failed, current.failed)
        )
        return f"the plan is for a job {plans}, and this one trains {jobs}"
    if current.plan_fingerprint == plan.fingerprint:
        return "it is in force already"
    if plan.partition != current.partition and job.spec.relayout == "never":
        return (
            f"its layers per stage are {_counts(plan.partition)}, and those of this job stay {_counts(job.state.held)}"
        )
    return _too_much(job, plan)


def use_plan(job: LiveJob, plan: Plan, actor: str) -> str:
    """Opens a generation with the same workers and this plan, which was checked when it was made or saved; returns what
    the coordinator makes of it.

    Raises ConsoleError (409) naming what does not fit; then nothing has changed.
    """
    if why := misfit(job, plan):
        raise ConsoleError(409, "misfit", f"plan {plan.fingerprint[:8]}: {why}")
    who = plain(actor).strip()[:80] or "unknown"
    audit = {
        "at": time.time(),
        "actor": who,
        "action": "use plan",
        "target": plan.fingerprint,
        "detail": "",
    }
    return job.apply(UsePlan(plan.fingerprint, plan.failed, who, "", plan.partition), plan=plan, audit=audit)


def _counts(partition: tuple[int, ...]) -> str:
    return ", ".join(map(str, partition))


def _too_much(job: LiveJob, plan: Plan) -> str:
    """Would a worker hold more activations than the job's own limit allows?"""
    limits = MemoryLimit.parse(job.spec.memory, field="memory").limits(plan.problem().job, plan.technique)
    for name, held in plan.metrics.peak_activations.items():
        limit = limits[Worker.parse(name).stage]
        if limit is not None and held > limit:
            return f"{name} would hold {held} activations, and the job's memory limit {job.spec.memory} allows {limit}"
    return ""
