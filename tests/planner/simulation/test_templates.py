"""Oobleck's planner: partitions, the Frobenius cover, instantiation, and the distribution of micro-batches."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.jobs.job import Job
from openrecycle.planner.simulation.planned import PlannedJob, distribute, instantiations, template_depths


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 12))
def test_every_number_of_workers_is_a_sum_of_depths(least: int, tolerated: int, more: int) -> None:
    """From (f + 1) n0 workers on, with the templates that Oobleck makes."""
    workers = (tolerated + 1) * least + more
    depths = template_depths(workers, least, tolerated, workers)
    for living in range((tolerated + 1) * least, workers + 1):
        assert next(instantiations(living, depths, living), None) is not None


@given(st.integers(1, 24), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_instantiations_use_every_worker(workers: int, least: int, more: int, pipelines: int) -> None:
    depths = range(least, least + more)
    found = list(instantiations(workers, depths, pipelines))
    assert len(set(found)) == len(found)
    for chosen in found:
        assert sum(chosen) == workers and len(chosen) <= pipelines
        assert all(depth in depths for depth in chosen) and list(chosen) == sorted(chosen, reverse=True)
    every = {
        tuple(sorted(c, reverse=True))
        for n in range(1, pipelines + 1)
        for c in product(depths, repeat=n)
        if n <= 4 and sum(c) == workers
    }
    assert every <= set(found)


def test_many_workers_are_spread_evenly() -> None:
    assert list(instantiations(95, range(10, 13), 8)) == [(12,) * 7 + (11,)]


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=3),
    st.integers(1, 14),
    st.integers(0, 30),
    st.dictionaries(st.integers(2, 5), st.integers(1, 60), min_size=4, max_size=4),
)
def test_distribution_is_the_best_of_all(depths: list[int], total: int, ramp: int, each: dict[int, int]) -> None:
    """Also where depth says little of the time."""
    chosen = tuple(sorted(depths, reverse=True))

    def time(depth: int, n: int) -> float:
        return each[depth] * n + (ramp if n else 0)

    best, share = distribute(total, chosen, time)
    assert sum(share) == total
    assert max(map(time, chosen, share)) <= best
    ways = product(range(total + 1), repeat=len(chosen))
    assert best == min(max(map(time, chosen, way)) for way in ways if sum(way) == total)


@pytest.mark.parametrize(
    ("stages", "workers", "seconds"),
    [(4, 7, 200), (8, 15, 210)],  # the first: 63 and 33 micro-batches over depths 4 and 3
)
def test_layers_that_are_few_leave_depths_far_from_their_share(stages: int, workers: int, seconds: float) -> None:
    """A layer more on one of its stages makes a pipeline half as fast, whatever its depth."""
    planned = PlannedJob(Job.uniform(2, stages, 48), samples=96, layers=1)
    rate = planned.templates(workers)
    assert rate is not None and rate.seconds == seconds
