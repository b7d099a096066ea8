"""Requests to fill catalogs of any grid."""

from __future__ import annotations

from openrecycle.app.catalogs.contents import CatalogRequest
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.packed import CatalogQuestion


def catalog_request(
    pipelines: int = 3,
    stages: int = 4,
    micro_batches: int = 6,
    *,
    durations: dict[str, float] | None = None,
    technique: str = "staggered",
    memory: str = "uniform",
    tolerance: int = 2,
    solver: str = "list",
    time_limit: float = 10.0,
) -> CatalogRequest:
    job = Job.uniform(pipelines, stages, micro_batches, durations=durations or {})
    question = CatalogQuestion(job, Technique(technique), MemoryLimit.parse(memory, field="memory"))
    return CatalogRequest(question, tolerance, solver, time_limit)
