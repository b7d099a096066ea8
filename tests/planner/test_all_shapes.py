"""No loop over a job's size takes longer than the size: 2,048 workers in every shape, at length 16,384."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.catalogs.catalog_build import listed_patterns, targets
from openrecycle.planner.check import check
from openrecycle.planner.jobs.failures import canonical_pattern, failures_per_stage, patterns
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.layers.migration import MOST_BOUNDED_STAGES, best_migrations
from openrecycle.planner.plans.bounds import CountBounds, period_bound
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import at_length

SHAPES = ((1, 2_048), (2_048, 1), (64, 32))
LARGE = ((1, 16_384), (16_384, 1), (128, 128))
# CPU seconds, so that a busy machine does not count. Before, some took hours, of 4,096 workers several minutes.
SECONDS = 10.0


@pytest.fixture(params=[*SHAPES, *map(at_length, LARGE)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def job(request: pytest.FixtureRequest) -> Job:
    pipelines, stages = request.param
    return Job.uniform(pipelines, stages, 1)


def _dead(job: Job) -> frozenset[Worker]:
    return frozenset({Worker(job.pipelines - 1, job.stages // 2)} if job.pipelines > 1 else ())


def _question(job: Job) -> CatalogQuestion:
    return CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"))


WORK: dict[str, Callable[[Job], Any]] = {
    "patterns of 1": lambda job: list(islice(patterns(job, 1), 10_000)),
    "patterns of 2": lambda job: list(islice(patterns(job, 2), 2_000)),
    "patterns of as many as can be": lambda job: list(islice(patterns(job, job.stages * (job.pipelines - 1)), 3)),
    "patterns of too many": lambda job: list(patterns(job, job.stages * (job.pipelines - 1) + 1)),
    "a catalog's patterns": lambda job: Catalog(job, Technique.STAGGERED, MemoryLimit("uniform")).patterns(1),
    "what a catalog holds": lambda job: targets(_question(job), min(2, job.stages * (job.pipelines - 1))),
    "what is listed": lambda job: listed_patterns(job, 1),
    "bound": lambda job: period_bound(Problem(job, _dead(job))),
    "list scheduler": lambda job: ListScheduler().solve(Problem(job, _dead(job))).schedule.period,
    "plan and check": lambda job: check(make_plan(Problem(job, _dead(job)), solver="list", look_ahead=False)),
    "migrations": lambda job: best_migrations(job, _dead(job)),
    "pattern": lambda job: canonical_pattern(_dead(job), job),
}


@pytest.mark.parametrize("what", WORK)
def test_what_the_planner_does_for_any_shape_is_done_soon(what: str, job: Job) -> None:
    begin = time.process_time()
    WORK[what](job)
    assert time.process_time() - begin < SECONDS


def test_a_grid_of_one_pipeline_has_no_pattern_of_failures() -> None:
    job = Job.uniform(1, 16_384, 1)
    assert list(patterns(job, 0)) == [frozenset()]
    assert list(patterns(job, 1)) == []
    unlike = Job(1, 16_384, 1, speeds=((Worker(0, 3), 0.5),))
    assert list(patterns(unlike, 1)) == []


@pytest.mark.parametrize("speeds", [(), ((Worker(0, 0), 0.5),)])
def test_every_pattern_leaves_each_stage_a_peer(speeds: tuple[tuple[Worker, float], ...]) -> None:
    """Near the most that can fail, where most choices lead nowhere."""
    job = Job(6, 40, 1, speeds=speeds)
    for spared in (0, 1, 3):
        found = list(islice(patterns(job, 40 * 5 - spared), 50))
        assert len(found) == len(set(found)) > 0
        for dead in found:
            assert len(dead) == 40 * 5 - spared and max(failures_per_stage(dead, job)) < job.pipelines


@pytest.mark.parametrize("technique", [Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED])
@pytest.mark.parametrize("memory", ["uniform", "1f1b", "none", "2"])
def test_the_bounds_by_count_are_the_bounds(technique: Technique, memory: str) -> None:
    job = Job.uniform(4, 5, 6, durations={"F": 1, "I": 1.5, "W": 0.5, "O": 2, "transfer": 0.25})
    by_count = CountBounds(job, technique, MemoryLimit(memory))
    for stage in range(5):
        for dead in range(4):
            failed = frozenset(Worker(p, stage) for p in range(dead))
            problem = Problem(job, failed, technique, MemoryLimit(memory))
            assert by_count.ticks(stage, dead) == period_bound(problem)


def test_beyond_some_stages_failures_are_moved_by_load_alone() -> None:
    job = Job.uniform(2, MOST_BOUNDED_STAGES + 1, 1)
    moved = best_migrations(job, [Worker(0, 0), Worker(1, 0)])
    assert sum(moved.counts) == 2 and max(moved.counts) == 1
