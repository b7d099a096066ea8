"""Catalogs whose plans have a partition each."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from openrecycle.planner.catalogs.catalog import Catalog, open_folder
from openrecycle.planner.catalogs.catalog_build import InlineEngine, build_catalog
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.layers.partition import bound_over
from openrecycle.planner.plans.packed import CatalogQuestion, Effort

JOB = Job.uniform(3, 3, 4, layers=12)
QUESTION = CatalogQuestion(JOB, Technique.STAGGERED, MemoryLimit("none"), "partitions")


def test_each_plan_has_the_partition_of_its_failures(tmp_path: Path) -> None:
    report = build_catalog(QUESTION, 2, tmp_path, engine=InlineEngine(), effort=Effort(solver="list"))
    assert report.finished and report.planned == report.total
    catalog = open_folder(tmp_path / report.catalog.info.fingerprint)
    cells = list(JOB.workers())
    partitions = set()
    for failed in [(), *combinations(cells, 1), *combinations(cells[:5], 2)]:
        found = catalog.find(failed)
        assert found is not None and check(found.plan) == []
        assert set(found.plan.failed) == {str(w) for w in failed}
        assert found.plan.metrics.bound_over == "partitions"
        units = found.plan.metrics.lower_bound * JOB.ticks_per_unit
        assert units == bound_over(found.plan.problem(), "partitions")
        partitions.add(found.plan.partition)
    assert (4, 4, 4) in partitions and len(partitions) > 2


def test_a_catalog_of_one_partition_is_another(tmp_path: Path) -> None:
    fixed = CatalogQuestion(JOB, Technique.STAGGERED, MemoryLimit("none"))
    made = [
        build_catalog(q, 1, tmp_path, engine=InlineEngine(), effort=Effort(solver="list")).catalog
        for q in (fixed, QUESTION)
    ]
    assert made[0].info.fingerprint != made[1].info.fingerprint
    assert {made[0].plan(name).partition for name in made[0].blobs.names()} == {(4, 4, 4)}
    shorter = [c.find([Worker(0, 1)]) for c in made]
    assert all(shorter) and shorter[1].plan.metrics.period < shorter[0].plan.metrics.period  # type: ignore[union-attr]


def test_a_plan_that_is_made_now() -> None:
    catalog = Catalog(JOB, Technique.STAGGERED, MemoryLimit("none"))
    plan, _ = catalog.plan_for([Worker(1, 1)])
    assert check(plan) == [] and plan.metrics.bound_over == "schedules" and plan.partition == (4, 4, 4)
    catalog.add(plan)
    assert catalog.find([Worker(1, 1)]) == plan
    renamed = catalog.find([Worker(2, 1)])
    assert renamed is not None and renamed.partition == plan.partition and check(renamed) == []


def test_a_plan_of_another_partition_is_kept_with_its_own() -> None:
    catalog = Catalog(JOB, Technique.STAGGERED, MemoryLimit("none"))
    moved, _ = catalog.at((5, 4, 3)).plan_for([Worker(1, 1)])
    catalog.add(moved)
    assert catalog.find([Worker(1, 1)]) is None and catalog.at((5, 4, 3)).find([Worker(1, 1)]) == moved
