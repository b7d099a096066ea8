from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.jobs.job import Job, Problem, Technique, Worker
from tests.planner.problems import route


def test_one_failure_is_spread_round_robin_as_in_the_papers_figure() -> None:
    routes = route(Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)})))
    # Micro-batches 7..12 of the figure are 0..5 of pipeline 1.
    assert [routes[2, 1, j] for j in range(6)] == [0, 2, 0, 2, 0, 2]


def test_a_micro_batch_stays_at_home_where_its_worker_lives() -> None:
    failed = frozenset({Worker(1, 2), Worker(0, 3)})
    for (stage, pipeline, _), worker in route(Problem(Job.uniform(3, 4, 6), failed)).items():
        assert (worker == pipeline) == (Worker(pipeline, stage) not in failed)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.data())
def test_loads_of_living_peers_differ_by_at_most_one(pipelines: int, stages: int, m: int, data: st.DataObject) -> None:
    failed = frozenset(
        Worker(p, s)
        for s in range(stages)
        for p in data.draw(st.sets(st.integers(0, pipelines - 1), max_size=pipelines - 1))
    )
    problem = Problem(Job.uniform(pipelines, stages, m), failed, Technique.ADAPTIVE)
    routes = route(problem)
    assert len(routes) == pipelines * stages * m
    for stage in range(stages):
        loads = Counter(worker for (s, _, _), worker in routes.items() if s == stage)
        assert set(loads) == set(problem.living_peers(stage))
        assert max(loads.values()) - min(loads.values()) <= 1
